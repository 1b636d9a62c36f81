"""The cookies of a browser: of its session, of a sign-in at the provider that it has begun, and of a web program at a host name of its own.

Browsers send a cookie to every port of a host, so its name contains the port: the dashboards of two heads on one machine, or behind two
forwarded ports, do not replace each other's. Over TLS the prefix `__Host-` makes browsers refuse the cookie from any other host.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import Response

from phalanx.api.auth.browser_sessions import SESSION_LIFETIME_S
from phalanx.api.auth.sign_in_attempts import ATTEMPT_LIFETIME_S

CSRF_HEADER: Final = "x-phalanx-csrf"
_SESSION, _ATTEMPT, _PROGRAM = "session", "sign-in", "program"
_OWN: Final = re.compile(r"(?:__Host-)?phalanx-.*", re.DOTALL)
_TLS: Final = frozenset({"https", "wss"})


def session_secret(connection: HTTPConnection) -> str | None:
    """Return the secret in the session's cookie; None without one, or with several, as another port of this host can plant one."""
    return _value(connection, _SESSION)


def session_secrets(connection: HTTPConnection) -> set[str]:
    """Return the secrets of all sessions of this host, whatever the port of their head."""
    pairs = (part.strip().partition("=") for one in connection.headers.getlist("cookie") for part in one.split(";"))
    found = _prefix(connection) + f"phalanx-{_SESSION}-"
    return {value for name, _, value in pairs if name.startswith(found)}


def is_own_cookie(name: str) -> bool:
    """Return whether a cookie is one of a head, which no program of a job may read or set."""
    return _OWN.fullmatch(name) is not None


def program_value(connection: HTTPConnection) -> str | None:
    """Return the value of the cookie of a web program; None likewise."""
    return _value(connection, _PROGRAM)


def attempt_value(connection: HTTPConnection) -> str | None:
    """Return the value of the browser's attempt to sign in at the provider; None likewise."""
    return _value(connection, _ATTEMPT)


def _value(connection: HTTPConnection, kind: str) -> str | None:
    wanted = _name(connection, kind) + "="
    found = [
        part.strip().removeprefix(wanted)
        for header in connection.headers.getlist("cookie")
        for part in header.split(";")
        if part.strip().startswith(wanted)
    ]
    return found[0] if len(found) == 1 else None


def set_session_cookie(response: Response, connection: HTTPConnection, secret: str) -> None:
    """Make the browser keep the secret: out of reach of scripts, and sent with requests of this head's own pages only."""
    _set(response, connection, _SESSION, secret, int(SESSION_LIFETIME_S))


def clear_session_cookie(response: Response, connection: HTTPConnection) -> None:
    """Make the browser drop the secret."""
    _set(response, connection, _SESSION, "", 0)


def set_program_cookie(response: Response, connection: HTTPConnection, value: str) -> None:
    """Make the browser keep the value for the web program whose host name this is."""
    _set(response, connection, _PROGRAM, value, int(SESSION_LIFETIME_S))


def set_attempt_cookie(response: Response, connection: HTTPConnection, value: str) -> None:
    """Make the browser keep the value of its attempt, as above."""
    _set(response, connection, _ATTEMPT, value, int(ATTEMPT_LIFETIME_S))


def clear_attempt_cookie(response: Response, connection: HTTPConnection) -> None:
    """Make the browser drop it."""
    _set(response, connection, _ATTEMPT, "", 0)


def _set(response: Response, connection: HTTPConnection, kind: str, value: str, lifetime_s: int) -> None:
    response.set_cookie(
        _name(connection, kind),
        value,
        max_age=lifetime_s,
        path="/",
        secure=_encrypted(connection),
        httponly=True,
        samesite="strict",
    )


def _encrypted(connection: HTTPConnection) -> bool:
    return connection.scope["scheme"] in _TLS


def _prefix(connection: HTTPConnection) -> str:
    return "__Host-" if _encrypted(connection) else ""


def _name(connection: HTTPConnection, kind: str) -> str:
    """Return the cookie's name, with the port that the browser uses."""
    encrypted = _encrypted(connection)
    port = connection.headers.get("host", "").rpartition(":")[2]
    return f"{_prefix(connection)}phalanx-{kind}-{port if port.isdecimal() else 443 if encrypted else 80}"
