"""Sweeps in virtual time: the values of parameters, the same trials from the same seed, early stops, and kills between any two writes."""

import math
import os
from dataclasses import replace

import msgspec
import pytest

from benchmarks.sweep import VirtualTrialJobs, grid_best, swept
from phalanx.cli.sweep.picture import parallel_axes
from phalanx.core.errors import BadRequest
from phalanx.sweep.definition import SweepDefinition
from phalanx.sweep.driver import SweepDriver, SweepEvent, best_trial
from phalanx.sweep.space import parse_parameter, variable_of
from phalanx.sweep.study import SweepStudy, read_trials
from phalanx.sweep.trial_jobs import trial_job

pytestmark = pytest.mark.slow

LR = parse_parameter("lr", "log:1e-5..1e-2")
LAYERS = parse_parameter("layers", "2,4")


def definition(**fields):
    given = {
        "id": "x",
        "name": "s",
        "parameters": (LR, LAYERS),
        "job": {"run": ["python", "train.py"]},
        "append": True,
        "samples": 9,
        "asha": True,
        "max_parallel": 3,
    }
    return SweepDefinition(**{**given, **fields})


def loss(at, step):
    return abs(math.log10(float(at["lr"])) + 3) + 4 / step


class Killed(BaseException):
    """The process ends here."""


class KilledAt(VirtualTrialJobs):
    """Ends the process at the n-th call that changes something, before or after it has its effect."""

    left = -1

    def _call(self, act):
        self.left -= 1
        if self.left == 0:
            raise Killed
        found = act()
        self.left -= 1
        if self.left == 0:
            raise Killed
        return found

    def submit(self, trial):
        return self._call(lambda: super(KilledAt, self).submit(trial))

    def cancel(self, job_id, why):
        self._call(lambda: super(KilledAt, self).cancel(job_id, why))


def drive(made, jobs, journal=None):
    study = SweepStudy(made, journal)
    driver = SweepDriver(made, study, jobs)
    events: list[SweepEvent] = []
    for now_s in range(10_000):
        if driver.done:
            return study.trials(), events
        events += driver.turn(float(now_s))
    raise AssertionError("the sweep does not end")


def test_ranges_lists_and_their_mistakes():
    assert (LR.log, LR.whole, LR.low, LR.high) == (True, False, 1e-5, 1e-2)
    assert parse_parameter("n", "2..8").whole
    assert parse_parameter("n", "log:1..8:4").grid_values() == [1, 2, 4, 8]
    assert parse_parameter("p", "0.1..0.5:3").grid_values() == pytest.approx([0.1, 0.3, 0.5])
    assert parse_parameter("p", "-1..-0.5").low == -1
    assert variable_of("weight-decay") == "SWEEP_WEIGHT_DECAY"
    for text in ("5", "8..2", "log:0..1", "1..x", "2,2", "2,", "1..2:1", "nan..1", "1e999..2"):
        with pytest.raises(BadRequest):
            parse_parameter("n", text)
    with pytest.raises(BadRequest, match="number of values"):
        LR.grid_values()


def test_values_reach_the_program_as_options_words_and_variables():
    values = {"lr": "0.001", "layers": "{lr}"}
    job = trial_job(definition(), 4, values)
    assert job["run"] == ["python", "train.py", "--lr=0.001", "--layers={lr}"]
    assert job["env"] == {"SWEEP_LR": "0.001", "SWEEP_LAYERS": "{lr}", "SWEEP_NAME": "s", "SWEEP_TRIAL": "4"}
    assert job["labels"] == {**values, "sweep": "s", "trial": "4"}
    filled = trial_job(
        definition(job={"run": "a {lr} {layers} {x}"}, append=False), 0, {"lr": "1; rm", "layers": "{lr}"}
    )
    assert filled["run"] == "a '1; rm' '{lr}' {x}", "one pass, and words of a shell"
    line = trial_job(definition(job={"run": "a b\n"}), 0, {"lr": "1; rm"})
    assert line["run"] == "a b '--lr=1; rm'"
    kept = trial_job(definition(job={"run": ["a"], "checkpoint": "/c/"}), 2, values)
    assert kept["checkpoint"] == "/c/s-2"


@pytest.mark.parametrize("search", ["random", "grid"])
def test_the_same_seed_gives_the_same_trials_also_after_a_restart(search, tmp_path):
    layers = parse_parameter("lr", "log:1e-5..1e-2:4")
    made = definition(search=search, parameters=(layers, LAYERS), samples=8, asha=False)
    whole = [one.values for one in drive(made, VirtualTrialJobs(loss, steps=3))[0]]
    jobs = VirtualTrialJobs(loss, steps=3)
    journal = str(tmp_path / "log")
    half = SweepDriver(made, SweepStudy(made, journal), jobs)
    half.turn(0.0)
    again, _ = drive(made, jobs, journal)
    assert [one.values for one in again] == whole
    assert len({tuple(one.items()) for one in whole}) == 8
    other = drive(msgspec.structs.replace(made, seed=1), VirtualTrialJobs(loss, steps=3))[0]
    assert [one.values for one in other] != whole


def test_bad_trials_stop_early_and_free_their_devices():
    jobs = VirtualTrialJobs(loss)
    trials, events = drive(definition(samples=20), jobs)
    stopped = [one for one in trials if one.state == "stopped"]
    best = best_trial(trials, maximize=False)
    assert best is not None
    assert len(stopped) >= 10
    assert jobs.device_steps < 20 * 81 / 3
    assert best.value == min(one.value for one in trials if one.state == "complete")
    assert {event.trial for event in events if event.kind == "freed"} == {one.number for one in stopped}
    assert {str(one.number + 1) for one in stopped} == jobs.cancelled


def test_a_kill_between_any_two_calls_loses_and_doubles_no_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the machine stays up
    plain = [one.values for one in drive(definition(), VirtualTrialJobs(loss, steps=27))[0]]
    kills = 0
    for at in range(1, 40, 2):
        jobs, journal = KilledAt(loss, steps=27), str(tmp_path / str(at))
        jobs.left = at
        try:
            drive(definition(), jobs, journal)
        except Killed:
            kills += 1
        with open(journal, "ab") as file:
            file.write(b'{"op_code": 4, "torn')
        jobs.left = -1
        trials, _ = drive(definition(), jobs, journal)
        assert [one.values for one in trials] == plain
        assert (
            [one.job_id for one in trials] == [str(number) for number in range(1, 10)] == sorted(jobs.trials, key=int)
        )
        assert all(one.state in {"complete", "stopped"} for one in trials)
        assert jobs.cancelled == {one.job_id for one in trials if one.state == "stopped"}
    assert kills >= 10


def test_trials_without_a_number_fail_or_stop():
    silent, _ = drive(definition(samples=1), VirtualTrialJobs(lambda *_: None))
    assert "reported no loss" in silent[0].why
    diverged, _ = drive(definition(samples=2), VirtualTrialJobs(lambda at, step: loss(at, step) if step < 5 else None))
    assert [one.state for one in diverged] == ["stopped", "stopped"]


def test_another_process_reads_a_sweep_without_changing_it(tmp_path):
    made, journal = definition(samples=2), str(tmp_path / "log")
    assert read_trials(made, journal) == []
    drive(made, VirtualTrialJobs(loss, steps=9), journal)
    with open(journal, "ab") as file:
        file.write(b"{")
    before = (tmp_path / "log").read_bytes()
    assert len(read_trials(made, journal)) == 2
    assert (tmp_path / "log").read_bytes() == before


def test_axes_of_the_picture_put_better_values_higher():
    trials, _ = drive(definition(asha=False, samples=4), VirtualTrialJobs(loss, steps=9))
    axes = parallel_axes(definition(), trials)
    assert [axis.title for axis in axes] == ["lr", "layers", "loss"]
    assert [axes[0].place(one) for one in (1e-5, 10**-3.5)] == pytest.approx([0.0, 0.5])
    assert axes[1].place("4") == 1.0
    best = best_trial(trials, maximize=False)
    assert best is not None
    assert axes[2].place(best.value) == pytest.approx(1.0)
    assert best_trial([replace(best, state="failed")], maximize=False) is None


def test_a_sweep_needs_a_third_of_the_grid_for_a_better_result():
    value, steps = swept("branin", 0)
    assert value <= grid_best("branin")
    assert 3 * steps <= 81 * 81
