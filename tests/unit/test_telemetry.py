"""Live readings: progress from step reports however they are cut, and utilisation of what works for a job."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from phalanx.controller.telemetry import PROGRESSED_EVERY_S, SILENT_S, Telemetry
from phalanx.core.work.pace import StepPace
from phalanx.wire.supervisor import DeviceSample, SamplesRequest


def line(kind="step", step=1, *, rank=0, generation=0, at_s=None, **fields):
    base = {"k": kind, "rank": rank, "epoch": 1, "generation": generation, "step": step}
    if kind == "step":
        base |= {"begin_ns": step * 10**9, "end_ns": (step + 1) * 10**9, "at_s": float(step) if at_s is None else at_s}
    return json.dumps({**base, **fields}).encode() + b"\n"


def samples(node_id, *devices):
    return SamplesRequest(
        supervisor_id="s",
        node_id=node_id,
        at_s=1.0,
        devices=[
            DeviceSample(index=i, uuid=f"{node_id}-{i}", counter="rank_cpu", utilization=busy, job_id=job)
            for i, (job, busy) in enumerate(devices)
        ],
    )


def test_progress_is_that_of_the_newest_step():
    live = Telemetry()
    assert live.progress("1") is None
    live.put_steps(
        "1",
        1,
        0,
        line("planned", steps_total=100) + line(step=1, loss=3.0, tokens=10) + line(step=2, loss=2.0, tokens=10),
    )
    progress = live.progress("1")
    assert (progress.step, progress.steps_total, progress.loss, progress.step_s, progress.tokens_per_s) == (
        2,
        100,
        2.0,
        1.0,
        10.0,
    )


@given(st.lists(st.integers(0, 400), max_size=6))
def test_progress_does_not_depend_on_how_the_stream_is_cut(cuts):
    stream = b"".join(line(step=n, loss=1 / n) for n in range(1, 5))
    live = Telemetry()
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, end in pairwise(places):
        live.put_steps("1", 1, 0, stream[begin:end])
    assert (live.progress("1").step, live.progress("1").loss) == (4, 0.25)


def test_controller_hears_sparsely_but_of_each_beginning():
    live = Telemetry()
    told = live.put_steps("1", 1, 0, b"".join(line(step=n, at_s=n * PROGRESSED_EVERY_S / 4) for n in range(1, 10)))
    assert [(event.epoch, event.step) for event in told] == [(1, 1), (1, 5), (1, 9)]
    assert [event.step for event in live.put_steps("1", 2, 0, line(step=3, at_s=5.0))] == [3]


def test_a_pace_is_the_median_of_enough_steps_of_the_present_processes():
    live = Telemetry()

    def told(first, count, step_s, generation=0):
        report = b"".join(
            line(
                step=n,
                at_s=n * PROGRESSED_EVERY_S,
                begin_ns=int((n - 1) * step_s * 1e9),
                end_ns=int(n * step_s * 1e9),
                tokens=64,
                generation=generation,
            )
            for n in range(first, first + count)
        )
        return [event.pace for event in live.put_steps("1", 1, 0, report)]

    assert told(1, 19, 0.5) == [None] * 19
    assert told(20, 1, 0.5) == [StepPace(steps=20, step_s=0.5, tokens=64)]
    live.put_steps("1", 1, 0, line("planned", steps_total=50))
    assert [pace.steps_left for pace in told(21, 1, 0.5)] == [29]
    live = Telemetry()
    told(1, 20, 0.5)
    (stalled, *_, last) = told(61, 3, 0.5)  # 40 steps' time passed without one
    assert (stalled.step_s, last.step_s, last.steps) == (0.5, 0.5, 23)
    assert told(64, 1, 0.5, generation=1) == [None]


def test_other_ranks_older_epochs_and_noise_change_nothing():
    live = Telemetry()
    live.put_steps("1", 2, 0, line(step=7))
    assert live.put_steps("1", 1, 0, line(step=99)) == []
    assert live.put_steps("1", 2, 1, line(step=99)) == []
    live.put_steps(
        "1", 2, 0, line(step=98, rank=1) + b"[]\nnoise\n\xff\n" + b'{"k":"step","rank":0,"generation":0,"step":"x"}\n'
    )
    assert live.progress("1").step == 7


def test_restart_in_place_begins_its_rate_anew_and_keeps_the_plan():
    live = Telemetry()
    live.put_steps("1", 1, 0, line("planned", steps_total=9) + line(step=5))
    live.put_steps("1", 1, 0, line(step=3, generation=1) + line(step=6, generation=0))
    progress = live.progress("1")
    assert (progress.generation, progress.step, progress.steps_total) == (1, 3, 9)
    live.put_steps("1", 2, 0, line(step=1))
    assert live.progress("1").steps_total == 9


def test_saving_lasts_from_the_stall_to_the_checkpoint():
    live = Telemetry()
    live.put_steps("1", 1, 0, line(step=1) + line("stall", cause="save", seconds=0.1))
    assert live.progress("1").saving
    live.put_steps("1", 1, 0, line("checkpoint", step=1))
    assert (live.progress("1").saving, live.progress("1").checkpoint_step) == (False, 1)


def test_loss_that_json_has_no_word_for_is_left_out():
    live = Telemetry()
    live.put_steps("1", 1, 0, line(step=1, loss=float("nan")))
    assert live.progress("1").loss is None


def test_utilisation_is_the_mean_over_the_jobs_devices_on_all_nodes():
    live = Telemetry()
    live.put_samples(samples("n0", ("1", 1.0), ("1", 0.5), ("2", 0.0)))
    live.put_samples(samples("n1", ("1", 0.0), (None, 1.0)))
    assert (live.utilization("1"), live.utilization("2"), live.utilization("3")) == (0.5, 0.0, None)
    live.put_samples(samples("n0", ("2", 0.25)))
    assert (live.utilization("1"), live.utilization("2")) == (0.0, 0.25)
    live.remove_node("n1")
    assert live.utilization("1") is None
    assert live.node_samples("n1") is None


def test_device_that_does_not_tell_counts_for_nothing():
    live = Telemetry()
    live.put_samples(samples("n0", ("1", None), ("1", 0.5)))
    assert live.utilization("1") == 0.5


def seat(who, at_s, *devices):
    return SamplesRequest(
        supervisor_id=who,
        node_id="n0",
        at_s=at_s,
        devices=[
            DeviceSample(index=i, uuid=f"n0-{i}", counter="nvml", utilization=busy, job_id=job)
            for i, job, busy in devices
        ],
    )


def test_two_seats_on_one_node_each_speak_of_their_own_devices():
    live = Telemetry()
    live.put_samples(seat("a", 1.0, (0, "1", 0.5)))
    live.put_samples(seat("b", 1.2, (1, "2", 0.25)))
    assert [(device.index, device.job_id) for device in live.node_samples("n0").devices] == [(0, "1"), (1, "2")]
    assert (live.utilization("1"), live.utilization("2")) == (0.5, 0.25)


def test_a_seat_that_fell_silent_is_forgotten_while_its_neighbour_speaks():
    live = Telemetry()
    live.put_samples(seat("a", 1.0, (0, "1", 0.5)))
    live.put_samples(seat("b", 2.0 + SILENT_S, (1, "2", 0.25)))
    assert (live.utilization("1"), live.utilization("2")) == (None, 0.25)


def test_a_seat_that_is_told_to_speak_rarely_is_not_silent_before_it_has_missed_three_words():
    live = Telemetry()
    rare = msgspec.structs.replace(seat("a", 1.0, (0, "1", 0.5)), every_s=25.0)
    live.put_samples(rare)
    live.put_samples(seat("b", 76.0, (1, "2", 0.25)))
    assert (live.utilization("1"), live.utilization("2")) == (0.5, 0.25)
    live.put_samples(seat("b", 76.5, (1, "2", 0.25)))
    assert live.utilization("1") is None


def test_a_device_is_as_its_newest_supervisor_says():
    live = Telemetry()
    live.put_samples(seat("old", 1.0, (0, "1", 0.5)))
    live.put_samples(seat("new", 2.0, (0, "1", 1.0)))
    assert live.utilization("1") == 1.0


def test_steps_of_a_stored_stream_are_no_new_steps():
    live, told = Telemetry(), []
    live.step_listeners.append(lambda job_id, steps: told.append((job_id, [one.step for one in steps])))
    live.put_steps("1", 1, 0, line(step=7), replayed=True)
    live.put_steps("1", 1, 0, line(step=8))
    assert told == [("1", []), ("1", [8])]
    assert live.progress("1").step == 8


def test_counts_of_tokens_go_to_their_listeners_and_make_no_training_of_a_batch():
    live, told = Telemetry(), []
    live.token_listeners.append(lambda job_id, counts: told.append((job_id, [tuple(one) for one in counts])))
    count = line("tokens", hour=7200, requests=3, prompt_tokens=40, answer_tokens=5)
    live.put_steps("1", 1, 0, count[:30])
    live.put_steps("1", 1, 0, count[30:])
    live.put_steps("1", 1, 0, line("tokens", hour=7200, requests=-3, prompt_tokens=40, answer_tokens=5))
    live.put_steps("1", 1, 0, line("tokens", hour=7200, requests=3, prompt_tokens="x", answer_tokens=True))
    live.put_steps("1", 1, 0, count, replayed=True)
    assert told == [("1", [(7200, 3, 40, 5)])]
    assert live.step_activity("1") is None
    live.put_steps("1", 1, 0, line(step=1))
    assert live.step_activity("1").reported == 1
