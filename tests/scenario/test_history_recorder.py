"""Weeks of history in virtual time: what is stored, what is dropped, what a crash loses, and what questions find."""

import math

import pytest

from phalanx.core.ids import JobId, NodeId, SupervisorId
from phalanx.core.work.pace import TimedStep
from phalanx.ports.history import ChunkKind, HistoryUnavailable
from phalanx.store.history.levels import DAY_S
from phalanx.store.history.memory import MemoryHistory
from phalanx.store.history.metrics import NODE_METRICS, decode
from phalanx.store.history.recorder import HistoryRecorder
from phalanx.store.history.rollups import COUNT, MAXIMUM, MEAN, MINIMUM
from phalanx.wire.supervisor import DeviceSample, SamplesRequest

DAY = 1_800_000_000 // DAY_S * DAY_S
NODE = NodeId("n0")
UTILIZATION = len(NODE_METRICS)


class Clock:
    def __init__(self, at_s=float(DAY)):
        self.at_s = at_s

    def now_s(self):
        return self.at_s

    def boottime_s(self):
        return self.at_s


class FailingHistory(MemoryHistory):
    """A store whose disk can be full."""

    full = False

    def put(self, chunks):
        if self.full:
            raise HistoryUnavailable("the disk is full")
        super().put(chunks)


class SlowHistory(MemoryHistory):
    """A store during whose writes something else happens."""

    meanwhile = staticmethod(lambda: None)

    def put(self, chunks):
        happens, self.meanwhile = self.meanwhile, lambda: None
        super().put(chunks)
        happens()


def sample(busy, every_s=10.0):
    device = DeviceSample(index=0, uuid="u", counter="gpm_sm", utilization=busy)
    return SamplesRequest(supervisor_id=SupervisorId("s"), node_id=NODE, at_s=0.0, devices=[device], every_s=every_s)


def recorded(recorder, clock, until_s, busy, *, every_s=10):
    """Samples and turns until a time; `busy` gives the utilization at a time."""
    while clock.at_s < until_s:
        recorder.add_samples(sample(busy(clock.at_s), every_s))
        clock.at_s += every_s
        recorder.turn()


def utilization(recorder, clock, since_s, step_s=None, until_s=None, field=MEAN):
    found = recorder.rollups(NODE, since_s, clock.at_s if until_s is None else until_s, step_s, devices=1)
    values = decode(found.cells_FRT[field], found.metrics)
    return found, [None if math.isnan(value) else round(float(value), 4) for value in values[UTILIZATION]]


def test_the_last_minutes_are_found_before_anything_is_stored():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    recorded(recorder, clock, DAY + 30, lambda _: 0.5)
    found, values = utilization(recorder, clock, DAY)
    assert (found.step_s, found.begin_s, values) == (10, DAY, [0.5, 0.5, 0.5])
    assert store.read(ChunkKind.TEN_SECONDS, NODE, 0, 1 << 40) == []


def test_a_crash_loses_a_minute_at_most():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    recorded(recorder, clock, DAY + 1000, lambda _: 0.5)
    after = HistoryRecorder(store, clock)  # the first one is gone without a word
    recorded(after, clock, DAY + 1100, lambda _: 0.5)
    _, values = utilization(after, clock, DAY)
    assert len(values) == 110
    assert values.count(None) <= 6
    assert all(value == 0.5 for value in values if value is not None)


def test_a_stop_loses_nothing():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    recorded(recorder, clock, DAY + 1000, lambda _: 0.5)
    recorder.stop()
    recorder.turn(everything=True)  # as its thread does
    assert None not in utilization(HistoryRecorder(store, clock), clock, DAY)[1]


def test_two_days_are_rolled_up_and_old_values_are_dropped():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    night = (DAY + 3600, DAY + 2 * 3600)  # slow, with one spike
    busy = lambda at_s: 0.2 if night[0] <= at_s < night[1] and at_s != night[0] + 1200 else 0.9  # noqa: E731
    recorded(recorder, clock, DAY + 2 * DAY_S + 3600, busy, every_s=60)
    kinds = {kind: store.read(kind, NODE, 0, 1 << 40) for kind in ChunkKind}
    assert [len(kinds[kind]) for kind in (ChunkKind.FIVE_MINUTES, ChunkKind.HOURS)] == [3, 1]
    assert kinds[ChunkKind.TEN_SECONDS][0].begin_s >= DAY + DAY_S - 3600  # a day is left
    found, means = utilization(recorder, clock, DAY, 3600)
    assert found.step_s == 3600
    assert len(means) == 49
    assert (means[0], means[1], means[2]) == (0.9, 0.21, 0.9)
    assert utilization(recorder, clock, DAY, 3600, field=MAXIMUM)[1][1] == 0.9
    assert utilization(recorder, clock, DAY, 3600, field=MINIMUM)[1][1] == 0.2
    assert None not in means
    # The day of ten seconds has passed for the first hours: an answer about them is no finer than five minutes.
    assert utilization(recorder, clock, DAY, 10, until_s=DAY + 7200)[0].step_s == 300
    assert utilization(recorder, clock, clock.at_s - 3600, 10)[0].step_s == 10


def test_an_hour_that_a_crash_left_is_rolled_up_by_the_next_head():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    recorded(recorder, clock, DAY + 1800, lambda _: 0.5)
    clock.at_s = DAY + 5 * 3600.0  # nothing ran for hours
    after = HistoryRecorder(store, clock)
    after.turn()
    (rolled,) = store.read(ChunkKind.FIVE_MINUTES, NODE, 0, 1 << 40)
    assert rolled.pending
    assert store.pending(ChunkKind.TEN_SECONDS, 1 << 40, 10) == []
    _, counts = utilization(after, clock, DAY, 3600, field=COUNT)
    assert counts[0] is not None
    assert utilization(after, clock, DAY, 3600)[1] == [0.5, None, None, None, None]


def test_a_damaged_chunk_is_a_hole_and_stops_nothing():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    recorded(recorder, clock, DAY + 7300, lambda _: 0.5)
    first, *_ = store.read(ChunkKind.TEN_SECONDS, NODE, 0, 1 << 40)
    store.put([type(first)(series=NODE, kind=first.kind, begin_s=first.begin_s, data=first.data[:-9], pending=True)])
    recorder.turn()
    assert recorder.health().problem == ""
    _, values = utilization(recorder, clock, DAY, 10)
    assert set(values[:360]) == {None}
    assert set(values[360:]) == {0.5}


def test_a_full_disk_is_reported_and_what_is_in_memory_is_stored_later():
    clock, store = Clock(), FailingHistory()
    recorder = HistoryRecorder(store, clock)
    recorded(recorder, clock, DAY + 3000, lambda _: 0.5)
    store.full = True
    recorded(recorder, clock, DAY + 5000, lambda _: 0.5)
    assert recorder.health().problem == "the disk is full"
    store.full = False
    recorded(recorder, clock, DAY + 5100, lambda _: 0.5)
    assert recorder.health().problem == ""
    assert None not in utilization(HistoryRecorder(store, clock), clock, DAY, until_s=DAY + 5000)[1]


@pytest.mark.parametrize("end_s", [DAY + 3600, DAY + 3590])
def test_what_arrives_during_a_write_is_stored_by_the_next(end_s):
    clock, store = Clock(), SlowHistory()
    recorder = HistoryRecorder(store, clock)
    recorder.add_steps(JobId("7"), [TimedStep(0, float(DAY), 0.8, 1.0)])
    recorded(recorder, clock, end_s - 10, lambda _: 0.5)

    def arrives():
        recorder.add_samples(sample(0.5))
        recorder.add_steps(JobId("7"), [TimedStep(1, clock.at_s, 0.8, 1.0)])
        clock.at_s += 10
        recorder.rollups(NODE, DAY, clock.at_s, None, devices=1)  # a question takes it in

    store.meanwhile = arrives
    recorder.turn(everything=True)
    recorder.turn(everything=True)
    after = HistoryRecorder(store, clock)
    assert None not in utilization(after, clock, DAY, 10)[1]
    curve = after.job_curve(JobId("7"))
    assert curve is not None
    assert curve.points[-1].last_step == 1


def test_a_disk_that_stays_full_costs_a_bounded_number_of_hours():
    clock, store = Clock(), FailingHistory()
    recorder = HistoryRecorder(store, clock)
    store.full = True
    recorded(recorder, clock, DAY + 9 * 3600, lambda _: 0.5, every_s=60)
    assert recorder.health().lost > 0
    assert len(recorder._held(NODE)) <= 5


@pytest.mark.parametrize(("span_s", "step_s"), [(3600, 10), (DAY_S, 300), (30 * DAY_S, 7200), (700 * DAY_S, 5 * DAY_S)])
def test_the_step_follows_the_span(span_s, step_s):
    clock = Clock()
    recorder = HistoryRecorder(MemoryHistory(), clock)
    found = recorder.rollups(NODE, DAY - span_s, DAY, None, devices=8)
    assert found.step_s == step_s


def test_the_curve_of_a_job_outlives_the_head():
    clock, store = Clock(), MemoryHistory()
    recorder = HistoryRecorder(store, clock)
    steps = [TimedStep(step, DAY + step, 0.8, 10.0 - step / 100) for step in range(600)]
    recorder.add_steps(JobId("7"), steps)
    recorder.turn(everything=True)
    after = HistoryRecorder(store, clock)
    found = after.job_curve(JobId("7"))
    assert found is not None
    assert (found.points[0].loss_first, found.points[-1].loss_last) == (10.0, steps[-1].loss)
    after.add_steps(JobId("7"), [TimedStep(600, DAY + 600.0, 0.8, 1.0)])
    again = after.job_curve(JobId("7"))
    assert again is not None
    assert again.points[-1].last_step == 600
    assert after.job_curve(JobId("8")) is None
