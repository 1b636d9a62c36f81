"""Sums of energy: cost and CO2 by the rates that held in each hour, and what is unknown."""

import pytest

from phalanx.cli.report.price_file import parse_price_file
from phalanx.core.accounting.energy_report import KWH_MJ, sum_energy
from phalanx.core.accounting.usage_report import UsageKey
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.usage.electricity import check_rates
from phalanx.core.work.usage.price_list import parse_rate
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow

HOUR_US = 3_600_000_000


def row(job, kwh, *, source="counter", covered=HOUR_US, held=HOUR_US):
    energy = ((source, round(kwh * KWH_MJ), covered),) if covered else ()
    return UsageRow(
        model="h100",
        pool="",
        project="p" if job else "",
        user="ada" if job else "",
        queue="q" if job else "",
        job=job,
        amounts=(("computing", "", held),),
        energy=energy,
    )


def hour(at_h, *rows):
    fleet = sum(one.amounts[0][2] for one in rows)
    metered = sum(millijoules for one in rows for _, millijoules, _ in one.energy)
    return UsageHour(id=str(at_h * 3600), fleet=fleet, rows=rows, millijoules=metered)


def totals(hours, rates=(), by=UsageKey.JOB, rows_max=10):
    found = sum_energy(hours, by, check_rates(rates), rows_max=rows_max)
    assert found.total.millijoules == found.metered_mj == sum(one.millijoules for one in found.rows)
    return found


def test_each_hour_has_the_rate_that_held_then():
    rates = [
        parse_rate("1970-01-01T02:00Z", per_kwh="0.20", pue="1.5", gco2_per_kwh="400"),
        parse_rate("1970-01-01T03:00Z", per_kwh="0.10"),
        parse_rate("1971-01-01", per_kwh="9"),
    ]
    found = totals([hour(1, row("7", 1)), hour(2, row("7", 2)), hour(3, row("7", 4))], rates)
    (seven,) = found.rows
    assert seven.cost_micro == 2 * 1.5 * 200_000 + 4 * 100_000
    assert seven.gco2 == pytest.approx(2 * 1.5 * 400)
    assert (seven.unpriced_mj, seven.unrated_mj) == (KWH_MJ, 5 * KWH_MJ)
    assert [rate.from_s for rate in found.rates] == [7200, 10800], "the rates that held in the period"


def test_mean_power_is_that_of_the_time_whose_energy_is_known():
    found = totals([hour(1, row("7", 0.35, covered=HOUR_US // 2), row("", 0, covered=0))])
    rows = {one.key: one for one in found.rows}
    assert rows["7"].mean_w == pytest.approx(700)
    assert rows["7"].unknown == HOUR_US // 2
    assert (rows[""].mean_w, rows[""].unknown) == (None, HOUR_US)
    assert (rows[""].cost_micro, rows[""].gco2) == (None, None)


def test_sources_are_told_apart_and_the_rest_of_a_long_list_is_one_row():
    found = totals([hour(1, row("1", 1), row("2", 2, source="integrated"), row("3", 0.5))], rows_max=1)
    first, rest = found.rows
    assert (first.key, first.counter_mj, first.integrated_mj) == ("2", 0, 2 * KWH_MJ)
    assert (rest.merged, rest.counter_mj) == (2, round(1.5 * KWH_MJ))


def test_no_amount_is_rounded_before_the_sum():
    rates = [parse_rate("", per_kwh="0.123457", pue="1.111")]
    found = totals([hour(at_h, row(str(at_h), 1e-6)) for at_h in range(1, 1001)], rates, rows_max=2000)
    assert found.total.cost == sum(one.cost for one in found.rows) == 1000 * 3600 * 1111 * 123_457


PRICES = "currency: EUR\nprices: []\n"


def test_price_file_may_have_rates_of_electricity():
    text = f"{PRICES}electricity:\n  - {{from: 2026-01-01, per_kwh: 0.18, pue: 1.25, gco2_per_kwh: 344.5}}\n"
    *_, rates = parse_price_file(text, path="FILE")
    assert rates == [{"from": "2026-01-01", "per_kwh": "0.18", "pue": "1.25", "gco2_per_kwh": "344.5"}]
    assert parse_price_file(PRICES, path="FILE")[2] is None
    assert parse_price_file(f"{PRICES}electricity: []\n", path="FILE")[2] == []


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("{from: 2026-01-01}", "needs per_kwh or gco2_per_kwh"),
        ("{per_kwh: cheap}", "is not an amount"),
        ("{per_kwh: 0.1, pue: 0.9}", "pue: 0.9 is not from 1 to 5"),
        ("{per_kwh: 0.1, pue: 9}", "pue: 9 is not from 1 to 5"),
        ("{per_kwh: 0.1, from: soon}", "is not a date"),
        ("{per_kwh: 0.1, from: '2026-01-01T00:30Z'}", "is not a full hour"),
        ("{per_kwh: 0.1, co2: 3}", "unknown key 'co2'"),
        ("{per_kwh: 0.1}\n  - {per_kwh: 0.2}", "has a rate on line 4 already"),
    ],
)
def test_a_wrong_rate_is_refused_with_its_line(rate, message):
    with pytest.raises(BadFile, match=r"^FILE:[0-9]+: ") as refused:
        parse_price_file(f"{PRICES}electricity:\n  - {rate}\n", path="FILE")
    assert message in refused.value.message


def test_two_rates_of_one_hour_are_refused():
    with pytest.raises(BadRequest, match="two rates"):
        check_rates([parse_rate("", per_kwh="1"), parse_rate("1970-01-01", per_kwh="2")])
