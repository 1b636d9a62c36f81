"""Reports that a job wrote to harm whoever reads them."""

# mypy: disable-error-code="arg-type"

import json

import msgspec
import pytest

from phalanx.api.routes.steps import _step_of
from phalanx.controller.telemetry import Telemetry
from phalanx.core.jsonline import finite_float, parse_object
from phalanx.node.member.rank_reports import parse_report

HUGE = 10**400
STEP = {
    "k": "step",
    "rank": 0,
    "epoch": 1,
    "generation": 1,
    "step": 7,
    "begin_ns": 1,
    "end_ns": 2,
    "at_s": 1.0,
    "loss": 0.5,
    "tokens": 3,
}


def line(**changes):
    return json.dumps({**STEP, **changes}).encode()


def test_a_report_is_read():
    assert parse_object(line()) == STEP
    assert parse_object(line(step=-(2**63), tokens=2**63 - 1)) == {**STEP, "step": -(2**63), "tokens": 2**63 - 1}


@pytest.mark.parametrize(
    "harm",
    [
        b"",
        b"[]",
        b"7",
        b'{"a":',
        b'"' + b"x" * 100,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        line(step=2**63),
        line(step=-HUGE),
        line(at_s=HUGE),
    ],
)
def test_harm_is_none(harm):
    assert parse_object(harm) is None
    assert parse_report(harm) is None
    assert _step_of(1, harm, "all") is None


@pytest.mark.parametrize("value", ["1", None, True, [], float("nan"), float("inf"), -float("inf"), HUGE, -HUGE])
def test_what_is_no_number_is_none(value):
    assert finite_float(value) is None


@pytest.mark.parametrize("name", ["step", "rank", "generation", "at_s", "loss", "tokens", "begin_ns", "end_ns"])
@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**63, float("inf"), float("nan"), True, "x", None, [], {}])
def test_head_takes_any_value_of_any_field(name, value):
    view = _step_of(1, line(**{name: value}), "all")
    assert view is None or all(
        abs(number) < 2**64 for number in (view.step, view.at_s, view.loss or 0, view.tokens or 0)
    )
    msgspec.json.encode(view)
    telemetry = Telemetry()
    for heard in telemetry.put_steps("1", 1, 0, line(**{name: value}) + b"\n"):
        assert abs(heard.step) < 2**63
    telemetry.progress("1")
