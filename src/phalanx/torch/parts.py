"""What a model says about itself so that it can be split: the chain of its parts, and how its layers share a matrix product.

A model declares it in its method `phalanx_parts`. Every layout computes the chain, part after part, and never the model's own
`forward`: so what is computed is the same whatever the layout, and a model whose `forward` does more than its chain shows it at once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from phalanx.core.errors import BadRequest
from phalanx.core.work.layout import Layout
from phalanx.core.work.nearest import nearest
from phalanx.core.work.split import Splittable

COLUMNS: Final = "columns"
ROWS: Final = "rows"
SHARED: Final = "shared"
WHOLE: Final = "whole"
_ROLES: Final = (COLUMNS, ROWS, SHARED, WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model as a chain of parts, each a module that takes one tensor (B, T, ...) and gives one.

    Attributes:
        chain: names of the parts in the order of computing. The members of a ModuleList are a part each, and its name stands for them.
        tensor: layer names, `*` for any text, to the way tensor parallel ranks share the layer: "columns" (each computes some of the
            outputs), "rows" (each takes some of the inputs, and the results are added), "shared" (all hold it whole, each applies it to
            its own share: a norm over each head), "whole" (all apply it to the whole stream). A layer not named is "whole" where that is
            beyond doubt, and refused else.
        heads, kv_heads: of attention, to be checked; `kv_heads` 0 where they equal `heads`, 0 for a model without.
        positions: names of buffers whose first dimension is the position in the sequence, for context parallel; None for "not said".
    """

    chain: tuple[str, ...]
    tensor: Mapping[str, str] = field(default_factory=dict)
    heads: int = 0
    kv_heads: int = 0
    positions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One member of the chain. `layer` is True for what a ModuleList holds: the blocks that a pipeline shares out."""

    name: str
    module: Any
    layer: bool


def declared(model: Any) -> Parts:
    """What the model declares.

    Raises:
        BadRequest: it declares nothing, or what it names is not there.
    """
    if not hasattr(model, "phalanx_parts"):
        raise BadRequest(
            f"{type(model).__name__} does not declare its parts",
            hint="give it a method phalanx_parts() that returns phalanx.torch.Parts(chain=...); see docs/layouts.md",
        )
    parts: Parts = model.phalanx_parts()
    names = dict(model.named_modules())
    for name in parts.chain:
        if name not in names:
            raise BadRequest(
                f"{type(model).__name__}: part {name!r} of the chain is not in the model", hint=_near(name, names)
            )
    for pattern, role in parts.tensor.items():
        if role not in _ROLES:
            raise BadRequest(f"tensor role {role!r} of {pattern!r} is none of {', '.join(_ROLES)}")
        if not fnmatch.filter(names, pattern):
            raise BadRequest(f"tensor role of {pattern!r}: no layer has that name", hint=_near(pattern, names))
    _check_whole(model, parts)
    return parts


def chain(model: Any, parts: Parts) -> tuple[Part, ...]:
    """The parts in order."""
    found: list[Part] = []
    for name in parts.chain:
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            found += [
                Part(name=f"{name}.{index}", module=member, layer=True) for index, member in module.named_children()
            ]
        else:
            found.append(Part(name=name, module=module, layer=False))
    return tuple(found)


def role(parts: Parts, layer: str) -> str | None:
    """How tensor parallel ranks share the layer of that full name; None for held whole."""
    for pattern, said in parts.tensor.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return said
    return None


def splittable(model: Any, parts: Parts, layout: Layout, *, sequence: int = 0, batch: int = 0) -> Splittable:
    """What `core.work.split` must know to judge the layout."""
    widths: list[tuple[str, int]] = []
    for name, module in model.named_modules():
        said = role(parts, name)
        weight = getattr(module, "weight", None)
        if said in {COLUMNS, ROWS} and weight is not None and layout.tensor > 1:
            # A Linear's weight is (outputs, inputs), a table (rows, width).
            outputs_first = not isinstance(module, nn.Embedding)
            dimension = 0 if (said == COLUMNS) == outputs_first else 1
            widths.append((f"{name} ({said})", int(weight.shape[dimension])))
    return Splittable(
        layers=sum(part.layer for part in chain(model, parts)),
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        widths=tuple(widths),
        sequence=sequence,
        batch=batch,
    )


def tied(model: Any) -> list[tuple[str, str]]:
    """Pairs of names of one and the same parameter."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            pairs.append((other, name))
    return pairs


def _check_whole(model: Any, parts: Parts) -> None:
    """Every parameter must lie in a part, else no rank would train it."""
    heads = tuple(f"{name}." for name in parts.chain)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not name.startswith(heads):
            raise BadRequest(
                f"{type(model).__name__}: parameter {name!r} lies in no part of the chain",
                hint="name its module in `chain`, or move it into the part that uses it",
            )


def _near(name: str, known: Mapping[str, Any]) -> str:
    close = nearest(name, [one for one in known if one])
    return f"did you mean {close!r}?" if close else ""
