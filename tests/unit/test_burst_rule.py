"""The burst rule of a queue: how it is written, and what it admits."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.ids import QueueId
from phalanx.core.work.burst_rule import BurstRule, parse_burst_rule
from phalanx.core.work.queue import burst_rule
from tests.builders import queue

HOUR = 3600.0


@pytest.mark.parametrize(
    ("text", "rule", "written"),
    [
        ("when wait > 2h and price < 40", BurstRule(wait_s=2 * HOUR, price=40.0), None),
        ("when price<$3.5/gpu-h  and wait>90m", BurstRule(wait_s=1.5 * HOUR, price=3.5, per_gpu_h=True), 0),
        ("when wait > 1h30m", BurstRule(wait_s=1.5 * HOUR), None),
        ("when price < 0.0001", BurstRule(price=0.0001), None),
        ("always", BurstRule(), None),
        ("never", BurstRule(never=True), None),
    ],
)
def test_a_rule_is_read_and_written(text, rule, written):
    assert parse_burst_rule(text) == rule
    assert str(rule) == (text if written is None else "when wait > 1h30m and price < 3.5/GPU-h")
    assert parse_burst_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "when",
        "wait > 2h",
        "when wait > 2",
        "when wait > 2h and",
        "when wait > 2h and wait > 3h",
        "when price < 4 and price < 3",
        "when wait < 2h",
        "when price < -1",
        "when wait > 2h or price < 40",
        "sometimes",
    ],
)
def test_another_sentence_is_refused(text):
    with pytest.raises(BadRequest):
        parse_burst_rule(text)


@pytest.mark.parametrize(
    ("rule", "sooner_h", "price", "gpu_h", "refusal"),
    [
        ("when wait > 2h and price < 40", 2.1, 39.9, 8, ""),
        ("when wait > 2h and price < 40", 2.0, 39.9, 8, "wait > 2h"),
        ("when wait > 2h and price < 40", 2.1, 40.0, 8, "price < 40"),
        ("when wait > 2h and price < 40", 9.0, None, 8, "price < 40"),  # its run time is unknown
        ("when wait > 2h", 9.0, None, 8, ""),
        ("when wait > 2h", float("inf"), 1e6, 8, ""),
        ("when price < 5/GPU-h", -1.0, 39.9, 8, ""),
        ("when price < 5/GPU-h", -1.0, 40.0, 8, "price < 5/GPU-h"),
        ("always", -1.0, None, 8, ""),
        ("never", float("inf"), 0.0, 8, "never"),
    ],
)
def test_which_condition_refuses(rule, sooner_h, price, gpu_h, refusal):
    assert parse_burst_rule(rule).refusal(sooner_h * HOUR, price, gpu_h) == refusal


def test_a_queue_without_a_rule_has_the_one_above():
    rule, never = parse_burst_rule("when wait > 2h"), parse_burst_rule("never")
    tree = {
        one.id: one
        for one in (
            queue("top", burst=rule),
            queue("middle", parent="top"),
            queue("low", parent="middle", burst=never),
            queue("other"),
        )
    }
    assert [burst_rule(tree, QueueId(name)) for name in ("middle", "low", "other")] == [rule, never, None]
