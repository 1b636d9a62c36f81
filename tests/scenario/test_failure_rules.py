"""Failures are judged by rules, in a whole cluster in virtual time: who pays, where the job goes on, which node is drained, used last, or neither."""

import pytest

from phalanx.core.fleet.custom_failure_rules import FailureRules
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import CordonNode, PutFailureRules, UncordonNode
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.failure import FailureEvidence
from phalanx.core.work.states import JobState
from tests.harness import Harness
from tests.simulated_node import JobBehaviour


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4 n2=4 n3=4 n4=4")


def fails_once(rank=0, code=1, *, signal=None, also=(), times=1, lines=(), xids=(), oom=False, node=""):
    """The first `times` generations of the job: this rank fails after a second, with that evidence; `also` ranks echo it."""
    echo = FailureEvidence(
        lines=("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5",)
    )
    own = FailureEvidence(lines=lines, xids=xids, oom_killed=oom)

    def ends(key, each):
        if key.epoch - 1 + key.generation >= times:
            return None
        if each == rank:
            return 1.0, None if signal else code, signal
        return (0.995, 1, None) if each in also else None  # heard first, and yet not the cause

    return JobBehaviour(run_s=3.0, ends=ends, evidence=lambda _key, each: own if each == rank else echo)


def said(cluster, job):
    return [line.text for line in cluster.store.history(job_id=job, limit=1000) if line.kind == "verdict"]


def node(cluster, name):
    return cluster.world.nodes[NodeId(name)]


def test_value_error_is_the_users_and_is_tried_nowhere_else(cluster):
    job = cluster.submit(gpus=4, behaviour=fails_once(lines=("ValueError: bad shape",), times=9))
    ended = cluster.ends(job)
    assert (ended.state, ended.exit_code, ended.epoch, ended.charged_restarts) == (JobState.FAILED, 1, 1, 0)
    assert "ValueError: bad shape (python-error: user)" in ended.detail
    assert said(cluster, job)[0].endswith("the job ends: no retry requested, none used")


def test_value_error_is_retried_in_place_as_often_as_asked(cluster):
    job = cluster.submit(gpus=4, retry=2, behaviour=fails_once(lines=("ValueError: x",), times=2))
    ended = cluster.ends(job)
    assert (ended.state, ended.epoch, ended.user_retries, ended.charged_restarts) == (JobState.SUCCEEDED, 1, 2, 0)
    assert "counted as retry 1 of 2" in said(cluster, job)[0]


def test_lost_gpu_moves_the_job_elsewhere_drains_its_node_and_costs_no_retry(cluster):
    job = cluster.submit(gpus=4, behaviour=fails_once(xids=(79,)))
    where = cluster.world.attempts[job].allocation.grants[0].node_id
    ended = cluster.ends(job)
    first, second = cluster.attempts(job)
    assert (ended.state, ended.user_retries, ended.failure_count) == (JobState.SUCCEEDED, 0, 1)
    assert first.causes == (EndCause.FAULT,)
    assert second.allocation.grants[0].node_id != where
    cordon = node(cluster, where).cordon
    assert (cordon.by, cordon.drain) == ("recovery", True)
    assert cordon.why == f"XID 79: the GPU has fallen off the bus (job {job}, rule xid-79)"
    assert f"{where} is drained; counted as restart 1 of 5 without progress" in said(cluster, job)[0]


def test_drained_node_lets_its_other_jobs_save_and_move(cluster):
    bad = cluster.submit(gpus=2, behaviour=fails_once(xids=(95,)), nodelist=(NodeId("n0"),), retry=0)
    other = cluster.submit(
        gpus=2,
        behaviour=JobBehaviour(run_s=60.0, save_every_s=1.0, saves_on_stop=True),
        nodelist=(NodeId("n0"), NodeId("n1")),
    )
    cluster.until(lambda: node(cluster, "n0").cordon is not None)
    cluster.until(lambda: len(cluster.attempts(other)) > 1)
    assert cluster.attempts(other)[0].causes == (EndCause.DRAINED,)
    assert cluster.job(bad).user_retries == 0


def test_job_that_prints_what_a_broken_gpu_prints_drives_nobody_off_its_node(cluster):
    other = cluster.submit(gpus=2, behaviour=JobBehaviour(run_s=60.0), nodelist=(NodeId("n0"), NodeId("n1")))
    cluster.runs(other)
    where = cluster.live(other).allocation.grants[0].node_id
    liar = cluster.submit(
        gpus=2,
        nodelist=(where, NodeId("n2")),
        behaviour=fails_once(lines=("CUDA error: uncorrectable ECC error encountered",)),
    )
    cluster.ends(liar)
    assert "the gang is placed again elsewhere; counted as restart 1 of 5" in said(cluster, liar)[0]
    assert [one.id for one in cluster.world.nodes.values() if one.cordon is not None] == []
    assert len(cluster.attempts(other)) == 1
    assert node(cluster, where).fault_score > 0.9


def test_echoes_that_are_heard_first_hide_no_cause(cluster):
    job = cluster.submit(gpus="2x2", behaviour=fails_once(rank=3, also=(0, 1, 2), lines=("TypeError: no",), times=9))
    ended = cluster.ends(job)
    assert ended.detail.startswith("rank 3 on n1: exit code 1: TypeError: no")
    assert ended.state is JobState.FAILED


def test_gang_of_echoes_alone_starts_again_and_costs_no_retry(cluster):
    job = cluster.submit(
        gpus="2x2", behaviour=fails_once(rank=0, also=(1, 2, 3), lines=("ncclRemoteError: remote process exited",))
    )
    ended = cluster.ends(job)
    assert (ended.state, ended.user_retries, ended.epoch) == (JobState.SUCCEEDED, 0, 1)


def test_task_without_peers_echoes_nobody(cluster):
    lines = ("ConnectionRefusedError: [Errno 111] Connection refused",)
    job = cluster.submit(gpus=1, behaviour=fails_once(lines=lines, times=9))
    ended = cluster.ends(job)
    assert (ended.state, ended.charged_restarts) == (JobState.FAILED, 0)


def test_killed_for_want_of_memory_is_the_users(cluster):
    job = cluster.submit(gpus=4, behaviour=fails_once(signal=9, oom=True, times=9))
    ended = cluster.ends(job)
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 137)
    assert "out of memory: killed by the kernel" in ended.detail


def test_full_disk_moves_the_job_and_drains_nothing(cluster):
    job = cluster.submit(gpus=4, behaviour=fails_once(lines=("OSError: [Errno 28] No space left on device",)))
    ended = cluster.ends(job)
    first, second = cluster.attempts(job)
    assert (ended.state, ended.user_retries) == (JobState.SUCCEEDED, 0)
    assert first.allocation.grants[0].node_id != second.allocation.grants[0].node_id
    assert all(one.cordon is None for one in cluster.world.nodes.values())


def test_faults_without_progress_end_with_the_budget(cluster):
    job = cluster.submit(gpus=4, behaviour=fails_once(lines=("No space left on device",), times=99))
    ended = cluster.ends(job)
    assert (ended.state, ended.charged_restarts) == (JobState.FAILED, 5)
    assert ended.detail.startswith("5 restarts without progress; the last: rank 0")


# ---- operators' own rules --------------------------------------------------------------------------------------------


def put(cluster, text):
    cluster.request(PutFailureRules(rules=FailureRules(rules=text, by=UserId("op"), at_s=1.0)))


SPOT = '[{"name": "spot", "codes": [117], "blame": "preempted", "remedy": "elsewhere"}]'
STOP = '[{"name": "licence", "pattern": "no licence", "blame": "infrastructure", "remedy": "stop"}]'


def test_own_rule_decides_and_outlives_the_head(cluster):
    put(cluster, SPOT)
    cluster.kill_head()
    cluster.start_head()
    job = cluster.submit(gpus=4, behaviour=fails_once(code=117))
    ended = cluster.ends(job)
    assert (ended.state, ended.user_retries, ended.avoided_nodes) == (JobState.SUCCEEDED, 0, ())
    assert "(spot: preempted)" in said(cluster, job)[0]


def test_stop_ends_the_job_whatever_retries_are_left(cluster):
    put(cluster, STOP)
    job = cluster.submit(gpus=4, retry=5, behaviour=fails_once(lines=("error: no licence left",), times=9))
    ended = cluster.ends(job)
    assert (ended.state, ended.user_retries) == (JobState.FAILED, 0)
    assert said(cluster, job)[0].endswith("the job ends: by rule licence")


def test_rules_that_this_release_cannot_read_leave_the_shipped_ones(cluster):
    put(cluster, '[{"name": "new", "moon": "full", "blame": "user", "remedy": "stop"}]')
    job = cluster.submit(gpus=4, behaviour=fails_once(xids=(79,)))
    assert cluster.ends(job).state is JobState.SUCCEEDED


# ---- bad nodes ------------------------------------------------------------------------------------------------------


def fail_on(cluster, name, times):
    """Jobs on that node whose device errors are no reason to drain it by themselves: half a mark each."""
    for _ in range(times):
        job = cluster.submit(gpus=4, nodelist=(NodeId(name),), behaviour=fails_once(xids=(92,), times=1))
        cluster.until(lambda job=job: cluster.job(job).state.terminal or node(cluster, name).cordon is not None)


def test_node_that_fails_gangs_again_and_again_is_used_last_then_drained_and_remembered(cluster):
    fail_on(cluster, "n0", 4)
    assert node(cluster, "n0").bad_node_reason.startswith("fails gangs 15.2 times as often as the others")
    assert node(cluster, "n0").cordon is None
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(run_s=1.0))
    cluster.runs(job)
    assert cluster.live(job).allocation.grants[0].node_id != "n0"
    cluster.kill_head()
    cluster.start_head()
    assert node(cluster, "n0").bad_node_reason
    fail_on(cluster, "n0", 3)
    assert node(cluster, "n0").cordon.why.startswith("fails gangs")
    assert [one.id for one in cluster.world.nodes.values() if one.bad_node_reason or one.cordon] == ["n0"]


def test_node_let_back_by_a_person_starts_with_a_clean_record(cluster):
    fail_on(cluster, "n0", 7)
    cluster.request(UncordonNode(node_id=NodeId("n0"), by=UserId("op")))
    assert (node(cluster, "n0").bad_node_reason, node(cluster, "n0").fault_score) == ("", 0.0)


def test_rules_drain_no_more_than_two_fifths_of_the_fleet(cluster):
    for name in ("n0", "n1", "n2"):
        job = cluster.submit(gpus=4, nodelist=(NodeId(name), NodeId("n4")), behaviour=fails_once(xids=(79,)))
        cluster.ends(job)
    drained = [one.id for one in cluster.world.nodes.values() if one.cordon is not None]
    assert len(drained) == 2, cluster.told()
    assert any(line.kind == "drain_doubted" for line in cluster.store.history(limit=1000))


def test_persons_drain_stands_and_is_not_taken_over(cluster):
    cluster.request(CordonNode(node_id=NodeId("n1"), by=UserId("op"), why="disk", drain=True))
    fail_on(cluster, "n0", 7)
    assert node(cluster, "n1").cordon.by == "op"
