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
            index.forget([slot])
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
    popular.tokens = 1300
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=50) is quiet, "it saves less than it waits"
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=500) is popular
    popular.tokens = 12_000
    assert choose_replica([quiet, popular], {1: 10}, 10, 0.0, prompt_tokens=5000) is quiet, "it is over the bound"


def test_of_two_replicas_the_one_that_has_read_a_prompt_gets_it_while_it_has_a_request_and_the_other_none():
    """The bound counts the new request: without it, half of one request was the mean, and over it was whoever had one."""
    idle, reading = replica(0, 0), replica(1, 600, in_flight=1)
    assert choose_replica([idle, reading], {1: 10}, 10, 0.0, prompt_tokens=600) is reading
    reading.tokens, reading.in_flight = 1200, 2
    assert choose_replica([idle, reading], {1: 10}, 10, 0.0, prompt_tokens=600) is idle


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
    """Whatever prefixes are popular: over the bound, which counts the new request, is only who is also the least loaded."""
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
        assert found.tokens == least or found.tokens <= LOAD_BOUND * (total + tokens) / count
        found.begin(tokens, 0)
        open_.append((found, tokens))
    for chosen, cost in open_:
        chosen.end(cost)
    assert all(one.tokens == 0 == one.in_flight for one in replicas)


def test_a_full_cache_costs_new_requests_and_not_those_whose_prompt_was_read():
    full, roomy = replica(0, 1000, cache_use=0.95), replica(1, 1100, cache_use=0.4)
    assert choose_replica([full, roomy], {}, 10, 0.0, prompt_tokens=500) is roomy
    assert choose_replica([full, roomy], {0: 10}, 10, 0.0, prompt_tokens=1000) is full, "its blocks are shared"
    roomy.cache_use = 0.95
    assert choose_replica([full, roomy], {}, 10, 0.0, prompt_tokens=500) is full, "there is no better one"


def test_the_use_of_a_cache_follows_what_was_sent_since_and_is_forgotten():
    one = replica(0, 1000)
    one.read_cache(0.5, 10_000, 100.0)
    assert one.cache_use_at(100.0) == 0.5
    one.begin(2000, 1)
    assert one.cache_use_at(104.0) == pytest.approx(0.7)
    one.end(2000)
    assert one.cache_use_at(105.0) == 0.5
    assert one.cache_use_at(110.0) == pytest.approx(0.25)
    assert one.cache_use_at(200.0) < 0.001
    one.read_cache(0.0, 10_000, 200.0)
    one.begin(5000, 2)
    assert one.cache_use_at(200.0) == 0.0, "engines without the metric say 0"


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
REPLICAS = st.lists(
    st.tuples(
        st.integers(0, 10**7), FLOATS, st.integers(-5, 10**7), st.integers(0, 10**7), st.integers(0, 3), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(REPLICAS, st.integers(0, 10**6), st.integers(0, 4096), st.floats(0, 1e6), st.data())
def test_whatever_engines_report_the_choice_is_one_that_may_take_it_and_within_the_bound(
    found, prompt, blocks, now_s, data
):
    replicas = []
    for slot, (tokens, use, size, before, flight, avoided) in enumerate(found):
        one = replica(slot, tokens, limit=3, in_flight=flight, avoided_until_s=now_s + 1 if avoided else 0.0)
        one.cache_use, one.cache_tokens, one.tokens_read = use, size, before
        one.cache_read_s = data.draw(st.floats(0, 1e6))
        assert 0.0 <= one.cache_use_at(now_s) <= 1.0
        replicas.append(one)
    matches = {slot: data.draw(st.integers(0, blocks)) for slot in range(len(replicas))}
    usable = [one for one in replicas if one.in_flight < 3 and one.avoided_until_s <= now_s]
    chosen = choose_replica(replicas, matches, blocks, now_s, prompt_tokens=prompt)
    if not usable:
        assert chosen is None
        return
    assert chosen in usable
    assert chosen is not None
    mean = (sum(one.tokens for one in usable) + prompt) / len(usable)
    assert chosen.tokens <= LOAD_BOUND * mean + 1 or chosen.tokens == min(one.tokens for one in usable)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.integers(16, 2000))
def test_no_replica_starves_however_full_its_cache_is_said_to_be(uses, prompt):
    """Requests that do not end: the bound on the others' load brings one to each."""
    replicas = [replica(slot, limit=10_000, cache_use=use) for slot, use in enumerate(uses)]
    for number in range(200):
        chosen = choose_replica(replicas, {}, 0, 0.0, prompt_tokens=prompt)
        assert chosen is not None
        chosen.begin(expected_tokens(prompt * 4, 0.0, 16), number)
    assert all(one.in_flight for one in replicas)


def test_expected_tokens_count_what_was_not_read_and_the_answer():
    assert expected_tokens(4000, 0.0, 100) == 1101
    assert expected_tokens(4000, 0.75, 100) == 351
    assert expected_tokens(0, 0.0, None) > 200
    assert expected_tokens(400, 0.0, -5) == 101
