"""Read the shipped coefficients of `core.performance`: `Physics`, and the software stacks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.facts.table import TableColumns, read_rows
from phalanx.planner.facts.table_files import shipped_json, shipped_text

DEFAULT_STACK: Final = "phalanx"
"""`phalanx.torch`. The planner proposes only layouts that it can build, so that you can run the answer unchanged."""
WIDER_STACK: Final = "megatron-core"
"""The default for features that `phalanx.torch` does not support: expert parallelism and fp8."""
ADAPTER_STACK: Final = "transformers"
"""The default for LoRA and QLoRA, and for DPO and GRPO (trl), which `phalanx.torch` does not build."""
WRITING_STACK: Final = "nemo-rl"
"""The default for GRPO of mixtures."""
OFFLOAD_STACK: Final = "deepspeed"
"""The default for full training with states on the host."""
_COLUMNS: Final = TableColumns(required=("scope", "name", "value", "meaning"), optional=("prior", "spread"))
_ANY: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One row. `prior` and `spread` (of the logarithm) are None unless the value was fitted."""

    scope: str
    name: str
    value: float
    prior: float | None
    spread: float | None


@cache
def coefficients() -> tuple[Coefficient, ...]:
    """Return the shipped table, in its order."""
    rows = read_rows(shipped_text("coefficients.csv"), "coefficients.csv", _COLUMNS)
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
    """Return the shipped record."""
    return physics_from(coefficients())


@cache
def stacks() -> Mapping[str, Stack]:
    """Return the shipped stacks by name."""
    return stacks_from(coefficients())


def physics_from(table: Sequence[Coefficient]) -> Physics:
    """Build the record from the rows of the scopes "physics", "spread" and "seen"."""
    return Physics(
        **{one.name: one.value for one in table if one.scope == "physics"},
        spreads={one.name: one.value for one in table if one.scope == "spread"},
        fitted_gpus=tuple(one.name for one in table if one.scope == "seen"),
    )


def stacks_from(table: Sequence[Coefficient]) -> dict[str, Stack]:
    """Build every stack: numbers from the table, the rest from stacks.json."""
    shares: dict[str, dict[str, float]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    described = _descriptions()
    for one in table:
        if one.scope in described:
            numbers.setdefault(one.scope, {})[one.name] = one.value
        elif one.scope not in {"physics", "spread", "seen"}:
            shares.setdefault(one.scope, {})[one.name.replace(_ANY, "")] = one.value
    known = {field.name for field in fields(Stack)}
    out = {}
    for name, description in described.items():
        given: dict[str, Any] = dict(numbers[numbers_of(name)])
        for key, value in description.items():
            if key in known:
                given[key] = tuple(value) if isinstance(value, list) else value
        kernel = dict(shares[description["attention"]])
        given |= {f"flash_{key}": kernel.pop(key) for key in ("backward", "ramp")}
        out[name] = Stack(name=name, flash_shares=kernel, **given)
    return out


def numbers_of(stack: str) -> str:
    """Return the name of the stack whose numbers in the table this stack has: its own, or that of its nearest kin."""
    return str(_descriptions()[stack].get("like", stack))


def find_stack(text: str) -> Stack:
    """Return the stack with this name, or the stack of the framework with this name ("torchtitan", "NeMo").

    Raises:
        BadRequest: unknown name; the hint has the nearest one.
    """
    name = find_stack_name(text)
    if name is None:
        known = sorted(_descriptions())
        hint = suggestion(text, known, f"known: {', '.join(known)}", form="{!r}")
        raise BadRequest(f"unknown stack {text!r}", hint=hint)
    return stacks()[name]


def default_stack(
    model: ModelShape,
    precision: str,
    notes: list[str],
    *,
    adapters: bool = False,
    preferences: bool = False,
    writes: bool = False,
    offload: bool = False,
) -> Stack:
    """Return the default stack for a model, trained whole or by adapters; `notes` receives the reason if it is not `phalanx.torch`."""
    own = stacks()[DEFAULT_STACK]
    if adapters and model.mixture is None and precision in stacks()[ADAPTER_STACK].precisions:
        notes.append(f"phalanx.torch builds no adapters; planned for the stack {ADAPTER_STACK} (with peft) instead")
        return stacks()[ADAPTER_STACK]
    if preferences and model.mixture is None and precision in stacks()[ADAPTER_STACK].precisions:
        notes.append(
            f"phalanx.torch writes and compares no answers; planned for the stack {ADAPTER_STACK} (with trl) instead"
        )
        return stacks()[ADAPTER_STACK]
    if offload and precision in stacks()[OFFLOAD_STACK].precisions:
        notes.append(f"phalanx.torch keeps nothing on the host; planned for the stack {OFFLOAD_STACK} instead")
        return stacks()[OFFLOAD_STACK]
    if writes and precision in stacks()[WRITING_STACK].precisions:
        notes.append(f"trl splits no experts; planned for the stack {WRITING_STACK} instead")
        return stacks()[WRITING_STACK]
    lacks = [
        *(["expert parallelism"] if model.mixture is not None and not own.experts else []),
        *([precision] if precision not in own.precisions else []),
    ]
    if not lacks:
        return own
    notes.append(
        f"phalanx.torch does not support {' or '.join(lacks)} yet; planned for the stack {WIDER_STACK} instead"
    )
    return stacks()[WIDER_STACK]


def find_stack_name(text: str) -> str | None:
    """Return the name of the stack whose framework `text` mentions, by the longest framework name in it; None without one."""
    low = text.strip().lower()
    described = _descriptions()
    if low in described:
        return low
    found = [(len(word), name) for name, one in described.items() for word in one["frameworks"] if word in low]
    return max(found)[1] if found else None


@cache
def _descriptions() -> Mapping[str, Mapping[str, Any]]:
    descriptions: Mapping[str, Mapping[str, Any]] = shipped_json("stacks.json")
    return descriptions
