"""The body of every error."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is that of a class in core.errors; `retry`: the same request may succeed later.

    `hint`: what to do next, in plain words; if it has a code of core.hints, `hint_code` and `hint_args` are that code and its arguments.
    `leader`: only from a standby, the URL of the leading head; empty if unknown.
    """

    code: str
    message: str
    hint: str = ""
    hint_code: str | msgspec.UnsetType = msgspec.UNSET
    hint_args: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    retry: bool = False
    leader: str | msgspec.UnsetType = msgspec.UNSET


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error."""

    error: ErrorBody
