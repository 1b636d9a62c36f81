"""A node that fails its preflight is swapped and kept out, with its evidence; the job is not charged, and a false test is bounded."""

from dataclasses import replace
from functools import partial

import pytest

from phalanx.core.errors import Conflict
from phalanx.core.fleet.fitness import FULL_DISK, PREFLIGHT
from phalanx.core.fleet.node import Cordon
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, UserId
from phalanx.core.lifecycle.attempt import transition
from phalanx.core.lifecycle.events import ReminderDue
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.events import CordonNode, UncordonNode
from phalanx.core.state.reports import DiskFreed, MemberReady
from phalanx.core.state.world import WorldChange
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import AttemptState, JobState
from tests.builders import facts, keyed, placed
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

BROKEN = "?/var/lib/phalanx: a write of 4 MiB failed: Input/output error"
FULL = "??/var/lib/phalanx: 0 B free, 64 MiB needed"


@pytest.fixture
def cluster():
    return Harness("n0=4 n1=4 n2=4")


def where(cluster, job_id):
    return sorted(str(grant.node_id) for grant in cluster.live(job_id).allocation.grants)


def kept_out(cluster):
    return {
        str(node.id): node.cordon.why for node in cluster.store.nodes() if node.cordon and node.cordon.by == PREFLIGHT
    }


def cut(cluster, *pairs):
    cluster.bad_links += [set(pair.split("-")) for pair in pairs]


def test_a_node_with_a_broken_disk_is_swapped_at_once_and_the_job_is_not_charged(cluster):
    job = cluster.submit(gpus=8, behaviour=JobBehaviour(refuses={"n1": BROKEN}))
    cluster.until(lambda: job in cluster.world.attempts and cluster.live(job).epoch == 2)
    cluster.runs(job)
    assert where(cluster, job) == ["n0", "n2"]
    first = cluster.attempts(job)[0]
    assert first.causes == (EndCause.UNFIT,)
    assert cluster.live(job).placed_s == first.ended_s  # in the same breath
    assert (cluster.job(job).charged_restarts, cluster.job(job).failure_count) == (0, 0)
    assert kept_out(cluster) == {"n1": BROKEN.removeprefix("?")}


def test_the_node_takes_no_other_job_until_somebody_lets_work_onto_it_again(cluster):
    first = cluster.submit(gpus=8, behaviour=JobBehaviour(refuses={"n1": BROKEN}))
    cluster.until(lambda: bool(kept_out(cluster)))
    cluster.ends(first)
    waits = cluster.submit(gpus=12)
    cluster.run(5.0)
    assert cluster.job(waits).state is JobState.PENDING
    cluster.request(UncordonNode(node_id=NodeId("n1"), by=UserId("op")))
    cluster.runs(waits)
    assert "n1" in where(cluster, waits)


def test_only_its_engine_returns_a_node_that_the_engine_keeps_out_of_service(cluster):
    known = cluster.world.nodes[NodeId("n1")]
    cordon = Cordon(by=known.engine, why="bad fan", since_s=0.0, remedy="resume n1")
    WorldChange(world=cluster.world).put(replace(known, cordon=cordon))
    with pytest.raises(Conflict, match=r"kept out of service by its engine, .*: bad fan") as refused:
        cluster.request(UncordonNode(node_id=NodeId("n1"), by=UserId("op")))
    assert refused.value.hint == Hint(HintCode.UNDRAIN_IN_ENGINE, command="resume n1")
    assert not cluster.world.nodes[NodeId("n1")].schedulable


def test_what_runs_on_the_node_already_goes_on(cluster):
    runs = cluster.submit(gpus=2, behaviour=JobBehaviour(run_s=30.0))
    cluster.runs(runs)
    at = where(cluster, runs)[0]
    cluster.submit(gpus="3x2", behaviour=JobBehaviour(refuses={at: BROKEN}))
    cluster.until(lambda: at in kept_out(cluster))
    assert cluster.ends(runs).state is JobState.SUCCEEDED
    assert len(cluster.attempts(runs)) == 1


def test_a_node_whose_links_are_bad_to_two_others_is_the_one_at_fault():
    cluster = Harness("n0=4 n1=4 n2=4 n3=4")
    cut(cluster, "n0-n1", "n1-n2")
    job = cluster.submit(gpus=12)
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.runs(job)
    assert where(cluster, job) == ["n0", "n2", "n3"]
    assert kept_out(cluster) == {"n1": "link n1 - n0, n2: no connection in 5 s"}
    assert cluster.job(job).charged_restarts == 0


def test_of_two_nodes_alone_neither_is_kept_out_and_the_pair_is_avoided(cluster):
    cut(cluster, "n0-n1")
    job = cluster.submit(gpus=8)
    cluster.until(lambda: cluster.job(job).epoch == 2)
    cluster.runs(job)
    assert where(cluster, job) == ["n0", "n2"]
    assert kept_out(cluster) == {}
    assert "link n1 - n0: no connection in 5 s; either end may be at fault" in cluster.event_lines(job)


def test_a_node_that_reaches_nobody_is_gone_from_gangs_of_two_after_two_swaps():
    cluster = Harness("n0=4 n1=4 n2=4 n3=4")
    cut(cluster, "n0-n1", "n0-n2", "n0-n3")
    job = cluster.submit(gpus=8)
    cluster.until(lambda: cluster.job(job).state is JobState.RUNNING and "n0" not in where(cluster, job))
    cluster.runs(job)
    assert cluster.job(job).epoch == 3
    assert cluster.job(job).charged_restarts == 0


def test_a_test_that_fails_everywhere_keeps_out_no_more_than_its_share():
    cluster = Harness(" ".join(f"n{number}=4" for number in range(10)))
    everywhere = {f"n{number}": BROKEN for number in range(10)}
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(refuses=everywhere))
    assert cluster.ends(job, 900.0).state is JobState.FAILED
    assert len(kept_out(cluster)) == 4
    assert "is the test wrong?" in cluster.event_lines()
    healthy = cluster.submit(gpus=4)
    assert cluster.ends(healthy).state is JobState.SUCCEEDED


def test_the_last_node_is_never_kept_out():
    cluster = Harness("n0=4")
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(refuses={"n0": BROKEN}))
    ended = cluster.ends(job, 900.0)
    assert (ended.state, kept_out(cluster)) == (JobState.FAILED, {})
    assert "Input/output error" in ended.detail


def test_a_gang_that_finds_no_better_place_ends_within_its_budget_and_says_why():
    cluster = Harness("n0=4 n1=4")
    cut(cluster, "n0-n1")
    ended = cluster.ends(cluster.submit(gpus=8), 900.0)
    assert ended.state is JobState.FAILED
    assert "link n1 - n0: no connection" in ended.detail


def test_a_node_that_dies_while_its_peers_probe_it_is_lost_and_not_kept_out(cluster):
    job = cluster.submit(gpus=8, behaviour=JobBehaviour(prepare_s=3.0))
    cluster.run(1.0)
    cut(cluster, "n0-n1", "n1-n2")
    cluster.kill_node("n1", silent=True)
    cluster.until(lambda: cluster.job(job).epoch == 2)
    assert cluster.attempts(job)[0].causes == (EndCause.NODE_FAIL,)
    assert kept_out(cluster) == {}


def test_of_two_supervisors_brought_for_one_attempt_the_later_knows_where_to_probe_the_earlier():
    case, asked = placed(), {}
    for name, port in (("n0", 20_007), ("n1", 20_008)):
        outcome = transition(case, ReminderDue(node_id=NodeId(name), probe_port=port), facts())
        (command,) = outcome.commands
        assert isinstance(command, PrepareTasks)
        case, asked[name] = outcome.case, command.probe_ports
    assert asked == {"n0": (20_007, 0), "n1": (20_007, 20_008)}


def test_a_wall_clock_that_is_off_is_named_and_nothing_is_refused():
    case = placed()
    for name, off_s in (("n0", -7.0), ("n1", 0.4)):
        ready = MemberReady(**keyed(case.attempt), node_id=NodeId(name), port=29_500, clock_off_s=off_s)
        outcome = transition(case, ready, facts())
        case = outcome.case
        named = [line.text for line in outcome.history if line.kind == "clock_off"]
        assert named == (
            ["n0: its clock is 7 s behind the head's; time limits there are off by as much"] if off_s < -5 else []
        )
    assert case.attempt.state is AttemptState.STARTING


def on_full_disks(cluster):
    return sorted(str(node.id) for node in cluster.store.nodes() if node.cordon and node.cordon.by == FULL_DISK)


def test_a_job_waits_uncharged_until_the_only_node_has_room():
    cluster = Harness("n0=4")
    full = JobBehaviour(refuses={"n0": FULL})
    job = cluster.submit(gpus=4, behaviour=full)
    cluster.until(lambda: on_full_disks(cluster) == ["n0"])
    cluster.run(1800.0)
    assert cluster.job(job).state is JobState.PENDING
    assert (cluster.job(job).charged_restarts, len(cluster.attempts(job))) == (0, 1)
    full.refuses.clear()
    cluster.request(DiskFreed(node_id=NodeId("n0"), free_bytes=3 << 30))
    assert on_full_disks(cluster) == []
    assert "n0 is in service again: 3 GiB are free on its disk" in cluster.event_lines()
    cluster.runs(job)


def test_every_node_with_a_full_disk_is_cordoned():
    cluster = Harness("n0=4 n1=4 n2=4")
    everywhere = {f"n{number}": FULL for number in range(3)}
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(refuses=everywhere))
    cluster.until(lambda: len(on_full_disks(cluster)) == 3)
    assert cluster.job(job).state is JobState.PENDING
    assert cluster.job(job).charged_restarts == 0


def _tried(cluster, job, tries):
    return len(cluster.attempts(job)) == tries and on_full_disks(cluster) == ["n0"]


def test_a_full_disk_costs_a_job_no_restart_however_often_the_cordon_is_undone():
    cluster = Harness("n0=4")
    job = cluster.submit(gpus=4, behaviour=JobBehaviour(refuses={"n0": FULL}))
    for tries in range(1, 10):
        cluster.until(partial(_tried, cluster, job, tries))
        cluster.request(UncordonNode(node_id=NodeId("n0"), by=UserId("op")))
    assert (cluster.job(job).state, cluster.job(job).charged_restarts) == (JobState.PENDING, 0)


def test_room_ends_no_cordon_of_an_operator():
    cluster = Harness("n0=4")
    cluster.request(CordonNode(node_id=NodeId("n0"), by=UserId("op"), why="a fan", drain=False))
    cluster.request(DiskFreed(node_id=NodeId("n0"), free_bytes=3 << 30))
    cordon = cluster.world.nodes[NodeId("n0")].cordon
    assert cordon is not None
    assert cordon.by == "op"
