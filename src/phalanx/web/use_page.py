"""The page Use and waste: GPU-hours by state over time, who wastes now and what mends it, who wasted most, and what failures cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.accounting.cost_report import CostRow
from phalanx.core.accounting.usage_report import UsagePeriod, UsageSum, UsageTotals
from phalanx.core.hints import parse_hint
from phalanx.core.work.usage.waste_terms import WASTE_STATES
from phalanx.web.cells import live, moment, number, state_word
from phalanx.web.charts import ChartPart, key, stacked_bar, stacked_columns, strip
from phalanx.web.command_hints import render_hint
from phalanx.web.document import Viewer, document
from phalanx.web.fields import choice
from phalanx.web.html import Child, Html, element, join, link, table
from phalanx.wire.api.cost import BudgetView
from phalanx.wire.api.waste import WasteRowView, WasteView

HOUR_US: Final = 3_600_000_000
# Words of the states of the ledger, in the order in which they are stacked: work below, then what is lost, then what is free.
STATES: Final = {
    "computing": "computing",
    "checkpointing": "saving a checkpoint",
    "starting": "starting",
    "low": "low activity",
    "data_bound": "waiting for data",
    "communicating": "waiting for other ranks",
    "idle": "idle",
    "unoccupied": "held without a process",
    "hung": "hung",
    "lost": "lost to failures",
    "preempted": "stopping for other jobs",
    "broken": "broken",
    "draining": "draining",
    "reserved": "reserved",
    "provisioning": "ordered, not up yet",
    "fragmented": "free, but unusable",
    "free_demand": "free although jobs wait",
    "free": "free",
}
_NO_JOB: Final = "(no job)"
_HOUR_NAME: Final = "%m-%d %H:00"
_DAY_NAME: Final = "%Y-%m-%d"
_PROJECTS_DRAWN: Final = 6
_OTHERS: Final = "s6"
_BUDGETS_SHOWN: Final = 20
_NEARLY_PERCENT: Final = 90  # from which a budget is shown as nearly used up


@dataclass(frozen=True, slots=True, kw_only=True)
class UseAsked:
    """What the page is asked for: days back, by what the wasters are grouped, and whether columns are hours."""

    days: int
    by: str
    hourly: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What projects cost, most expensive first: in the whole time, and in each period by its begin."""

    currency: str
    rows: Sequence[CostRow]
    series: Sequence[tuple[int, Sequence[CostRow]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What the page shows.

    Attributes:
        wasters: rows by what was asked, most waste first.
        failed: jobs, most lost time first.
        costs: None without prices.
        nodes: node, failures and number of jobs, most failures first; the node is "" where it is unknown.
        nodes_of_jobs: how many of the newest jobs these count; None for all.
        spending: of projects this month, the most used budget first; None if the period is shorter than a month.
    """

    series: Sequence[UsagePeriod]
    wasters: UsageTotals
    failed: Sequence[UsageSum]
    waste: WasteView
    costs: Costs | None
    nodes: Sequence[tuple[str, int, int]]
    nodes_of_jobs: int | None = None
    spending: Sequence[BudgetView] | None = None


def use_page(asked: UseAsked, use: Use, days: Sequence[int], keys: Sequence[str], viewer: Viewer) -> Html:
    """Return the page. `days` and `keys`: what may be asked for."""
    form = element(
        "form",
        choice("Days", "days", [str(one) for one in days], chosen=str(asked.days)),
        choice("Wasters by", "by", keys, chosen=asked.by),
        element("button", "Show", type="submit"),
        method="get",
        action="/use",
        class_="filter",
        aria_label="Period",
    )
    total = use.wasters.total
    content: list[Child] = [
        form,
        live(
            _summary(total),
            element("h2", f"GPU-hours by {'hour' if asked.hourly else 'day'}, UTC"),
            _columns(use.series, hourly=asked.hourly),
            element("h2", "Money by project"),
            _money(use.costs, hourly=asked.hourly),
            element("h2", "Spending and budgets this month"),
            _spending(use.spending, asked),
            element("h2", "Waste now"),
            _waste_now(use.waste),
            element("h2", f"Who wasted most, by {asked.by}"),
            _wasters(use.wasters, asked.by),
            element("h2", "Jobs that lost most to failures"),
            _failures(use.failed),
            element("h2", "Nodes that failed"),
            _nodes(use),
            element("h2", "All states"),
            _states(total),
        ),
    ]
    return document("use", "Use and waste", *content, viewer=viewer)


def _summary(total: UsageSum) -> Html:
    parts = (
        ("GPU-hours of the fleet", _hours(total.total)),
        ("computing", _share(total.by_state.get("computing", 0), total.total)),
        ("wasted", _share(_wasted(total), total.total)),
        ("free", _share(sum(total.by_state.get(one, 0) for one in ("free", "free_demand")), total.total)),
    )
    return element(
        "div", [element("div", element("strong", value), f" {words}") for words, value in parts], class_="summary"
    )


def _columns(series: Sequence[UsagePeriod], *, hourly: bool) -> Html:
    """Return a column for each period, stacked by state, with its times below and the same as a table."""
    if not series:
        return element("p", "Nothing has been counted in this time.", class_="empty")
    occurred = [state for state in STATES if any(one.by_state.get(state) for one in series)]
    form = _HOUR_NAME if hourly else _DAY_NAME
    names = [time.strftime(form, time.gmtime(one.since_s)) for one in series]
    columns = [
        [
            (
                f"u-{state}",
                one.by_state.get(state, 0) / HOUR_US,
                f"{name}: {STATES[state]} {_hours(one.by_state[state])}",
            )
            for state in occurred
            if one.by_state.get(state)
        ]
        for one, name in zip(series, names, strict=True)
    ]
    most = max(one.fleet for one in series) / HOUR_US
    picture = stacked_columns(columns, height=220.0, most=most, name=f"GPU-hours by state, {names[0]} to {names[-1]}")
    scale = element("div", element("span", names[0]), element("span", names[-1]), class_="ends")
    top = element("p", f"The top of the picture is {most:,.1f} GPU-hours.", class_="note")
    legend = element("ul", [element("li", key(f"u-{state}", STATES[state])) for state in occurred], class_="legend")
    rows = [
        (name, _hours(one.fleet), *(_hours(one.by_state.get(state, 0)) for state in occurred))
        for one, name in zip(reversed(series), reversed(names), strict=True)
    ]
    titles = ("Time", "All", *(STATES[state] for state in occurred))
    numbers = table(titles, rows, caption="GPU-hours by state", empty="")
    return join(picture, scale, top, legend, element("details", element("summary", "The numbers"), numbers))


def _money(costs: Costs | None, *, hourly: bool) -> Html:
    """Return a column for each period, stacked by project, and a table of the whole time."""
    if costs is None:
        how = element("code", "phalanx prices apply FILE")
        return element(
            "p", "No prices are stored, so GPU-hours have no cost. An admin stores them with ", how, ".", class_="empty"
        )
    if not any(row.cents for row in costs.rows):
        return element("p", "Nothing cost money in this time.", class_="empty")
    shown = [row.key for row in costs.rows if row.used_cents and not row.merged][:_PROJECTS_DRAWN]
    kinds = {project: f"s{place}" for place, project in enumerate(shown)}
    form = _HOUR_NAME if hourly else _DAY_NAME
    names = [time.strftime(form, time.gmtime(since_s)) for since_s, _ in costs.series]
    columns = [_money_column(rows, kinds, name) for (_, rows), name in zip(costs.series, names, strict=True)]
    most = max(sum(amount for _, amount, _ in column) for column in columns)
    picture = stacked_columns(columns, height=220.0, most=most, name=f"Money by project, {names[0]} to {names[-1]}")
    scale = element("div", element("span", names[0]), element("span", names[-1]), class_="ends")
    top = element("p", f"The top of the picture is {most:,.2f} {costs.currency}.", class_="note")
    drawn = {kind for column in columns for kind, _, _ in column}
    words = {**{kind: project for project, kind in kinds.items()}, _OTHERS: "other projects", "u-free": "no job"}
    legend = element("ul", [element("li", key(kind, words[kind])) for kind in words if kind in drawn], class_="legend")
    total = sum(row.cents for row in costs.rows)
    rows = [
        (
            f"{row.merged} more" if row.merged else row.key or _NO_JOB,
            _hours(row.used.gpu_us + row.idle.gpu_us),
            _money_text(row.cents),
            _share(row.cents, total),
        )
        for row in costs.rows
    ]
    rows.append(("total", _hours(sum(row.used.gpu_us + row.idle.gpu_us for row in costs.rows)), _money_text(total), ""))
    titles = ("Project", "GPU-hours", f"Cost in {costs.currency}", "Share")
    return join(picture, scale, top, legend, table(titles, rows, caption="Money by project", empty=""))


def _spending(budgets: Sequence[BudgetView] | None, asked: UseAsked) -> Html:
    """Return what each project spent this month, and how much of its budget that is."""
    if budgets is None:
        here = link("a period of 30 days", "use", days="30", by=asked.by)
        return element("p", "Shown for ", here, " or more.", class_="empty")
    shown = budgets[:_BUDGETS_SHOWN]
    rows = [
        (
            one.project,
            f"{_money_text(one.spent_cents)} {one.currency}",
            f"{_money_text(one.forecast_cents)} {one.currency}",
            one.budget or "none",
            "" if one.percent is None else join(f"{one.percent} %", _budget_bar(one.percent)),
        )
        for one in shown
    ]
    titles = ("Project", "Spent", "Forecast of the month", "Budget", "Used")
    month = f"Spending in {budgets[0].month}, UTC" if budgets else ""
    found = table(titles, rows, caption=month, empty="No project has spent money or has a budget this month.")
    more = len(budgets) - len(shown)
    return join(
        found,
        element("p", f"{more} more projects: ", element("code", "phalanx report cost --by project"), class_="note")
        if more
        else None,
    )


def _budget_bar(percent: int) -> Html:
    kind = "bad" if percent >= _NEARLY_PERCENT else "own"
    return strip([ChartPart(start=0.0, size=min(percent, 100), kind=kind)], 100.0, name=f"{percent} % of the budget")


def _money_column(rows: Sequence[CostRow], kinds: Mapping[str, str], name: str) -> list[tuple[str, float, str]]:
    """Return the amounts of one period: of the projects with a colour, of all others, and of GPUs that no job held."""
    cents = {row.key: row.used_cents for row in rows if not row.merged}
    own = [(kind, project, cents.get(project, 0)) for project, kind in kinds.items()]
    others = sum(row.used_cents for row in rows) - sum(amount for _, _, amount in own)
    idle = sum(row.idle_cents for row in rows)
    parts = [*own, (_OTHERS, "other projects", others), ("u-free", "no job", idle)]
    return [(kind, amount / 100, f"{name}: {words} {_money_text(amount)}") for kind, words, amount in parts if amount]


def _nodes(use: Use) -> Html:
    rows = [
        (link(node, "nodes", node) if node else "(unknown)", str(count), str(jobs)) for node, count, jobs in use.nodes
    ]
    empty = "No node had a failure in this time."
    shown = table(("Node", "Failures", "Jobs"), rows, caption="Nodes that failed, most failures first", empty=empty)
    counted = f"Of the newest {use.nodes_of_jobs} jobs. All, with" if use.nodes_of_jobs else "With"
    command = element("code", "phalanx report failures --by node")
    return join(shown, element("p", f"{counted} the GPU-hours that they lost and their cost: ", command, class_="note"))


def _waste_now(waste: WasteView) -> Html:
    rows = [
        (
            state_word("alarm" if one.alarm else "early"),
            _whose(one),
            one.kind.replace("_", " "),
            element("span", f"{number(one.gpus)} of {number(one.gpus_held)}", class_="whole"),
            moment(one.since_s),
            _hours(one.gpu_us),
            one.advice,
            element("code", render_hint(parse_hint(one.hint, one.hint_code, one.hint_args))),
        )
        for one in waste.rows
    ]
    titles = ("Alarm", "Job or node", "Waste", "GPUs", "Since", "GPU-hours", "Why", "What mends it")
    shown = table(titles, rows, caption="Waste now, most GPU-hours first", empty="Nothing wastes GPUs now.")
    more = element("p", f"{waste.left_off} more: ", element("code", "phalanx waste"), class_="note")
    return join(shown, more if waste.left_off else None)


def _whose(row: WasteRowView) -> Html:
    if row.job:
        return join(link(f"job {row.job}", "jobs", row.job), f" {row.name} of {row.user}")
    more = f" and {row.nodes_more} more" if row.nodes_more else ""
    return join([join(link(node, "nodes", node), " ") for node in row.nodes], more)


def _wasters(found: UsageTotals, by: str) -> Html:
    rows = []
    for one in found.rows:
        wasted = _wasted(one)
        if not wasted:
            continue
        amounts = [
            (f"u-{state}", float(one.by_state.get(state, 0)), f"{STATES[state]}: {_hours(one.by_state.get(state, 0))}")
            for state in WASTE_STATES
            if one.by_state.get(state)
        ]
        largest = max(amounts, key=lambda amount: amount[1])[2]
        rows.append(
            (
                _name(one, by),
                _hours(one.total),
                _hours(wasted),
                _share(wasted, one.total),
                join(largest, stacked_bar(amounts, float(one.total), name=largest)),
            )
        )
    titles = (by.capitalize(), "GPU-hours", "Wasted", "Share", "Most of it")
    return table(titles, rows, caption="Who wasted most", empty="No GPU-hours were wasted in this time.")


def _failures(rows: Sequence[UsageSum]) -> Html:
    shown = [
        (link(f"job {one.key}", "jobs", one.key), _hours(one.total), _hours(one.by_state.get("lost", 0)))
        for one in rows
        if one.key and one.by_state.get("lost")
    ]
    titles = ("Job", "GPU-hours", "Lost to failures")
    return table(
        shown and titles, shown, caption="Jobs that lost most to failures", empty="No job lost time to failures."
    )


def _states(total: UsageSum) -> Html:
    rows = [
        (
            key(f"u-{state}", words),
            _hours(amount),
            _share(amount, total.total),
            "waste" if state in WASTE_STATES else "",
            "; ".join(f"{note} {_hours(part)}" for note, part in total.by_note.get(state, {}).items()),
        )
        for state, words in STATES.items()
        if (amount := total.by_state.get(state, 0))
    ]
    titles = ("State", "GPU-hours", "Share", "Counts as", "Of it")
    return table(
        titles, rows, caption="All states: they add up to the fleet times the time", empty="Nothing is counted yet."
    )


def _name(one: UsageSum, by: str) -> Html | str:
    if one.merged:
        return f"{one.merged} more"
    if not one.key:
        return _NO_JOB
    return link(one.key, "jobs", one.key) if by == "job" else one.key


def _wasted(one: UsageSum) -> int:
    return sum(one.by_state.get(state, 0) for state in WASTE_STATES)


def _hours(amount_us: int) -> str:
    """Hours with as many digits as matter; empty for none."""
    hours = amount_us / HOUR_US
    if not hours:
        return ""
    if hours < 0.0005:
        return "<0.001"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 10 else f"{hours:.3f}"


def _money_text(cents: int) -> str:
    """Hundredths of a currency as a decimal number with separators of thousands."""
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100:,}.{abs(cents) % 100:02}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
