"""Errors of the Kubernetes API server, each with its status and its reason."""

from __future__ import annotations

import json
from typing import Final

from phalanx.core.errors import PhalanxError, Unreachable

_TEXT_MAX: Final = 500  # characters of an error that reach a message


class KubernetesError(PhalanxError):
    """The API server refused a request.

    Args:
        status: HTTP status.
        reason: Kubernetes' word for it, such as AlreadyExists; empty if the answer has none.
        message: the server's own text.
        retry_after_s: seconds to wait before the next try, as the server asks; None if it asks for none.
    """

    code = "kubernetes_refused"

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    @property
    def is_absent(self) -> bool:
        """Whether the object, or its namespace, does not exist."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """Whether the object exists already, has changed since, or has fields of another manager."""
        return self.status == 409

    @property
    def is_expired(self) -> bool:
        """Whether the resource version, or the token of a list, is too old: list again."""
        return self.status == 410

    @property
    def is_forbidden(self) -> bool:
        """Whether rights, a quota or an admission rule forbid it."""
        return self.status == 403

    @property
    def is_overload(self) -> bool:
        """Whether the server asks to try again later."""
        return self.status == 429 or (self.status >= 500 and self.retry_after_s is not None)


class KubernetesUnreachable(Unreachable):
    """The API server does not answer, or not within the time."""


def error_of(status: int, payload: bytes, retry_after: str | None) -> KubernetesError:
    """Return the error in an answer. The text of a proxy's page is kept as far as it is readable."""
    wait_s = float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else None
    try:
        found = json.loads(payload)
        return KubernetesError(
            status, str(found.get("reason") or ""), _one_line(str(found.get("message") or "")), wait_s
        )
    except (ValueError, AttributeError):
        text = _one_line(payload[:_TEXT_MAX].decode(errors="replace"))
        return KubernetesError(status, "", text or f"HTTP status {status}", wait_s)


def error_of_event(status: object) -> KubernetesError:
    """Return the error in a watch event of the type ERROR."""
    found = status if isinstance(status, dict) else {}
    code = found.get("code")
    return KubernetesError(
        code if isinstance(code, int) else 500,
        str(found.get("reason") or ""),
        _one_line(str(found.get("message") or "")),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_TEXT_MAX]
