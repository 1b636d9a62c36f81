# mypy: disable-error-code="arg-type"
# Drawings name jobs and nodes by plain text.
"""Slurm in words: what its commands print becomes records, attempts become its command lines, and its queue is judged."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.core.state.events import CancelJob
from phalanx.core.state.reports import AttemptWithdrawn, SeatLost
from phalanx.core.units import GIB, MIB
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause, Member, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.slurm import (
    inventory,
    parse,
    render,
    submissions,
)
from phalanx.engines.slurm.engine import SlurmEngine
from phalanx.engines.slurm.inventory import OurUsage
from phalanx.engines.slurm.parse import GresGpus, SlurmJob, SlurmPartition
from phalanx.engines.slurm.sbatch_request import SlurmSettings
from phalanx.engines.slurm.submissions import SlurmSubmission, SubmissionPhase

GOLDEN = Path(__file__).parent.parent / "golden" / "slurm"
NODES = {node.name: node for node in parse.parse_nodes((GOLDEN / "nodes.txt").read_text())}
JOBS = parse.parse_jobs((GOLDEN / "jobs.txt").read_text(), "|5f1c|")


def grant(node="h1", devices=(0, 1), rank=0, cpus=0, memory=0):
    return NodeGrant(
        node_id=node,
        node_rank=rank,
        devices=tuple(devices),
        cpus=cpus,
        memory_bytes=memory,
        tasks=max(1, len(devices)),
        first_rank=0,
    )


def attempt(*nodes, state=AttemptState.PLACED, member=MemberState.REQUESTED, ending=None, epoch=1):
    grants = tuple(grant(node, rank=rank) for rank, node in enumerate(nodes))
    members = tuple(Member(node_id=node, state=member) for node in nodes)
    return Attempt(
        job_id="17",
        epoch=epoch,
        folder=f"17-k/epoch-{epoch}-k",
        allocation=Allocation(grants=grants),
        placed_s=0.0,
        state=state,
        members=members,
        stop_cause=ending,
    )


# ---- parse --------------------------------------------------------------------------------------------------------------


def test_a_node_is_read_with_what_of_it_is_used():
    node = NODES["h1"]
    assert (node.address, node.cpus, node.cpus_used) == ("10.77.0.2", 16, 1)
    assert (node.memory_bytes, node.memory_used_bytes) == (4096 * MIB, 256 * MIB)
    assert (node.gpus, node.gpus_used) == ((GresGpus(kind="h100", count=4),), (GresGpus(kind="h100", count=3),))
    assert (node.closed_reason, node.down_reason, node.partitions) == ("", "", ("lab",))


def test_a_drained_node_is_shut_and_a_silent_one_is_gone_with_the_reasons_that_slurm_gives():
    assert NODES["h2"].closed_reason == "Slurm state drain: bad fan"
    assert NODES["h3"].down_reason == "Slurm state down+not_responding: Not responding"


def test_a_node_may_have_several_types_and_things_that_are_no_gpus():
    node = NODES["h4"]
    assert node.gpus == (GresGpus(kind="a100", count=4), GresGpus(kind="h100", count=2))
    assert node.gpus_used == (GresGpus(kind="a100", count=1), GresGpus(kind="h100", count=0))
    assert node.features == ("nvlink", "ib")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:4", [("", 4)]),
        ("gpu:h100:4(S:0-1)", [("h100", 4)]),
        ("gpu:a100-sxm4-40gb:8", [("a100-sxm4-40gb", 8)]),
        ("(null)", []),
        ("gpu:0(IDX:N/A)", [("", 0)]),
        ("mps:100,gpu:2(IDX:0,3)", [("", 2)]),
        ("", []),
    ],
)
def test_gres(text, found):
    assert [(gpus.kind, gpus.count) for gpus in parse.parse_gres(text)] == found


def test_the_queue_is_read_with_wait_statuses_and_comments_of_any_kind():
    found = {job.id: job for job in JOBS}
    assert (found["1"].has_ended, found["1"].exit_code, found["1"].nodes) == (True, 0, ("h0",))
    assert found["3"].exit_code == 137, "squeue prints the wait status"
    assert (found["6"].has_nodes, found["6"].user, found["6"].nodes) == (True, "alice", ("h0", "h1", "h2"))
    assert (found["7"].has_nodes, found["7"].has_ended, found["7"].comment) == (False, False, "a | in a comment")
    assert render.parse_comment(found["9"].comment) == ("8f3ac2a5", "17_4", 2)


def test_a_comment_with_a_line_end_is_no_row_and_what_is_no_whole_row_is_refused():
    assert [job.id for job in JOBS] == ["1", "3", "6", "7", "9", "12", "13"]
    assert JOBS[-1].comment.startswith("one\n6|root|CANCELLED|")
    assert parse.parse_jobs("", "|m|") == ()
    for text in ("1|m|root|m|\n", "slurm_load_jobs error\n", f"{'1|m|' * 7}\nmore"):
        with pytest.raises(parse.SlurmOutputError, match="not a complete row of 7"):
            parse.parse_jobs(text, "|m|")


def test_partitions_and_switches():
    lab, long = parse.parse_partitions((GOLDEN / "partitions.txt").read_text())
    assert (lab.default, lab.up, lab.max_time) == (True, True, "UNLIMITED")
    assert (long.name, long.default, long.up, long.max_time) == ("long", False, False, "7-00:00:00")
    places = parse.parse_topology((GOLDEN / "topology.txt").read_text())
    assert places["h1"] == {"leaf": "s0", "spine": "s2"}
    assert places["h4"] == {"leaf": "s1", "spine": "s2"}


def test_what_is_no_slurm_is_refused_with_its_words():
    with pytest.raises(parse.SlurmOutputError, match="sinfo reports the version"):
        parse.parse_version("bash: sinfo: command not found")
    assert parse.parse_version("slurm 22.05.8\n") == (22, 5)
    assert parse.parse_version("slurm-wlm 23.11.4") == (23, 11)


# ---- render -------------------------------------------------------------------------------------------------------------


def ask(**changes):
    given = {
        "name": "my job; rm -rf /",
        "tag": "8f3ac2a5",
        "job_id": "17",
        "epoch": 2,
        "grants": (grant("h0", cpus=8, memory=2 * GIB), grant("h1", rank=1, cpus=8, memory=2 * GIB)),
        "supervisor": ("/opt/it's/python", "-P", "-m", "phalanx.app.seat_supervisor"),
        "kind": "h100",
    }
    return render.SlurmJobRequest(**{**given, **changes})


def test_an_attempt_is_one_slurm_job_of_exactly_its_nodes():
    argv, script = render.submit_command(ask(limit_s=3600.0, partition="lab", account="physics", qos="high"))
    shown = "\n".join([*argv, "", script])
    golden = GOLDEN / "submit.txt"
    assert shown == golden.read_text(), f"see {golden}"


def test_a_single_node_needs_no_srun_and_a_job_without_limit_takes_the_partitions():
    argv, script = render.submit_command(ask(grants=(grant("h0", devices=()),), kind="", time_max="UNLIMITED"))
    assert "--time=UNLIMITED" in argv
    assert not any(word.startswith(("--gres", "--mem")) for word in argv)
    assert "srun" not in script
    assert script.splitlines()[-1].startswith("exec '/opt/it'\"'\"'s/python' -P -m")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "0-00:01:00"), (60, "0-00:01:00"), (3601, "0-01:01:00"), (90000, "1-01:00:00")]
)
def test_times_are_rounded_up_to_a_minute(seconds, text):
    assert render.format_time_limit(seconds) == text


# ---- inventory ----------------------------------------------------------------------------------------------------------


def node_of(name, granted=OurUsage(), begun=OurUsage(), **more):
    return inventory.fleet_node(
        NODES[name], granted=granted, allocated=begun, jobs=JOBS, our_job_ids=frozenset({"9"}), **more
    )


def test_others_hold_what_slurm_has_given_and_not_to_us():
    node = node_of("h1")
    assert node.per_attempt
    assert len(node.devices) == 4
    assert (node.foreign_usage.devices, node.foreign_usage.cpus, node.foreign_usage.owners) == (
        (1, 2, 3),
        1,
        ("Slurm job 6 of alice",),
    )
    ours = OurUsage(devices=frozenset({0, 1}), cpus=1, memory_bytes=256 * MIB)
    assert node_of("h1", granted=ours, begun=ours).foreign_usage.devices == (3,), "two of the three are ours"


def test_what_the_head_has_granted_is_never_said_to_be_others():
    granted = OurUsage(devices=frozenset({2, 3}))
    assert node_of("h1", granted=granted).foreign_usage.devices == (0, 1)


def test_a_contended_node_has_nothing_free_for_a_while():
    assert node_of("h0", contended="someone").foreign_usage.devices == (0, 1, 2, 3)


def test_a_drained_node_is_cordoned_in_slurms_name():
    node = node_of("h2")
    assert (node.cordon.by, node.cordon.why) == ("slurm", "Slurm state drain: bad fan")


def test_all_nodes_of_a_closed_partition_are_cordoned_with_the_command_that_opens_it():
    closed = SlurmPartition(name="gpu", default=True, state="DOWN", max_time="UNLIMITED")
    cordon = node_of("h0", partition=closed).cordon
    assert (cordon.why, cordon.remedy) == (
        "Slurm's partition gpu is DOWN",
        "scontrol update PartitionName=gpu State=UP",
    )
    assert node_of("h0", partition=replace(closed, state="UP")).cordon is None
    assert node_of("h2", partition=closed).cordon.remedy == "scontrol update NodeName=h2 State=RESUME"


def test_a_job_asks_for_its_devices_part_of_the_node_and_for_no_more_than_is_free():
    (share,) = inventory.request_shares([grant("h0")], NODES)
    assert (share.cpus, share.memory_bytes) == (8, 2048 * MIB)
    both = inventory.request_shares([grant("h0"), grant("h1", rank=1)], NODES)
    assert {share.cpus for share in both} == {8}
    (asked,) = inventory.request_shares([grant("h0", cpus=3, memory=GIB)], NODES)
    assert (asked.cpus, asked.memory_bytes) == (3, GIB)
    assert inventory.gres_type(grant("h4", devices=(4,)), NODES["h4"]) == "h100"


# ---- orders -------------------------------------------------------------------------------------------------------------


def row(state, nodes=("h0",), reason="None", code=0):
    return SlurmJob(id="5", user="me", state=state, nodes=nodes, reason=reason, exit_code=code, comment="")


def look(order, seen, now_s=100.0, **more):
    return submissions.evaluate(
        order, seen, now_s, **{"down_nodes": (), "holders": (), "python": "/opt/python", **more}
    )


def order(**changes):
    return SlurmSubmission(**{"attempt": attempt("h0", "h1"), "slurm_id": "5", "since_s": 90.0, **changes})


def test_a_job_that_does_not_begin_in_15_s_is_taken_back_and_says_who_took_the_node():
    waiting = order()
    assert look(waiting, row("PENDING"), 104.0).events == ()
    verdict = look(waiting, row("PENDING", reason="Resources"), 105.0, holders=["Slurm job 6 of alice"])
    (back,) = verdict.events
    assert isinstance(back, AttemptWithdrawn)
    assert back.cause is EndCause.CONTENDED
    assert (
        back.why
        == "Slurm job 6 of alice took h0, h1 before our Slurm job 5 started, within 15 s (Slurm's reason: Resources)"
    )
    assert (verdict.cancel, verdict.contended, verdict.submission.phase) == (
        True,
        ("h0", "h1"),
        SubmissionPhase.SETTLED,
    )


def test_while_a_job_of_ours_is_cleared_away_there_the_next_one_waits_longer():
    waiting = look(order(), row("PENDING"), 110.0, cleaning_up=True)
    assert waiting.events == ()
    assert look(waiting.submission, row("PENDING"), 124.5).events == (), "15 s from when the place was clear"
    assert "in 35 s" in look(waiting.submission, row("PENDING"), 125.0).events[0].why
    (back,) = look(order(cleaning_up_s=149.5), row("PENDING"), 150.0, cleaning_up=True).events
    assert "within 60 s" in back.why, "but no longer than that in all"
    old = SlurmJob(id="4", user="me", state="COMPLETING", nodes=("h1", "h2"), reason="", exit_code=0, comment="")
    assert (old.is_cleaning_up(("h0", "h1")), old.is_cleaning_up(("h0",))) == (True, False)


def test_slurm_is_asked_to_look_again_at_a_job_that_waits():
    assert not look(order(), row("PENDING"), 91.0).nudge
    first = look(order(), row("PENDING"), 91.5)
    assert first.nudge
    assert not look(first.submission, row("PENDING"), 92.5).nudge
    assert look(first.submission, row("PENDING"), 93.0).nudge
    assert not look(order(), row("RUNNING"), 95.0).nudge
    assert render.nudge_command("5", "phalanx:ab:17.1") == ("scontrol", "update", "JobId=5", "Comment=phalanx:ab:17.1")


def test_a_job_whose_attempt_lost_a_node_gives_up_the_others_at_once():
    lost = attempt("h0", "h1", member=MemberState.LOST, state=AttemptState.ENDED)
    assert look(order(attempt=lost, phase=SubmissionPhase.STARTED, attempt_ended_s=100.0), row("RUNNING"), 100.0).cancel
    failed = attempt("h0", "h1", member=MemberState.STOPPED, state=AttemptState.ENDED)
    assert not look(
        order(attempt=failed, phase=SubmissionPhase.STARTED, attempt_ended_s=100.0), row("RUNNING"), 100.0
    ).cancel


def test_one_that_began_is_left_alone():
    verdict = look(order(), row("RUNNING"), 200.0)
    assert (verdict.submission.phase, verdict.events, verdict.cancel) == (SubmissionPhase.STARTED, (), False)


def test_a_job_that_ended_before_its_supervisors_came_tells_what_it_looked_for():
    first = look(order(phase=SubmissionPhase.STARTED), row("FAILED", code=127), 100.0)
    assert first.events == (), "its supervisors may still have a word to say"
    (back,) = look(first.submission, row("FAILED", code=127), 103.0).events
    assert (back.cause, "check that /opt/python exists on h0, h1" in back.why) == (EndCause.START_FAIL, True)


def test_a_job_that_ended_under_its_ranks_loses_the_seats_but_those_on_nodes_that_are_gone():
    running = order(
        attempt=attempt("h0", "h1", member=MemberState.STARTED), phase=SubmissionPhase.STARTED, slurm_ended_s=90.0
    )
    (lost,) = look(running, row("NODE_FAIL"), 100.0, down_nodes=["h1"]).events
    assert lost == SeatLost(job_id="17", epoch=1, node_ids=("h0",), why="Slurm job 5 ended as NODE_FAIL")


def test_an_scancel_by_hand_cancels_the_job_also_when_the_attempt_has_ended_by_then():
    left = order(
        attempt=attempt("h0", member=MemberState.STARTED, ending=EndCause.NODE_FAIL),
        phase=SubmissionPhase.STARTED,
        attempt_ended_s=99.0,
    )
    verdict = look(left, row("CANCELLED"))
    assert [type(report) for report in verdict.events] == [CancelJob]
    assert verdict.submission is None
    assert look(order(cancelled=True, attempt_ended_s=99.0), row("CANCELLED")).events == (), "it was us"


def test_what_is_left_of_an_ended_attempt_is_cancelled_at_once_by_wish_and_else_after_a_while():
    by_wish = order(
        attempt=attempt("h0", ending=EndCause.CANCELLED), phase=SubmissionPhase.STARTED, attempt_ended_s=100.0
    )
    assert look(by_wish, row("RUNNING"), 100.5).cancel
    well = order(attempt=attempt("h0", ending=EndCause.SUCCEEDED), phase=SubmissionPhase.STARTED, attempt_ended_s=100.0)
    assert not look(well, row("RUNNING"), 119.0).cancel
    assert look(well, row("RUNNING"), 120.0).cancel


def test_a_job_that_squeue_shows_no_more_is_over_after_three_looks():
    now = order(phase=SubmissionPhase.STARTED, attempt=attempt("h0", member=MemberState.STARTED))
    for at_s in (100.0, 100.5, 101.0):
        verdict = look(now, None, at_s)
        assert verdict.events == ()
        now = verdict.submission
    (lost,) = look(now, None, 105.0).events
    assert lost.why == "Slurm job 5 is gone"


# ---- engine -------------------------------------------------------------------------------------------------------------


def engine():
    """One that has looked at Slurm when it had h0 and h1."""
    settings = SlurmSettings(tag="8f3ac2a5", supervisor=("python",), head_url="https://h0:1")
    return SlurmEngine(settings=settings, key_of=lambda *_: "", _slurm={name: NODES[name] for name in ("h0", "h1")})


def test_an_attempt_on_a_node_that_left_the_partition_before_its_submit_comes_back():
    slurm, job = engine(), SimpleNamespace(id="17")
    slurm.follow(job, attempt("h0", "h1"))
    del slurm._slurm["h1"]
    slurm._drain_updates()
    (back,) = slurm.observe()
    assert (back.cause, back.why) == (EndCause.START_FAIL, "h1 is no longer in the Slurm partition")


def test_the_end_of_an_attempt_is_heard_also_when_its_node_has_left_the_partition():
    slurm, job = engine(), SimpleNamespace(id="17")
    slurm._orders["17", 1] = SlurmSubmission(attempt=attempt("h1"), slurm_id="5", since_s=0.0)
    del slurm._slurm["h1"]
    slurm.follow(job, attempt("h1", state=AttemptState.ENDED))
    slurm.follow(job, attempt("h7", epoch=9))  # another engine's
    slurm._drain_updates()
    assert slurm._orders["17", 1].attempt_ended_s is not None
    assert slurm.observe() == []


# ---- what the books shall say -------------------------------------------------------------------------------------------


def test_slurms_own_limit_is_a_minute_after_ours_but_never_over_what_the_partition_allows():
    hour = ask(limit_s=3600.0, time_max="01:00:00", partition="short")
    assert "--time=0-01:00:00" in render.submit_command(hour)[0]
    assert "--time=0-01:01:00" in render.submit_command(ask(limit_s=3600.0, time_max="7-00:00:00"))[0]
    assert render.time_limit_problem(hour, 3600.0) == ""
    assert "the job's time limit 0-02:00:00 exceeds the " in render.time_limit_problem(hour, 7200.0)
    assert render.time_limit_problem(ask(time_max="UNLIMITED"), 1e9) == ""


@pytest.mark.parametrize(
    ("text", "seconds"), [("7-00:00:00", 604_800.0), ("01:30:00", 5400.0), ("UNLIMITED", None), ("", None)]
)
def test_a_time_limit_as_slurm_prints_it(text, seconds):
    assert render.parse_time_limit(text) == seconds


def test_account_and_qos_may_be_named_after_the_jobs_project_and_queue():
    assert render.fill_pattern("{project}", "vision", "night") == "vision"
    assert render.fill_pattern("lab-{queue}", "vision", "night") == "lab-night"
    assert render.fill_pattern("physics", "vision", "night") == "physics"


def test_a_cancel_of_ours_is_not_taken_for_somebodys_scancel():
    row = SlurmJob(id="4", user="a", state="CANCELLED", nodes=("h1",), reason="", exit_code=0, comment="")
    begun = SlurmSubmission(
        attempt=attempt("h1", ending=EndCause.PREEMPTED), slurm_id="4", since_s=0.0, phase=SubmissionPhase.STARTED
    )
    verdict = submissions.evaluate(begun, row, 5.0, down_nodes=[], holders=[], python="p")
    assert [type(report) for report in verdict.events] == []
    by_hand = SlurmSubmission(attempt=attempt("h1"), slurm_id="4", since_s=0.0, phase=SubmissionPhase.STARTED)
    assert [
        type(report) for report in submissions.evaluate(by_hand, row, 5.0, down_nodes=[], holders=[], python="p").events
    ] == [CancelJob]


def test_after_a_silence_of_slurms_nothing_is_overdue():
    waiting = SlurmSubmission(attempt=attempt("h1"), slurm_id="4", since_s=0.0)
    assert (
        submissions.evaluate(
            submissions.after_outage(waiting, 100.0), None, 101.0, down_nodes=[], holders=[], python="p"
        ).events
        == ()
    )
    ended = SlurmSubmission(
        attempt=attempt("h1"), slurm_id="4", since_s=0.0, phase=SubmissionPhase.STARTED, attempt_ended_s=1.0
    )
    row = SlurmJob(id="4", user="a", state="RUNNING", nodes=("h1",), reason="", exit_code=0, comment="")
    assert submissions.evaluate(ended, row, 100.0, down_nodes=[], holders=[], python="p").cancel
    assert not submissions.evaluate(
        submissions.after_outage(ended, 100.0), row, 101.0, down_nodes=[], holders=[], python="p"
    ).cancel


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (127, "check that /opt/python exists on h1"),
        (69, "h1 cannot reach the head at https://10.0.0.5:7600"),
        (76, "h1 rejects the certificate of the head at https://10.0.0.5:7600"),
        (1, "before its supervisors connected to the head"),
    ],
)
def test_a_slurm_job_without_supervisors_says_by_its_code_what_was_wrong(code, words):
    row = SlurmJob(id="4", user="a", state="FAILED", nodes=("h1",), reason="", exit_code=code, comment="")
    order = SlurmSubmission(
        attempt=attempt("h1"), slurm_id="4", since_s=0.0, phase=SubmissionPhase.STARTED, slurm_ended_s=1.0
    )
    (report,) = submissions.evaluate(
        order, row, 10.0, down_nodes=[], holders=[], python="/opt/python", head_url="https://10.0.0.5:7600"
    ).events
    assert isinstance(report, AttemptWithdrawn)
    assert report.why.endswith(words) or f"; {words}" in report.why
