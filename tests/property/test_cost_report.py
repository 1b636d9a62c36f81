"""For any hours, prices and sharing rules, the rows of a report of cost add up to the invoice to the cent, and none is negative."""

import hypothesis.strategies as st
from hypothesis import given, settings

from phalanx.core.accounting.cost_report import CENT, CostKey, IdleRule, apportion, cost_rows, invoice, meter, to_cents
from phalanx.core.work.usage.price_list import GpuPrice, PriceBook
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow
from tests.effort import examples

HOURS = [
    1_796_076_000 + 3600 * each for each in range(6)
]  # the last two of November 2026, and the first four of December
MODELS, POOLS = ("h100", "a100", "virtual"), ("", "cloud")
AMOUNT = st.one_of(st.integers(1, 1000), st.integers(1, 4_000_000_000))
JOBS = st.sampled_from(
    [
        ("", "", "", ""),
        ("", "", "", "9"),
        ("nlp", "ann", "fast", "1"),
        ("nlp", "bob", "fast", "2"),
        ("vision", "bob", "slow", "3"),
    ]
)


@st.composite
def ledgers(draw):
    found = []
    for hour_s in draw(st.lists(st.sampled_from(HOURS), unique=True, min_size=1).map(sorted)):
        rows = tuple(
            UsageRow(
                model=model,
                pool=pool,
                project=project,
                user=user,
                queue=queue,
                job=job,
                amounts=tuple(
                    (state, "", amount) for state, amount in zip(("computing", "idle"), amounts, strict=False)
                ),
            )
            for model, pool, (project, user, queue, job), amounts in draw(
                st.lists(
                    st.tuples(
                        st.sampled_from(MODELS),
                        st.sampled_from(POOLS),
                        JOBS,
                        st.lists(AMOUNT, max_size=2),  # none: a row with energy that was read late
                    ),
                    max_size=8,
                )
            )
        )
        found.append(UsageHour(id=str(hour_s), fleet=0, rows=rows))
    return found


PRICES = st.lists(
    st.builds(
        GpuPrice,
        gpu=st.sampled_from(("h100", "a100")),  # the third model has no price
        pool=st.sampled_from(POOLS),
        from_s=st.sampled_from((0, *HOURS)),
        micro=st.one_of(st.integers(0, 3), st.integers(0, 50_000_000)),
    ),
    unique_by=lambda price: price.key,
    max_size=8,
)
QUOTAS = st.dictionaries(st.sampled_from(("fast", "slow", "unused")), st.integers(0, 8000))


@given(ledgers(), PRICES, QUOTAS, st.integers(1, 5))
@settings(max_examples=examples(500))
def test_rows_add_up_to_the_invoice_to_the_cent(hours, prices, quotas, rows_max):
    metered = meter(hours, PriceBook(tuple(prices)))
    lines = invoice(metered)
    counted = sum(amount for hour in hours for row in hour.rows for _, _, amount in row.amounts)
    assert sum(line.amount.gpu_us for line in lines) == counted
    for by in CostKey:
        for rule in IdleRule:
            rows = cost_rows(metered, by, rule, quotas=quotas, rows_max=rows_max)
            assert sum(row.cents for row in rows) == sum(line.cents for line in lines)
            assert sum(row.used.gpu_us + row.idle.gpu_us for row in rows) == counted
            assert sum(row.used.exact + row.idle.exact for row in rows) == sum(line.amount.exact for line in lines)
            assert all(row.used_cents >= 0 and row.idle_cents >= 0 for row in rows)
            assert all(abs(row.cents * CENT - row.used.exact - row.idle.exact) < 2 * CENT * len(lines) for row in rows)
            assert sum(row.used.unpriced_us + row.idle.unpriced_us for row in rows) == sum(
                line.amount.unpriced_us for line in lines
            )
            if rule is IdleRule.BY_USE and by is CostKey.JOB:
                assert all(row.key or row.merged or not row.idle.gpu_us or _unused(metered) for row in rows)


def _unused(metered):
    return [line for line in metered.values() if not any(amount.gpu_us for amount in line.held.values())]


@given(st.lists(st.integers(0, 10 * CENT), min_size=1, max_size=20))
def test_a_rounded_sum_is_divided_without_rest(exact):
    cents = apportion(to_cents(sum(exact)), exact)
    assert sum(cents) == to_cents(sum(exact))
    assert all(part // CENT <= share <= part // CENT + 1 for part, share in zip(exact, cents, strict=True))
