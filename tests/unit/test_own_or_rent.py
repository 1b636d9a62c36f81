"""`report own-or-rent`: break-even from measured use, prices and their dates."""

from datetime import date

import pytest

from phalanx.cli.report.own_or_rent import OwnOrRent, compare_models, own_or_rent_table, parse_own_price
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest
from phalanx.core.ids import PoolId
from phalanx.planner.facts.prices import parse_price_table
from phalanx.wire.api.cost import InvoiceLineView
from phalanx.wire.api.pools import PoolView

TODAY = date(2026, 11, 28)
SCREEN = Terminal(width=200, height=40, interactive=False, colour=False, blocks=True)
FACTS = parse_price_table(
    "offer,gpu,kind,usd_per_gpu_hour,region,source,date,note\n"
    "A big,h100-sxm5-80gb,on-demand,6.00,,price page,2026-11-01,\n"
    "B big,h100-sxm5-80gb,on-demand,5.00,,price page,2026-11-01,\n"
    "B big,h100-sxm5-80gb,spot,2.50,,price page,2026-02-01,\n"
    "C old,h100-sxm5-80gb,on-demand,1.00,,price page,2024-01,\n",
    "facts.csv",
)


def line(hours, idle, cents, gpu="NVIDIA H100 80GB HBM3", pool="", prices=("2.00",)):
    return InvoiceLineView(
        month="2026-11",
        pool=pool,
        gpu=gpu,
        gpu_hours=hours,
        gpu_us=int(hours * 3.6e9),
        idle_gpu_hours=idle,
        prices=list(prices),
        cost="0",
        cost_cents=cents,
    )


def pool(price=32.0):
    return PoolView(
        id=PoolId("cloud"),
        provider="aws",
        node="p5",
        devices=8,
        min_nodes=0,
        max_nodes=4,
        price_per_h=price,
        cost_per_h=0.0,
        idle_s=300.0,
        start_limit_s=600.0,
    )


def compared(lines, currency="USD", own=(), pools=()):
    return compare_models(lines, currency, dict(own), FACTS, list(pools), TODAY)


def test_break_even_is_the_own_price_over_the_rented_one():
    (found,) = compared([line(600.0, 200.0, 120_000), line(400.0, 200.0, 80_000)])
    assert (found.gpu_hours, found.used_gpu_hours, found.utilization) == (1000.0, 600.0, 0.6)
    assert (found.own_usd, found.own_usd_per_gpu_hour) == (2000.0, 2.0)
    spot, on_demand = found.rents
    assert (on_demand.offer, on_demand.use_rented_usd, on_demand.break_even, on_demand.cheaper) == (
        "B big",
        3000.0,
        pytest.approx(0.4),
        "own",
    )  # the newest price of a kind, of these the cheapest
    assert (spot.use_rented_usd, spot.break_even, spot.cheaper) == (1500.0, pytest.approx(0.8), "rent")
    assert (on_demand.age_days, spot.age_days) == (27, 300)


def test_the_cheaper_side_is_the_one_that_costs_less():
    for idle in (0.0, 100.0, 500.0, 900.0):
        (found,) = compared([line(1000.0, idle, 200_000)])
        for rent in found.rents:
            assert (rent.cheaper == "own") == (found.own_usd <= rent.use_rented_usd)


def test_nodes_of_pools_are_not_owned_and_their_price_is_one_to_compare_with():
    (found,) = compared([line(100.0, 0.0, 20_000), line(50.0, 0.0, 40_000, pool="cloud")], pools=[pool()])
    assert (found.gpu_hours, found.rented_gpu_hours) == (100.0, 50.0)
    (own_pool,) = [rent for rent in found.rents if rent.kind == "pool"]
    assert (own_pool.offer, own_pool.usd_per_gpu_hour, own_pool.age_days) == ("cloud", 4.0, 0)
    assert compared([line(50.0, 0.0, 40_000, pool="cloud")], pools=[pool()]) == []


@pytest.mark.parametrize(("currency", "prices"), [("EUR", ("2.00",)), ("", ()), ("USD", ())])
def test_without_an_own_price_in_dollars_nothing_is_cheaper(currency, prices):
    models = compared([line(100.0, 50.0, 0, prices=prices)], currency)
    assert models[0].own_usd is None
    assert {(rent.break_even, rent.cheaper) for rent in models[0].rents} == {(None, "")}
    report = own_or_rent_table(OwnOrRent(since_s=0.0, until_s=1.0, models=models), currency)
    assert any("give --own-price GPU=USD" in note for note in report.notes)
    (stated,) = compared([line(100.0, 50.0, 0, prices=prices)], currency, own=[("h100", 1.5)])
    assert stated.own_usd == 150.0


def test_the_table_says_how_old_prices_are():
    report = own_or_rent_table(
        OwnOrRent(since_s=0.0, until_s=1.0, models=compared([line(1000.0, 400.0, 200_000)])), "USD"
    )
    assert [" ".join(text.split()) for text in report.lines(SCREEN)] == [
        "GPU GPU-HOURS USED OWN USD/H OWN USD RENTED AS USD/H DAYS OLD USE RENTED USD BREAK-EVEN CHEAPER",
        "NVIDIA H100 80GB HBM3 1,000 60% 2.00 2,000 spot: B big 2.50 300 1,500 80% rent",
        "on-demand: B big 5.00 27 3,000 40% own",
    ]
    assert any("B big, is 300 days old" in note for note in report.notes)


def test_a_model_without_any_price_has_a_row():
    models = compared([line(10.0, 5.0, 100, gpu="unheard of")])
    assert models[0].rents == []
    text = own_or_rent_table(OwnOrRent(since_s=0.0, until_s=1.0, models=models), "USD").lines(SCREEN)[1]
    assert "no price known" in text


@pytest.mark.parametrize("word", ["h100", "=2", "h100=", "h100=x", "h100=-1"])
def test_a_wrong_own_price_is_one_line(word):
    with pytest.raises(BadRequest, match="is not GPU=USD"):
        parse_own_price(word)
