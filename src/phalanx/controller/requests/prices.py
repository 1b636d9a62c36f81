"""Prices of GPUs, and warnings that a project has spent its budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict
from phalanx.core.state.events import PutPrices
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import PRICE_LISTS, PROJECTS
from phalanx.core.state.reports import BudgetReached
from phalanx.core.work.usage.monthly_budget import cents_text
from phalanx.core.work.usage.price_list import PRICES
from phalanx.core.work.users import Action

handlers: Final = RequestHandlers()
BUDGET_WARNING: Final = "budget_warning"  # kinds of the history lines
BUDGET_EXCEEDED: Final = "budget_exceeded"


@handlers.add(
    PutPrices,
    Action.OPERATE,
    audit=lambda request, _: f"{len(request.prices.prices)} prices in {request.prices.currency}",
)
def put_prices(context: StepContext, request: PutPrices) -> None:
    """Replace the prices of GPUs, and the rates of electricity.

    Raises:
        Conflict: the stored rates of electricity, which would stay, are in another currency.
    """
    found, known = request.prices, context.world.table(PRICE_LISTS).get(PRICES)
    if known is not None and request.keep_electricity:
        if found.currency != known.currency and known.electricity:
            raise Conflict(
                f"the rates of electricity are in {known.currency}, the new prices in {found.currency}",
                hint="give the price file an electricity: section too; electricity: [] removes the rates",
            )
        found = replace(found, electricity=known.electricity)
    if known is not None and replace(known, by=found.by, at_s=found.at_s) == found:
        return
    context.change.put(found)
    text = f"{found.by} stored {len(found.prices)} prices of GPUs in {found.currency}"
    text += f" and {len(found.electricity)} rates of electricity" if found.electricity else ""
    context.add_history("prices_set", text, by=found.by)


def warn_of_budget(context: StepContext, reached: BudgetReached) -> None:
    """Write that a project has spent a part of its budget, once a month for each part; nothing if the budget has changed since."""
    project, warning = context.world.table(PROJECTS).get(reached.project_id), reached.warning
    if project is None or project.budget != reached.budget:
        return
    known = project.budget_warned
    if known is not None and (known.month, known.percent) >= (warning.month, warning.percent):
        return
    context.change.put(replace(project, budget_warned=warning))
    spent = f"{cents_text(reached.spent_cents)} {reached.budget.currency}"
    text = f"project {project.id} has spent {spent} in {warning.month}: {warning.percent} % of its budget of {reached.budget}"
    context.change.add_history(
        HistoryLine(
            seq=0,
            at_s=context.now.wall_s,
            kind=BUDGET_EXCEEDED if warning.percent >= 100 else BUDGET_WARNING,
            text=text,
            facts={
                "project": project.id,
                "month": warning.month,
                "percent": warning.percent,
                "spent": cents_text(reached.spent_cents),
                "budget": cents_text(reached.budget.cents),
                "currency": reached.budget.currency,
            },
        )
    )
