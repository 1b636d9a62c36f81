"""The energy of a device: what a reading adds, and when nothing can be subtracted."""

import pytest

from phalanx.controller.usage.energy_accounting import AGE_MAX_MS, count_energy
from phalanx.core.accounting.energy_ledger import (
    SPANS_MAX,
    EnergyLedger,
    EnergySource,
    MeterReading,
    ThrottleCause,
    throttle_cause,
)
from phalanx.core.accounting.state_ledger import HOUR_MS, Account, StateLedger
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.wire.supervisor import EnergyReading, SamplesRequest

N0 = NodeId("n0")
FREE, JOB, OTHER = Account(), Account(job="1"), Account(job="2")
WHOLE = 1000


def reading(millijoules, at_ms, *, meter="GPU-a", sender=("s", 0)):
    return MeterReading(meter, EnergySource.COUNTER, millijoules, at_ms, (sender[0], sender[1] or at_ms))


def held(*parts, at_ms=0):
    ledger = EnergyLedger()
    ledger.hold(N0, 0, parts, at_ms)
    return ledger


def shares(count):
    """Millijoules of each account."""
    found: dict[Account, int] = {}
    for hour in count.hours:
        for account, (millijoules, _) in hour.shares.items():
            found[account] = found.get(account, 0) + millijoules
    return found


def test_attempt_that_begins_and_ends_between_two_readings_gets_its_time():
    ledger = held((WHOLE, FREE))
    ledger.read(N0, 0, reading(5_000, 0))
    ledger.hold(N0, 0, ((WHOLE, JOB),), 300)
    ledger.hold(N0, 0, ((WHOLE, FREE),), 700)
    assert shares(ledger.read(N0, 0, reading(6_000, 1000))) == {FREE: 600, JOB: 400}


def test_readings_at_the_begin_and_end_of_an_attempt_give_it_what_it_drew():
    ledger = held((WHOLE, FREE))
    ledger.read(N0, 0, reading(0, 0))
    ledger.hold(N0, 0, ((WHOLE, JOB),), 300)
    before = shares(ledger.read(N0, 0, reading(27, 300)))
    ledger.hold(N0, 0, ((WHOLE, FREE),), 700)
    during = shares(ledger.read(N0, 0, reading(307, 700)))
    after = shares(ledger.read(N0, 0, reading(334, 1000)))
    assert (before, during, after) == ({FREE: 27}, {JOB: 280}, {FREE: 27})


def test_late_reading_counts_from_the_time_at_which_it_was_taken():
    ledger = held((WHOLE, JOB))
    ledger.read(N0, 0, reading(0, 0))
    ledger.hold(N0, 0, ((WHOLE, FREE),), 500)
    assert shares(ledger.read(N0, 0, reading(100, 500))) == {JOB: 100}
    assert shares(ledger.read(N0, 0, reading(130, 1500))) == {FREE: 30}


def test_shared_device_is_divided_by_the_share_held():
    ledger = held((250, JOB), (500, OTHER), (250, FREE))
    ledger.read(N0, 0, reading(0, 0))
    assert shares(ledger.read(N0, 0, reading(1001, 1000))) == {JOB: 250, OTHER: 500, FREE: 251}


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (reading(90, 1000), "went back by 10 mJ"),
        (reading(900, 1000, meter="GPU-b"), "another meter"),
        (reading(10**9, 1000), "no measurement"),
    ],
)
def test_meter_that_starts_again_counts_from_its_new_reading(then, why):
    ledger = held((WHOLE, JOB))
    ledger.read(N0, 0, reading(100, 0))
    found = ledger.read(N0, 0, then)
    assert why in found.restarted
    assert not found.hours
    assert shares(
        ledger.read(N0, 0, then._replace(millijoules=then.millijoules + 7, at_ms=2000, sender=("s", 2000)))
    ) == {JOB: 7}


def test_request_that_arrives_again_counts_once():
    ledger = held((WHOLE, JOB))
    ledger.read(N0, 0, reading(100, 0, sender=("s", 1)))
    ledger.read(N0, 0, reading(300, 1000, sender=("s", 3)))
    again = ledger.read(N0, 0, reading(200, 1500, sender=("s", 2)))
    assert not again.hours
    assert not again.restarted
    assert shares(ledger.read(N0, 0, reading(310, 2000, sender=("s", 4)))) == {JOB: 10}


def test_energy_is_divided_over_the_hours_that_it_spans():
    ledger = held((WHOLE, JOB), at_ms=HOUR_MS - 1000)
    ledger.read(N0, 0, reading(0, HOUR_MS - 1000))
    found = ledger.read(N0, 0, reading(4001, HOUR_MS + 3000))
    assert [(hour.hour_ms, hour.total) for hour in found.hours] == [(0, 1000), (HOUR_MS, 3001)]


def test_hour_that_is_no_longer_in_memory_is_counted_in_the_oldest_that_is():
    ledger = StateLedger()
    ledger.add_energy(5 * HOUR_MS, "counter", {JOB: (7, 1000)}, 7)
    ledger.add_energy(2 * HOUR_MS, "counter", {JOB: (3, 500)}, 3)
    (hour,) = ledger.hours.values()
    assert hour.energy == {(JOB, "counter"): (10, 1500)}
    assert hour.millijoules == 10


def test_reading_that_claims_to_be_centuries_old_is_at_most_a_month_old():
    ledger, now_ms = StateLedger(), 1_800_000_000_000
    energy = held((WHOLE, JOB), at_ms=now_ms)
    for at_ns, millijoules in ((0, 0), (1 << 62, 1000)):
        one = EnergyReading(index=0, meter="GPU-a", millijoules=millijoules, at_ns=at_ns)
        request = SamplesRequest(
            supervisor_id=SupervisorId("s"), node_id=N0, at_s=0.0, devices=[], energy=[one], sent_ns=1 << 62
        )
        count_energy(energy, ledger, request, now_ms)
    assert sum(hour.millijoules for hour in ledger.hours.values()) == 1000
    assert len(ledger.hours) == AGE_MAX_MS // HOUR_MS


def test_device_that_changes_hands_without_readings_starts_again():
    ledger = held((WHOLE, JOB))
    ledger.read(N0, 0, reading(0, 0))
    for at_ms in range(1, SPANS_MAX + 2):
        ledger.hold(N0, 0, ((WHOLE, (JOB, OTHER)[at_ms % 2]),), at_ms)
    assert not ledger.read(N0, 0, reading(50, 1000)).hours
    assert sum(shares(ledger.read(N0, 0, reading(60, 2000))).values()) == 10


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [
        ((), None),
        (None, None),
        (("sync_boost",), None),
        (("sw_power_cap",), ThrottleCause.POWER),
        (("hw_slowdown", "hw_power_brake_slowdown"), ThrottleCause.POWER),
        (("hw_slowdown", "hw_thermal_slowdown", "sw_power_cap"), ThrottleCause.THERMAL),
        (("hw_slowdown",), ThrottleCause.HARDWARE),
    ],
)
def test_cause_of_slow_clocks(reasons, cause):
    assert throttle_cause(reasons) is cause


def test_slow_clocks_count_for_the_time_since_the_reading_before_unless_that_is_long_ago():
    ledger, hot = held((WHOLE, JOB)), ThrottleCause.THERMAL
    ledger.read(N0, 0, reading(0, 0)._replace(throttled=hot))
    assert ledger.read(N0, 0, reading(10, 1000)._replace(throttled=hot)).throttled is hot
    assert ledger.read(N0, 0, reading(20, 2000)).throttled is None
    assert ledger.read(N0, 0, reading(30, 90_000)._replace(throttled=hot)).throttled is None
    states = StateLedger()
    states.add_energy(0, "counter", {JOB: (7, 1000)}, 7, hot)
    assert states.hours[0].throttled == {(JOB, "thermal"): 1000}


def test_device_that_left_counts_no_more():
    ledger = held((WHOLE, JOB))
    ledger.read(N0, 0, reading(0, 0))
    ledger.keep(N0, ())
    assert not ledger.read(N0, 0, reading(60, 2000)).hours
    assert ledger.meters(N0) == ()
