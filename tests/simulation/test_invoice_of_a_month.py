"""A month of a simulated fleet: the invoice of the ledger is the one that a script without Phalanx adds up from the events of the nodes."""

import json

import pytest
from ruamel.yaml import YAML

from phalanx.cli.report.price_file import parse_price_file
from phalanx.core.accounting.cost_report import CostKey, IdleRule, cost_rows, invoice, meter
from phalanx.core.months import month_bounds_s
from phalanx.core.scheduling import scheduler
from phalanx.core.work.usage.price_list import PriceBook, check_prices, parse_price
from phalanx.simulator.drill import supervisor_calls
from tests import invoice_check
from tests.simulation.simulated_month import MONTH, SimulatedMonth

PRICES = """
currency: EUR
prices:
  - {gpu: h100, from: 2026-01-01, per_gpu_hour: 2.499999}
  - {gpu: h100, from: 2026-11-01T01:00Z, per_gpu_hour: 2.13}
  - {gpu: h100, from: 2026-11-09T17:00+01:00, per_gpu_hour: 3.000001}
  - {gpu: h100, from: 2026-11-21, per_gpu_hour: 2.49}
  - {gpu: a100, per_gpu_hour: 1.234567}
  - {gpu: l40s, from: 2026-10-01, per_gpu_hour: 9}
  - {gpu: l40s, pool: cloud, from: 2026-11-01T01:00Z, per_gpu_hour: 0.87}
  - {gpu: l40s, pool: cloud, from: 2026-11-15, per_gpu_hour: 0.333333}
"""
QUOTAS = {"fast": 8000, "slow": 2000}


@pytest.fixture(autouse=True)
def _slow_polls(monkeypatch):
    """Polls that find nothing, and orders of nodes, are rare here: they would take most of the time."""
    monkeypatch.setattr(supervisor_calls, "POLL_S", 600.0)
    monkeypatch.setattr(scheduler, "demand_period_s", lambda *_: 120.0)


def check(seed, hours, tmp_path):
    month = SimulatedMonth(seed, hours)
    month.run()
    events, prices = tmp_path / "events.jsonl", tmp_path / "prices.yaml"
    events.write_text("".join(json.dumps(event) + "\n" for event in month.events()), encoding="utf-8")
    prices.write_text(PRICES, encoding="utf-8")
    plain = YAML(typ="safe", pure=True).load(prices)["prices"]
    again = invoice_check.invoice(invoice_check.read_events(str(events)), plain, MONTH, month.now_ms)

    _, listed, _ = parse_price_file(PRICES, path="prices.yaml")
    book = PriceBook(
        check_prices(
            parse_price(one["gpu"], one.get("from", ""), one["per_gpu_hour"], pool=one.get("pool", ""))
            for one in listed
        )
    )
    begin_s, _ = month_bounds_s(MONTH)
    metered = meter([hour for hour in month.hours() if int(hour.id) >= begin_s], book)
    lines = invoice(metered)
    assert {(line.key.pool, line.key.model): line.cents for line in lines} == {
        key: int(cost * 100) for key, cost in again.items()
    }
    assert {line.key.model for line in lines} >= {"h100", "a100"}
    assert all(sum(amount for row in hour.rows for _, _, amount in row.amounts) == hour.fleet for hour in month.hours())
    for by in CostKey:
        for rule in IdleRule:
            rows = cost_rows(metered, by, rule, quotas=QUOTAS, rows_max=100)
            assert sum(row.cents for row in rows) == sum(line.cents for line in lines), (by, rule)
    return month, lines


def test_some_hours_cost_what_the_events_say(tmp_path):
    check(seed=3, hours=2, tmp_path=tmp_path)


@pytest.mark.timeout(1200)  # it takes about two minutes
def test_a_month_costs_what_the_events_say(tmp_path):
    month, lines = check(seed=7, hours=720, tmp_path=tmp_path)
    kinds = {event["kind"] for event in month.events()}
    assert {
        "node_requested",
        "node_released",
        "node_forgotten",
        "node_down",
        "failed",
        "succeeded",
        "cancelled",
    } <= kinds
    assert [line.key.pool for line in lines] == ["", "", "cloud"]
    assert len(lines[1].prices) == 4, "the price of an H100 changes three times"
