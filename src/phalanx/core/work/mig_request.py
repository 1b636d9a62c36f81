"""MIG slices in the request for GPUs: their words in the grammar, and the profile that holds a part of a GPU.

    [NODESx][MODEL.]PROFILE[,MODEL.PROFILE...][:SLICES]
    h100.1g.10gb   4xh100.1g.10gb:2   1g.10gb   h100.1g.10gb,a100-80gb.1g.10gb

SLICES counts slices on each node, one without it. Several models have one profile: a gang is of one kind. Each task sees one slice, since a
CUDA process uses at most one (NVIDIA Multi-Instance GPU User Guide, r580, "CUDA Device Enumeration").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.mig import MigProfile, device_memory_slices
from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.nearest_match import nearest_match
from phalanx.core.work.share import MILLI_PER_DEVICE

_HINT: Final = Hint(
    HintCode.MIG_PROFILES, profiles="write h100.1g.10gb, or 4xh100.1g.10gb:2 for two slices on each of four nodes"
)
_LISTED_MAX: Final = 12  # profiles in one message; a model has at most 11
SLICES_MAX: Final = 1024  # on one node; bounds a typo
_PROFILE: Final = r"[0-9]{1,2}g\.[0-9]{1,4}gb(?:[+-][a-z0-9.]{1,12})*"
_LIKE_MIG: Final = re.compile(r"(?:^|[x.,])[0-9]{1,2}g\.[0-9]{1,4}")
_GRAMMAR: Final = re.compile(r"(?:(?P<nodes>[0-9]{1,9})x)?(?P<kinds>[^:]+?)(?::(?P<count>[0-9]{1,9}))?")
_KIND: Final = re.compile(rf"(?:(?P<model>[a-z][a-z0-9_.-]*)\.)?(?P<profile>{_PROFILE})")
_NOMINAL_GB: Final = re.compile(r"\.([0-9]{1,4})gb")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigWords:
    """Slices as they were asked for. `models`: as written, in order of preference; empty for any."""

    nodes: int
    models: tuple[str, ...]
    profile: str
    count: int


def parse_mig_words(words: str) -> MigWords | None:
    """The slices that the text (lower case) asks for; None if it names no MIG profile.

    Raises:
        BadRequest: it names one, but is outside the grammar.
    """
    if not _LIKE_MIG.search(words):
        return None
    match = _GRAMMAR.fullmatch(words)
    kinds = [] if match is None else [_KIND.fullmatch(word.strip()) for word in match["kinds"].split(",")]
    named = [kind for kind in kinds if kind is not None]
    if match is None or not named or len(named) < len(kinds):
        raise BadRequest(f"gpus: {words[:120]!r} is not a number of MIG slices", hint=_HINT)
    nodes, count = int(match["nodes"] or 1), int(match["count"] or 1)
    if not nodes or not count:
        raise BadRequest(f"gpus: {words!r} requests no GPU", hint=_HINT)
    if count > SLICES_MAX:
        raise BadRequest(f"gpus: {words} is more slices than a node has", hint=_HINT)
    profiles = list(dict.fromkeys(kind["profile"] for kind in named))
    if len(profiles) > 1:
        raise BadRequest(
            f"gpus: {words} names two profiles, {profiles[0]} and {profiles[1]}: a gang has slices of one kind",
            hint="name one profile, or let Phalanx choose on each model: gpus h100,a100:20GiB with share mig",
        )
    models = [kind["model"] for kind in named]
    if len(models) > 1 and None in models:
        raise BadRequest(f"gpus: {words} names {profiles[0]} with and without a model", hint=_HINT)
    return MigWords(
        nodes=nodes, models=tuple(model for model in models if model is not None), profile=profiles[0], count=count
    )


def profile_milli(profile: MigProfile, profiles: Iterable[MigProfile]) -> int:
    """Thousandths of a device that an instance takes: its part of the memory slices.

    No two instances share a memory slice, so those of a device sum to at most 1,000. Parts of the processors would not do: a 4g.40gb and a
    3g.40gb of an H100 have 4/7 and 3/7 of these and 4/8 each of the memory, and the larger of both would sum to more than the device.
    """
    return MILLI_PER_DEVICE * profile.memory_slices // device_memory_slices(profiles)


def smallest_profile(profiles: Sequence[MigProfile], *, milli: int = 0, memory_gib: int = 0) -> MigProfile | None:
    """The smallest profile that has at least so many thousandths, or so much memory by its name; None if the device has none.

    Smallest: the fewest memory slices, then the fewest processors. Names count ("1g.20gb" has 20 GB), as drivers keep a little of the memory.
    Profiles with the media extension are not chosen: a device has it once.
    """
    fitting = [
        one
        for one in profiles
        if not one.has_media and profile_milli(one, profiles) >= milli and nominal_gb(one.name) >= memory_gib
    ]
    return min(fitting, key=lambda one: (one.memory_slices, one.compute_slices, one.name), default=None)


def nominal_gb(profile: str) -> int:
    """The memory in the name of a profile."""
    match = _NOMINAL_GB.search(profile)
    return int(match[1]) if match else 0


def unknown_profile_hint(profile: str, known: Iterable[str]) -> Hint:
    """The nearest profile, and all of the model if these are not too many."""
    names = list(dict.fromkeys(known))
    near = nearest_match(profile, names)
    words = [f"did you mean {near}?"] if near else []
    if 0 < len(names) <= _LISTED_MAX:
        words.append(f"the model has {', '.join(names)}")
    return Hint(HintCode.MIG_PROFILES, profiles=" ".join(words) or "name another profile")
