"""The layout of a model over the ranks of a job: the degree of each kind of parallelism, and the order of ranks along the axes.

The planner (`core.layouts`) chooses it, the job carries it, `phalanx.torch` builds its mesh from it. `core.performance` estimates its cost.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import suggestion

RANKS_MAX: Final = 1 << 20  # larger than any fleet; bounds a typo
DEGREES_MAX: Final = 1 << 20


class Recompute(enum.StrEnum):
    """What the backward pass recomputes instead of keeping it from the forward pass."""

    NONE = "none"
    SELECTIVE = "selective"  # the core of attention (scores, softmax, dropout): little work, much memory without flash attention
    FULL = "full"  # whole blocks: only their inputs are kept


class Axis(enum.StrEnum):
    """One dimension of the mesh of ranks."""

    TENSOR = "tensor"
    CONTEXT = "context"
    SHARD = "shard"  # data parallel ranks that together hold one copy of the states
    PIPELINE = "pipeline"
    REPLICATE = "replicate"  # data parallel ranks that each hold a full copy of what a shard group holds


DEFAULT_AXIS_ORDER: Final = (Axis.TENSOR, Axis.CONTEXT, Axis.SHARD, Axis.REPLICATE, Axis.PIPELINE)
"""Innermost first: the axis with the most communication per second is placed nearest. Tensor parallel exchanges activations in every
layer and blocks on them, context parallel exchanges keys and values in every layer, sharded data parallel parameters once per layer,
replicas gradients once per step; a pipeline sends one activation per micro-batch, which is the least."""

_SHORT_NAMES: Final = {
    "dp": "replicate",
    "fsdp": "shard",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "vpp": "interleave",
    "mbs": "micro_batch",
    "accumulate": "micro_batches",
}
_PAIR: Final = re.compile(r"\s*([a-z_]+)\s*=\s*([a-z0-9_,-]+)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A split of one model over `ranks` processes, one device each.

    Attributes:
        tensor: ranks that share each matrix product. With `sequence`, also splits the sequence between them (sequence parallel).
        pipeline: stages, each with its own layers.
        interleave: runs of layers per stage (virtual stages); 1 for plain 1F1B.
        context: ranks that share one sequence's attention.
        expert: ranks, out of `context * shard * replicate`, that share the experts of a mixture; 1 for dense models.
        shard: data parallel ranks over which states are sharded, see `zero`.
        replicate: data parallel groups of `shard` ranks. Plain DDP is shard 1; FSDP over all is replicate 1; both above 1 is hybrid.
        zero: what `shard` splits: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (FSDP2).
        micro_batch: sequences that one rank computes at once.
        micro_batches: micro-batches per step; the global batch is micro_batch * micro_batches * data.
        precision: of the matrix products: "bf16", "fp16", "fp8", "nvfp4" or "fp32".
        order: axes, innermost first, that define a rank's number.
    """

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    expert: int = 1
    shard: int = 1
    replicate: int = 1
    zero: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = Recompute.NONE
    precision: str = "bf16"
    order: tuple[Axis, ...] = DEFAULT_AXIS_ORDER

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.shard * self.replicate

    @property
    def ranks(self) -> int:
        """Total number of processes."""
        return self.tensor * self.context * self.shard * self.pipeline * self.replicate

    @property
    def global_batch(self) -> int:
        """Sequences per step over all ranks."""
        return self.micro_batch * self.micro_batches * self.data

    def size(self, axis: Axis) -> int:
        """Ranks along the axis."""
        return int(getattr(self, axis.value))

    def stride(self, axis: Axis) -> int:
        """Distance in rank numbers between neighbours along the axis."""
        return math.prod(self.size(inner) for inner in self.order[: self.order.index(axis)])

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The position of the rank along each axis.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in self.order}

    def __str__(self) -> str:
        """The text form, which `parse_layout` reads back: `tp=2,pp=2,fsdp=4,mbs=1`; degrees of 1 and defaults are left out."""
        words = [
            f"{short}={getattr(self, long)}"
            for short, long in sorted(_SHORT_NAMES.items(), key=lambda pair: _TEXT_ORDER.index(pair[0]))
            if getattr(self, long) != 1
        ]
        words += [f"zero={self.zero}"] * (self.zero > 0 and self.zero != 3)
        words += ["sp=1"] * self.sequence
        words += [f"recompute={self.recompute}"] * (self.recompute is not Recompute.NONE)
        words += [f"precision={self.precision}"] * (self.precision != "bf16")
        words += [f"order={'-'.join(self.order)}"] * (self.order != DEFAULT_AXIS_ORDER)
        return ",".join(words) or "single"


_TEXT_ORDER: Final = ("tp", "cp", "ep", "pp", "vpp", "fsdp", "dp", "mbs", "accumulate")


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """All fields of the layout as plain values."""
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return values | {"recompute": layout.recompute.value, "order": [axis.value for axis in layout.order]}


def layout_from_json(values: Mapping[str, Any]) -> Layout:
    """The reverse; missing fields have their defaults.

    Raises:
        BadRequest: an unknown field, or an invalid value.
    """
    known = {field.name: field for field in fields(Layout)}
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise BadRequest(
                f"layout: unknown field {name!r}",
                hint=suggestion(name, known, f"known: {', '.join(known)}", form="{!r}"),
            )
        if name == "recompute":
            given[name] = _recompute(value)
        elif name == "order":
            given[name] = _order(value)
        elif name == "precision":
            given[name] = _precision(value)
        elif name == "sequence":
            given[name] = bool(value)
        else:
            given[name] = _degree(name, value, least=0 if name == "zero" else 1)
    return validated_layout(Layout(**given))


def parse_layout(text: str) -> Layout:
    """The layout of a text such as `tp=2,pp=2,fsdp=2,mbs=4,accumulate=2,recompute=full`. Long names are accepted too; `single` is one rank.

    Raises:
        BadRequest: outside the grammar, an axis given twice, or an invalid value.
    """
    if text.strip().lower() == "single":
        return Layout()
    values: dict[str, Any] = {}
    for part in text.split(","):
        found = _PAIR.fullmatch(part)
        if found is None:
            raise BadRequest(f"layout {text!r}: {part.strip()!r} is not name=value", hint="write tp=2,pp=2,fsdp=4")
        name, value = found[1].lower(), found[2].lower()
        name = {"sp": "sequence"}.get(name, _SHORT_NAMES.get(name, name))
        if name in values:
            raise BadRequest(f"layout {text!r}: {name} is given twice")
        values[name] = value.split("-") if name == "order" else value == "1" if name == "sequence" else value
    if "shard" in values:
        values.setdefault("zero", 3)
    return layout_from_json(values)


def validated_layout(layout: Layout) -> Layout:
    """The layout itself.

    Raises:
        BadRequest: its fields contradict each other.
    """
    if layout.interleave > 1 and layout.pipeline == 1:
        raise BadRequest(f"interleave {layout.interleave} needs a pipeline", hint="give pp=2 or more, or leave vpp out")
    if layout.zero == 3 and layout.shard * layout.context == 1:
        raise BadRequest("zero=3 shards parameters over `fsdp` ranks, and fsdp is 1", hint="give fsdp=2 or more")
    if layout.sequence and layout.tensor == 1:
        raise BadRequest("sequence parallel splits over the tensor ranks, and tp is 1", hint="leave sp out")
    sharers = layout.context * layout.data
    if sharers % layout.expert:
        raise BadRequest(
            f"expert {layout.expert} does not divide the {sharers} ranks of context x data that share experts"
        )
    if layout.ranks > RANKS_MAX:
        raise BadRequest(f"{layout.ranks} ranks are more than the maximum of {RANKS_MAX}")
    return layout


def _degree(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not str(value).strip().lstrip("-").isdigit():
        raise BadRequest(f"layout: {name} is {value!r}; it must be a whole number")
    number = int(str(value))
    most = 3 if name == "zero" else DEGREES_MAX
    if not least <= number <= most:
        raise BadRequest(f"layout: {name} is {number}; it must be {least} to {most}")
    return number


def _recompute(value: object) -> Recompute:
    try:
        return Recompute(str(value).lower())
    except ValueError:
        known = [one.value for one in Recompute]
        raise BadRequest(f"layout: recompute is {value!r}; it must be one of {', '.join(known)}") from None


PRECISIONS: Final = ("bf16", "fp16", "fp8", "nvfp4", "fp32")


def _precision(value: object) -> str:
    text = str(value).lower()
    if text not in PRECISIONS:
        raise BadRequest(f"layout: precision is {value!r}; it must be one of {', '.join(PRECISIONS)}")
    return text


def _order(value: object) -> tuple[Axis, ...]:
    words = [str(word) for word in value] if isinstance(value, (list, tuple)) else []
    if sorted(words) != sorted(axis.value for axis in Axis):
        raise BadRequest(
            f"layout: order is {value!r}; it must name each of {', '.join(DEFAULT_AXIS_ORDER)} once, innermost first"
        )
    return tuple(Axis(word) for word in words)
