"""An HTTP session of Authlib whose answers are limited in size and time. It follows no redirect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from authlib.integrations.requests_client import OAuth2Session

ANSWER_BYTES: Final = 1 << 20  # metadata and key sets have some KiB
CONNECT_S: Final = 3.05
READ_S: Final = 5.0  # between two pieces
ANSWER_S: Final = 10.0  # for the whole answer


class ProviderHttpError(Exception):
    """The answer is over a limit."""


class _BoundedBody:
    """The body of an answer, while it is read."""

    def __init__(self, raw: Any, ends_s: float) -> None:
        self._raw, self._ends_s = raw, ends_s

    def stream(self, amount: int, **options: Any) -> Iterator[bytes]:
        """Yield pieces.

        Raises:
            ProviderHttpError: the body is too long, or arrives too slowly.
        """
        size = 0
        for piece in self._raw.stream(amount, **options):
            size += len(piece)
            if size > ANSWER_BYTES:
                raise ProviderHttpError(f"the answer is over {ANSWER_BYTES >> 10} KiB")
            if time.monotonic() > self._ends_s:
                raise ProviderHttpError(f"the answer was not complete after {ANSWER_S:g} s")
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def provider_session(**options: Any) -> OAuth2Session:
    """Return a session with these options of Authlib's OAuth2Session."""
    from authlib.integrations.requests_client import OAuth2Session

    class BoundedSession(OAuth2Session):  # type: ignore[misc]  # Authlib ships no types
        """See the module."""

        def request(self, method: str, url: str, **more: Any) -> Any:
            more |= {"timeout": (CONNECT_S, READ_S), "allow_redirects": False, "stream": True}
            reply = super().request(method, url, **more)
            reply.raw = _BoundedBody(reply.raw, time.monotonic() + ANSWER_S)
            with reply:
                reply.content  # noqa: B018  reads it, within the limits; later readers find it there
            if reply.is_redirect:
                raise ProviderHttpError(f"it redirects {url.partition('?')[0]} elsewhere")
            return reply

    return BoundedSession(**options)
