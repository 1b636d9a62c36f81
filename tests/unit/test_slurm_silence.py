# mypy: disable-error-code="arg-type"
# Drawings name jobs and nodes by plain text.
"""A Slurm that does not answer, or breaks off in the middle: heads start, what was seen is told, and what shall end is told to end again."""

import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.core.errors import Conflict, TryLater
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.state.events import CancelJob
from phalanx.core.state.reports import AttemptWithdrawn, NodeDied, NodeListed, SeatLost
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause, Member, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.slurm import commands, engine, submissions
from phalanx.engines.slurm.engine import SlurmEngine
from phalanx.engines.slurm.engine_type import SlurmEngineType
from phalanx.engines.slurm.options import OPTIONS
from phalanx.engines.slurm.parse import SlurmJob
from phalanx.engines.slurm.sbatch_request import SlurmSettings
from phalanx.engines.slurm.submissions import SlurmSubmission, SubmissionPhase
from phalanx.ports.engine import HeadSetup

GOLDEN = Path(__file__).parent.parent / "golden" / "slurm"
UNHEARD = "scancel: error: Unable to contact slurm controller (connect failure)"


@dataclass
class Played:
    """Slurm's commands, with the queue in `rows` as id -> (state, attempt). `fails`: how a command ends that is not well."""

    rows: dict = field(default_factory=dict)
    fails: dict = field(default_factory=dict)
    silent: bool = False
    said: list = field(default_factory=list)

    def run(self, argv, *, given="", more=None, within_s=commands.ANSWER_S):
        self.said.append((argv, within_s))
        failure = self.fails.get(argv[0], self.fails.get(argv[-1]))
        if self.silent or failure is TryLater:
            raise TryLater(f"{argv[0]}: no answer from Slurm in {within_s:.0f} s")
        if failure is not None:
            return commands.CommandResult(code=failure, stdout="", stderr=UNHEARD)
        return commands.CommandResult(code=0, stdout=self._out(argv), stderr="")

    def _out(self, argv):
        if argv[0] == "squeue":
            mark = argv[-1].partition("JobID:")[2].partition(",")[0]
            return "".join(
                f"{mark.join([number, 'me', state, 'h0', 'None', '0', f'phalanx:8f3ac2a5:{of}'])}{mark}\n"
                for number, (state, of) in self.rows.items()
            )
        shown = {"node": "nodes.txt", "partition": "partitions.txt"}.get(argv[-1])
        return "" if shown is None else (GOLDEN / shown).read_text()

    def cancels(self):
        """Those that were told to end since the last call, by command."""
        found = [list(argv[2:]) for argv, _ in self.said if argv[0] == "scancel" and "--batch" not in argv]
        self.said.clear()
        return found


@pytest.fixture
def played(monkeypatch):
    one = Played()
    monkeypatch.setattr(commands, "run", one.run)
    return one


def slurm(*known):
    """An engine with these orders."""
    settings = SlurmSettings(tag="8f3ac2a5", supervisor=("python",), head_url="https://h0:1")
    found = {(one.attempt.job_id, one.attempt.epoch): one for one in known}
    return SlurmEngine(settings=settings, key_of=lambda *_: "", _orders=found)


def attempt(job="17", *, state=AttemptState.RUNNING, member=MemberState.STARTED, node="h0"):
    grant = NodeGrant(node_id=node, node_rank=0, devices=(0,), cpus=0, memory_bytes=0, tasks=1, first_rank=0)
    members = (Member(node_id=node, state=member),)
    return Attempt(
        job_id=job,
        epoch=1,
        folder=f"{job}-k/epoch-1-k",
        allocation=Allocation(grants=(grant,)),
        placed_s=0.0,
        state=state,
        members=members,
    )


def order(job="17", slurm_id="4", *, since_s=0.0, **changes):
    given = {"attempt": attempt(job), "phase": SubmissionPhase.STARTED, **changes}
    return SlurmSubmission(slurm_id=slurm_id, since_s=time.monotonic() + since_s, **given)


def lost(job="17"):
    ended = attempt(job, state=AttemptState.ENDED, member=MemberState.LOST)
    return replace(ended, stop_cause=EndCause.NODE_FAIL)


def node(name, *, kind="slurm", state=NodeState.UP):
    return Node(id=name, engine=kind, devices=(), cpus=1, memory_bytes=0, state=state, per_attempt=kind == "slurm")


def live(*attempts):
    return [(SimpleNamespace(id=one.job_id), one) for one in attempts]


def looked(one):
    """The engine's thread for one look, and what it had to say by then: of jobs, and the nodes it saw."""
    try:
        one._poll()
    except TryLater as error:
        one._mark_unreachable(error.message)
    said = one.observe()
    nodes = {event.node.id: event.node for event in said if isinstance(event, NodeListed)}
    return [event for event in said if not isinstance(event, NodeListed | NodeDied)], nodes


# ---- a head that starts while Slurm is silent -----------------------------------------------------------------------


def test_a_head_starts_without_slurm_and_finds_its_jobs_once_it_answers(played):
    one = slurm()
    played.silent = True
    one.discover([node("h0"), node("h2", state=NodeState.DOWN)], live(attempt()))
    (excluded,) = one.observe()
    assert (excluded.node.id, "does not answer" in excluded.node.cordon.why) == ("h0", True), (
        "and the lost one stays lost"
    )
    assert [within_s for _, within_s in played.said] == [engine.FIRST_ANSWER_S], "leases do not wait for Slurm"
    assert looked(one) == ([], {})
    played.silent, played.rows = False, {"4": ("RUNNING", "17.1"), "5": ("RUNNING", "12.1")}
    reports, nodes = looked(one)
    assert (reports, nodes["h0"].cordon) == ([], None)
    assert (one._orders["17", 1].slurm_id, played.cancels()) == ("4", [["5"]]), "what nobody knows any more is ended"
    assert looked(one) == ([], {})


def test_the_nodes_count_as_listed_once_slurm_has_answered_and_their_events_wait(played):
    one = slurm()
    played.silent = True
    one.discover([], [])
    assert one.expected_nodes() is None
    played.silent = False
    one._poll()
    assert one.expected_nodes() == []
    assert {event.node.id for event in one.observe() if isinstance(event, NodeListed)} >= {"h0"}


def test_what_ended_while_slurm_was_silent_is_found_by_its_comment_and_ended(played):
    one = slurm()
    played.silent = True
    one.discover([node("h0")], live(attempt()))
    one.follow(SimpleNamespace(id="17"), lost())
    one._drain_updates()
    played.silent, played.rows = False, {"4": ("RUNNING", "17.1")}
    looked(one)
    assert played.cancels() == [["4"]]


def test_an_adopted_attempt_without_a_slurm_job_is_lost_once_slurm_answers(played, monkeypatch):
    monkeypatch.setattr(submissions, "SUPERVISOR_REPORT_S", 0.0)
    one = slurm()
    played.silent = True
    one.discover([node("h0")], live(attempt()))
    played.silent = False
    assert looked(one)[0] == []
    assert [type(report) for report in looked(one)[0]] == [SeatLost]


def test_nodes_and_attempts_of_another_engine_are_none_of_slurms(played):
    one = slurm()
    played.silent = True
    one.discover([node("here", kind="local")], live(attempt(node="here")))
    assert (one.observe(), one._orders) == ([], {})


def test_slurm_is_asked_for_what_is_new_and_not_when_a_head_starts_again(played, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    older = {"partition": "lab", "account": "", "qos": ""}
    before = {**{option.name: "" for option in OPTIONS}, **older}
    setup = HeadSetup(listens=True, listened_before=True, shares_store=False, virtual="")
    played.silent = True
    assert SlurmEngineType().check({}, before, setup) == before
    assert SlurmEngineType().check({"partition": "lab"}, before, setup) == before
    assert SlurmEngineType().check({}, older, setup) == before, "a head before had fewer options"
    for changed, known, now in (
        ({"partition": "long"}, before, setup),
        ({}, before, replace(setup, listens=False)),
        ({}, None, setup),
    ):
        with pytest.raises(TryLater):
            SlurmEngineType().check(changed, known, now)
    with pytest.raises(Conflict, match="--virtual cannot be used with --engine slurm"):
        SlurmEngineType().check({}, before, replace(setup, virtual="3x4"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Conflict, match="sbatch, scancel, scontrol, sinfo, squeue not found"):
        SlurmEngineType().check({}, before, setup)


# ---- a look that breaks off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["scontrol update", "scancel"])
def test_an_scancel_by_hand_is_told_also_when_a_command_of_the_same_look_is_not_answered(played, failing):
    queued = order(
        "18", "5", since_s=-2.0, attempt=attempt("18", member=MemberState.REQUESTED), phase=SubmissionPhase.QUEUED
    )
    one = slurm(order(), queued)
    played.rows = {"4": ("CANCELLED", "17.1"), "5": ("PENDING", "18.1"), "6": ("RUNNING", "12.1")}
    played.fails = {"scancel" if failing == "scancel" else "Comment=phalanx:8f3ac2a5:18.1": TryLater}
    assert [(type(report), report.job_id) for report in looked(one)[0]] == [(CancelJob, "17")]
    assert one._unreachable, "it did break off"


def test_a_withdrawal_is_told_and_its_slurm_job_ended_though_the_first_scancel_was_not_answered(played):
    one = slurm(order(since_s=-16.0, attempt=attempt(member=MemberState.REQUESTED), phase=SubmissionPhase.QUEUED))
    played.rows, played.fails = {"4": ("PENDING", "17.1")}, {"scancel": TryLater}
    assert [type(report) for report in looked(one)[0]] == [AttemptWithdrawn]
    played.cancels()
    played.fails = {}
    assert (looked(one)[0], played.cancels()) == ([], [["4"]])
    assert (looked(one)[0], played.cancels()) == ([], [])


# ---- an scancel that failed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [8, TryLater])
def test_an_scancel_of_a_bereft_job_that_slurm_did_not_hear_is_said_again(played, failure):
    one = slurm(order())
    played.rows, played.fails = {"4": ("RUNNING", "17.1")}, {"scancel": failure}
    one.follow(SimpleNamespace(id="17"), lost())
    looked(one)
    assert one._orders["17", 1].cancel_unconfirmed
    played.cancels()
    played.fails = {}
    looked(one)
    assert played.cancels() == [["4"]]
    looked(one)
    assert played.cancels() == [], "once it was heard"


def test_an_scancel_at_a_look_that_slurm_did_not_hear_is_said_again_and_a_leaving_job_is_left_alone(played):
    by_wish = replace(attempt(state=AttemptState.ENDED), stop_cause=EndCause.CANCELLED)
    one = slurm(order(attempt=by_wish, attempt_ended_s=time.monotonic()))
    played.rows, played.fails = {"4": ("RUNNING", "17.1")}, {"scancel": 8}
    looked(one)
    looked(one)
    assert played.cancels() == [["4"], ["4"]]
    played.rows = {"4": ("COMPLETING", "17.1")}
    looked(one)
    assert played.cancels() == []


def test_after_a_silence_what_was_told_to_end_is_told_once_more(played):
    one = slurm(order(attempt=lost(), attempt_ended_s=time.monotonic(), cancelled=True))
    played.rows = {"4": ("RUNNING", "17.1")}
    looked(one)
    assert played.cancels() == []
    one._mark_unreachable("squeue: no answer from Slurm in 30 s")
    looked(one)
    looked(one)
    assert played.cancels() == [["4"]]


def test_a_cancel_of_ours_that_seemed_unheard_is_not_taken_for_somebodys_scancel():
    row = SlurmJob(id="4", user="me", state="CANCELLED", nodes=("h0",), reason="", exit_code=0, comment="")
    told = order(attempt=lost(), attempt_ended_s=1.0, cancelled=True, cancel_unconfirmed=True)
    verdict = submissions.evaluate(told, row, 5.0, down_nodes=[], holders=[], python="p")
    assert (verdict.submission, verdict.events) == (None, ())


def test_a_head_that_ends_does_not_break_off_where_slurm_is_silent(played):
    one = slurm(order())
    played.silent = True
    one.close(keep_nodes=False)
    assert [argv for argv, _ in played.said] == [("scancel", "--quiet", "4")]
