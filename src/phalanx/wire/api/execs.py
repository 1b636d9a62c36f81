"""Records of commands beside a job's ranks."""

from __future__ import annotations

import msgspec


class ExecBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command beside a job's ranks, on one of its nodes."""

    argv: list[str]
    tty: bool = False
    rows: int = 24
    cols: int = 80
    node_rank: int = 0


class ExecOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The session's name, for the calls that follow."""

    session: str


class ExecOutputReply(msgspec.Struct, frozen=True, kw_only=True):
    """Output from byte `after` on. `end`: ask next with `after=end`. `done`: the command has ended and this is its last output."""

    data: bytes
    end: int
    done: bool = False
    exit_code: int | None = None
    error: str = ""


class ExecInputBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's input from byte `offset` of the whole input on. Idempotent."""

    offset: int
    data: bytes = b""
    closed: bool = False


class ExecInputReply(msgspec.Struct, frozen=True, kw_only=True):
    """Input up to byte `end` is received; continue from there."""

    end: int


class ExecResizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The terminal's new size."""

    rows: int
    cols: int
