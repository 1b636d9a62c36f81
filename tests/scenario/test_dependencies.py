"""Jobs that wait for others, arrays, and jobs that begin later: under the real controller and supervisors, in virtual time."""

import time

import pytest

from phalanx.controller.controller import ENDED_JOBS_KEPT
from phalanx.core.errors import BadRequest, Conflict, NotFound, TryLater
from phalanx.core.ids import JobId, ProjectId, QueueId, UserId
from phalanx.core.lifecycle import dependencies
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.events import CancelJob, HoldJob, RequeueJob, SubmitJob, UpdateJob
from phalanx.core.state.reports import MemberStopped, TaskExited
from phalanx.core.work.array import parse_array
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.ports.store import StoreRefused
from tests.builders import T, exited, keyed, spec
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

ADA = UserId("ada")
FAILS = JobBehaviour(ends=lambda _key, _rank: (5.0, 3, None))
LONG = JobBehaviour(run_s=1000.0)
PENDING, SUCCEEDED, FAILED, CANCELLED = JobState.PENDING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED


@pytest.fixture
def cluster():
    return Harness("r: n0=4 n1=4")


def submit(cluster, name="child", *, after=(), array="", behaviour=None, key="", parents=None, **fields):
    """Submit a job; ids of the array where it is one."""
    if behaviour is not None:
        cluster.behaviours[name] = behaviour
    ask = parse_array(array) if array else None
    wanted = spec(
        name,
        dependencies=parse_dependencies(after),
        array="" if ask is None else str(ask),
        array_max=None if ask is None else ask.running_max,
        **fields,
    )
    submission = SubmitJob(
        spec=wanted,
        user=ADA,
        project=ProjectId("gpt"),
        queue=QueueId("default"),
        key=key,
        body_sha256=repr(wanted),
        parents=parents or {},
    )
    answer = cluster.request(submission)
    if isinstance(answer, list):
        return [job.id for job in answer]
    return answer.id


def states(cluster, ids):
    return [cluster.job(job_id).state for job_id in ids]


# ---- one parent -----------------------------------------------------------------------------------------------------


def test_child_starts_when_its_parent_has_succeeded_and_not_before(cluster):
    parent = submit(cluster, "parent")
    child = submit(cluster, after=parent)
    assert cluster.job(child).unmet_dependencies == parse_dependencies(parent)
    assert (cluster.job(child).reason, cluster.job(child).detail) == (
        WaitReasonCode.DEPENDENCY,
        f"waits for job {parent} to succeed",
    )
    ended_s = cluster.ends(parent).ended_s
    assert cluster.ends(child).state is SUCCEEDED
    assert cluster.attempts(child)[0].placed_s >= ended_s
    assert cluster.attempts(child)[0].placed_s == ended_s, "it is let go in the very step in which its parent ends"
    assert cluster.kinds(child)[:3] == ["submitted", "dependencies_met", "placed"]


@pytest.mark.parametrize(
    ("kind", "behaviour", "state"),
    [
        ("afterok", FAILS, CANCELLED),
        ("afterany", FAILS, SUCCEEDED),
        ("afternotok", FAILS, SUCCEEDED),
        ("afterok", None, SUCCEEDED),
        ("afterany", None, SUCCEEDED),
        ("afternotok", None, CANCELLED),
    ],
)
def test_kinds(cluster, kind, behaviour, state):
    parent = submit(cluster, "parent", behaviour=behaviour)
    before = submit(cluster, "before", after=f"{kind}:{parent}")
    assert cluster.ends(before).state is state
    assert cluster.ends(submit(cluster, "behind", after=f"{kind}:{parent}")).state is state, (
        "a parent that is over counts at once"
    )


def test_a_failed_parent_ends_the_whole_chain_in_the_same_step_and_is_named(cluster):
    parent = submit(cluster, "parent", behaviour=FAILS)
    child = submit(cluster, "child", after=parent)
    grandchild = submit(cluster, "grandchild", after=child)
    sweeper = submit(cluster, "sweeper", after=f"afternotok:{grandchild}")
    ended_s = cluster.ends(parent).ended_s
    assert states(cluster, [child, grandchild]) == [CANCELLED, CANCELLED]
    assert cluster.job(child).detail == f"job {parent} failed, so afterok:{parent} can never be met"
    assert cluster.job(grandchild).detail == f"job {child} was cancelled, so afterok:{child} can never be met"
    assert (cluster.job(child).ended_s, cluster.job(grandchild).ended_s) == (ended_s, ended_s)
    assert cluster.kinds(child) == ["submitted", "cancelled"]
    assert cluster.ends(sweeper).state is SUCCEEDED, "it waited for just that"


@pytest.mark.parametrize("how", ["cancel", "timeout", "node"])
def test_every_way_to_end_reaches_the_children(cluster, how):
    limit_s = 3.0 if how == "timeout" else None
    parent = submit(cluster, "parent", behaviour=JobBehaviour(run_s=1000.0), time_limit_s=limit_s, gpus="2x4")
    child, sweeper = submit(cluster, after=parent), submit(cluster, "sweeper", after=f"afterany:{parent}")
    cluster.runs(parent)
    if how == "cancel":
        cluster.cancel(parent)
    if how == "node":
        cluster.kill_node("n0")
        cluster.run(30.0)
        assert cluster.job(parent).state is PENDING, "it waits for its node, and they for it"
        assert states(cluster, [child, sweeper]) == [PENDING, PENDING]
        cluster.cancel(parent)
    cluster.ends(parent)
    assert cluster.job(child).state is CANCELLED
    assert cluster.ends(sweeper).state is SUCCEEDED


def test_a_parent_cancelled_while_it_waits_ends_its_children_at_once(cluster):
    parent = submit(cluster, "parent", hold=True)
    child = submit(cluster, after=parent)
    cluster.cancel(parent)
    assert cluster.job(child).state is CANCELLED


def test_requeued_parent_keeps_its_children_waiting(cluster):
    parent = submit(cluster, "parent", behaviour=JobBehaviour(run_s=20.0))
    child = submit(cluster, after=parent)
    cluster.runs(parent)
    cluster.request(RequeueJob(job_id=parent, by=ADA))
    cluster.until(lambda: cluster.job(parent).epoch == 2)
    assert cluster.job(child).state is PENDING
    cluster.ends(parent)
    assert cluster.ends(child).state is SUCCEEDED


def test_all_of_several_must_hold(cluster):
    first, second = (
        submit(cluster, "first", behaviour=JobBehaviour(run_s=2.0)),
        submit(cluster, "second", behaviour=JobBehaviour(run_s=9.0)),
    )
    child = submit(cluster, after=[first, f"afterany:{second}"])
    cluster.ends(first)
    assert [str(one) for one in cluster.job(child).unmet_dependencies] == [f"afterany:{second}"]
    assert cluster.job(child).detail == f"waits for job {second} to end"
    cluster.ends(second)
    assert cluster.ends(child).state is SUCCEEDED


def test_held_child_stays_held_when_its_parent_has_ended(cluster):
    parent = submit(cluster, "parent")
    child = submit(cluster, after=parent, hold=True)
    cluster.ends(parent)
    assert (cluster.job(child).unmet_dependencies, cluster.job(child).reason) == ((), WaitReasonCode.HELD)
    cluster.request(HoldJob(job_id=child, held=False, by=ADA))
    assert cluster.ends(child).state is SUCCEEDED


def test_released_child_says_again_what_it_waits_for(cluster):
    parent = submit(cluster, "parent", behaviour=LONG)
    child = submit(cluster, after=parent, hold=True)
    cluster.request(HoldJob(job_id=child, held=False, by=ADA))
    assert (cluster.job(child).reason, cluster.job(child).detail) == (
        WaitReasonCode.DEPENDENCY,
        f"waits for job {parent} to succeed",
    )


def test_unknown_parent_is_refused_by_name_and_nothing_is_made(cluster):
    with pytest.raises(NotFound, match="no job 99 to depend on"):
        submit(cluster, after=99)
    assert cluster.world.jobs == {}


def test_a_parent_that_left_the_memory_is_known_by_what_the_request_brings(cluster):
    gone = JobId("77")
    for state, end in ((SUCCEEDED, SUCCEEDED), (FAILED, CANCELLED)):
        child = submit(cluster, after=gone, parents={gone: {gone: state}})
        assert cluster.ends(child).state is end
    with pytest.raises(TryLater, match="has just ended"):
        submit(cluster, after=gone, parents={gone: {gone: JobState.RUNNING}})


def test_what_the_world_knows_counts_more_than_what_the_request_brought(cluster):
    parent = submit(cluster, "parent", behaviour=FAILS)
    cluster.ends(parent)
    child = submit(cluster, after=parent, parents={parent: {parent: JobState.RUNNING}})
    assert cluster.job(child).state is CANCELLED


def test_a_head_that_was_killed_still_knows_who_waits_for_whom(cluster):
    parent = submit(cluster, "parent", behaviour=JobBehaviour(run_s=10.0))
    child, chain = submit(cluster, after=parent), submit(cluster, "chain", after=["singleton", parent])
    last = submit(cluster, "chain", after="singleton")
    cluster.runs(parent)
    cluster.kill_head()
    cluster.run(1.0)
    cluster.start_head()
    assert [str(one) for one in cluster.job(last).unmet_dependencies] == ["singleton"]
    for job in (parent, child, chain, last):
        assert cluster.ends(job).state is SUCCEEDED
    assert cluster.attempts(last)[0].placed_s >= cluster.job(chain).ended_s


def test_a_step_that_the_store_refuses_lets_nobody_go(cluster):
    parent = submit(cluster, "parent", hold=True)
    child = submit(cluster, after=parent)
    cluster.store.full_commits = 1
    with pytest.raises(StoreRefused):
        cluster.cancel(parent)
    assert cluster.job(child).state is PENDING
    assert cluster.world.jobs[child].unmet_dependencies
    cluster.cancel(parent)
    assert cluster.job(child).state is CANCELLED


def test_ended_jobs_leave_nothing_among_the_relations(cluster):
    parent = submit(cluster, "parent")
    submit(cluster, after=[parent, "singleton"])
    submit(cluster, array="0-3", after=parent)
    cluster.until(lambda: not cluster.world.pending and not cluster.world.attempts)
    relations = cluster.world.relations
    assert (relations.dependents, relations.singletons, relations.named, relations.elements) == ({}, {}, {}, {})


# ---- singleton ------------------------------------------------------------------------------------------------------


def test_singletons_of_one_name_run_one_after_the_other(cluster):
    plain = submit(cluster, "train", behaviour=JobBehaviour(run_s=3.0))
    chain = [submit(cluster, "train", after="singleton") for _ in range(3)]
    other = submit(cluster, "other", after="singleton")
    assert cluster.job(other).unmet_dependencies == (), "another name waits for nobody"
    for before, after in zip([plain, *chain], chain, strict=False):
        cluster.ends(after)
        assert cluster.attempts(after)[0].placed_s >= cluster.job(before).ended_s


def test_a_job_that_takes_another_name_lets_the_singleton_go(cluster):
    first = submit(cluster, "train", behaviour=LONG)
    second = submit(cluster, "train", after="singleton")
    assert cluster.job(second).unmet_dependencies
    cluster.request(UpdateJob(job_id=first, by=ADA, name="eval"))
    assert not cluster.job(second).unmet_dependencies


def test_elements_of_a_singleton_array_wait_for_earlier_jobs_and_not_for_each_other(cluster):
    first = submit(cluster, "train", behaviour=JobBehaviour(run_s=5.0))
    ids = submit(cluster, "train", array="0-3", after="singleton")
    later = submit(cluster, "train", after="singleton")
    cluster.ends(first)
    cluster.run(0.1)
    assert states(cluster, ids) == [JobState.RUNNING] * 4
    assert cluster.job(later).state is PENDING
    assert cluster.ends(later).state is SUCCEEDED


# ---- arrays ---------------------------------------------------------------------------------------------------------


def test_one_submit_makes_all_elements_with_their_place_and_variables(cluster):
    ids = submit(cluster, "eval", array="3,5-7:2%2")
    assert ids == ["1_3", "1_5", "1_7"]
    places = [cluster.job(job_id).array for job_id in ids]
    assert [(p.array_id, p.index, p.size, p.running_max, p.lowest, p.highest) for p in places] == [
        ("1", 3, 3, 2, 3, 7),
        ("1", 5, 3, 2, 3, 7),
        ("1", 7, 3, 2, 3, 7),
    ]
    assert [cluster.job(job_id).seq for job_id in ids] == [1, 2, 3]
    assert submit(cluster, "next") == "4"
    prepares = [
        command for command in cluster.commands if isinstance(command, PrepareTasks) and command.job_id == "1_5"
    ]
    assert prepares[0].array == cluster.job("1_5").array


def test_elements_share_one_spec_so_that_they_are_judged_once(cluster):
    ids = submit(cluster, "eval", array="0-9", hold=True)
    assert len({id(cluster.world.jobs[job_id].spec) for job_id in ids}) == 1


def test_one_key_makes_one_array(cluster):
    first = submit(cluster, "eval", array="0-9", key="k", hold=True)
    assert submit(cluster, "eval", array="0-9", key="k", hold=True) == first[:1]
    assert len(cluster.world.jobs) == 10
    with pytest.raises(Conflict, match="was used for another job"):
        submit(cluster, "eval", array="0-8", key="k", hold=True)


def test_an_array_is_made_whole_or_not_at_all(cluster):
    cluster.store.full_commits = 1
    with pytest.raises(StoreRefused):
        submit(cluster, "eval", array="0-99", hold=True)
    assert cluster.world.jobs == {}
    assert cluster.store.states(1, 200) == []
    assert submit(cluster, "eval", array="0-99", hold=True)[0] == "1_0"


@pytest.mark.parametrize(
    ("kind", "bad", "state"),
    [
        ("afterok", (), SUCCEEDED),
        ("afterok", (1,), CANCELLED),
        ("afterany", (0, 2), SUCCEEDED),
        ("afternotok", (0,), SUCCEEDED),
        ("afternotok", (2,), SUCCEEDED),
        ("afternotok", (), CANCELLED),
    ],
)
def test_an_array_counts_as_one_parent(cluster, kind, bad, state):
    ids = submit(cluster, "eval", array="0-2", hold=True)
    child = submit(cluster, "child", after=f"{kind}:1")
    for index, job_id in enumerate(ids):
        assert cluster.job(child).state is PENDING or (kind == "afterok" and bad)
        if index in bad:
            cluster.cancel(job_id)
        else:
            cluster.request(HoldJob(job_id=job_id, held=False, by=ADA))
            cluster.ends(job_id)
    assert cluster.ends(child).state is state
    behind = submit(cluster, "behind", after=f"{kind}:1")
    assert cluster.ends(behind).state is state


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failure_among_elements_that_end_together_is_not_overlooked(cluster, bad):
    """All in one step, and the one that counts comes first, in between, and last."""
    ids = submit(cluster, "eval", array="0-2", behaviour=LONG)
    child, sweeper = submit(cluster, after="1"), submit(cluster, "sweeper", after="afternotok:1")
    for job_id in ids:
        cluster.runs(job_id)
    reports = []
    for index, job_id in enumerate(ids):
        attempt = cluster.live(job_id)
        member = attempt.members[0].node_id
        end = exited(0, member, 3 if index == bad else 0)
        reports += [TaskExited(**keyed(attempt), exit=end), MemberStopped(**keyed(attempt), node_id=member, at_s=T)]
    cluster.turn(reports)
    assert [cluster.job(job_id).state is FAILED for job_id in ids] == [index == bad for index in range(3)]
    assert cluster.job(child).state is CANCELLED
    assert cluster.job(sweeper).unmet_dependencies == ()


def test_whole_array_cancelled_in_one_step_counts_as_failed(cluster):
    submit(cluster, "eval", array="0-2", hold=True)
    child, sweeper = submit(cluster, after="1"), submit(cluster, "sweeper", after="afternotok:1")
    cluster.request(CancelJob(job_id=JobId("1"), by=ADA))
    assert cluster.job(child).state is CANCELLED
    assert cluster.ends(sweeper).state is SUCCEEDED


def test_a_failed_element_ends_afterok_children_while_its_siblings_still_run(cluster):
    submit(cluster, "eval", array="0-2", hold=True)
    child = submit(cluster, after="1")
    sweeper = submit(cluster, "sweeper", after="afternotok:1")
    cluster.cancel(JobId("1_1"))
    assert cluster.job(child).detail == "job 1_1 was cancelled, so afterok:1 can never be met"
    assert [str(one) for one in cluster.job(sweeper).unmet_dependencies] == ["afterany:1"], (
        "what it waits for is the end of the rest"
    )


def test_aftercorr_pairs_elements(cluster):
    parents = submit(cluster, "prepare", array="0-2", hold=True)
    children = submit(cluster, "train", array="0-2", after="aftercorr:1")
    assert [str(cluster.job(child).unmet_dependencies[0]) for child in children] == [
        "aftercorr:1_0",
        "aftercorr:1_1",
        "aftercorr:1_2",
    ]
    cluster.cancel(parents[1])
    cluster.request(HoldJob(job_id=parents[2], held=False, by=ADA))
    assert cluster.ends(children[2]).state is SUCCEEDED
    assert states(cluster, children) == [PENDING, CANCELLED, SUCCEEDED]


def test_aftercorr_of_other_elements_or_no_array_is_refused(cluster):
    submit(cluster, "prepare", array="0-2", hold=True)
    plain = submit(cluster, "plain", hold=True)
    with pytest.raises(BadRequest, match=r"has no element 3-4"):
        submit(cluster, "train", array="0-4", after="aftercorr:1")
    with pytest.raises(BadRequest, match="is not an array"):
        submit(cluster, "train", array="0-4", after=f"aftercorr:{plain}")


def test_verbs_act_on_all_elements_that_they_apply_to(cluster):
    ids = submit(cluster, "eval", array="0-9", gpus=4, behaviour=LONG)
    cluster.until(lambda: len(cluster.world.attempts) == 2)
    held = cluster.request(HoldJob(job_id=JobId("1"), held=True, by=ADA))
    assert [job.id for job in held] == ids[2:]
    updated = cluster.request(UpdateJob(job_id=JobId("1"), by=ADA, priority=7))
    assert {job.spec.priority for job in updated} == {7}
    assert len(updated) == 10
    released = cluster.request(HoldJob(job_id=JobId("1"), held=False, by=ADA))
    assert len(released) == 8
    assert len(cluster.request(RequeueJob(job_id=JobId("1"), by=ADA))) == 2
    assert len(cluster.request(CancelJob(job_id=JobId("1"), by=ADA))) == 10
    cluster.until(lambda: not cluster.world.attempts)
    assert set(states(cluster, ids)) == {CANCELLED}
    with pytest.raises(NotFound):
        cluster.request(CancelJob(job_id=JobId("1"), by=ADA))


def test_a_verb_that_applies_to_no_element_says_so(cluster):
    submit(cluster, "eval", array="0-3", hold=True)
    with pytest.raises(Conflict, match="no element of array 1 runs"):
        cluster.request(RequeueJob(job_id=JobId("1"), by=ADA))


# ---- begin ----------------------------------------------------------------------------------------------------------


def test_a_job_begins_no_earlier_than_asked(cluster):
    job = submit(cluster, begin_s=T + 40.0)
    assert cluster.job(job).reason is WaitReasonCode.BEGIN_TIME
    cluster.run(30.0)
    assert cluster.job(job).state is PENDING
    cluster.submit()  # so that something happens after it may begin
    assert cluster.ends(job).state is SUCCEEDED
    assert cluster.attempts(job)[0].placed_s >= T + 40.0


def test_a_begin_that_has_passed_means_at_once(cluster):
    job = submit(cluster, begin_s=T - 5000.0)
    assert cluster.job(job).reason is not WaitReasonCode.BEGIN_TIME
    assert cluster.ends(job).state is SUCCEEDED


def test_begin_may_be_changed_while_it_waits_and_not_later(cluster):
    job = submit(cluster, begin_s=T + 4000.0, behaviour=LONG)
    cluster.request(UpdateJob(job_id=job, by=ADA, begin_s=T))
    cluster.runs(job)
    with pytest.raises(Conflict, match="has begun"):
        cluster.request(UpdateJob(job_id=job, by=ADA, begin_s=T + 9000.0))


# ---- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_dependents_of_one_parent_are_let_go_in_one_step(cluster):
    """Linear: each dependent is touched once. Some 40 us each here; quadratic would be minutes."""
    parent = submit(cluster, "parent", hold=True)
    submit(cluster, "eval", array="0-9999", after=f"afterany:{parent}", gpus="2x4")
    assert len(cluster.world.relations.dependents) == 1
    began = time.perf_counter()
    outbox = cluster.head.controller.step(cluster.now, [CancelJob(job_id=parent, by=ADA)])
    took_s = time.perf_counter() - began
    assert all(not job.unmet_dependencies for job in cluster.world.pending.values())
    assert len(outbox.change.records) >= 10_001
    cluster.head.controller.refused(outbox)
    assert sum(bool(job.unmet_dependencies) for job in cluster.world.pending.values()) == 10_000, (
        "and undone as a whole"
    )
    assert took_s < 10.0, f"{took_s:.1f} s"


def test_a_chain_of_thousands_ends_in_one_step_without_recursion(cluster):
    first = submit(cluster, "job0", hold=True)
    before = first
    wishes = []
    for number in range(1, 3000):
        wishes.append(
            SubmitJob(
                spec=spec(f"job{number}", dependencies=parse_dependencies(before)),
                user=ADA,
                project=ProjectId("gpt"),
                queue=QueueId("default"),
            )
        )
        before = JobId(str(number + 1))
    assert not any(isinstance(answer, Exception) for answer in cluster.turn(wishes))
    cluster.cancel(first)
    assert not cluster.world.pending
    assert cluster.job(before).state is CANCELLED
    assert len(cluster.world.jobs) <= ENDED_JOBS_KEPT


def test_singletons_of_a_name_are_judged_once_however_long_the_chain_that_ends(cluster, monkeypatch):
    """Found by reading: a chain of one name, with one singleton behind it, was gone through once for each of its jobs."""
    judged = []
    free = dependencies._free_singletons

    def counted(world, name):
        judged.append(name)
        return free(world, name)

    monkeypatch.setattr(dependencies, "_free_singletons", counted)
    first = before = submit(cluster, "same", hold=True)
    for _ in range(20):
        before = submit(cluster, "same", after=before)
    alone = submit(cluster, "same", after="singleton", behaviour=JobBehaviour(run_s=1.0))
    cluster.cancel(first)
    assert cluster.job(before).state is CANCELLED
    assert len(judged) == 1
    assert cluster.ends(alone).state is JobState.SUCCEEDED


def test_no_more_elements_run_at_once_than_asked(cluster):
    ids = submit(cluster, "eval", array="0-9%3", behaviour=JobBehaviour(run_s=3.0))
    most = 0
    for _ in cluster.events(lambda: not all(cluster.job(job_id).state.terminal for job_id in ids)):
        most = max(most, len(cluster.world.attempts))
    assert most == 3
    assert set(states(cluster, ids)) == {SUCCEEDED}


@pytest.mark.parametrize("fault", ["head", "node", "requeue"])
def test_elements_at_once_stay_within_bounds_whatever_happens(cluster, fault):
    submit(cluster, "eval", array="0-7%2", behaviour=JobBehaviour(run_s=20.0))
    cluster.until(lambda: len(cluster.world.attempts) == 2)
    for job_id in tuple(cluster.world.attempts):
        cluster.runs(job_id)
    if fault == "head":
        cluster.kill_head()
        cluster.run(1.0)
        cluster.start_head()
    elif fault == "node":
        cluster.kill_node("n0")
        cluster.run(2.0)
        cluster.revive_node("n0")
    else:
        cluster.request(RequeueJob(job_id=next(iter(cluster.world.attempts)), by=ADA))
    for _ in cluster.events(lambda: bool(cluster.world.pending or cluster.world.attempts)):
        assert len(cluster.world.attempts) <= 2
