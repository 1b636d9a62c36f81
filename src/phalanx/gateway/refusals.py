"""The gateway's own answers instead of a replica's, in the form of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web


class Refused(Exception):
    """A request gets an error. `kind`: the type that clients see; by the status if it is ""."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        retry_after_s: int | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after_s = status, message, code, retry_after_s
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON of the error."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        """The whole answer."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(status=self.status, body=self.body(), headers=headers, content_type="application/json")
