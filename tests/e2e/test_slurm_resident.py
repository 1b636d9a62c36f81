"""Resident Slurm jobs, on real daemons: nodes of a pool, with real heads, supervisors and ranks."""

import collections
import pathlib

import pytest

from benchmarks.cluster import wait_until
from benchmarks.control import succeeded_jobs
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.slurm_rig import slurm
from tests.slurm_here import why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
POOL = "resident-2gpu"
WORDS = ("--min-run", "1s", "--slurm-resident", "2x2", "--slurm-resident-idle", "1h")


@pytest.fixture(scope="module")
def shared():
    with slurm((*WORDS, "--slurm-resident-time", "2h"), nodes=0) as made:
        yield made


@pytest.fixture
def rig(shared):
    yield shared
    for job in shared.call("GET", "/v1/jobs")["jobs"]:
        if job["state"] in ("pending", "running"):
            shared.call("POST", f"/v1/jobs/{job['id']}/cancel")
            shared.wait_for_state(job["id"], "cancelled", "failed", "succeeded")


def pilots(rig):
    """Slurm's number of each resident job -> its comment."""
    said = rig.slurm.run("squeue", "--noheader", "--states=PD,CF,R", "--format=%i %k")
    return {line.split()[0]: line.split()[1] for line in said.splitlines() if "phalanx-resident:" in line}


def pilot_of(rig, node):
    [found] = [number for number, comment in pilots(rig).items() if f":{node}:" in comment]
    return found


def story(rig, job):
    return " | ".join(line["text"] for line in rig.history(job))


def runs(rig, job):
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", f"job {job} runs", limit_s=60.0)


def is_placed_again(rig, job):
    wait_until(lambda: rig.job(job)["attempts"] >= 2, f"job {job} is placed again", limit_s=90.0)


def ends_well(rig, job):
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert view["state"] == "succeeded", story(rig, job)
    return view


def causes(rig, job):
    return [attempt["cause"] for attempt in rig.call("GET", f"/v1/jobs/{job}/receipt")["attempts"]]


def set_idle(rig, idle):
    body = {"provider": "slurm", "node": "2", "min_nodes": 0, "max_nodes": 2, "price_per_h": 0.0}
    rig.call("PUT", f"/v1/pools/{POOL}", {**body, "idle": idle, "start_limit": "10m"})


def test_slurm_jobs_come_for_a_gang_stay_for_the_next_and_go_when_they_idle(rig):
    ends_well(rig, rig.submit(run="echo first", gpus="2x2", tasks_per_node=1, name="first"))
    numbers = set(pilots(rig))
    assert len(numbers) == 2
    for _ in range(3):
        ends_well(rig, rig.submit(run="echo next", gpus="2x2", tasks_per_node=1, name="next"))
    assert set(pilots(rig)) == numbers, "the same Slurm jobs ran them"
    assert {node["id"].rpartition("-")[0] for node in rig.nodes()} == {POOL}
    set_idle(rig, "1s")
    wait_until(lambda: not pilots(rig), "idle Slurm jobs are cancelled", limit_s=60.0)
    set_idle(rig, "1h")


def test_an_array_shares_the_resident_jobs_and_each_element_runs_once(rig):
    folder = pathlib.Path(rig.home, "elements")
    folder.mkdir()
    before = succeeded_jobs(rig)
    rig.submit(run=f"echo x >> {folder}/$PHALANX_ARRAY_TASK_ID", gpus=1, array="0-59", name="many")
    wait_until(lambda: succeeded_jobs(rig) == before + 60, "all elements have ended")
    counts = {path.name: path.read_text().count("x") for path in folder.iterdir()}
    assert counts == {str(index): 1 for index in range(60)}
    assert 1 <= len(pilots(rig)) <= 2


def test_jobs_of_a_resident_job_that_is_cancelled_in_slurm_run_again_uncharged(rig):
    jobs = [gated(rig, f"cancelled{number}", gpus=1, retry=0) for number in range(4)]
    for job in jobs:
        runs(rig, job)
    by_node = collections.defaultdict(list)
    for job in jobs:
        by_node[rig.job(job)["nodes"][0]].append(job)
    assert len(by_node) == 2
    node, hit = next(iter(by_node.items()))
    rig.slurm.run("scancel", pilot_of(rig, node))
    for job in hit:
        is_placed_again(rig, job)
    for number in range(len(jobs)):
        open_gate(rig, f"cancelled{number}")
    for job in jobs:
        ends_well(rig, job)
        said = causes(rig, job)
        assert said.count("succeeded") == 1, story(rig, job)
        assert set(said) <= {"succeeded", "drained", "node_fail", "preempted"}, story(rig, job)
        assert job not in hit or len(said) >= 2, story(rig, job)


def test_a_head_that_comes_back_finds_its_resident_jobs(rig):
    job = gated(rig, "kept", gpus="1x2")
    runs(rig, job)
    before = set(pilots(rig))
    rig.kill_head()
    rig.start(wait_nodes=False)
    open_gate(rig, "kept")
    view = ends_well(rig, job)
    assert view["attempts"] == 1
    assert before <= set(pilots(rig))


def test_a_job_of_no_order_is_cancelled(rig):
    ends_well(rig, rig.submit(run="true", gpus=1))
    comment = next(iter(pilots(rig).values()))
    stray = comment.rpartition(":")[0] + ":another"
    number = rig.slurm.run("sbatch", "--parsable", f"--comment={stray}", "--wrap", "sleep 600").strip()
    wait_until(lambda: number not in pilots(rig), "the job of a lost order is cancelled", limit_s=60.0)


def test_its_time_limit_in_slurm_drains_it_before_its_end():
    with slurm((*WORDS, "--slurm-resident-time", "1m"), nodes=0) as rig:
        job = gated(rig, "limit", gpus="1x2")
        runs(rig, job)
        [node] = rig.job(job)["nodes"]
        is_placed_again(rig, job)
        runs(rig, job)
        assert rig.job(job)["nodes"] != [node]
        open_gate(rig, "limit")
        ends_well(rig, job)
        assert causes(rig, job) == ["drained", "succeeded"], story(rig, job)
