"""Read the facts of inference: coefficients of engines (`serving.csv`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.facts.coefficient_table import Coefficient
from phalanx.planner.facts.table import TableColumns, read_rows
from phalanx.planner.facts.table_files import shipped_text
from phalanx.planner.serving.iteration_time import ServingSpeed

DEFAULT_ENGINE: Final = "vllm"
"""The engine that `phalanx serve model` prefers."""
_COLUMNS: Final = TableColumns(required=("scope", "name", "value", "meaning"), optional=("prior", "spread"))
_SHARED: Final = frozenset({"physics", "spread"})


@cache
def serving_coefficients() -> tuple[Coefficient, ...]:
    """Return the shipped table, in its order."""
    return tuple(
        Coefficient(
            scope=row.text("scope"),
            name=row.text("name"),
            value=row.number("value"),
            prior=row.number("prior") if row.text("prior") else None,
            spread=row.number("spread") if row.text("spread") else None,
        )
        for row in read_rows(shipped_text("serving.csv"), "serving.csv", _COLUMNS)
    )


def serving_speeds(table: Sequence[Coefficient] | None = None) -> Mapping[str, ServingSpeed]:
    """Return the coefficients of every engine by its name."""
    rows = serving_coefficients() if table is None else table
    physics = {one.name: one.value for one in rows if one.scope == "physics"}
    spreads = {one.name: one.value for one in rows if one.scope == "spread"}
    engines: dict[str, dict[str, float]] = {}
    for one in rows:
        if one.scope not in _SHARED:
            engines.setdefault(one.scope, {})[one.name] = one.value
    return {name: ServingSpeed(**physics, **own, spreads=spreads) for name, own in engines.items()}


def find_serving_speed(engine: str) -> ServingSpeed:
    """Return the coefficients of an engine.

    Raises:
        BadRequest: unknown name.
    """
    known = serving_speeds()
    if engine not in known:
        hint = suggestion(engine, known, f"known: {', '.join(sorted(known))}", form="{!r}")
        raise BadRequest(f"unknown inference engine {engine[:60]!r}", hint=hint)
    return known[engine]
