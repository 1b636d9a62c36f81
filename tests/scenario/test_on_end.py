"""After a job ended, its `on_end` command runs in a job without GPUs, once, however the job ended."""

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.core.ids import ProjectId, QueueId, UserId
from phalanx.core.state.events import SubmitJob
from phalanx.core.work.job_file.on_end import OnEnd, parse_on_end
from phalanx.core.work.states import JobState
from phalanx.simulator.drill.behaviour import JobBehaviour
from tests.builders import spec
from tests.harness import Harness

REPORT = OnEnd(script="./report.sh")


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4")


def end_jobs(cluster, job_id):
    return [job for job in cluster.head.controller.world.jobs.values() if job.name == f"end-of-{job_id}"]


def variables(job):
    return {name.removeprefix("PHALANX_ENDED_"): value for name, value in job.spec.env}


def test_success_submits_one_job_without_gpus_that_ends_by_itself(cluster):
    job_id = cluster.submit(gpus=8, on_end=REPORT, env=(("LR", "3e-4"),))
    cluster.runs(job_id)
    assert not end_jobs(cluster, job_id)
    cluster.ends(job_id)
    (end,) = end_jobs(cluster, job_id)
    assert (end.spec.role.milli, end.spec.role.script, end.spec.time_limit_s) == (0, "./report.sh", 600.0)
    assert (end.user, end.project, end.queue) == ("ada", "gpt", "default")
    found = variables(end)
    assert (found["JOB"], found["STATE"], found["EXIT_CODE"], found["LR"]) == (job_id, "succeeded", "0", "3e-4")
    assert found["ATTEMPTS"] == "1"
    assert found["OUTPUT_DIR"].endswith(cluster.job(job_id).folder)
    assert cluster.kinds(job_id)[-1] == "on_end"
    assert cluster.ends(end.id).state is JobState.SUCCEEDED
    assert not end_jobs(cluster, end.id), "it has no command of its own"


@pytest.mark.parametrize(
    ("terms", "state"),
    [
        ({"behaviour": JobBehaviour(ends=lambda _key, _rank: (1.0, 3, None))}, JobState.FAILED),
        ({"behaviour": JobBehaviour(run_s=500.0), "time_limit_s": 20.0}, JobState.TIMEOUT),
    ],
)
def test_failures_and_time_limits_run_it_too(cluster, terms, state):
    job_id = cluster.submit(gpus=1, on_end=REPORT, **terms)
    job = cluster.ends(job_id)
    (end,) = end_jobs(cluster, job_id)
    assert job.state is state
    assert variables(end)["STATE"] == state.value
    assert variables(end)["REASON"] == job.detail


def test_cancelled_job_runs_it_only_if_it_was_placed(cluster):
    job_id, waits = cluster.submit(gpus=8, on_end=REPORT), cluster.submit(gpus=8, on_end=REPORT)
    cluster.runs(job_id)
    cluster.cancel(waits)
    cluster.cancel(job_id)
    cluster.ends(job_id)
    assert not end_jobs(cluster, waits)
    (end,) = end_jobs(cluster, job_id)
    assert variables(end)["STATE"] == "cancelled"
    assert variables(end)["CANCELLED_BY"]


def test_lost_node_and_requeue_run_it_after_the_last_attempt_only(cluster):
    job_id = cluster.submit(gpus=4, on_end=REPORT)
    cluster.runs(job_id)
    (grant,) = cluster.live(job_id).allocation.grants
    cluster.kill_node(grant.node_id)
    cluster.until(lambda: cluster.job(job_id).epoch == 2)
    assert not end_jobs(cluster, job_id)
    cluster.ends(job_id)
    (end,) = end_jobs(cluster, job_id)
    assert (variables(end)["STATE"], variables(end)["ATTEMPTS"]) == ("succeeded", "2")


def test_each_element_of_an_array_has_its_own(cluster):
    array = spec("many", gpus=1, array="0-2", on_end=REPORT)
    event = SubmitJob(spec=array, user=UserId("ada"), project=ProjectId("gpt"), queue=QueueId("default"))
    jobs = [job.id for job in cluster.request(event)]
    for job_id in jobs:
        cluster.ends(job_id)
    assert [len(end_jobs(cluster, job_id)) for job_id in jobs] == [1, 1, 1]


def test_new_head_neither_loses_nor_repeats_it(cluster):
    job_id = cluster.submit(gpus=1, on_end=REPORT)
    cluster.ends(job_id)
    cluster.kill_head()
    cluster.start_head()
    cluster.run(1.0)
    (end,) = end_jobs(cluster, job_id)
    assert cluster.ends(end.id).state is JobState.SUCCEEDED
    assert len(end_jobs(cluster, job_id)) == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        "  ",
        3,
        None,
        [],
        {},
        {"run": ""},
        {"run": "x", "time": "0s"},
        {"run": "x", "time": "2d"},
        {"run": "x\0"},
        {"command": "x"},
    ],
)
def test_invalid_commands_are_refused(value):
    with pytest.raises(PhalanxError, match="on_end"):
        parse_on_end(value)


def test_text_and_mapping_give_the_command():
    assert parse_on_end({"run": "a\nb", "time": "1h"}) == OnEnd(script="a\nb", time_limit_s=3600.0)
    assert str(parse_on_end("\n a\nb")) == "a"
