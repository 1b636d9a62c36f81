"""Limits on requests and tokens, in virtual time: one gateway and several that share."""

# mypy: disable-error-code="arg-type, comparison-overlap, union-attr"

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.api.live.gateway_demands import SETTLING_S, SILENT_S, GatewayDemands
from phalanx.core.errors import BadRequest
from phalanx.core.work.services.request_limits import RequestLimits, demand_share, parse_per_minute, parse_weight
from phalanx.gateway.rate_limits import LimitReached, RateLimiter, TokenReservation, duration_text, limit_headers

RPM = {"project nlp": RequestLimits(requests_per_minute=60)}
TPM = {"project nlp": RequestLimits(tokens_per_minute=6000)}


def let_through(limiter, limits, tokens, now_s):
    found = limiter.reserve(limits, tokens, now_s)
    return isinstance(found, TokenReservation), found


def test_a_minutes_amount_passes_at_once_and_then_one_each_second():
    limiter = RateLimiter()
    assert [let_through(limiter, RPM, 1, 0.0)[0] for _ in range(61)] == [True] * 60 + [False]
    refused = limiter.reserve(RPM, 1, 0.25)
    assert isinstance(refused, LimitReached)
    assert refused.retry_after_s == pytest.approx(0.75)
    assert refused.state.remaining == 0
    assert let_through(limiter, RPM, 1, 0.25 + refused.retry_after_s)[0], "Retry-After is long enough"
    assert [let_through(limiter, RPM, 1, 3600.0)[0] for _ in range(61)] == [True] * 60 + [False], "no more is saved up"


def test_estimates_are_corrected_and_a_debt_is_paid_off():
    limiter = RateLimiter()
    passed, first = let_through(limiter, TPM, 5000, 0.0)
    assert passed
    assert not let_through(limiter, TPM, 2000, 0.0)[0]
    limiter.settle(first, 100, 0.0)
    limiter.settle(first, 100, 0.0)
    passed, second = let_through(limiter, TPM, 100, 0.0)
    assert passed
    assert second.states[0].remaining == 5800
    limiter.settle(second, 11_900, 0.0)  # 6,000 more than a minute has
    refused = limiter.reserve(TPM, 1, 0.0)
    assert refused.retry_after_s == pytest.approx(60.01)
    assert let_through(limiter, TPM, 1, 60.02)[0]


def test_a_request_larger_than_a_minute_passes_a_full_bucket_alone():
    limiter = RateLimiter()
    assert let_through(limiter, TPM, 18_000, 0.0)[0]
    assert limiter.reserve(TPM, 1, 0.0).retry_after_s == pytest.approx(120.01)


def test_a_request_that_one_limit_refuses_takes_nothing_from_the_others():
    limiter = RateLimiter()
    both = {**RPM, "key k": RequestLimits(requests_per_minute=1, tokens_per_minute=10**6)}
    assert let_through(limiter, both, 10, 0.0)[0]
    for _ in range(100):
        refused = limiter.reserve(both, 10, 0.0)
        assert (refused.state.scope, refused.state.kind) == ("key k", "requests")
    assert limit_headers(limiter.reserve(RPM, 10, 0.0).states)["x-ratelimit-remaining-requests"] == "58"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 4000), st.integers(0, 8000)), max_size=60))
def test_settled_use_stays_below_the_limit_plus_what_the_last_requests_exceed(asked):
    limiter, now_s, used, longest = RateLimiter(), 0.0, 0.0, 0
    for pause_s, estimate, actual in asked:
        now_s += pause_s
        found = limiter.reserve(TPM, estimate, now_s)
        if isinstance(found, TokenReservation):
            assert used <= 6000 + now_s * 100 + 1e-6, "no request passes while there is a debt"
            limiter.settle(found, actual, now_s)
            used += actual
            longest = max(longest, actual)
    assert used <= 6000 + now_s * 100 + longest + 1e-6


@pytest.mark.parametrize("gateways", [1, 2, 5])
def test_several_gateways_keep_a_limit_together_and_lend_what_others_do_not_use(gateways):
    rng = random.Random(gateways)
    limit = {"project nlp": RequestLimits(requests_per_minute=600)}
    limiters = {str(number): RateLimiter() for number in range(gateways)}
    head, now_s, passed = GatewayDemands(began_s=-100.0), 0.0, []
    for second in range(300):
        for name, limiter in limiters.items():
            _, even, shares = head.report(name, limiter.demands(now_s), now_s)
            limiter.set_shares(shares, even)
        busy = ["0"] if second < 150 else list(limiters)  # one gets everything, then all do
        for number in range(30):
            now_s = second + number / 30
            name = rng.choice(busy)
            if isinstance(limiters[name].reserve(limit, 10, now_s), TokenReservation):
                passed.append(now_s)
        now_s = second + 1.0
    allowed = 600 + 300 * 10
    assert 0.9 * allowed <= len(passed) <= 1.01 * allowed
    late = [at_s for at_s in passed if 90 <= at_s < 150]
    assert 0.88 * 600 <= len(late) <= 1.01 * 600, "the busy one gets nearly all of it"


@given(st.lists(st.floats(0.0, 1e12), min_size=1, max_size=8))
def test_shares_sum_to_one_and_each_gateway_has_one(demands):
    shares = [demand_share(asked, sum(demands), len(demands)) for asked in demands]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.1 / len(demands) - 1e-12


def test_the_head_waits_for_all_gateways_and_forgets_those_that_are_silent():
    head = GatewayDemands(began_s=0.0)
    assert head.report("a", {"key k": 5.0}, SETTLING_S - 1.0) == (1, None, {})
    assert head.report("b", {}, SETTLING_S) == (2, 0.5, {"key k": pytest.approx(0.05)})
    assert head.report("b", {}, SETTLING_S - 1.0 + SILENT_S) == (1, 1.0, {})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (1.5, "1.5s"), (360, "6m0s"), (61.25, "1m1.25s")]
)
def test_durations_read_as_those_of_openai(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "10 k", "k", "٣", "9" * 30, "inf", "None"])
def test_wrong_limits_are_refused(text):
    with pytest.raises(BadRequest):
        parse_per_minute(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1001"])
def test_wrong_weights_are_refused(text):
    with pytest.raises(BadRequest):
        parse_weight(text)


def test_limits_are_read_as_they_are_typed():
    assert [parse_per_minute(text) for text in ("600", "200k", "2M", "none")] == [600, 200_000, 2_000_000, 0]
    assert str(RequestLimits(requests_per_minute=60, tokens_per_minute=2000)) == "60 requests/min, 2000 tokens/min"
