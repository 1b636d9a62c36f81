"""Prices: which one holds, what a price file may say, and plug-ins that refresh them."""

import importlib.metadata
from datetime import UTC, datetime

import pytest

from phalanx.api.routes.money.prices import compare_prices
from phalanx.cli.report.price_file import parse_price_file
from phalanx.cli.report.price_plugins import ENTRY_POINTS, refreshed_prices
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.ids import UserId
from phalanx.core.work.usage.electricity import RATES_MAX
from phalanx.core.work.usage.monthly_budget import MonthlyBudget, parse_budget
from phalanx.core.work.usage.price_list import (
    PRICES_MAX,
    PriceBook,
    PriceList,
    check_prices,
    micro_text,
    parse_micro,
    parse_price,
)

H100 = "NVIDIA H100 80GB HBM3"


def book(*prices):
    return PriceBook(check_prices(parse_price(gpu, since, amount, pool=pool) for gpu, since, amount, pool in prices))


def text_of(*args):
    found = book(*args[:-3]).price(*args[-3:])
    return None if found is None else micro_text(found.micro)


def test_the_latest_price_that_has_begun_holds():
    prices = (("h100", "", "1", ""), ("h100", "1970-01-02", "2", ""), ("h100", "1970-01-03", "3", ""))
    found = [text_of(*prices, H100, "", hour) for hour in (0, 82_800, 86_400, 169_200, 172_800)]
    assert found == ["1.00", "1.00", "2.00", "2.00", "3.00"]


def test_a_price_for_the_pool_wins_once_it_has_begun():
    prices = (("h100", "", "1", ""), ("h100", "1970-01-02", "2", "cloud"))
    assert text_of(*prices, H100, "cloud", 82_800) == "1.00"
    assert text_of(*prices, H100, "cloud", 86_400) == "2.00"
    assert text_of(*prices, H100, "other", 86_400) == "1.00"


def test_more_words_of_the_model_win_and_other_models_have_no_price():
    prices = (("h100", "", "1", ""), ("h100 80gb", "", "2", ""), (H100, "", "3", ""))
    assert text_of(*prices[:2], H100, "", 0) == "2.00"
    assert text_of(*prices, H100, "", 0) == "3.00"
    assert text_of(*prices, "NVIDIA H200", "", 0) is None


@pytest.mark.parametrize(
    ("text", "micro"), [("2.49", 2_490_000), ("0.000001", 1), ("3", 3_000_000), ("999999999", 999_999_999_000_000)]
)
def test_amounts_are_exact(text, micro):
    assert parse_micro(text) == micro
    assert parse_micro(micro_text(micro)) == micro


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("gpu: h100\n    per_gpu_hour: 2.1234567", "FILE:3: per_gpu_hour: '2.1234567' is not an amount"),
        ("gpu: h100\n    per_gpu_hour: -1", "is not an amount"),
        ("gpu: h100\n    per_gpu_hour: 1e3", "is not an amount"),
        ("gpu: h100", "is not an amount"),
        ("per_gpu_hour: 1", "needs the model"),
        ("gpu: h100\n    per_gpu_hour: 1\n    from: 2026-11-01T06:30Z", "is not a full hour"),
        ("gpu: h100\n    per_gpu_hour: 1\n    from: 2026-11-01T06:00+05:30", "is not a full hour"),
        ("gpu: h100\n    per_gpu_hour: 1\n    from: tomorrow", "is not a date"),
        ("gpu: h100\n    per_gpu_hour: 1\n    price: 1", "unknown key 'price'"),
        ("gpu: h100\n    per_gpu_hour: 1\n  - gpu: h100\n    per_gpu_hour: 2", "have a price on line 3 already"),
    ],
)
def test_a_wrong_price_is_refused_with_its_line(price, message):
    with pytest.raises(BadFile, match=r"^FILE:[0-9]+: ") as refused:
        parse_price_file(f"currency: EUR\nprices:\n  - {price}\n", path="FILE")
    assert message in refused.value.message


@pytest.mark.parametrize(
    "text", ["prices: []", "currency: EUR", "currency: eur\nprices: []", "currency: EUR\nprices: 3"]
)
def test_a_file_without_currency_or_list_is_refused(text):
    with pytest.raises(BadFile):
        parse_price_file(text, path="FILE")


def test_a_file_may_have_as_many_prices_and_rates_as_the_head_stores():
    prices = [f"- {{gpu: g{number}, pool: p, from: 2026-11-01, per_gpu_hour: 1, source: x}}" for number in range(1000)]
    hours = [datetime.fromtimestamp(3600 * number, UTC).isoformat() for number in range(500)]
    rates = [f"- {{from: {hour!r}, per_kwh: 1, pue: 1, gco2_per_kwh: 1, source: x}}" for hour in hours]
    text = "\n".join(["currency: EUR", "prices:", *prices, "electricity:", *rates])
    currency, found, electricity = parse_price_file(text, path="prices.yaml")
    assert (currency, len(found), len(electricity or ())) == ("EUR", PRICES_MAX, RATES_MAX)


def test_what_changes_is_named_and_whether_the_past_changes():
    def listed(currency, *prices):
        return PriceList(currency=currency, prices=book(*prices).prices, by=UserId("op"), at_s=0.0)

    old = listed("EUR", ("h100", "", "1", ""), ("a100", "", "1", ""), ("l4", "", "1", ""))
    new = listed("EUR", ("h100", "", "2", ""), ("a100", "", "1", ""), ("h100", "1970-01-03", "3", ""))
    found = compare_prices(old, new, now_s=100_000.0)
    changes = [[one.gpu for one in each] for each in (found.added, found.changed, found.removed)]
    assert changes == [["h100"], ["h100"], ["l4"]]
    assert (found.unchanged, found.past_from_s) == (1, 0)
    future = listed("EUR", *(("h100", "", "2", ""), ("a100", "", "1", ""), ("h100", "1970-01-03", "4", "")))
    assert compare_prices(new, future, now_s=100_000.0).past_from_s is None
    assert len(compare_prices(old, listed("USD", ("h100", "", "1", "")), now_s=0.0).changed) == 1


def as_plugin(monkeypatch, value):
    point = importlib.metadata.EntryPoint("site", value, ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])


def site_prices(known):
    assert known == {"currency": "", "prices": []}
    return "currency: EUR\nprices:\n  - {gpu: h100, per_gpu_hour: 2.49}\n"


def test_a_plugin_gives_the_text_of_a_price_file(monkeypatch):
    as_plugin(monkeypatch, "tests.unit.test_prices:site_prices")
    assert refreshed_prices("site", {"currency": "", "prices": []}) == (
        "EUR",
        [{"gpu": "h100", "per_gpu_hour": "2.49"}],
        None,
    )


@pytest.mark.parametrize("value", ["no.such.module:prices", "tests.unit.test_prices:site_prices", "builtins:len"])
def test_a_plugin_that_fails_is_named(monkeypatch, value):
    as_plugin(monkeypatch, value)
    with pytest.raises(BadRequest, match="the plug-in site"):
        refreshed_prices("site", {"wrong": 1})
    with pytest.raises(BadRequest, match="no plug-in 'other'"):
        refreshed_prices("other", {})


@pytest.mark.parametrize("text", ["5000 EUR/month", "5000.00EUR per month"])
def test_budgets_are_read(text):
    assert parse_budget(text) == MonthlyBudget(cents=500_000, currency="EUR")
    assert str(parse_budget(text)) == "5000 EUR/month"


@pytest.mark.parametrize(
    "text", ["5000", "5000 EUR", "0 EUR/month", "5000 EUR/week", "-5 EUR/month", "5000 euro/month"]
)
def test_words_that_are_no_budget_are_refused(text):
    with pytest.raises(BadRequest, match="is not a budget"):
        parse_budget(text)
