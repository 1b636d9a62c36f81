"""Named extras: what nodes offer besides devices, CPUs and memory, and licences that the whole fleet shares.

A user asks for both in one list of names: `scratch:100GiB,matlab:2`. An amount is a count, or a size with a unit. Counts stay below 2^20
and sizes are whole MiB, so that an amount of either kind can be shown without its kind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.resources import Extras, amount_text, extras_of
from phalanx.core.units import MIB, parse_memory_bytes

EXTRAS_MAX: Final = 32  # of one job or node; bounds a typo, as no known site has so many
COUNT_MAX: Final = 1_000_000  # below 1 MiB, see the module
SIZE_MAX_BYTES: Final = 1 << 60
_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_COUNT: Final = re.compile(r"[0-9]{1,7}")
_SIZE: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,6})?\s*[kmgt](?:i?b)?", re.IGNORECASE)
# Names of amounts that have keys of their own, here and in quotas.
OWN_KEYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gpu", "gpus"), "gpus"),
    **dict.fromkeys(("cpu", "cpus"), "cpus"),
    **dict.fromkeys(("mem", "memory"), "memory"),
    **dict.fromkeys(("job", "jobs"), "jobs"),
    **dict.fromkeys(("node", "nodes"), "nodes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """Seats of a licence, which the whole fleet shares. Jobs hold them from their start to their end.

    Attributes:
        id: its name, as jobs ask for it.
        total: seats that exist.
    """

    id: str
    total: int


def seats_of(licences: Mapping[str, Licence]) -> list[tuple[str, int]]:
    """The name and the seats of each licence."""
    return [(licence.id, licence.total) for licence in licences.values()]


def parse_extras(value: object, *, key: str = "resources", least: int = 1) -> Extras:
    """Parse `scratch:100GiB,matlab:2`, with `:` or `=`, or a mapping of names to amounts. A name alone is 1 of it.

    Args:
        value: the text or the mapping.
        key: for messages.
        least: the least amount: 1 for a request, 0 for a limit.

    Raises:
        BadRequest: not such a list; the message names the word.
    """
    if isinstance(value, Mapping):
        pairs = [(str(name), "1" if amount is None else str(amount)) for name, amount in value.items()]
    else:
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        pairs = [(name, amount) for name, _, amount in (_split(word) for word in words)]
    if len(pairs) > EXTRAS_MAX:
        raise BadRequest(f"{key}: {len(pairs)} names; at most {EXTRAS_MAX} are allowed")
    found: dict[str, int] = {}
    for name, amount in pairs:
        valid = check_extra_name(name, key=key)
        if valid in found:
            raise BadRequest(f"{key}: {valid} is given twice")
        found[valid] = parse_amount(amount, f"{key}: {valid}", least=least)
    return extras_of(found.items())


def check_extra_name(name: str, *, key: str) -> str:
    """The name in lower case.

    Raises:
        BadRequest: it is not a name, or that of an amount with a key of its own.
    """
    word = name.strip().lower()
    if word in OWN_KEYS:
        raise BadRequest(f"{key}: {word} is not an extra", hint=f"ask for it by the key {OWN_KEYS[word]}")
    if not _NAME.fullmatch(word):
        raise BadRequest(
            f"{key}: {name[:40]!r} is not a name of a resource",
            hint="a letter, then letters, digits and . _ -, at most 32 characters: scratch, nic, matlab",
        )
    return word


def parse_amount(text: str, what: str, *, least: int = 1) -> int:
    """Parse a count (`2`) or a size (`100GiB`, `2T`), which is rounded up to whole MiB.

    Raises:
        BadRequest: neither, or out of bounds.
    """
    word = text.strip()
    if _COUNT.fullmatch(word):
        count = int(word)
        if not least <= count <= COUNT_MAX:
            raise BadRequest(f"{what}: {word} is not between {least} and {COUNT_MAX}", hint="a size has a unit: 100GiB")
        return count
    if not _SIZE.fullmatch(word):
        raise BadRequest(f"{what}: {word[:40]!r} is not an amount", hint="write a count, or a size: 2, 100GiB")
    size = -(-parse_memory_bytes(word) // MIB) * MIB
    if not MIB <= size <= SIZE_MAX_BYTES:
        raise BadRequest(f"{what}: {word} is not between 1 MiB and 1 EiB")
    return size


def extras_text(extras: Extras) -> str:
    """The extras as they are shown: "scratch 100 GiB, matlab 2"."""
    return ", ".join(f"{name} {amount_text(amount)}" for name, amount in extras)


def split_licences(extras: Extras, licences: Collection[str]) -> tuple[Extras, Extras]:
    """The extras that nodes offer, and those that are licences, by the names of the licences that exist."""
    return (
        tuple(pair for pair in extras if pair[0] not in licences),
        tuple(pair for pair in extras if pair[0] in licences),
    )


def _split(word: str) -> tuple[str, str, str]:
    at = min((place for place in (word.find(":"), word.find("=")) if place >= 0), default=-1)
    return (word, "", "1") if at < 0 else (word[:at], word[at], word[at + 1 :])


def parse_offers(text: str) -> str:
    """Check what a node offers, as the option of that name writes it, and return it in one form; empty for `off`.

    Raises:
        BadRequest: not such a list.
    """
    extras = () if text.strip().lower() == "off" else parse_extras(text, key="offers")
    return ",".join(f"{name}={amount // MIB}M" if amount >= MIB else f"{name}={amount}" for name, amount in extras)
