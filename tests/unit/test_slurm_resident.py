"""Resident Slurm jobs: their options, command lines, rows of squeue, judgement, and the commands that their provider runs. No clock, no Slurm."""

# Ids are written as plain words here.
# mypy: disable-error-code="arg-type"

import itertools

import pytest

from phalanx.core.errors import BadRequest, Conflict, TryLater
from phalanx.engines.slurm import commands, head_setup, parse, render, resident_jobs
from phalanx.engines.slurm.commands import CommandResult
from phalanx.engines.slurm.parse import GresGpus, ResidentRow, SlurmNode
from phalanx.engines.slurm.resident_jobs import DRAIN_BEFORE_S, MISSING_S, ResidentJob, ResidentJobs, judge, node_share
from phalanx.engines.slurm.resident_options import resident_pools, resident_time
from phalanx.engines.slurm.sbatch_request import SlurmSettings
from phalanx.ports.engine import HeadSetup
from phalanx.ports.provider import CallUnanswered, LeavingNode, LostNode, NodeOrder, PoolTerms
from phalanx.wire.resident import RESIDENT_VARIABLE, decode_resident

SETTINGS = SlurmSettings(tag="8f3ac2a5", supervisor=("python3", "-m", "x"), head_url="https://h0:1", partition="gpu")
ORDER = NodeOrder(node_id="resident-2gpu-0", token="t1", template="2")
COMMENT = render.resident_comment(SETTINGS.tag, ORDER.node_id, ORDER.token)
ROW = ResidentRow(id="7", state="RUNNING", reason="None", nodes=("n0",), left_s=None, limit_s=None, comment=COMMENT)
NO_OPTIONS = {"partition": "", "account": "", "qos": "", "slurm-resident": "", "slurm-resident-idle": ""}
SHOWN = (
    "NodeName=n0 CPUTot=8 RealMemory=4096 Gres=gpu:h100:4 State=IDLE Partitions=gpu\n"
    "NodeName=n1 CPUTot=8 RealMemory=4096 Gres=gpu:h100:4 State=IDLE Partitions=gpu\n"
    "NodeName=n2 CPUTot=64 RealMemory=8192 Gres=gpu:h100:8 State=IDLE Partitions=other\n"
)


def test_the_options_ask_for_a_pool():
    assert resident_pools(NO_OPTIONS) == ()
    [pool] = resident_pools({**NO_OPTIONS, "slurm-resident": "1-4x8", "slurm-resident-idle": "90s"})
    assert (pool.id, pool.template, pool.min_nodes, pool.max_nodes, pool.idle_s) == ("resident-8gpu", "8", 1, 4, 90.0)
    assert resident_time({"slurm-resident-time": "8h"}) == "0-08:00:00"
    for wrong in ("8", "0x8", "5-4x8", "4x65", "4x8x2"):
        with pytest.raises(BadRequest, match=r"--slurm-resident .*not of the form"):
            resident_pools({**NO_OPTIONS, "slurm-resident": wrong})


@pytest.mark.parametrize("name", ["account", "qos"])
def test_accounts_that_differ_from_job_to_job_are_refused_with_resident_jobs(name):
    options = {**NO_OPTIONS, "slurm-resident": "4x8", name: "{project}"}
    with pytest.raises(Conflict, match=f"--slurm-resident and --{name} {{project}} exclude each other"):
        head_setup.check_options(
            options, None, HeadSetup(listens=True, listened_before=True, virtual=False, shares_store=False)
        )


def test_the_script_finds_the_address_of_its_own_node_and_holds_no_secret():
    words, script = render.resident_command(
        render.ResidentRequest(
            name="resident-2gpu-0",
            comment=COMMENT,
            gpus=2,
            kind="h100",
            cpus=4,
            memory_bytes=2048 * 2**20,
            time="0-08:00:00",
            command=("python3", "-m", "x"),
            partition="gpu",
        )
    )
    assert {"--gres=gpu:h100:2", "--cpus-per-task=4", "--mem=2048M", "--time=0-08:00:00", "--no-requeue"} <= set(words)
    assert script.splitlines()[-1] == "exec python3 -m x"
    assert "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p" in script
    assert render.parse_comment(COMMENT) is None, "it is no attempt, whatever the node is called"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7-00:00:10", 604_810.0),
        ("1:30:00", 5400.0),
        ("59:30", 3570.0),
        ("0:05", 5.0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", 0.0),
    ],
)
def test_times_of_squeue(text, seconds):
    assert parse.parse_time_left_s(text) == seconds


def test_a_share_is_in_proportion_to_the_gpus_of_the_most_frequent_kind_of_node():
    nodes = parse.parse_nodes(SHOWN)
    share = node_share(nodes[:2], 2)
    assert (share.kind, share.cpus, share.memory_bytes) == ("h100", 4, 2048 * 2**20)
    assert node_share(nodes[:2], 0).cpus == 8, "without GPUs, the whole node"
    with pytest.raises(BadRequest, match="no node of Slurm's partition has 8 GPUs; the largest has 4"):
        node_share(nodes[:2], 8)


def judged(row, *, seen=True, now_s=1.0):
    return judge(ResidentJob(ORDER, COMMENT, 0.0, seen=seen), row, now_s)


def changed(**fields):
    return ResidentRow(**({name: getattr(ROW, name) for name in ROW.__dataclass_fields__} | fields))


def test_what_the_state_of_its_job_means_for_a_node():
    assert judged(ROW) is None
    assert judged(changed(state="PENDING", left_s=1.0, limit_s=60.0)) is None, "its time has not begun"
    assert judged(None, seen=False) is None, "squeue may be older than the submit"
    assert isinstance(judged(None, seen=False, now_s=MISSING_S), LeavingNode)
    assert isinstance(judged(None), LeavingNode)
    assert isinstance(judged(changed(state="COMPLETING")), LeavingNode)
    for state in ("CANCELLED", "TIMEOUT", "PREEMPTED", "FAILED", "COMPLETED"):
        assert isinstance(judged(changed(state=state)), LostNode)
    for state in ("NODE_FAIL", "BOOT_FAIL"):
        assert isinstance(judged(changed(state=state)), LeavingNode), "only its lease says that nothing runs on"


@pytest.mark.parametrize(("limit_s", "left_s"), [(3600.0, DRAIN_BEFORE_S), (60.0, 15.0)])
def test_it_leaves_before_its_time_limit(limit_s, left_s):
    assert judged(changed(limit_s=limit_s, left_s=left_s + 1)) is None
    assert isinstance(judged(changed(limit_s=limit_s, left_s=left_s)), LeavingNode)


class FakeSlurm:
    """Answers the commands of the provider from a queue of its own. `ended`: numbers that scancel has ended."""

    def __init__(self, monkeypatch):
        self.jobs: dict[str, tuple[str, str]] = {}
        self.assignments: list[str] = []
        self.numbers = itertools.count(1)
        self.refusal = ""
        self.silent = False
        monkeypatch.setattr(commands, "run", self.run)

    def run(self, argv, *, given="", more=None, within_s=30.0):
        if self.silent:
            raise TryLater("no answer from Slurm")
        stdout = ""
        match argv[0]:
            case "sbatch":
                if self.refusal:
                    return CommandResult(code=1, stdout="", stderr=f"sbatch: error: {self.refusal}")
                number = str(next(self.numbers))
                self.jobs[number] = ("RUNNING", next(word for word in argv if word.startswith("--comment="))[10:])
                self.assignments.append(more[RESIDENT_VARIABLE])
                stdout = f"{number}\n"
            case "scancel":
                for number in argv[2:]:
                    self.jobs[number] = ("CANCELLED", self.jobs[number][1])
            case "squeue":
                mark = argv[-1].partition("JobID:")[2].partition(",")[0]
                rows = [
                    (number, state, "None", "n0", "1:00:00", "2:00:00", comment)
                    for number, (state, comment) in self.jobs.items()
                ]
                stdout = "".join(f"{word}{mark}" for row in rows for word in row)
            case "scontrol":
                stdout = SHOWN
            case _:
                raise AssertionError(argv)
        return CommandResult(code=0, stdout=stdout, stderr="")

    def live(self):
        return {number for number, (state, _) in self.jobs.items() if state == "RUNNING"}


@pytest.fixture
def slurm(monkeypatch):
    return FakeSlurm(monkeypatch)


@pytest.fixture
def provider():
    return ResidentJobs(settings=SETTINGS, token_of=lambda node: f"secret of {node}", time="0-02:00:00")


def test_a_repeated_start_submits_one_job_and_a_stop_cancels_it(slurm, provider):
    provider.start(ORDER)
    provider.start(ORDER)
    assert slurm.live() == {"1"}
    given = decode_resident(slurm.assignments[0])
    assert (given.node_id, given.token, given.devices, given.cpus) == (
        ORDER.node_id,
        f"secret of {ORDER.node_id}",
        2,
        4,
    )
    assert given.signals_reach_ranks
    provider.stop(ORDER)
    provider.stop(ORDER)
    assert slurm.live() == set()


def test_a_start_that_slurm_does_not_answer_is_called_again_and_one_that_it_refuses_is_not(slurm, provider):
    slurm.silent = True
    with pytest.raises(CallUnanswered):
        provider.start(ORDER)
    slurm.silent, slurm.refusal = False, "Unable to contact slurm controller (connect failure)"
    with pytest.raises(CallUnanswered):
        provider.start(ORDER)
    slurm.refusal = "Invalid account or account/partition combination specified"
    with pytest.raises(BadRequest, match="Slurm refused the resident job of resident-2gpu-0: Invalid account"):
        provider.start(ORDER)


def test_an_end_is_reported_once_and_nothing_is_concluded_while_slurm_is_silent(slurm, provider):
    provider.start(ORDER)
    assert provider.observe() == (), "nothing is listed yet"
    provider._note(provider._list())
    assert list(provider.observe()) == []
    slurm.jobs["1"] = ("CANCELLED", slurm.jobs["1"][1])
    provider._note(provider._list())
    [seen] = provider.observe()
    assert isinstance(seen, LostNode)
    assert seen.token == ORDER.token
    assert list(provider.observe()) == []


def test_jobs_of_orders_that_this_head_does_not_know_are_cancelled_and_those_of_other_heads_are_not(slurm, provider):
    provider.start(ORDER)
    slurm.jobs["8"] = ("RUNNING", render.resident_comment(SETTINGS.tag, "resident-2gpu-9", "lost"))
    slurm.jobs["9"] = ("RUNNING", render.resident_comment("ffffffff", "resident-2gpu-9", "theirs"))
    provider._note(provider._list())
    assert slurm.live() == {"1", "9"}
    assert list(provider.close(keep_nodes=False)) == []
    assert slurm.live() == {"9"}


def test_an_offer_is_a_share_of_the_nodes_of_the_partition(slurm, provider):
    template = provider.offer(PoolTerms(template="2"))
    assert (len(template.devices), template.devices[1].index, template.cpus) == (2, 1, 4)
    with pytest.raises(BadRequest, match="has 8 GPUs; the largest has 4"):
        provider.offer(PoolTerms(template="8"))
    with pytest.raises(BadRequest, match="no zones"):
        provider.offer(PoolTerms(template="2", zones=("a",)))


def test_kinds_of_gpus_are_named_only_if_one_kind_suffices():
    node = parse.parse_nodes(SHOWN)[0]
    mixed = SlurmNode(
        **{name: getattr(node, name) for name in node.__dataclass_fields__}
        | {"gpus": (GresGpus(kind="a", count=1), GresGpus(kind="b", count=3))}
    )
    assert node_share([mixed], 2).kind == "b"
    assert node_share([mixed], 4).kind == ""
    assert resident_jobs.COMMAND[-1] == "phalanx.app.resident_supervisor"
