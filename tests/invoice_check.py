"""Adds an invoice up again, from the events of the nodes and the price file alone: nothing of Phalanx is imported.

    python tests/invoice_check.py EVENTS PRICES.yaml 2026-11

EVENTS: the head's database (`phalanx.db`, SQLite), or its history as JSON lines. Prints each line of the invoice, by pool and GPU model.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from math import floor
from pathlib import Path

from ruamel.yaml import YAML

HOUR_MS = 3_600_000


def read_events(path: str) -> list[dict]:
    """The history, in its order."""
    if path.endswith(".db"):
        rows = sqlite3.connect(f"file:{path}?mode=ro", uri=True).execute("SELECT doc FROM history ORDER BY seq")
        return [json.loads(text) for (text,) in rows]
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def spans(events: Iterable[dict], end_ms: int) -> Iterator[tuple[str, str, int, int, int]]:
    """Pool, model, number of GPUs, begin and end of each time in which a node had the same GPUs: from its order or first start to its release."""
    have: dict[str, tuple[dict, int]] = {}
    for event in [*events, None]:
        at_ms = end_ms if event is None else min(end_ms, int(event["at_s"] * 1000))
        changed = list(have) if event is None else [event["node_id"]]
        comes = event is not None and event["kind"] in ("node_requested", "node_up")
        if event is not None and not comes and event["kind"] not in ("node_released", "node_forgotten"):
            continue
        for node in changed:
            facts, since_ms = have.pop(node, ({}, at_ms))
            for name, count in facts.items():
                if name.startswith("gpus "):
                    yield facts["pool"], name.removeprefix("gpus "), count, since_ms, at_ms
            if comes and event is not None:
                have[node] = (event["facts"], at_ms)


def price_of(prices: list[dict], model: str, pool: str, hour_s: int) -> Fraction | None:
    """The newest price of exactly this model that has begun; one for the pool wins."""
    found = [
        (bool(one.get("pool")), begin_s(one), Fraction(str(one["per_gpu_hour"])))
        for one in prices
        if one["gpu"] == model and one.get("pool", "") in ("", pool) and begin_s(one) <= hour_s
    ]
    return max(found)[2] if found else None


def begin_s(price: dict) -> float:
    """When a price begins, in Unix seconds."""
    since = datetime.fromisoformat(str(price.get("from", "1970-01-01")))
    return (since if since.tzinfo else since.replace(tzinfo=UTC)).timestamp()


def invoice(
    events: Iterable[dict], prices: list[dict], month: str, end_ms: int = 1 << 62
) -> dict[tuple[str, str], Decimal]:
    """The cost of each pool and model in a month (UTC), rounded once. Time without a price costs nothing."""
    year, number = map(int, month.split("-"))
    first_ms = int(datetime(year, number, 1, tzinfo=UTC).timestamp() * 1000)
    next_ms = int(datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC).timestamp() * 1000)
    sums: dict[tuple[str, str], Fraction] = {}
    for pool, model, count, since_ms, until_ms in spans(events, min(end_ms, next_ms)):
        at_ms = max(since_ms, first_ms)
        while at_ms < until_ms:
            hour_ms = at_ms - at_ms % HOUR_MS
            stop_ms = min(until_ms, hour_ms + HOUR_MS)
            price = price_of(prices, model, pool, hour_ms // 1000) or Fraction(0)
            sums[pool, model] = sums.get((pool, model), Fraction(0)) + count * (stop_ms - at_ms) * price / HOUR_MS
            at_ms = stop_ms
    return {key: Decimal(floor(one * 100 + Fraction(1, 2))) / 100 for key, one in sorted(sums.items())}


if __name__ == "__main__":
    plain = YAML(typ="safe", pure=True).load(Path(sys.argv[2]).read_text(encoding="utf-8"))
    found = invoice(read_events(sys.argv[1]), plain["prices"], sys.argv[3], int(datetime.now(UTC).timestamp() * 1000))
    for (pool, model), cost in found.items():
        print(f"{pool or '(no pool)'}\t{model}\t{cost} {plain['currency']}")
    print(f"total\t\t{sum(found.values())} {plain['currency']}")
