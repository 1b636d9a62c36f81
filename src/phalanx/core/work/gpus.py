"""The request for GPUs of a job: one grammar wherever GPUs are named (DESIGN 4).

    [NODES[..MOST]x][KIND[,KIND...]:]COUNT      KIND = MODEL[-MEM|:MEM] or any-MEM
    8   2x8   h200:8   a100-80gb:8   H100:80GB:8   4xh200:8   h200,h100:8   a100-80gb,h100:8   2..8xh200:8   any-60gb:8

    [NODESx][KIND[,KIND...]:]SHARE              SHARE = N/M, a decimal below 1, or the device memory it needs
    1/4   0.5   h100:0.25   20GiB   h100,a100:20GiB   4x1/2

    [NODESx][MODEL.]PROFILE[:SLICES]            MIG slices of each node; see `mig_request`
    h100.1g.10gb   4xh100.1g.10gb:2   1g.10gb

    REQUEST|REQUEST[|...]                       one of several requests, in order of preference
    h100:8|a100:16   2xh100:8|4xa100:8   h100:1/4|a100:1/2

With NODES, COUNT is per node; without, it is the job's total and Phalanx picks the shape. Several kinds are tried in the order written,
one of them for the whole gang; MEM belongs to the kind that it is written with, `any-MEM` is every model with so much memory. With MOST the gang is elastic: from NODES to MOST nodes.

A share is a part of one device, in thousandths, on each of NODES nodes; a device's memory is shared in the same proportion. Asked for as
memory, it is the smallest share that has so much. More than one device is always whole devices.

Of several requests, one holds for the whole gang and decides its shape and its number of tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.mig import MEMORY_SLICES_MAX, MigProfile
from phalanx.core.hints import Hint, HintCode
from phalanx.core.units import GIB
from phalanx.core.work.mig_request import MigWords, parse_mig_words, smallest_profile
from phalanx.core.work.share import MILLI_PER_DEVICE, ShareKind

_KIND_WORDS: Final = r"[a-z][a-z0-9_.]*(?:-[a-z0-9_.]+)*?(?:[-:][0-9]{1,6}\s*g(?:i?b)?)?"
_KIND: Final = re.compile(r"(?P<model>[a-z][a-z0-9_.]*(?:-[a-z0-9_.]+)*?)(?:[-:](?P<memory>[0-9]{1,6})\s*g(?:i?b)?)?")
_GRAMMAR: Final = re.compile(
    r"(?:(?P<nodes>[0-9]{1,9})(?:\.\.(?P<most>[0-9]{1,9}))?x)?"
    rf"(?:(?P<kinds>{_KIND_WORDS}(?:\s*,\s*{_KIND_WORDS})*):)?"
    r"(?:(?P<count>[0-9]{1,9})(?P<rest>\.[0-9]{1,9})?(?:/(?P<parts>[0-9]{1,9}))?|(?P<memory>[0-9]{1,6})\s*g(?:i?b)?)",
)
_BARE: Final = re.compile(rf"{_KIND_WORDS}(?:\s*,\s*{_KIND_WORDS})*")  # models without a number
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")
_HINT: Final = "write 8, 2x8, h200:8, a100-80gb:8, 4xh200:8, h200,h100:8, h100:8|a100:16, any-60gb:8 or 2..8xh200:8; for a part of one GPU 1/4, 0.5, 20GiB or h100.1g.10gb"
_SEPARATOR: Final = "|"  # between requests of which one holds
ANY_MODEL: Final = "any"  # in place of a model: every model with the memory that follows
GPUS_MAX: Final = 1_000_000  # past any fleet; bounds a typo
GPU_KINDS_MAX: Final = 8  # more models than any fleet has
_TEXT_MAX: Final = 400  # characters; the longest model name known has 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRequest:
    """A part of one device.

    Attributes:
        milli: thousandths of the device, 1 to 999; 0 if asked for as memory.
        memory_gib: device memory asked for; 0 if asked for as a fraction.
        kind: how it may be shared.
        profile: MIG profile by name; "" for a part asked for as a fraction or memory.
        count: MIG slices on each node.
        slice_milli: thousandths of a device that one MIG slice takes at least, as the head found at submit; 0 if unknown. Not in the grammar.
    """

    milli: int = 0
    memory_gib: int = 0
    kind: ShareKind = ShareKind.MPS
    profile: str = ""
    count: int = 1
    slice_milli: int = 0

    @property
    def milli_min(self) -> int:
        """Thousandths of devices on a node, at least. That of MIG slices depends on the model; memory counts as a device."""
        if self.slice_milli:
            return self.count * self.slice_milli
        if self.profile:
            return self.count * (MILLI_PER_DEVICE // MEMORY_SLICES_MAX)
        return self.milli or MILLI_PER_DEVICE

    def mig_profile(self, profiles: Sequence[MigProfile]) -> MigProfile | None:
        """The profile that serves it on a device with these; None if none does."""
        if self.profile:
            return next((one for one in profiles if one.name == self.profile), None)
        return smallest_profile(profiles, milli=self.milli, memory_gib=self.memory_gib)

    def milli_of(self, memory_bytes: int) -> int:
        """Thousandths of a device with so much memory; the whole device if it is a little smaller than its name says (79.6 GiB for 80)."""
        if not self.memory_gib:
            return self.milli
        milli = ceil(Fraction(self.memory_gib * GIB * MILLI_PER_DEVICE, max(1, memory_bytes)))
        return min(max(1, milli), MILLI_PER_DEVICE)

    def __str__(self) -> str:
        if self.profile:
            return self.profile + (f":{self.count}" if self.count > 1 else "")
        return f"{self.memory_gib}GiB" if self.memory_gib else f"{self.milli / MILLI_PER_DEVICE:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """The GPUs requested. Either `nodes` and `per_node` are both set (a fixed shape), or only `total` counts.

    Attributes:
        total: of the whole job; 0 for a CPU-only job.
        model: lower case, as in the fleet ("h200"); None for any.
        memory_gib: at least this much per GPU of `model`; None for any.
        alternative_models: alternatives to `model`, in order of preference, each with its own memory if one was written ("h100", "a100-80gb"). A
            gang uses one model throughout.
        nodes_max: elastic: from `nodes` up to this many nodes, as capacity allows; None for a fixed number. `total` counts the fewest.
        uneven: whole nodes and the remainder on one more, instead of equal parts; only if the shape is not fixed. Not in the grammar:
            used by traces.
        share: the part of one device on each of `nodes` nodes; None for whole devices. Then `total` is 0, and `nodes` is set.
        alternatives: further requests, tried after this one in this order; each has none itself.
    """

    total: int
    nodes: int | None = None
    per_node: int | None = None
    model: str | None = None
    memory_gib: int | None = None
    alternative_models: tuple[str, ...] = ()
    nodes_max: int | None = None
    uneven: bool = False
    share: ShareRequest | None = None
    alternatives: tuple[GpuRequest, ...] = ()

    @property
    def choices(self) -> tuple[GpuRequest, ...]:
        """This request and its alternatives, each alone, in order of preference."""
        return (replace(self, alternatives=()), *self.alternatives) if self.alternatives else (self,)

    @property
    def is_mig(self) -> bool:
        """Whether it, without its alternatives, is for MIG slices."""
        return self.share is not None and self.share.kind is ShareKind.MIG

    @property
    def has_shares(self) -> bool:
        """Whether it, or an alternative, is for parts of devices."""
        return any(one.share is not None for one in self.choices)

    @property
    def milli(self) -> int:
        """Thousandths of devices of the whole job, of its first alternative; a share that depends on the device counts as in `ShareRequest.milli_min`."""
        if self.share is None:
            return self.total * MILLI_PER_DEVICE
        return (self.nodes or 1) * self.share.milli_min

    @property
    def amount_text(self) -> str:
        """GPUs of the whole job for messages: "8", "4 x 0.5", or "8 or 16"."""
        if self.alternatives:
            return " or ".join(dict.fromkeys(one.amount_text for one in self.choices))
        if self.share is None:
            return str(self.total)
        share = f"{self.share.count} x {self.share.profile}" if self.share.count > 1 else str(self.share)
        return share if self.nodes == 1 else f"{self.nodes} x {share}"

    @property
    def kinds(self) -> tuple[tuple[str | None, int | None], ...]:
        """Accepted models with their least memory in GiB, in order of preference; a pair of None and a memory means any model."""
        return ((self.model, self.memory_gib), *(_kind(text) for text in self.alternative_models))

    @property
    def kinds_text(self) -> str:
        """The kinds in the grammar; empty for any."""
        if self.model is None and self.memory_gib is None:
            return ""
        return ",".join((_kind_text(self.model, self.memory_gib), *self.alternative_models))

    def __str__(self) -> str:
        if self.alternatives:
            return _SEPARATOR.join(map(str, self.choices))
        kind = self.kinds_text and self.kinds_text + ":"
        if self.share is not None and self.share.profile:
            models = [f"{model}." for model in self.kinds_text.split(",")] if kind else [""]
            named = (
                ",".join(model + self.share.profile for model in models) + str(self.share)[len(self.share.profile) :]
            )
            return named if self.nodes == 1 else f"{self.nodes}x{named}"
        if self.share is not None:
            return f"{kind}{self.share}" if self.nodes == 1 else f"{self.nodes}x{kind}{self.share}"
        if self.nodes is None:
            return f"{kind}{self.total}"
        most = "" if self.nodes_max is None else f"..{self.nodes_max}"
        return f"{self.nodes}{most}x{kind}{self.per_node}"


def parse_gpus(text: object) -> GpuRequest:
    """The request that `text` states.

    Raises:
        BadRequest: outside the grammar, zero nodes, a range that ends before it begins, or a kind named twice.
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise BadRequest(f"gpus: {text!r} is not a number of GPUs", hint=_HINT)
    if isinstance(text, int) and not 0 <= text <= GPUS_MAX:
        raise BadRequest(
            f"gpus: {'a negative number' if text < 0 else f'more than {GPUS_MAX}'} cannot be requested", hint=_HINT
        )
    words = str(text).strip().lower()
    parts = words.split(_SEPARATOR)
    return (
        _parse_one(words)
        if len(parts) == 1
        else _one_of([_parse_alternative(part.strip()) for part in _checked(parts)])
    )


def _checked(parts: list[str]) -> list[str]:
    if len(parts) > GPU_KINDS_MAX:
        raise BadRequest(f"gpus: {len(parts)} alternatives are more than {GPU_KINDS_MAX}", hint=_HINT)
    if not all(part.strip() for part in parts):
        raise BadRequest("gpus: an alternative is empty", hint="write h100:8|a100:16, with a request on each side of |")
    return parts


def _parse_alternative(words: str) -> GpuRequest:
    try:
        return _parse_one(words)
    except BadRequest:
        if not _BARE.fullmatch(words):
            raise
        raise BadRequest(
            f"gpus: {words[:60]} has no number of GPUs",
            hint=f"write {words[:60]}:8 on its side of |; one number for several models is h100,a100:8",
        ) from None


def _one_of(choices: list[GpuRequest]) -> GpuRequest:
    """One request with the others as its alternatives.

    Raises:
        BadRequest: one is given twice, or asks for no GPU.
    """
    for number, one in enumerate(choices):
        if one in choices[:number]:
            raise BadRequest(f"gpus: {one} is given twice", hint="name each alternative once, the best first")
        if not one.total and one.share is None:
            raise BadRequest("gpus: an alternative without GPUs", hint="remove it, or ask for at least one GPU")
    return replace(choices[0], alternatives=tuple(choices[1:]))


def map_choices(gpus: GpuRequest, change: Callable[[GpuRequest], GpuRequest]) -> GpuRequest:
    """The request with each alternative changed."""
    if not gpus.alternatives:
        return change(gpus)
    return _one_of(list(dict.fromkeys(change(one) for one in gpus.choices)))


def _parse_one(words: str) -> GpuRequest:
    mig = parse_mig_words(words) if len(words) <= _TEXT_MAX else None
    if mig is not None:
        return _slices(mig, words)
    match = _GRAMMAR.fullmatch(words) if len(words) <= _TEXT_MAX else None
    if match is None:
        raise BadRequest(f"gpus: {words[:120]!r} is not a number of GPUs", hint=_HINT)
    (model, memory), others = _kinds(match["kinds"])
    share = _share(match, words)
    if share is not None:
        nodes, most = _ordered(int(match["nodes"] or 1), match["most"], "gpus")
        if most is not None:
            raise BadRequest(
                f"gpus: {words} is an elastic job on shares of GPUs", hint="give a fixed number of nodes, or whole GPUs"
            )
        if not 1 <= nodes <= GPUS_MAX:
            raise BadRequest(
                f"gpus: {words!r} requests no GPU" if not nodes else f"gpus: {words} is more than any fleet has",
                hint=_HINT,
            )
        return GpuRequest(
            total=0, nodes=nodes, per_node=0, model=model, memory_gib=memory, alternative_models=others, share=share
        )
    count = _whole(match)
    if match["nodes"] is None:
        if count > GPUS_MAX:
            raise BadRequest(f"gpus: {words!r} is more than any fleet has")
        return GpuRequest(total=count, model=model, memory_gib=memory, alternative_models=others)
    nodes, most = _ordered(int(match["nodes"]), match["most"], "gpus")
    if nodes == 0 or count == 0:
        raise BadRequest(f"gpus: {words!r} requests no GPU", hint=_HINT)
    if count * (most or nodes) > GPUS_MAX:
        raise BadRequest(f"gpus: {words!r} is more than any fleet has")
    return GpuRequest(
        total=count * nodes,
        nodes=nodes,
        per_node=count,
        model=model,
        memory_gib=memory,
        alternative_models=others,
        nodes_max=most,
    )


def _slices(mig: MigWords, words: str) -> GpuRequest:
    """The request for MIG slices.

    Raises:
        BadRequest: more nodes than any fleet has, or a model outside the grammar, or named twice.
    """
    if mig.nodes > GPUS_MAX:
        raise BadRequest(f"gpus: {words} is more than any fleet has", hint=_HINT)
    wrong = next((model for model in mig.models if not _KIND.fullmatch(model)), None)
    if wrong is not None:
        raise BadRequest(f"gpus: {wrong[:60]!r} is not a GPU model", hint=_HINT)
    (model, memory), others = _kinds(",".join(mig.models) or None)
    share = ShareRequest(kind=ShareKind.MIG, profile=mig.profile, count=mig.count)
    return GpuRequest(
        total=0, nodes=mig.nodes, per_node=0, model=model, memory_gib=memory, alternative_models=others, share=share
    )


def _share(match: re.Match[str], words: str) -> ShareRequest | None:
    """The part of a device that the amount states; None for whole devices.

    Raises:
        BadRequest: no part, a part below a thousandth, or more than one device that is not whole devices.
    """
    if match["memory"] is not None:
        if not int(match["memory"]):
            raise BadRequest(f"gpus: {words!r} requests no GPU", hint=_HINT)
        return ShareRequest(memory_gib=int(match["memory"]))
    if match["rest"] is None and match["parts"] is None:
        return None
    if (match["rest"] is not None and match["parts"] is not None) or (
        match["parts"] is not None and not int(match["parts"])
    ):
        raise BadRequest(f"gpus: {words[:120]!r} is not a number of GPUs", hint=_HINT)
    amount = Fraction(match["count"] + (match["rest"] or "")) / int(match["parts"] or 1)
    if amount.denominator == 1 and amount:
        return None
    if amount > 1:
        raise BadRequest(
            f"gpus: {words} is more than one GPU and not a whole number: a share is a part of one GPU",
            hint=f"request {int(amount)} or {int(amount) + 1}, or several nodes with a share each, such as {int(amount) + 1}x{round(float(amount) / (int(amount) + 1), 3):g}",
        )
    milli = int(amount * MILLI_PER_DEVICE)
    if not milli:
        raise BadRequest(
            f"gpus: {words!r} requests {'less than a thousandth of a GPU' if amount else 'no GPU'}", hint=_HINT
        )
    return ShareRequest(milli=milli)


def _whole(match: re.Match[str]) -> int:
    return int(Fraction(match["count"] + (match["rest"] or "")) / int(match["parts"] or 1))


def parse_nodes(text: object) -> tuple[int, int | None]:
    """Fewest and most nodes of `4` or `2..8`; None for most where the number is fixed.

    Raises:
        BadRequest: neither a number nor a range, zero, or a range that ends before it begins.
    """
    words = str(text).strip()
    match = None if isinstance(text, bool) else _RANGE.fullmatch(words)
    if match is None:
        raise BadRequest(f"nodes: {words[:60]!r} is not a number of nodes", hint="write 4, or 2..8 for an elastic job")
    fewest, most = _ordered(int(match[1]), match[2], "nodes")
    if not 1 <= fewest <= (most or fewest) <= GPUS_MAX:
        raise BadRequest(f"nodes: {words} is not between 1 and {GPUS_MAX}")
    return fewest, most


def _ordered(fewest: int, most: str | None, what: str) -> tuple[int, int | None]:
    """`2..2` is the same as `2`."""
    if most is None or int(most) == fewest:
        return fewest, None
    if int(most) < fewest:
        raise BadRequest(f"{what}: {fewest}..{int(most)} ends before it begins", hint=f"write {int(most)}..{fewest}")
    return fewest, int(most)


def _kinds(text: str | None) -> tuple[tuple[str | None, int | None], tuple[str, ...]]:
    """The first kind in parts, the other kinds as they are stored."""
    if text is None:
        return (None, None), ()
    found = [_kind(word.strip()) for word in text.split(",")]
    if len(found) > GPU_KINDS_MAX:
        raise BadRequest(f"gpus: {len(found)} models are more than {GPU_KINDS_MAX}", hint=_HINT)
    twice = next((kind for kind in found if found.count(kind) > 1), None)
    if twice is not None:
        raise BadRequest(f"gpus: {_kind_text(*twice)} is given twice", hint="name each model once, the best first")
    return found[0], tuple(_kind_text(*kind) for kind in found[1:])


def _kind(text: str) -> tuple[str | None, int | None]:
    match = _KIND.fullmatch(text)
    assert match is not None, text  # guaranteed by the grammar
    memory_gib = int(match["memory"]) if match["memory"] else None
    if match["model"] != ANY_MODEL:
        return match["model"], memory_gib
    if memory_gib is None:
        raise BadRequest("gpus: any without a memory", hint="write any-60gb:8, or 8 for any GPU")
    return None, memory_gib


def _kind_text(model: str | None, memory_gib: int | None) -> str:
    return (model or ANY_MODEL) + ("" if memory_gib is None else f"-{memory_gib}gb")


def with_share_kind(gpus: GpuRequest, kind: str) -> GpuRequest:
    """The request with the way of sharing that `kind` names; unchanged if it is empty.

    Raises:
        BadRequest: there is no such way, or the request is not for a share.
    """
    if not kind:
        return gpus
    try:
        chosen = ShareKind(kind.strip().lower())
    except ValueError:
        known = " or ".join(ShareKind)
        raise BadRequest(f"share: {kind[:60]!r} is not a way to share a GPU", hint=f"write {known}") from None
    if not gpus.has_shares:
        raise BadRequest(
            f"share: {chosen} is for a part of a GPU, but gpus is {gpus}", hint="ask for a part, such as 1/4 or 20GiB"
        )
    if chosen is not ShareKind.MIG and any(one.share is not None and one.share.profile for one in gpus.choices):
        raise BadRequest(
            f"share: {gpus} is a MIG slice, which is not shared by {chosen}",
            hint="ask for a part, such as 1/4 or 20GiB",
        )
    return map_choices(
        gpus, lambda one: one if one.share is None else replace(one, share=replace(one.share, kind=chosen))
    )


def combine_gpu_options(
    gpus: GpuRequest | None, nodes: int | None, gpus_per_node: int | None, nodes_max: int | None = None
) -> GpuRequest:
    """One request from `--gpus`, `--nodes` (with `nodes_max` for a range) and `--gpus-per-node`; without any of them: no GPU, one node.

    They hold for each alternative of `gpus`.

    Raises:
        BadRequest: they contradict each other or do not divide.
    """
    for name, value in (("nodes", nodes), ("gpus-per-node", gpus_per_node)):
        if value is not None and value < (1 if name == "nodes" else 0):
            raise BadRequest(f"{name}: {value} is too small")
    if gpus is not None and gpus.alternatives:
        return map_choices(gpus, lambda one: combine_gpu_options(one, nodes, gpus_per_node, nodes_max))
    if nodes_max is not None:
        return _elastic(gpus, nodes or 1, nodes_max, gpus_per_node)
    if gpus is None:
        per_node = gpus_per_node or 0
        if nodes is None and gpus_per_node is None:
            return GpuRequest(total=0)
        return GpuRequest(total=(nodes or 1) * per_node, nodes=nodes or 1, per_node=per_node)
    if gpus.share is not None and gpus.nodes == 1 and (nodes, gpus_per_node) != (None, None):
        raise BadRequest(
            f"gpus {gpus} is {'MIG slices' if gpus.is_mig else 'a part of one GPU'} on one node, which does not fit {_stated(nodes, gpus_per_node)}",
            hint=Hint(HintCode.GIVE_VALUE, key="gpus", value=f"{nodes or 2}x{gpus}"),
        )
    if gpus.nodes is not None:
        fixed = nodes is not None and (nodes != gpus.nodes or gpus.nodes_max is not None)
        if fixed or gpus_per_node not in (None, gpus.per_node):
            raise BadRequest(
                f"gpus {gpus} (nodes x GPUs per node) conflicts with {_stated(nodes, gpus_per_node)}",
                hint="give one of the two",
            )
        return gpus
    if nodes is None and (gpus_per_node is None or gpus_per_node == gpus.total == 0):
        return gpus
    if nodes is None and gpus_per_node:
        nodes, rest = divmod(gpus.total, gpus_per_node)
        if rest or nodes == 0:
            raise BadRequest(f"{gpus.total} GPUs do not divide into nodes of {gpus_per_node}")
    per_node, rest = divmod(gpus.total, nodes or 1)
    if rest:
        raise BadRequest(
            f"{gpus.total} GPUs do not divide over {nodes} nodes",
            hint=f"ask for {f'{per_node * (nodes or 1)} or ' if per_node else ''}{(per_node + 1) * (nodes or 1)}",
        )
    if gpus_per_node not in (None, per_node):
        raise BadRequest(
            f"{gpus.total} GPUs on {nodes} nodes are {per_node} per node, not {gpus_per_node}",
            hint="gpus is the job's total",
        )
    return replace(gpus, nodes=nodes, per_node=per_node)


def _elastic(gpus: GpuRequest | None, nodes: int, nodes_max: int, gpus_per_node: int | None) -> GpuRequest:
    """A range of nodes. The GPUs per node must be given: a total would mean another number for every size."""
    if gpus is None and gpus_per_node:
        if nodes_max * gpus_per_node > GPUS_MAX:
            raise BadRequest(f"{nodes_max} nodes of {gpus_per_node} GPUs are more than any fleet has")
        return GpuRequest(total=nodes * gpus_per_node, nodes=nodes, per_node=gpus_per_node, nodes_max=nodes_max)
    if gpus is None:
        raise BadRequest(
            f"nodes {nodes}..{nodes_max} without GPUs: an elastic job needs GPUs on each node",
            hint=Hint(HintCode.GIVE_KEY, key="gpus_per_node"),
        )
    if (gpus.nodes, gpus.nodes_max) == (nodes, nodes_max) and gpus_per_node in (None, gpus.per_node):
        return gpus
    kind = gpus.kinds_text and gpus.kinds_text + ":"
    if gpus.nodes is None:
        raise BadRequest(
            f"gpus {gpus} is the job's total, which does not fit a range of nodes ({nodes}..{nodes_max})",
            hint=Hint(HintCode.GIVE_VALUE, key="gpus", value=f"{nodes}..{nodes_max}x{kind}{gpus_per_node or 8}"),
        )
    raise BadRequest(
        f"gpus {gpus} (nodes x GPUs per node) conflicts with {_stated(f'{nodes}..{nodes_max}', gpus_per_node)}",
        hint="give one of the two",
    )


def _stated(nodes: int | str | None, gpus_per_node: int | None) -> str:
    given = {"nodes": nodes, "gpus-per-node": gpus_per_node}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
