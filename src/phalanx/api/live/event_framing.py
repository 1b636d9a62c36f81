"""The form of server-sent events."""

from __future__ import annotations

from typing import Any, Final

import msgspec

HEARTBEAT: Final = b": still here\n\n"


def encode_event(kind: str, record: Any, cursor: str = "") -> bytes:
    """Encode one event. One data line is enough, as encoded JSON has no line breaks."""
    mark = f"id: {cursor}\n" if cursor else ""
    return f"event: {kind}\n{mark}data: ".encode() + msgspec.json.encode(record) + b"\n\n"
