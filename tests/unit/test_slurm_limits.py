"""Slurm's limits: which of its reasons ends a job, which lets it wait, and what an attempt does when its node goes down before the start."""

from dataclasses import replace

import pytest

from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.attempt import EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.slurm import render, sbatch_request
from phalanx.engines.slurm.limits import LimitScope, limit_of
from tests.unit.test_slurm_engine import attempt, look, order, row

JOB, USAGE, CLOSED, HELD = LimitScope.JOB, LimitScope.USAGE, LimitScope.CLOSED, LimitScope.HELD


@pytest.mark.parametrize(
    ("reason", "scope", "remedy"),
    [
        ("PartitionTimeLimit", JOB, "shorter time limit"),
        ("PartitionNodeLimit", JOB, "fewer nodes"),
        ("QOSMaxWallDurationPerJobLimit", JOB, "shorter time limit"),
        ("AssocMaxWallDurationPerJobLimit", JOB, "shorter time limit"),
        ("QOSMaxGRESPerJob", JOB, "fewer GPUs"),
        ("QOSMaxNodePerJobLimit", JOB, "fewer nodes"),
        ("QOSMaxGRESPerNode", JOB, "fewer GPUs"),
        ("AssocMaxCpuPerNode", JOB, "fewer CPUs"),
        ("MaxCPUsPerNode", JOB, "fewer CPUs"),
        ("MaxMemPerLimit", JOB, "less memory"),
        ("PartitionConfig", JOB, "nodes and GPUs that the partition has"),
        ("AssocMaxCpuMinutesPerJobLimit", JOB, "shorter time limit"),
        ("QOSMinGRES", JOB, "ask for more"),
        ("AccountNotAllowed", JOB, "account"),
        ("InvalidQOS", JOB, "QOS"),
        ("QOSMaxGRESPerUser", USAGE, "other jobs under this limit"),
        ("QOSMaxJobsPerUserLimit", USAGE, "other jobs under this limit"),
        ("QOSGrpGRES", USAGE, "fewer GPUs"),
        ("AssocGrpCpuLimit", USAGE, "fewer CPUs"),
        ("AssocMaxJobsLimit", USAGE, "other jobs under this limit"),
        ("AssocGrpWallLimit", USAGE, "other jobs under this limit"),
        ("MaxCpuPerAccount", USAGE, "fewer CPUs"),
        ("PartitionDown", CLOSED, "PartitionName=gpu State=UP"),
        ("PartitionInactive", CLOSED, "PartitionName=gpu State=UP"),
        ("JobHeldAdmin", HELD, "held by hand"),
    ],
)
def test_a_limit_of_slurm_has_a_scope_and_a_remedy(reason, scope, remedy):
    limit = limit_of(reason, "gpu")
    assert limit is not None
    assert (limit.reason, limit.scope) == (reason, scope)
    assert remedy in limit.remedy


@pytest.mark.parametrize(
    "reason",
    [
        "None",
        "",
        "Resources",
        "Priority",
        "ReqNodeNotAvail, UnavailableNodes:n1",
        "Reservation",
        "Prolog",
        "NewInSlurm99",
    ],
)
def test_nodes_in_use_are_no_limit(reason):
    assert limit_of(reason) is None


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("PartitionTimeLimit", EndCause.FAILED),
        ("PartitionDown", EndCause.CONTENDED),
        ("JobHeldUser", EndCause.LIMITED),
    ],
)
def test_a_limit_ends_the_attempt_at_the_first_poll(reason, cause):
    verdict = look(order(), row("PENDING", reason=reason), 90.5, partition="gpu")
    (back,) = verdict.events
    assert (back.cause, verdict.cancel) == (cause, True)
    assert back.why.startswith(f"Slurm does not start the job: {reason}; ")


@pytest.mark.parametrize(
    ("reason", "cause", "scope"),
    [
        ("QOSMaxJobsPerUserLimit", EndCause.LIMITED, USAGE),  # other jobs may end
        ("PartitionConfig", EndCause.FAILED, JOB),  # at first, of a job over PartitionTimeLimit
    ],
)
def test_a_reason_that_may_change_gets_two_more_looks_of_slurms_scheduler(reason, cause, scope):
    pending = row("PENDING", reason=reason)
    assert look(order(), pending, 93.9).events == ()
    verdict = look(order(), pending, 94.0)
    assert (verdict.events[0].cause, verdict.limit.scope) == (cause, scope)


def test_a_limit_of_a_job_that_runs_is_not_looked_at():
    assert look(order(), row("RUNNING", reason="QOSMaxJobsPerUserLimit"), 95.0).events == ()


@pytest.mark.parametrize("state", [AttemptState.PLACED, AttemptState.STOPPING])
def test_a_node_that_slurm_marks_down_before_the_start_is_replaced_at_once(state):
    begun = order(attempt=replace(attempt("h0", "h1"), state=state))
    assert look(begun, row("RUNNING", nodes=("h0", "h1")), 91.0).events == ()
    verdict = look(begun, row("RUNNING", nodes=("h0", "h1")), 92.0, down_nodes=("h1",))
    (back,) = verdict.events
    assert (back.cause, back.nodes, verdict.cancel) == (EndCause.UNFIT, ("h1",), True)
    assert back.why == "h1 is down in Slurm, before our Slurm job 5 started its ranks"


def test_the_lease_decides_about_a_node_that_is_down_once_its_supervisor_registered():
    there = attempt("h0", "h1")
    members = tuple(replace(member, state=MemberState.READY) for member in there.members)
    begun = order(attempt=replace(there, members=members))
    assert look(begun, row("RUNNING", nodes=("h0", "h1")), 92.0, down_nodes=("h1",)).events == ()


def test_a_slurm_job_that_ends_leaves_nothing_to_wait_for_on_a_node_where_no_supervisor_registered():
    there = attempt("h0", "h1")
    members = (replace(there.members[0], state=MemberState.READY), there.members[1])
    begun = order(attempt=replace(there, members=members, state=AttemptState.STOPPING), slurm_ended_s=90.0)
    (lost,) = look(begun, row("FAILED", nodes=("h0", "h1")), 95.0, down_nodes=("h0", "h1")).events
    assert lost.node_ids == ("h1",), "h0's supervisor may still run, and its lease decides"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", EndCause.LIMITED),
        ("Requested partition configuration not available now", EndCause.LIMITED),
        ("Invalid account or account/partition combination specified", EndCause.FAILED),
        ("Socket timed out on send/recv operation", EndCause.CONTENDED),
        ("something else", EndCause.START_FAIL),
    ],
)
def test_what_sbatch_refuses(said, cause):
    ask = render.SlurmJobRequest(name="a", tag="ab", job_id=JobId("1"), epoch=Epoch(1), grants=(), supervisor=("x",))
    assert sbatch_request.explain_refusal(ask, said)[1] is cause
