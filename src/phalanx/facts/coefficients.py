"""The shipped numbers of `core.performance`: `Physics`, and each software stack by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.performance.coefficients import Physics, Stack
from phalanx.core.performance.model import Model
from phalanx.core.work.nearest import nearest
from phalanx.facts.files import shipped_json, shipped_text
from phalanx.facts.table import Columns, rows_of

DEFAULT_STACK: Final = "phalanx"
"""`phalanx.torch`: what it cannot build is not planned, so that the answer can be run as it stands."""
WIDER_STACK: Final = "megatron-core"
"""What is planned for instead where `phalanx.torch` does not go: experts spread over ranks, and fp8."""
_COLUMNS: Final = Columns(needed=("scope", "name", "value", "meaning"), free=("prior", "spread"))
_ANY: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One number. `prior` and `spread` (of its logarithm) where it was fitted, else None."""

    scope: str
    name: str
    value: float
    prior: float | None
    spread: float | None


@cache
def coefficients() -> tuple[Coefficient, ...]:
    """The shipped table, in its order."""
    rows = rows_of(shipped_text("coefficients.csv"), "coefficients.csv", _COLUMNS)
    return tuple(
        Coefficient(
            scope=row.text("scope"),
            name=row.text("name"),
            value=row.number("value"),
            prior=row.number("prior") if row.text("prior") else None,
            spread=row.number("spread") if row.text("spread") else None,
        )
        for row in rows
    )


@cache
def physics() -> Physics:
    """As shipped."""
    return physics_from(coefficients())


@cache
def stacks() -> Mapping[str, Stack]:
    """As shipped, by name."""
    return stacks_from(coefficients())


def physics_from(table: Sequence[Coefficient]) -> Physics:
    """The record of the rows of scope "physics"."""
    return Physics(
        **{one.name: one.value for one in table if one.scope == "physics"},
        spreads={one.name: one.value for one in table if one.scope == "spread"},
        seen=tuple(one.name for one in table if one.scope == "seen"),
    )


def stacks_from(table: Sequence[Coefficient]) -> dict[str, Stack]:
    """Every stack, its numbers from the table and the rest from stacks.json."""
    shares: dict[str, dict[str, float]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    described = _described()
    for one in table:
        if one.scope in described:
            numbers.setdefault(one.scope, {})[one.name] = one.value
        elif one.scope not in {"physics", "spread", "seen"}:
            shares.setdefault(one.scope, {})[one.name.replace(_ANY, "")] = one.value
    known = {field.name for field in fields(Stack)}
    out = {}
    for name, words in described.items():
        given: dict[str, Any] = dict(numbers[str(words.get("like", name))])
        for key, value in words.items():
            if key in known:
                given[key] = tuple(value) if isinstance(value, list) else value
        out[name] = Stack(name=name, flash_shares=shares[words["attention"]], **given)
    return out


def stack_named(text: str) -> Stack:
    """The stack of that name, or the one that a framework of that name belongs to ("torchtitan", "NeMo").

    Raises:
        BadRequest: nobody is called so; the nearest is named.
    """
    name = stack_of(text)
    if name is None:
        every = sorted(_described())
        close = nearest(text, every)
        raise BadRequest(
            f"unknown stack {text!r}", hint=f"did you mean {close!r}?" if close else f"known: {', '.join(every)}"
        )
    return stacks()[name]


def stack_for(model: Model, precision: str, notes: list[str]) -> Stack:
    """The stack to plan for where nobody names one; `notes` is told why it is not `phalanx.torch`."""
    own = stacks()[DEFAULT_STACK]
    lacks = [
        *(["spread experts"] if model.mixture is not None and not own.experts else []),
        *([f"train in {precision}"] if precision not in own.precisions else []),
    ]
    if not lacks:
        return own
    notes.append(
        f"phalanx.torch does not {' or '.join(lacks)} yet: planned for the habits of {WIDER_STACK}; --stack names another"
    )
    return stacks()[WIDER_STACK]


def stack_of(text: str) -> str | None:
    """The name of the stack that `text` mentions, by the longest framework name in it; None where it mentions none."""
    low = text.strip().lower()
    described = _described()
    if low in described:
        return low
    found = [(len(word), name) for name, words in described.items() for word in words["frameworks"] if word in low]
    return max(found)[1] if found else None


@cache
def _described() -> Mapping[str, Mapping[str, Any]]:
    described: Mapping[str, Mapping[str, Any]] = shipped_json("stacks.json")
    return described
