"""Console output of pooled nodes that never joined: what their machines printed while they booted, kept after they are gone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId, PoolId

CONSOLE_CHARS_MAX: Final = 32_768  # the end of a boot with cloud-init; four of each pool are 128 KiB of a database
CONSOLES_MAX: Final = 4  # of one pool, the newest
_CONTROL: Final = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)  # but tabs and ends of lines
_TOKEN: Final = re.compile(
    r"phx[a-z]\.[\w.-]+"
)  # all tokens of a head begin so; also in words: a removed `\r` ends one


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConsole:
    """The end of what the machine of a node printed. `at_s`: when it was read, in Unix seconds."""

    id: NodeId
    pool: PoolId
    machine: str
    at_s: float
    text: str


def console_text(raw: str) -> str:
    """Return the end of a console's output that is kept: without tokens of the head, and without control characters."""
    masked = _TOKEN.sub("[token]", _CONTROL.sub("", raw))
    return masked[-CONSOLE_CHARS_MAX:]


def surplus_consoles(consoles: Iterable[NodeConsole], pool: PoolId) -> list[NodeConsole]:
    """Return those of a pool beyond the newest `CONSOLES_MAX`."""
    own = sorted((one for one in consoles if one.pool == pool), key=lambda one: (one.at_s, one.id))
    return own[:-CONSOLES_MAX]
