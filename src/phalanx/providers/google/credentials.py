"""Access tokens of Google by google-auth, over calls of our own: the library brings no HTTP client that the head would need.

google-auth is imported with the first pool that asks for it. Credentials come from the file that GOOGLE_APPLICATION_CREDENTIALS names, else from
that of gcloud; the metadata service is asked only if the pool says so.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import CallUnanswered
from phalanx.providers.clouds.rest_calls import one_line, plain_opener, send_request

SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_GCLOUD_FILE: Final = ("gcloud", "application_default_credentials.json")


@dataclass(slots=True)
class GoogleToken:
    """The credentials of a head, whose access token is renewed when it runs out. Thread-safe."""

    credentials: Any
    guard: threading.Lock = field(default_factory=threading.Lock)

    def header(self) -> dict[str, str]:
        """Return the header of a call.

        Raises:
            BadRequest: Google does not accept the credentials.
            CallUnanswered: it does not answer.
        """
        from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError

        with self.guard:
            if not self.credentials.valid:
                try:
                    self.credentials.refresh(_token_request)
                except TransportError as error:
                    raise CallUnanswered(one_line(f"no access token: {error}")) from error
                except RefreshError as error:
                    if error.retryable:
                        raise CallUnanswered(one_line(f"no access token: {error}")) from error
                    raise wrong_credentials(str(error.args[0])) from error
                except (GoogleAuthError, ValueError) as error:
                    raise BadRequest(one_line(f"the Google credentials cannot be used: {error}")) from error
            return {"Authorization": f"Bearer {self.credentials.token}"}

    def drop(self, header: Mapping[str, str]) -> None:
        """Sign in again with the next call: Google does not accept this header any more."""
        with self.guard:
            if header == {"Authorization": f"Bearer {self.credentials.token}"}:
                self.credentials.token = None


def wrong_credentials(why: str) -> BadRequest:
    """Return the error of credentials that Google does not accept."""
    return BadRequest(
        one_line(f"Google does not accept the credentials: {why}"), hint="use another key file where the head starts"
    )


@lru_cache(maxsize=2)
def open_credentials(*, from_instance: bool) -> GoogleToken:
    """Return the credentials of the head's account.

    Raises:
        BadRequest: google-auth is not installed, or there are no credentials.
    """
    try:
        from google.auth import compute_engine
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise BadRequest("the provider google needs google-auth", hint="pip install google-auth") from error
    if from_instance:
        return GoogleToken(compute_engine.Credentials())  # type: ignore[no-untyped-call]
    path = credentials_file(os.environ)
    if not path or not os.path.exists(path):
        raise BadRequest(
            "no Google credentials: the environment and the files of gcloud of the head's account have none",
            hint="set GOOGLE_APPLICATION_CREDENTIALS where the head starts",
        )
    try:
        with open(path, encoding="utf-8") as file:
            return GoogleToken(_of_file(json.load(file)))
    except (GoogleAuthError, ValueError, KeyError, OSError) as error:
        raise BadRequest(one_line(f"the Google credentials in {path} cannot be used: {error}")) from error


def _of_file(found: Mapping[str, Any]) -> Any:
    """Return the credentials of a key file, by its type.

    Raises:
        ValueError: another type, or the file is damaged.
    """
    from google.auth import identity_pool
    from google.oauth2 import credentials, service_account

    makers: dict[str, Any] = {
        "service_account": service_account.Credentials.from_service_account_info,
        "authorized_user": credentials.Credentials.from_authorized_user_info,
        "external_account": identity_pool.Credentials.from_info,
    }
    kind = str(found.get("type", ""))
    if kind not in makers:
        raise ValueError(f"type {kind[:40]!r} is not one of {', '.join(makers)}")
    return makers[kind](found, scopes=[SCOPE])


def credentials_file(environment: Mapping[str, str]) -> str:
    """Return the path of the key file: that of GOOGLE_APPLICATION_CREDENTIALS, else that of gcloud."""
    if named := environment.get("GOOGLE_APPLICATION_CREDENTIALS", ""):
        return named
    folder = environment.get("CLOUDSDK_CONFIG") or os.path.join(environment.get("HOME", ""), ".config", _GCLOUD_FILE[0])
    return os.path.join(folder, _GCLOUD_FILE[1])


@dataclass(frozen=True, slots=True)
class _TokenReply:
    """What google-auth expects of its transport."""

    status: int
    headers: Mapping[str, str]
    data: bytes


def _token_request(
    url: str,
    method: str = "GET",
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **more: object,
) -> _TokenReply:
    """Send a request of google-auth (`google.auth.transport.Request`)."""
    from google.auth.exceptions import TransportError

    del timeout, more
    content = body.encode() if isinstance(body, str) else body
    request = urllib.request.Request(url, content, dict(headers or {}), method=method)  # noqa: S310  # from the key file
    try:
        reply = send_request(plain_opener(), request)
    except CallUnanswered as error:
        raise TransportError(str(error)) from error  # type: ignore[no-untyped-call]
    return _TokenReply(reply.status, reply.headers, reply.text.encode())
