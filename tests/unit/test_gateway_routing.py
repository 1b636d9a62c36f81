"""Prefixes and the choice of a replica, compared with plain models of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.gateway.prefixes import COARSE_BYTES, FINE_BLOCKS, FINE_BYTES, PrefixIndex, prefix_hashes
from phalanx.gateway.routing import LOAD_BOUND, RoutedReplica, choose_replica, expected_tokens

WHOLE = FINE_BYTES * FINE_BLOCKS


def test_hashes_are_those_of_common_beginnings_and_of_nothing_else():
    text = random.Random(1).randbytes(WHOLE + 3 * COARSE_BYTES)
    one, same, other = prefix_hashes(text), prefix_hashes(text[:-1] + b"x"), prefix_hashes(b"x" + text[1:])
    assert len(one) == FINE_BLOCKS + 3
    assert one[:-1] == same[:-1]
    assert one[-1] != same[-1]
    assert not set(one) & set(other)
    assert prefix_hashes(text[: FINE_BYTES - 1]) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_index_agrees_with_a_set_of_prefixes_for_each_replica(data):
    index = PrefixIndex()
    model: dict[int, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, 70))
        hashes = data.draw(st.lists(st.integers(0, 5), max_size=6))
        chained = [hash((number, *hashes[: number + 1])) for number in range(len(hashes))]
        if data.draw(st.booleans()):
            index.add(chained, slot)
            model.setdefault(slot, set()).update(chained)
        elif data.draw(st.booleans()):
            index.forget(slot)
            model.pop(slot, None)
        expected = {}
        for one, known in model.items():
            length = next((number for number, part in enumerate(chained) if part not in known), len(chained))
            if length:
                expected[one] = length
        assert index.matches(chained) == expected


def test_a_full_index_forgets_what_is_not_used():
    index = PrefixIndex(known_max=100)
    index.add(range(50), 1)
    for number in range(1000, 1400):
        index.add([number], 2)
        index.add(range(10), 1)
    assert index.matches(list(range(10))) == {1: 10}
    assert index.matches([30]) == {}
    assert len(index) <= 203


def replica(slot, tokens=0, **more) -> RoutedReplica:
    return RoutedReplica(job_id=str(slot), url="", slot=slot, limit=more.pop("limit", 8), tokens=tokens, **more)


def test_a_known_prefix_attracts_until_its_replica_has_too_much():
    quiet, popular = replica(0, 1000), replica(1, 1000)
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=50) is popular
    popular.tokens = 1200
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=50) is quiet, "it saves less than it waits"
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=500) is popular
    popular.tokens = 4000
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=5000) is quiet, "it is over the bound"


@pytest.mark.parametrize(
    "out",
    [{"limit": 3, "in_flight": 3}, {"avoided_until_s": 9.0}, {"cache_use": 0.99}],
    ids=["at-its-limit", "avoided", "cache-full"],
)
def test_a_replica_that_can_take_nothing_is_left_out(out):
    free, other = replica(0, 100), replica(1, 100, **out)
    assert choose_replica([free, other], {1: 10}, 10, 5.0, prompt_tokens=50) is free
    if "cache_use" not in out:
        assert choose_replica([other], {}, 0, 5.0) is None


def test_an_excluded_replica_is_not_asked_again():
    assert choose_replica([replica(0)], {}, 0, 0.0, excluded=frozenset({"0"})) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(10, 3000), st.booleans()), min_size=40, max_size=200),
    st.integers(2, 8),
)
def test_no_replica_gets_more_than_its_bound_of_the_load(requests, count):
    """Whatever prefixes are popular: over the bound is only who is also the least loaded."""
    replicas = [replica(slot, limit=10_000) for slot in range(count)]
    open_: list[tuple[RoutedReplica, int]] = []
    for favourite, tokens, ends in requests:
        if ends and open_:
            chosen, cost = open_.pop(0)
            chosen.end(cost)
        least = min(one.tokens for one in replicas)
        total = sum(one.tokens for one in replicas)
        found = choose_replica(replicas, {favourite % count: 10}, 10, 0.0, prompt_tokens=tokens)
        assert found is not None
        assert found.tokens == least or found.tokens <= LOAD_BOUND * total / count
        found.begin(tokens, 0)
        open_.append((found, tokens))
    for chosen, cost in open_:
        chosen.end(cost)
    assert all(one.tokens == 0 == one.in_flight for one in replicas)


def test_expected_tokens_count_what_was_not_read_and_the_answer():
    assert expected_tokens(4000, 0.0, 100) == 1101
    assert expected_tokens(4000, 0.75, 100) == 351
    assert expected_tokens(0, 0.0, None) > 200
    assert expected_tokens(400, 0.0, -5) == 101
