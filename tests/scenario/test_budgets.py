"""Warnings about budgets: when they come, and that each comes once a month."""

import pytest

from phalanx.controller.usage.budget_watch import BudgetWatch
from phalanx.core.accounting.project_spending import ForecastMethod, RunningUse, project_spending
from phalanx.core.ids import ProjectId, UserId
from phalanx.core.months import month_bounds_s, month_of
from phalanx.core.state.events import ChangeProject, PutPrices, PutUser
from phalanx.core.state.records import USAGE_HOURS
from phalanx.core.state.reports import UsageCounted
from phalanx.core.work.usage.monthly_budget import MonthlyBudget
from phalanx.core.work.usage.price_list import GpuPrice, PriceBook, PriceList
from phalanx.core.work.usage.usage_hour import USAGE_MARK, UsageHour, UsageMark, UsageRow
from phalanx.core.work.users import User, UserRole
from phalanx.ports.store import StoreRefused
from tests.harness import Harness

GPU_HOUR = 3_600_000_000
BEGIN_S, END_S = month_bounds_s("2026-11")
PRICE = GpuPrice(gpu="h100", from_s=0, micro=2_000_000)


def hour(number, gpus=10, project="gpt", begin_s=BEGIN_S):
    row = UsageRow(
        model="h100",
        pool="",
        project=project,
        user="ada",
        queue="q",
        job="1",
        amounts=(("computing", "", gpus * GPU_HOUR),),
    )
    return UsageHour(id=str(begin_s + 3600 * number), fleet=gpus * GPU_HOUR, rows=(row,))


class Watched:
    """A head with prices and hours, whose watch looks once after each hour."""

    def __init__(self):
        self.cluster = Harness("r: n0=4")
        self.cluster.request(PutUser(user=User(id=UserId("root"), role=UserRole.ADMIN)))
        prices = PriceList(currency="EUR", prices=(PRICE,), by=UserId("op"), at_s=0.0)
        self.cluster.request(PutPrices(prices=prices))
        self.watch = BudgetWatch(self.cluster.store)

    def budget(self, cents, currency="EUR"):
        change = ChangeProject(
            project_id=ProjectId("gpt"),
            by=UserId("root"),
            as_admin=True,
            budget=MonthlyBudget(cents=cents, currency=currency),
        )
        self.cluster.request(change)

    def store(self, *hours):
        mark = UsageMark(id=USAGE_MARK, until_ms=0, nodes=())
        self.cluster.turn([UsageCounted(hours=hours, mark=mark)])

    def look(self, newest, at_hour):
        reached = self.watch.check([newest] if newest else [], BEGIN_S + 3600 * at_hour + 60)
        if reached:
            self.cluster.turn(reached)
        return [one.warning.percent for one in reached]

    def warnings(self):
        lines = self.cluster.store.history(limit=1000)
        return [
            (line.facts["project"], line.facts["percent"], line.facts["spent"])
            for line in lines
            if line.kind in ("budget_warning", "budget_exceeded")
        ]


def test_each_part_of_a_budget_is_warned_of_once_a_month():
    watched = Watched()
    watched.budget(10_000)  # 100 EUR; each hour costs 20
    assert watched.look(hour(0), 0) == []
    hours = [hour(number) for number in range(6)]
    found = []
    for number in range(1, 6):
        watched.store(hours[number - 1])
        found.append(watched.look(hours[number], number))
    assert found == [[], [], [80], [100], []]
    assert watched.warnings() == [("gpt", 80, "80.00"), ("gpt", 100, "100.00")]
    assert BudgetWatch(watched.cluster.store).check([hours[5]], BEGIN_S + 6 * 3600) == [], "after a restart of the head"
    assert watched.look(hour(720), 720) == [], "another month begins at zero"


def test_an_hour_that_could_not_be_read_is_counted_at_the_next_look(monkeypatch):
    watched = Watched()
    watched.budget(10_000)
    watched.store(*(hour(number) for number in range(5)))
    store = watched.cluster.store
    with monkeypatch.context() as patched:
        patched.setattr(store, "record", failing_at(USAGE_HOURS, store.record))
        with pytest.raises(StoreRefused):
            watched.look(None, 5)
    assert watched.look(None, 5) == [100]


def failing_at(failing, read):
    """Reads records as `read` does, but none of one kind."""

    def record(kind, key):
        if kind is failing:
            raise StoreRefused("the database does not answer")
        return read(kind, key)

    return record


def test_another_budget_or_price_is_judged_anew():
    watched = Watched()
    watched.store(*(hour(number) for number in range(5)))
    watched.budget(10_000, currency="USD")
    assert watched.look(None, 5) == [], "not comparable"
    watched.budget(10_000)
    assert watched.look(None, 5) == [100]
    watched.budget(12_000)
    assert watched.look(None, 5) == [80]
    dearer = PriceList(
        currency="EUR", prices=(GpuPrice(gpu="h100", from_s=0, micro=3_000_000),), by=UserId("op"), at_s=1.0
    )
    watched.cluster.request(PutPrices(prices=dearer))
    assert watched.look(None, 5) == [100]


def test_the_forecast_takes_the_larger_of_run_rate_and_running_jobs():
    now_s = BEGIN_S + 3600 * 240.0  # ten days of 10 GPUs at 2 EUR: 4800 EUR
    hours = [hour(number) for number in range(240)]
    book = PriceBook((PRICE,))

    def forecast(*running):
        return project_spending(hours, book, running, now_s=now_s)["gpt"]

    steady = forecast()
    assert (steady.spent_cents, steady.forecast_cents, steady.method) == (480_000, 1_440_000, ForecastMethod.RUN_RATE)
    use = RunningUse(project="gpt", model="h100", pool="", milli=30_000, until_s=None)
    grown = forecast(use)
    assert (grown.forecast_cents, grown.method) == (480_000 + 30 * 200 * 480, ForecastMethod.RUNNING_JOBS)
    ending = forecast(RunningUse(project="gpt", model="h100", pool="", milli=30_000, until_s=now_s + 3600.0))
    assert ending.forecast_cents == steady.forecast_cents
    assert month_of(END_S) == "2026-12"
