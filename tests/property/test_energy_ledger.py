"""For any readings, holders, restarts and meters, jobs plus idle get exactly what the devices' meters counted, each in proportion to what it held."""

from fractions import Fraction

import hypothesis.strategies as st
import msgspec
from hypothesis import example, given

from phalanx.controller.usage.usage_resume import hour_amounts, usage_hour
from phalanx.core.accounting.energy_ledger import EnergyLedger, EnergySource, MeterReading
from phalanx.core.accounting.state_ledger import HOUR_MS, Account, StateLedger
from phalanx.core.ids import NodeId
from phalanx.core.work.usage.usage_hour import CountedMeter, UsageHour

N0 = NodeId("n0")
START_MS = 500_000 * HOUR_MS - 7000  # an hour ends soon
HOLDERS = st.sampled_from(
    (
        ((1000, Account()),),
        ((1000, Account(job="1")),),
        ((1000, Account(job="2")),),
        ((250, Account(job="1")), (750, Account())),
        ((250, Account(job="1")), (333, Account(job="2")), (417, Account())),
    )
)
HAPPENINGS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3000), st.integers(0, HOUR_MS)),  # milliseconds that pass first
        st.one_of(
            st.tuples(st.just("hold"), HOLDERS),
            st.tuples(st.just("read"), st.integers(0, 2000)),  # its age as it arrives
            st.tuples(
                st.sampled_from(("reload", "replace", "head restarts", "supervisor restarts", "crash")), st.none()
            ),
        ),
    ),
    max_size=40,
)


class Metered:
    """A GPU that draws 90 W when idle and 700 W when held, its ledger, and what the ledger should say."""

    def __init__(self):
        self.now_ms, self.true_mj = START_MS, 0
        self.energy, self.ledger = EnergyLedger(), StateLedger()
        self.holders = ((1000, Account()),)
        self.meter, self.zero_mj, self.incarnation = "GPU-1", 0, 0
        self.base: tuple[str, int, int] | None = None  # meter, count, time of the newest reading
        self.held: list[tuple[int, int, tuple]] = []
        self.expected: dict[Account, Fraction] = {}
        self.counted = self.readings = 0
        self.energy.hold(N0, 0, self.holders, self.now_ms)
        self.stored = self.store()

    def store(self):
        """What a head stores, through the bytes that it writes."""
        hours = [usage_hour(hour, found) for hour, found in self.ledger.hours.items()]
        meters = self.energy.meters(N0)
        return (
            msgspec.json.decode(msgspec.json.encode(hours), type=list[UsageHour]),
            msgspec.json.decode(msgspec.json.encode(meters), type=tuple[CountedMeter, ...]),
            (self.base, dict(self.expected), self.counted, self.now_ms),
        )

    def restart(self, stored):
        """Another head continues from what was stored; the records say who held the device since."""
        hours, meters, (self.base, expected, self.counted, until_ms) = stored
        self.expected = dict(expected)
        self.energy, self.ledger = EnergyLedger(), StateLedger()
        self.ledger.hours = {int(one.id) * 1000: hour_amounts(one) for one in hours}
        self.energy.resume(N0, meters)
        for begin_ms, end_ms, holders in self.held:
            if end_ms > until_ms:
                self.energy.hold(N0, 0, holders, max(begin_ms, until_ms))
        self.energy.hold(N0, 0, self.holders, self.now_ms)

    def pass_time(self, ms):
        self.held.append((self.now_ms, self.now_ms + ms, self.holders))
        self.true_mj += ms * (90 if self.holders == ((1000, Account()),) else 700)
        self.now_ms += ms

    def read(self, age_ms):
        """A reading that was taken now, and is late by so much."""
        count = self.true_mj - self.zero_mj
        at_ms, self.readings = self.now_ms, self.readings + 1
        self.pass_time(age_ms)
        sender = (f"s{self.incarnation}", self.readings)
        found = self.energy.read(N0, 0, MeterReading(self.meter, EnergySource.COUNTER, count, at_ms, sender))
        for hour in found.hours:
            assert sum(mj for mj, _ in hour.shares.values()) == hour.total
            self.ledger.add_energy(hour.hour_ms, found.source, hour.shares, hour.total)
        if self.base is not None and self.base[0] == self.meter and count >= self.base[1]:
            self.expect(count - self.base[1], self.base[2], at_ms)
        self.base = (self.meter, count, at_ms)

    def expect(self, millijoules, begin_ms, end_ms):
        weights: dict[Account, int] = {}
        for since_ms, until_ms, holders in self.held:
            length_ms = min(until_ms, end_ms) - max(since_ms, begin_ms)
            for milli, account in holders if length_ms > 0 else ():
                weights[account] = weights.get(account, 0) + milli * length_ms
        self.counted += millijoules
        for account, weight in weights.items():
            share = Fraction(millijoules * weight, sum(weights.values()))
            self.expected[account] = self.expected.get(account, Fraction(0)) + share

    def happen(self, what, value):
        if what == "hold":
            self.holders = value
            self.energy.hold(N0, 0, value, self.now_ms)
        elif what == "read":
            self.read(value)
        elif what == "reload":
            self.zero_mj = self.true_mj
        elif what == "replace":
            self.meter, self.zero_mj = self.meter + "1", self.true_mj
        elif what == "supervisor restarts":
            self.incarnation += 1
        elif what == "head restarts":
            self.stored = self.store()
            self.restart(self.stored)
        else:
            self.restart(self.stored)  # what was counted since is lost, and counted again from the older reading


@given(HAPPENINGS)
@example(  # found by fresh examples: the job ends in the millisecond in which another head begins
    [
        (0, ("hold", ((1000, Account(job="1")),))),
        (0, ("read", 0)),
        (1, ("head restarts", None)),
        (0, ("hold", ((1000, Account()),))),
    ]
)
def test_jobs_and_idle_get_what_the_meters_counted(happenings):
    one = Metered()
    for ms, (what, value) in happenings:
        one.pass_time(ms)
        one.happen(what, value)
    one.read(0)
    found: dict[Account, int] = {}
    for hour in one.ledger.hours.values():
        assert sum(mj for mj, _ in hour.energy.values()) == hour.millijoules
        for (account, _), (mj, covered) in hour.energy.items():
            assert mj >= 0
            assert covered >= 0
            found[account] = found.get(account, 0) + mj
    assert sum(found.values()) == one.counted
    for account in found.keys() | one.expected.keys():
        # Each reading rounds at each piece: less than a millijoule.
        assert abs(found.get(account, 0) - one.expected.get(account, Fraction(0))) <= len(one.held) + 4 * one.readings
