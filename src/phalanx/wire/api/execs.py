"""Frames of the WebSocket `/v1/jobs/{job_id}/exec`, which runs a command beside a job's ranks.

The client's first frame is an `ExecBody`. The head answers `ExecOpened` or `ExecFailed`. From then on binary frames are the command's
input and output, and text frames are a `ClientFrame` or `HeadFrame` as JSON. Each side may have `window_bytes` bytes on their way that
the other has not acknowledged, so that a slow reader slows the writer down while pings and control frames still pass.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.wire.api.errors import ErrorBody


class ExecBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command beside a job's ranks, on one of its nodes."""

    argv: list[str]
    tty: bool = False
    rows: int = 24
    cols: int = 80
    node_rank: int = 0


class ExecAck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ack"):
    """The sender has consumed all bytes up to this offset. Both sides send it."""

    offset: int


class ExecResize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="resize"):
    """The terminal's new size."""

    rows: int
    cols: int


class ExecSignal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="signal"):
    """A signal for the command and its children."""

    name: Literal["HUP", "INT", "QUIT", "TERM"]


class ExecInputEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input_end"):
    """The end of the input."""


class ExecOpened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The node was asked to start the command. `window_bytes`: how many bytes may be unacknowledged, in each direction."""

    window_bytes: int


class ExecExit(msgspec.Struct, frozen=True, kw_only=True, tag="exit"):
    """The command has ended, and all its output was sent."""

    exit_code: int


class ExecFailed(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """Why the command was not started, or why its session ends."""

    error: ErrorBody


ClientFrame = ExecAck | ExecResize | ExecSignal | ExecInputEnd
HeadFrame = ExecOpened | ExecAck | ExecExit | ExecFailed
