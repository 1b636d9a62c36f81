"""`phalanx prices offers`: the shipped facts of what clouds ask for, with their source and how old they are. No head is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import msgspec

from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import NotFound

if TYPE_CHECKING:
    from phalanx.planner.facts.instances import InstanceEntry
    from phalanx.planner.facts.prices import PriceEntry


class OfferFact(msgspec.Struct, frozen=True, kw_only=True):
    """What a cloud asked for an hour of one GPU, when, and by which source. `gpus`: of its server; 0 if the table has no such server."""

    offer: str
    gpu: str
    kind: str
    region: str
    usd_per_gpu_hour: float
    gpus: int
    gbit_per_gpu: float
    date: str
    age_days: int
    source: str


def offer_facts(
    word: str, prices: Sequence[PriceEntry], instances: Sequence[InstanceEntry], today: date
) -> list[OfferFact]:
    """Return the facts whose offer or GPU has the word.

    Raises:
        NotFound: none has it.
    """
    servers = {one.offer.lower(): one for one in instances}
    found = []
    for entry in prices:
        price = entry.price
        if word.lower() not in f"{price.offer} {entry.gpu}".lower():
            continue
        server = servers.get(price.offer.lower())
        found.append(
            OfferFact(
                offer=price.offer,
                gpu=entry.gpu,
                kind=price.kind,
                region=price.region,
                usd_per_gpu_hour=price.usd_per_gpu_hour,
                gpus=0 if server is None else server.gpus,
                gbit_per_gpu=0.0 if server is None else server.network.bytes_per_s * 8 / 1e9,
                date=price.fact.date,
                age_days=max(0, (today - first_day(price.fact.date)).days),
                source=price.fact.source,
            )
        )
    if not found:
        raise NotFound(f"no fact has the price of {word!r}", hint="phalanx prices offers")
    return found


def offers_view(word: str) -> ListView:
    """Return the list for the terminal."""
    from phalanx.planner.facts.instances import read_instances
    from phalanx.planner.facts.prices import read_prices

    today = datetime.fromtimestamp(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), tz=UTC).date()
    found = offer_facts(word, read_prices(), read_instances(), today)
    return ListView(value=found, lines=lambda screen: _lines(found, screen))


def _lines(found: Sequence[OfferFact], screen: Terminal) -> list[str]:
    columns = (
        Column(title="OFFER", min_width=8),
        Column(title="GPU", min_width=8),
        Column(title="GPUS", right=True),
        Column(title="GBIT/S EACH", right=True),
        Column(title="KIND"),
        Column(title="REGION", hide_empty=True),
        Column(title="USD/GPU-H", right=True),
        Column(title="USD/H", right=True),
        Column(title="DAYS OLD", right=True),
        Column(title="SOURCE", min_width=12, max_width=60, drop_order=1),
    )
    rows: list[list[Cell | str]] = [
        [
            Cell(one.offer, "bold"),
            one.gpu,
            str(one.gpus or ""),
            f"{one.gbit_per_gpu:g}" if one.gpus else "",
            one.kind,
            one.region,
            f"{one.usd_per_gpu_hour:g}",
            f"{one.usd_per_gpu_hour * one.gpus:.2f}" if one.gpus else "",
            str(one.age_days),
            one.source,
        ]
        for one in found
    ]
    return table(columns, rows, screen)


def first_day(text: str) -> date:
    """The first day of a date such as 2026, 2026-11 or 2026-11-21: a fact is at least as old as that says."""
    parts = [int(part) for part in text.split("-")]
    return date(*[*parts, 1, 1][:3])
