"""The hour that is being recorded: what becomes of samples as they arrive."""

import numpy as np
import pytest

from phalanx.core.ids import NodeId, SupervisorId
from phalanx.store.history.metrics import DEVICE_METRICS, NODE_METRICS, UNKNOWN, decode
from phalanx.store.history.open_hours import FLEET, OpenHours
from phalanx.store.history.packing import pack_values, unpack
from phalanx.store.history.rollups import COUNT, MAXIMUM, MEAN
from phalanx.wire.supervisor import DeviceSample, SamplesRequest

HOUR = 1_800_000_000 // 3600 * 3600
NODE = len(NODE_METRICS)


def sample(node="n0", *, devices=(0,), every_s=1.0, cpu=None, **values):
    return SamplesRequest(
        supervisor_id=SupervisorId("s"),
        node_id=NodeId(node),
        at_s=0.0,
        devices=[DeviceSample(index=index, uuid=f"{node}-{index}", counter="gpm_sm", **values) for index in devices],
        cpu_utilization=cpu,
        every_s=every_s,
    )


def recording(load=lambda _series, _begin_s: None, at_s=HOUR):
    return OpenHours(load, at_s)


def column(hours, series, row, times=slice(0, 6)):
    (found,) = hours.held(series)
    values = decode(found.cells_FRT[MEAN], found.metrics)[row, times]
    return [None if np.isnan(value) else pytest.approx(value) for value in values]


def test_ten_seconds_have_the_mean_of_their_samples():
    hours = recording()
    for second in range(10):
        hours.add(sample(utilization=second / 10, power_w=300.0 + second), HOUR + second)
    hours.advance(HOUR + 10)
    assert column(hours, "n0", NODE, slice(0, 2)) == [0.45, None]
    assert column(hours, "n0", NODE + 2, slice(0, 1)) == [304.0]  # 304.5 to half a watt


def test_what_no_sample_says_is_unknown_and_not_zero():
    hours = recording()
    hours.add(sample(utilization=0.0), HOUR)
    hours.advance(HOUR + 10)
    assert column(hours, "n0", NODE, slice(0, 1)) == [0.0]
    assert [column(hours, "n0", row, slice(0, 1)) for row in (0, 2, NODE + 1, NODE + 2, NODE + 4)] == [[None]] * 5


def test_a_sample_stands_until_the_next_one_is_due():
    hours = recording()
    hours.add(sample(utilization=0.5, every_s=20.0), HOUR)
    hours.advance(HOUR + 60)
    assert column(hours, "n0", NODE) == [0.5, 0.5, 0.5, None, None, None]


def test_a_node_that_falls_silent_has_a_hole():
    hours = recording()
    hours.add(sample(utilization=0.5), HOUR + 9)
    hours.add(sample(utilization=0.7), HOUR + 45)
    hours.advance(HOUR + 60)
    assert column(hours, "n0", NODE) == [0.5, None, None, None, 0.7, None]


def test_throttle_reasons_of_ten_seconds_are_all_that_occurred():
    hours = recording()
    for second, reasons in enumerate([("hw_slowdown",), (), ("sw_power_cap", "a_later_one")]):
        hours.add(sample(throttle=reasons), HOUR + second)
    hours.add(sample(throttle=()), HOUR + 10)
    hours.advance(HOUR + 30)
    (found,) = hours.held("n0")
    assert list(found.cells_FRT[MAXIMUM, NODE + 4, :3]) == [0b1000011, 0, UNKNOWN]


def test_the_fleet_is_the_mean_of_its_devices():
    hours = recording()
    hours.add(sample("n0", devices=(0, 1), utilization=1.0, cpu=0.2), HOUR)
    hours.add(sample("n1", devices=(0,), utilization=0.25, cpu=0.6), HOUR)
    hours.advance(HOUR + 10)
    assert column(hours, FLEET, NODE, slice(0, 1)) == [0.75]
    assert column(hours, FLEET, 0, slice(0, 1)) == [0.4]


def test_a_device_that_comes_later_has_a_column_from_then_on():
    hours = recording()
    hours.add(sample(utilization=0.5), HOUR)
    hours.add(sample(devices=(0, 5), utilization=0.5), HOUR + 10)
    hours.advance(HOUR + 20)
    (found,) = hours.held("n0")
    assert found.devices == (0, 5)
    assert column(hours, "n0", NODE + len(DEVICE_METRICS), slice(0, 2)) == [None, 0.5]


def test_a_complete_hour_is_due_and_leaves_the_memory_once_stored():
    hours = recording()
    hours.add(sample(utilization=0.5), HOUR + 3595)
    hours.add(sample(utilization=0.6), HOUR + 3600)
    hours.advance(HOUR + 3610)
    due = hours.due(HOUR + 3610, 1e9, 10)
    assert [(hour.series, hour.begin_s) for hour in due] == [("n0", HOUR), (FLEET, HOUR)]
    assert len(hours.held("n0")) == 2
    hours.stored(due, HOUR + 3610)
    assert [found.begin_s for found in hours.held("n0")] == [HOUR + 3600]
    assert not hours.has_sealed


def test_an_hour_that_changed_is_due_after_its_period():
    hours = recording()
    hours.add(sample(utilization=0.5), HOUR)
    hours.advance(HOUR + 10)
    assert hours.due(HOUR + 59, 60, 10) == []
    due = hours.due(HOUR + 60, 60, 10)
    hours.stored(due, HOUR + 60)
    assert len(due) == 2
    assert hours.due(HOUR + 200, 60, 10) == []  # nothing new


def test_a_new_head_continues_the_hour_that_the_last_one_stored():
    before = recording()
    before.add(sample(devices=(4, 2), utilization=0.5, cpu=0.1), HOUR)
    before.advance(HOUR + 10)
    stored = {hour.series: hour for hour in before.due(HOUR + 10, 0, 10)}

    def load(series, begin_s):
        hour = stored.get(series)
        return hour and unpack(pack_values(begin_s, 10, hour.devices, hour.codes_RT))

    hours = recording(load, HOUR + 30)
    hours.add(sample(devices=(2,), utilization=0.9, cpu=0.3), HOUR + 30)
    hours.advance(HOUR + 40)
    (found,) = hours.held("n0")
    assert found.devices == (4, 2)
    assert column(hours, "n0", 0, slice(0, 4)) == [0.1, None, None, 0.3]
    assert column(hours, "n0", NODE, slice(0, 4)) == [0.5, None, None, None]
    assert column(hours, "n0", NODE + len(DEVICE_METRICS), slice(0, 4)) == [0.5, None, None, 0.9]
    assert column(hours, FLEET, NODE, slice(0, 4)) == [0.5, None, None, 0.9]


def test_a_clock_that_goes_back_changes_nothing():
    hours = recording(at_s=HOUR + 100)
    hours.add(sample(utilization=0.5), HOUR + 100)
    hours.add(sample(utilization=0.5), HOUR + 20)
    hours.advance(HOUR + 110)
    (found,) = hours.held("n0")
    assert found.cells_FRT[COUNT, NODE].sum() == 1


def test_a_machine_that_slept_for_days_begins_a_new_hour():
    hours = recording()
    hours.add(sample(utilization=0.5), HOUR)
    hours.add(sample(utilization=0.7), HOUR + 3 * 86_400)
    hours.advance(HOUR + 3 * 86_400 + 10)
    assert [found.begin_s for found in hours.held("n0")] == [HOUR, HOUR + 3 * 86_400]


def test_hours_that_cannot_be_stored_are_dropped_past_a_bound():
    hours = recording()
    for hour in range(5):
        hours.add(sample(utilization=0.5), HOUR + hour * 3600)
    assert hours.drop_sealed(4) == 4  # two series of four complete hours
    assert [found.begin_s for found in hours.held("n0")] == [HOUR + 7200, HOUR + 10_800]
