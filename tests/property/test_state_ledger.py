"""For any history of nodes, shares and states, the states in the ledger add up exactly to fleet x time."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.controller.usage.usage_resume import hour_amounts, usage_hour
from phalanx.core.accounting.state_ledger import HOUR_MS, Account, Part, StateLedger
from phalanx.core.accounting.usage_states import PartState, UsageState
from phalanx.core.ids import NodeId

STATES = st.builds(PartState, st.sampled_from(list(UsageState)), st.sampled_from(("", "quota")))
REPLACED = st.sampled_from((frozenset[UsageState](), frozenset(UsageState)))
STEP_MS = st.one_of(st.integers(0, 5000), st.integers(0, 3 * HOUR_MS))


@st.composite
def divisions(draw):
    """How a device is divided: parts that are a whole device together, some with a state that began earlier."""
    cuts = sorted(draw(st.sets(st.integers(1, 999), max_size=3)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, 1000], strict=True)]
    return [
        (key, milli, draw(STATES), draw(st.none() | st.integers(0, 2 * HOUR_MS)), draw(REPLACED))
        for key, milli in zip(("", "1", "2", "3"), sizes, strict=False)
    ]


HAPPENINGS = st.lists(
    st.tuples(
        STEP_MS,
        st.sampled_from(("open", "close", "divide", "settle", "restart")),
        st.sampled_from(("a", "b")),
        st.integers(1, 3),
        divisions(),
    ),
    max_size=30,
)


def restarted(ledger):
    """The ledger of another head, from what the first stored."""
    fresh = StateLedger()
    fresh.hours = {int(one.id) * 1000: hour_amounts(one) for one in itertools.starmap(usage_hour, ledger.hours.items())}
    return fresh


@given(HAPPENINGS)
def test_states_sum_to_fleet_times_time(happenings):
    ledger, now_ms, expected = StateLedger(), 10 * HOUR_MS - 7, 0
    fleet: dict[str, int] = {}
    for step_ms, what, node, count, division in happenings:
        expected += sum(fleet.values()) * 1000 * step_ms
        now_ms += step_ms
        name = NodeId(node)
        if what == "open" and node not in fleet:
            whole = Part(Account(model="m"), 1000, PartState(UsageState.FREE))
            ledger.open_node(name, dict.fromkeys(range(count), whole), now_ms)
            fleet[node] = count
        elif what == "close" and node in fleet:
            ledger.close_node(name, now_ms)
            del fleet[node]
        elif what == "divide" and node in fleet:
            parts = {
                key: Part(Account(job=key), milli, state, None if ago is None else now_ms - ago, replaced)
                for key, milli, state, ago, replaced in division
            }
            ledger.set_device(name, count % fleet[node], parts, now_ms)
        elif what == "settle":
            ledger.settle(now_ms)
        elif what == "restart":
            ledger.settle(now_ms)
            known: dict[NodeId, dict[int, dict[str, Part]]] = {
                name: {index: {} for index in ledger.device_indices(name)} for name in ledger.nodes
            }
            for name in known:
                for index, key, part in ledger.parts(name):
                    known[name][index][key] = part._replace(since_ms=None)
            ledger = restarted(ledger)
            for name, devices in known.items():
                whole = Part(Account(), 1000, PartState(UsageState.FREE))
                ledger.open_node(name, dict.fromkeys(devices, whole), now_ms)
                for index, parts in devices.items():
                    ledger.set_device(name, index, parts, now_ms)
    ledger.settle(now_ms)
    assert sum(hour.fleet for hour in ledger.hours.values()) == expected
    for hour in ledger.hours.values():
        assert sum(hour.amounts.values()) == hour.fleet
        assert all(amount > 0 for amount in hour.amounts.values())
    check_spans(ledger, fleet, now_ms)


def check_spans(ledger, fleet, now_ms):
    """At each moment the spans of a device are a whole device, and no part has two."""
    for node in fleet:
        by_device: dict[int, list] = {}
        for index, span in ledger.spans(NodeId(node), now_ms):
            by_device.setdefault(index, []).append(span)
        for spans in by_device.values():
            assert sum((one.end_ms - one.begin_ms) * one.milli for one in spans) == 1000 * (
                max(one.end_ms for one in spans) - min(one.begin_ms for one in spans)
            )
            for key in {one.key for one in spans}:
                times = [(one.begin_ms, one.end_ms) for one in spans if one.key == key]
                assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))


def test_state_that_became_known_later_counts_from_its_beginning():
    ledger, n0 = StateLedger(), NodeId("n0")
    account = Account(job="1")

    def device(state, since_ms=None):
        return {"1": Part(account, 1000, PartState(state), since_ms)}

    ledger.open_node(n0, {0: Part(account, 1000, PartState(UsageState.COMPUTING))}, 0)
    ledger.set_device(n0, 0, device(UsageState.COMPUTING), 0)
    ledger.settle(60_000)
    ledger.set_device(n0, 0, device(UsageState.HUNG, since_ms=20_000), 70_000)
    ledger.settle(90_000)
    amounts = {state.state.value: amount for (_, state), amount in ledger.hours[0].amounts.items()}
    assert amounts == {"computing": 20_000_000, "hung": 70_000_000}


def test_a_hang_replaces_what_was_made_of_the_silence_before_it_was_known():
    ledger, n0, account = StateLedger(), NodeId("n0"), Account(job="1")

    def becomes(state, at_ms, since_ms=None, replaces=frozenset()):
        ledger.set_device(n0, 0, {"1": Part(account, 1000, PartState(state), since_ms, replaces)}, at_ms)

    ledger.open_node(n0, {0: Part(account, 1000, PartState(UsageState.FREE))}, 0)
    for at_s, state in ((0, "starting"), (10, "computing"), (30, "low"), (40, "computing"), (50, "low")):
        becomes(UsageState(state), at_s * 1000)
    becomes(UsageState.HUNG, 90_000, 25_000, frozenset({UsageState.COMPUTING, UsageState.LOW}))
    ledger.settle(100_000)
    spans = [(one.state.state.value, one.begin_ms // 1000, one.end_ms // 1000) for _, one in ledger.spans(n0, 100_000)]
    assert spans == [("starting", 0, 10), ("computing", 10, 25), ("hung", 25, 100)]
    amounts = {state.state.value: amount // 1_000_000 for (_, state), amount in ledger.hours[0].amounts.items()}
    assert amounts == {"starting": 10, "computing": 15, "hung": 75}


def test_parts_that_are_no_whole_device_are_refused():
    ledger, n0 = StateLedger(), NodeId("n0")
    free = PartState(UsageState.FREE)
    ledger.open_node(n0, {0: Part(Account(), 1000, free)}, 0)
    with pytest.raises(ValueError, match="999 thousandths"):
        ledger.set_device(n0, 0, {"": Part(Account(), 999, free)}, 5)
