"""A gang that hangs, in virtual time: stopped whole, its stacks kept first, restarted once, and ended when it hangs again."""

import pytest

from phalanx.core.ids import NodeId
from phalanx.core.state.commands import StopTasks
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.failure import FailureEvidence, StuckPosition
from phalanx.core.work.states import JobState
from phalanx.node.logic import actions
from phalanx.node.logic.events import HangDetected
from phalanx.node.logic.hang_detector import Hang
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

SILENCE = Hang(silent_s=61.0, limit_s=30.0, step=7)


@pytest.fixture
def cluster():
    return Harness("n0=2 n1=2 n2=2")


def stands(_key, rank):
    """Rank 2 sleeps, the others wait for it."""
    position = StuckPosition(
        state="S", frame="sleep (t.py:1)" if rank == 2 else "all_reduce (c10d.py:9)", in_collective=rank != 2, step=7
    )
    return FailureEvidence(stuck_position=position)


GANG = JobBehaviour(run_s=600.0, evidence=stands)


def hang(cluster, job, name="n0"):
    node = cluster.nodes[NodeId(name)]
    (member,) = [one for one in node.logic.members() if one.key.job_id == job]
    node.deliver(HangDetected(key=member.key, hang=SILENCE))


def submitted(cluster, behaviour=GANG):
    job = cluster.submit(gpus="2x2", nodelist=(NodeId("n0"), NodeId("n1")), behaviour=behaviour)
    cluster.runs(job)
    return job


def said(cluster, job):
    return [line.text for line in cluster.store.history(job_id=job, limit=1000) if line.kind == "hung"]


def test_hung_gang_restarts_in_place_once_and_the_culprit_is_named(cluster):
    job = submitted(cluster)
    hang(cluster, job)
    cluster.until(lambda: cluster.live(job).generation == 1)
    cluster.runs(job)
    assert cluster.live(job).causes == (EndCause.HANG,)
    assert (cluster.job(job).hang_restarts, cluster.job(job).charged_restarts, cluster.job(job).user_retries) == (
        1,
        1,
        0,
    )
    first, second = said(cluster, job)
    assert first == "hung: no step for 61 s after step 7; at most 30 s are usual; taking stacks"
    assert second == "rank 2 on n1: is not in the collective in which 3 wait: sleep (t.py:1)"


def test_every_node_keeps_stacks_before_it_ends_its_ranks(cluster):
    job = submitted(cluster)
    done: dict[str, list[type]] = {}
    for name in ("n0", "n1"):
        node, seen = cluster.nodes[NodeId(name)], done.setdefault(name, [])
        node._perform = lambda action, node=node, seen=seen: (
            seen.append(type(action)),
            type(node)._perform(node, action),
        )
    hang(cluster, job)
    cluster.until(lambda: cluster.live(job).generation == 1)
    for seen in done.values():
        assert seen.index(actions.DumpStacks) < seen.index(actions.SendSigterm)
    stops = [one for one in cluster.commands if isinstance(one, StopTasks)]
    assert {(one.reason, one.grace_s) for one in stops} == {("hang", 1.0)}


def test_second_hang_without_progress_ends_the_job(cluster):
    job = submitted(cluster)
    hang(cluster, job)
    cluster.until(lambda: cluster.live(job).generation == 1)
    cluster.runs(job)
    hang(cluster, job, "n1")
    ended = cluster.ends(job)
    assert ended.state is JobState.FAILED
    assert ended.detail.startswith("hung again without progress: hung: no step for 61 s after step 7; rank 2 on n1")


def test_progress_in_between_forgives_a_hang(cluster):
    job = submitted(cluster, JobBehaviour(run_s=600.0, save_every_s=2.0, evidence=stands))
    for generation in (1, 2, 3):
        cluster.run(5.0)
        hang(cluster, job)
        cluster.until(lambda g=generation: cluster.live(job).generation == g)
        cluster.runs(job)
    assert cluster.job(job).state is JobState.RUNNING


def test_nodes_that_notice_it_both_stop_it_once(cluster):
    job = submitted(cluster)
    hang(cluster, job, "n0")
    hang(cluster, job, "n1")
    cluster.until(lambda: cluster.live(job).generation == 1)
    cluster.run(30.0)
    assert cluster.live(job).generation == 1


def test_hang_that_is_told_while_the_gang_is_stopped_for_another_reason_changes_nothing(cluster):
    job = submitted(cluster)
    cluster.cancel(job)
    hang(cluster, job)
    assert cluster.ends(job).state is JobState.CANCELLED


def test_frozen_ranks_do_not_hang(cluster):
    job = submitted(cluster)
    for node in cluster.nodes.values():
        node.cut = True
    cluster.run(8.0)  # past the lease
    hang(cluster, job)
    for node in cluster.nodes.values():
        node.cut = False
    cluster.run(30.0)
    assert said(cluster, job) == []


def test_node_of_the_culprit_is_marked_a_little(cluster):
    job = submitted(cluster)
    hang(cluster, job)
    cluster.until(lambda: cluster.live(job).generation == 1)
    assert {node.id: round(node.fault_score, 2) for node in cluster.world.nodes.values() if node.fault_score} == {
        "n1": 0.3
    }
