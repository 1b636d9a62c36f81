"""What a job cost and what came of it, drawn as small histories of one job."""

import json
import tracemalloc
from dataclasses import replace

import msgspec
import pytest

from phalanx.api.views.usage_summaries import relevant_reports
from phalanx.core.accounting.reports import LINE_BYTES_MAX, read_lines, read_reports
from phalanx.core.accounting.usage_summary import build_usage_summary
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job, PublishedCheckpoint
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import AttemptState, JobState

T = 1_700_000_000.0  # Unix seconds at which every history starts


def make_job(state=JobState.SUCCEEDED, *, ended_s=None, checkpoints=()):
    return Job(
        id=JobId("1"),
        folder="1-k",
        seq=1,
        spec=JobSpec(name="gpt", role=Role(), workdir="/w"),
        user=UserId("u"),
        project=ProjectId("p"),
        queue=QueueId("q"),
        submit_s=T,
        state=state,
        ended_s=None if ended_s is None else T + ended_s,
        checkpoints=tuple(PublishedCheckpoint(epoch=Epoch(1), step=step, path="", digest="") for step in checkpoints),
    )


def make_attempt(epoch, begin, end=None, *, nodes=("n0", "n1"), cause=None, running=None, **fields):
    grants = tuple(
        NodeGrant(
            node_id=NodeId(name), node_rank=rank, devices=(0, 1), cpus=1, memory_bytes=0, tasks=2, first_rank=2 * rank
        )
        for rank, name in enumerate(nodes)
    )
    return Attempt(
        job_id=JobId("1"),
        epoch=Epoch(epoch),
        folder=f"1-k/epoch-{epoch}-k",
        allocation=Allocation(grants=grants),
        placed_s=T + begin,
        ended_s=None if end is None else T + end,
        stop_cause=cause,
        causes=() if cause is None else (cause,),
        state=AttemptState.RUNNING if end is None else AttemptState.ENDED,
        running_s=None if running is None else T + running,
        first_running_s=None if running is None else T + running,
        **fields,
    )


def steps(epoch, numbers, start, *, step_s=1.0, generation=0, gap_s=0.0, rank=0):
    lines = []
    for place, step in enumerate(numbers):
        begin = start + place * (step_s + gap_s)
        lines.append(
            {
                "k": "step",
                "rank": rank,
                "epoch": epoch,
                "generation": generation,
                "step": step,
                "loss": 5.0 - step / 100,
                "tokens": 10,
                "begin_ns": round(begin * 1e9),
                "end_ns": round((begin + step_s) * 1e9),
                "at_s": T + begin + step_s,
            }
        )
    return lines


def report(kind, epoch=1, generation=0, **fields):
    return {"k": kind, "rank": 0, "epoch": epoch, "generation": generation, **fields}


def fleet(*names, boot_id="b", virtual=True):
    return {
        NodeId(name): Node(
            id=NodeId(name),
            engine="local",
            devices=(),
            cpus=1,
            memory_bytes=1,
            state=NodeState.UP,
            boot_id=boot_id,
            virtual=virtual,
        )
        for name in names
    }


def a_node_died():
    """Steps 1..10, a checkpoint of 6, the node dies; a second attempt resumes and makes 7..12."""
    attempts = [
        make_attempt(1, 0, 15, cause=EndCause.NODE_FAIL, running=1),
        make_attempt(2, 16, 30, cause=EndCause.SUCCEEDED, running=17, nodes=("n2", "n1")),
    ]
    reports = {
        Epoch(1): [
            report("planned", steps_total=12),
            *steps(1, range(1, 11), 2),
            report("stall", seconds=0.5, cause="save"),
            report("checkpoint", step=6, bytes=100, stall_s=0.5, write_s=2.0),
        ],
        Epoch(2): [report("resumed", epoch=2, step=6, load_s=0.25), *steps(2, range(7, 13), 20)],
    }
    return make_job(ended_s=30), attempts, reports


def test_steps_made_again_are_lost_once_and_kept_once():
    usage = build_usage_summary(*a_node_died(), now_s=T + 99)
    assert (usage.steps_kept, usage.steps_lost, usage.steps_redone) == (12, 4, 4)
    assert usage.gpu_seconds.productive == (6 + 6) * 4
    assert usage.gpu_seconds.lost == 4 * 4
    assert usage.gpu_seconds.saving == 0.5 * 4
    assert usage.gpu_seconds.restarting == (2 + 4) * 4
    assert usage.gpu_seconds.total == (15 + 14) * 4
    assert usage.goodput == pytest.approx(12 / 29)
    assert (usage.wall_s, usage.queued_s) == (30, 1)
    assert (usage.loss_first, usage.loss_last) == (4.99, 4.88)
    assert usage.tokens_kept == 120


def test_attempts_say_why_they_ended_and_where_they_resumed():
    first, second = build_usage_summary(*a_node_died(), now_s=T + 99).attempts
    assert (first.cause, first.resumed_from_step, first.first_step, first.last_step) == ("node_fail", None, 1, 10)
    assert (second.cause, second.resumed_from_step, second.first_step, second.last_step) == ("succeeded", 6, 7, 12)
    assert [share.node for share in second.nodes] == ["n2", "n1"]
    assert first.kept_until_s == T + 8
    assert second.generations[0].load_s == 0.25


def test_no_step_was_made_by_two_attempts_at_once():
    assert build_usage_summary(*a_node_died(), now_s=T + 99).overlapping_steps == 0


def test_a_step_begun_by_the_old_attempt_after_the_new_one_began_is_counted():
    job, attempts, reports = a_node_died()
    reports[Epoch(1)] += steps(1, [11, 12], 20.5)
    assert build_usage_summary(job, attempts, reports, now_s=T + 99).overlapping_steps == 2


def test_on_one_machine_the_boot_clock_decides_who_was_first():
    job, attempts, reports = a_node_died()
    for line in reports[Epoch(2)]:
        if line["k"] == "step":
            line["at_s"] -= 12  # Unix time was set back meanwhile
    assert build_usage_summary(job, attempts, reports, now_s=T + 99).overlapping_steps > 0
    assert build_usage_summary(job, attempts, reports, nodes=fleet("n0", "n2"), now_s=T + 99).overlapping_steps == 0


def test_virtual_devices_are_marked():
    assert build_usage_summary(*a_node_died(), nodes=fleet("n0", "n1"), now_s=T + 99).virtual
    assert not build_usage_summary(*a_node_died(), nodes=fleet("n0", "n1", virtual=False), now_s=T + 99).virtual


def test_restart_in_place_is_one_attempt_of_two_generations():
    attempt = make_attempt(1, 0, 20, cause=EndCause.SUCCEEDED, generation=Generation(1))
    lines = [
        *steps(1, range(1, 6), 1),
        report("resumed", generation=1, step=3, load_s=0),
        *steps(1, range(4, 9), 10, generation=1),
    ]
    usage = build_usage_summary(make_job(ended_s=20), [attempt], {Epoch(1): lines}, now_s=T + 20)
    assert (usage.steps_kept, usage.steps_lost) == (8, 2)
    assert usage.gpu_seconds.restarting == (1 + 4) * 4
    assert usage.gpu_seconds.idle == 5 * 4
    assert [each.resumed_from_step for each in usage.attempts[0].generations] == [None, 3]


def test_a_running_job_counts_what_it_made_as_kept_so_far():
    usage = build_usage_summary(
        make_job(JobState.RUNNING), [make_attempt(1, 0)], {Epoch(1): steps(1, range(1, 5), 1)}, now_s=T + 6
    )
    assert (usage.steps_kept, usage.steps_lost) == (4, 0)
    assert usage.gpu_seconds.total == 6 * 4


def test_a_cancelled_job_keeps_what_its_checkpoint_holds():
    job = make_job(JobState.CANCELLED, ended_s=10, checkpoints=(3,))
    attempt = make_attempt(1, 0, 10, cause=EndCause.CANCELLED)
    usage = build_usage_summary(job, [attempt], {Epoch(1): steps(1, range(1, 9), 1)}, now_s=T + 10)
    assert (usage.steps_kept, usage.steps_lost, usage.steps_redone) == (3, 5, 0)


def test_while_the_new_attempt_has_made_no_step_the_tail_of_the_old_one_is_lost():
    job, attempts, reports = a_node_died()
    del reports[Epoch(2)]
    waits = replace(job, state=JobState.RUNNING, checkpoints=make_job(checkpoints=(6,)).checkpoints)
    usage = build_usage_summary(waits, [attempts[0], make_attempt(2, 16)], reports, now_s=T + 18)
    assert (usage.steps_kept, usage.steps_lost) == (6, 4)


def test_a_job_that_reports_nothing_is_judged_by_its_attempts():
    attempts = [
        make_attempt(1, 0, 10, cause=EndCause.NODE_FAIL, running=2),
        make_attempt(2, 10, 20, cause=EndCause.SUCCEEDED, running=11),
    ]
    usage = build_usage_summary(make_job(ended_s=20), attempts, {}, now_s=T + 20)
    assert usage.measured_by == "attempts"
    assert usage.goodput is None, "a script without steps may have hung all the time"
    assert usage.gpu_seconds.productive == 9 * 4
    assert usage.gpu_seconds.lost == 8 * 4
    assert usage.gpu_seconds.restarting == 3 * 4


def test_a_job_that_never_started_has_an_empty_usage_summary():
    usage = build_usage_summary(make_job(JobState.PENDING), [], {}, now_s=T + 5)
    assert usage.gpu_seconds.total == 0
    assert usage.goodput is None
    assert (usage.wall_s, usage.queued_s) == (5, 5)


def test_a_clock_that_is_off_changes_no_sum():
    job, attempts, reports = a_node_died()
    for line in reports[Epoch(1)]:
        if "at_s" in line:
            line["at_s"] += 1000
    spent = build_usage_summary(job, attempts, reports, now_s=T + 99).gpu_seconds
    assert spent.total == (15 + 14) * 4
    assert spent.productive + spent.lost + spent.saving + spent.restarting + spent.idle == spent.total


@pytest.mark.parametrize(
    "odd", [{}, {"k": "step"}, {"k": "step", "rank": "0"}, {"k": [], "epoch": 1, "rank": 0}, {"loss": float("nan")}]
)
def test_lines_that_are_no_report_are_left_out(odd):
    job, attempts, reports = a_node_died()
    before = build_usage_summary(job, attempts, reports, now_s=T + 99)
    reports[Epoch(1)].append(odd)
    assert build_usage_summary(job, attempts, reports, now_s=T + 99) == before


def test_a_torn_stream_is_read_up_to_the_tear():
    lines = b"\n".join(json.dumps(line).encode() for line in steps(1, range(1, 4), 1))
    found = relevant_reports(Epoch(1), read_lines([b"noise\n[1]\n" + lines[:-5]]))
    assert [line["step"] for line in found] == [1, 2]


def stream(*lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
def test_a_stream_in_pieces_of_any_length_says_the_same(piece_bytes):
    data = stream(*a_node_died()[2][Epoch(1)]) + b"torn {"
    pieces = [data[place : place + piece_bytes] for place in range(0, len(data), piece_bytes)]
    assert list(read_lines(pieces)) == data.split(b"\n")


def test_a_line_without_end_is_left_out_and_those_behind_it_are_read():
    noise = [b"x" * LINE_BYTES_MAX] * 3
    assert list(read_lines([b"a\nb", *noise, b"c\nd"])) == [b"a", b"d"]
    assert list(read_lines([b"a\n", *noise])) == [b"a"]


def test_what_ranks_say_that_do_not_speak_changes_nothing_in_whatever_order_it_comes():
    """Their steps are not even read; all else that they say counts as before."""
    own = [
        report("stall", seconds=0.5, cause="save"),
        *steps(1, range(1, 9), 1),
        report("checkpoint", step=6, bytes=1, stall_s=0.1),
    ]
    others = [
        *steps(1, range(1, 9), 1.5, rank=3),
        {**report("stall", seconds=9.0, cause="save"), "rank": 3},
        report("planned", steps_total=9),
        {"k": "step", "rank": "0", "epoch": 1},
        {"k": "step", "rank": -1, "epoch": 2},
        {"k": "step", "rank": 1 << 70, "epoch": 1},
    ]
    whole = read_reports(Epoch(1), own + others)
    for lines in (own + others, others + own, [*others[:4], *own, *others[4:]]):
        assert read_reports(Epoch(1), relevant_reports(Epoch(1), read_lines([stream(*lines)]))) == whole
    assert (len(whole.steps), whole.stalls_us, whole.steps_total) == (8, {0: 500_000}, 9)


def test_a_usage_summary_holds_the_steps_of_one_rank_and_not_every_line_of_all():
    """Found by reading: whoever may see a job could have the head hold all lines of all ranks as objects, a kilobyte each."""
    data = stream(*(line for step in range(500) for rank in range(8) for line in steps(1, [step], step, rank=rank)))

    def pieces():
        for place in range(0, len(data), 10_000):
            yield data[place : place + 10_000]

    tracemalloc.start()
    found = read_reports(Epoch(1), relevant_reports(Epoch(1), read_lines(pieces())))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.steps) == 500
    assert peak_bytes < len(data)


def test_the_lowest_rank_that_reports_speaks_for_the_job():
    attempt = make_attempt(1, 0, 10, cause=EndCause.SUCCEEDED)
    lines = steps(1, range(1, 5), 1, rank=0) + steps(1, range(1, 5), 1.2, rank=1)
    assert build_usage_summary(make_job(ended_s=10), [attempt], {Epoch(1): lines}, now_s=T).steps_kept == 4


def test_it_travels_as_json():
    body = json.loads(msgspec.json.encode(build_usage_summary(*a_node_died(), now_s=T + 99)))
    assert set(body["gpu_seconds"]) == {"productive", "lost", "saving", "restarting", "idle", "total"}
    assert body["attempts"][0]["nodes"][0] == {"node": "n0", "devices": [0, 1], "first_rank": 0, "tasks": 2}
