"""Addresses of databases. The password is passed only to libpq, never to a message, a log or an argument."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from phalanx.core.errors import BadRequest

CONNECT_TIMEOUT_S: Final = 3  # a leader must be replaced within 5 s; libpq's minimum is 2
# A broken network is detected within 4 s: unanswered bytes by the user timeout, an idle connection by keepalives (2 s, then 2 probes).
DEFAULTS: Final[dict[str, str | int]] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "application_name": "phalanx",
    "client_encoding": "UTF8",
    "target_session_attrs": "read-write",
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "tcp_user_timeout": 4000,
}
SECRETS: Final = ("password", "sslpassword")
FORM: Final = "postgresql://USER@HOST:5432/DATABASE"
_CREDENTIALS: Final = re.compile(r"(//[^/:@]*):.*@")  # greedy: a password may contain an @


@dataclass(frozen=True, slots=True)
class Address:
    """One database.

    Attributes:
        conninfo: the complete address, for libpq.
        shown: user, host and database, without secrets.
        secrets: values that must not be shown.
    """

    conninfo: str = field(repr=False)
    shown: str
    secrets: tuple[str, ...] = field(repr=False, default=())

    @classmethod
    def parse(cls, text: str, *, session: str = "") -> Address:
        """Parse a URL or libpq's `key=value` words; missing values come from libpq's environment (PGHOST, PGPASSFILE ...).

        Args:
            text: as the user wrote it.
            session: application name of the connection on the server; if empty, the one in the address.

        Raises:
            BadRequest: it is neither.
        """
        try:
            given = {name: str(value) for name, value in conninfo_to_dict(text.strip()).items() if value is not None}
            named = {"application_name": session} if session else {}
            conninfo = make_conninfo("", **{**DEFAULTS, **given, **named})
        except psycopg.Error:  # libpq's message quotes the address with its password
            raise BadRequest(
                f"{without_password(text)!r} is not the address of a PostgreSQL database", hint=f"write {FORM}"
            ) from None
        secrets = tuple(given[name] for name in SECRETS if given.get(name))
        user, host = given.get("user"), given.get("host") or given.get("hostaddr") or "this machine"
        port = f":{given['port']}" if "port" in given else ""
        shown = f"{user + '@' if user else ''}{host}{port}/{given.get('dbname', user or '')}"
        return cls(conninfo=conninfo, shown=shown, secrets=secrets)

    def scrub(self, text: str) -> str:
        """The text in one line and without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def without_password(text: str) -> str:
    """The address without its password, whether valid or not."""
    text = _CREDENTIALS.sub(r"\1:***@", text.strip())
    return re.sub(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)", r"\1***", text, flags=re.IGNORECASE)


def has_password(text: str) -> bool:
    """Whether the address contains a secret, and must not appear on a command line."""
    return without_password(text) != text.strip()
