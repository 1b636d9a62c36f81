"""The declaration that makes a model splittable: the chain of its parts, and how ranks share the matrix products of its layers.

A model returns it from its method `phalanx_parts`. Every layout computes the chain, part after part, and never the `forward` of the model.
So all layouts compute the same, and a model whose `forward` does more than its chain fails visibly.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Layout
from phalanx.core.work.layouts.layout_split import SplitLimits
from phalanx.core.work.nearest_match import suggestion

COLUMNS: Final = "columns"
ROWS: Final = "rows"
SHARED: Final = "shared"
WHOLE: Final = "whole"
_ROLES: Final = (COLUMNS, ROWS, SHARED, WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model as a chain of parts, each a module that maps one tensor (B, T, ...) to one tensor.

    Attributes:
        chain: names of the parts in the order of computing. The name of a ModuleList stands for its members, each of which is a part.
        tensor: maps layer names (`*` matches any text) to the way tensor parallel ranks share the layer: "columns" (each rank computes some
            of the outputs), "rows" (each rank uses some of the inputs, and the results are added), "shared" (each rank has the whole layer
            and applies it to its own share, such as a norm over each head), "whole" (each rank applies it to the whole stream). Other
            layers are "whole" if that is certain, else they are an error.
        heads, kv_heads: of attention, to check the layout; 0 for a model without. `kv_heads` is 0 if equal to `heads`.
        positions: names of buffers whose first dimension is the position in the sequence, for context parallel; None if not declared.
    """

    chain: tuple[str, ...]
    tensor: Mapping[str, str] = field(default_factory=dict)
    heads: int = 0
    kv_heads: int = 0
    positions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One member of the chain. `layer` is True for members of a ModuleList: the blocks that a pipeline distributes."""

    name: str
    module: Any
    layer: bool


def read_declaration(model: Any) -> Parts:
    """Return the declaration of a model.

    Raises:
        BadRequest: it is missing, or names something that does not exist.
    """
    if not hasattr(model, "phalanx_parts"):
        raise BadRequest(
            f"{type(model).__name__} does not declare its parts",
            hint="add a method phalanx_parts() that returns phalanx.torch.Parts(chain=...); see docs/layouts.md",
        )
    parts: Parts = model.phalanx_parts()
    names = dict(model.named_modules())
    for name in parts.chain:
        if name not in names:
            raise BadRequest(
                f"{type(model).__name__}: part {name!r} of the chain is not in the model",
                hint=suggestion(name, filter(None, names), form="{!r}"),
            )
    for pattern, role in parts.tensor.items():
        if role not in _ROLES:
            raise BadRequest(f"tensor role {role!r} of {pattern!r} is not one of {', '.join(_ROLES)}")
        if not fnmatch.filter(names, pattern):
            raise BadRequest(
                f"tensor role of {pattern!r}: no layer has that name",
                hint=suggestion(pattern, filter(None, names), form="{!r}"),
            )
    _check_all_in_parts(model, parts)
    return parts


def list_parts(model: Any, parts: Parts) -> tuple[ModelPart, ...]:
    """Return the parts in order."""
    found: list[ModelPart] = []
    for name in parts.chain:
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            found += [
                ModelPart(name=f"{name}.{index}", module=member, layer=True)
                for index, member in module.named_children()
            ]
        else:
            found.append(ModelPart(name=name, module=module, layer=False))
    return tuple(found)


def tensor_role(parts: Parts, layer: str) -> str | None:
    """Return how tensor parallel ranks share the layer with this full name; None if it is not declared."""
    for pattern, declared_role in parts.tensor.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return declared_role
    return None


def splittable_sizes(model: Any, parts: Parts, layout: Layout, *, sequence: int = 0, batch: int = 0) -> SplitLimits:
    """Return the sizes that `core.work.layout_split` needs to check the layout."""
    widths: list[tuple[str, int]] = []
    for name, module in model.named_modules():
        layer_role = tensor_role(parts, name)
        weight = getattr(module, "weight", None)
        if layer_role in {COLUMNS, ROWS} and weight is not None and layout.tensor > 1:
            # The weight of a Linear is (outputs, inputs), of an Embedding (rows, width).
            outputs_first = not isinstance(module, nn.Embedding)
            dimension = 0 if (layer_role == COLUMNS) == outputs_first else 1
            widths.append((f"{name} ({layer_role})", int(weight.shape[dimension])))
    return SplitLimits(
        layers=sum(part.layer for part in list_parts(model, parts)),
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        widths=tuple(widths),
        sequence=sequence,
        batch=batch,
    )


def tied_parameters(model: Any) -> list[tuple[str, str]]:
    """Return pairs of names of the same parameter."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            pairs.append((other, name))
    return pairs


def _check_all_in_parts(model: Any, parts: Parts) -> None:
    """Check that every parameter is in a part; otherwise no rank would train it."""
    heads = tuple(f"{name}." for name in parts.chain)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not name.startswith(heads):
            raise BadRequest(
                f"{type(model).__name__}: parameter {name!r} is in no part of the chain",
                hint="name its module in `chain`, or move it into the part that uses it",
            )
