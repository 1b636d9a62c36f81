"""Where a database is and how it is said: the password is for libpq alone, never for a message, a log or an argument."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from phalanx.core.errors import BadRequest

CONNECT_TIMEOUT_S: Final = 3  # a leader has to be replaced within 5 s; libpq takes no less than 2
# A cut cable is noticed within 4 s: unanswered bytes by the user timeout, an idle connection by keepalives (2 s, then 2 probes).
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
_CREDENTIALS: Final = re.compile(r"(//[^/:@]*):.*@")  # greedy: a password may hold an @ of its own


@dataclass(frozen=True, slots=True)
class Address:
    """One database.

    Attributes:
        conninfo: all of it, for libpq.
        shown: who and where, without secrets.
        secrets: what must not be seen.
    """

    conninfo: str = field(repr=False)
    shown: str
    secrets: tuple[str, ...] = field(repr=False, default=())

    @classmethod
    def parse(cls, text: str, *, session: str = "") -> Address:
        """An address from a URL or from libpq's `key=value` words; what is not said comes from libpq's environment (PGHOST, PGPASSFILE ...).

        Args:
            text: as the user wrote it.
            session: by what name the server shall list the connection; as the address says, if empty.

        Raises:
            BadRequest: it is neither.
        """
        try:
            said = {name: str(value) for name, value in conninfo_to_dict(text.strip()).items() if value is not None}
            named = {"application_name": session} if session else {}
            conninfo = make_conninfo("", **{**DEFAULTS, **said, **named})
        except psycopg.Error:  # libpq quotes what it was given, the password with it
            raise BadRequest(
                f"{without_password(text)!r} is no address of a PostgreSQL database", hint=f"as in {FORM}"
            ) from None
        secrets = tuple(said[name] for name in SECRETS if said.get(name))
        who, where = said.get("user"), said.get("host") or said.get("hostaddr") or "this machine"
        shown = f"{who + '@' if who else ''}{where}{':' + said['port'] if 'port' in said else ''}/{said.get('dbname', who or '')}"
        return cls(conninfo=conninfo, shown=shown, secrets=secrets)

    def scrub(self, text: str) -> str:
        """A text in one line and without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def without_password(text: str) -> str:
    """An address as it may be shown, whether it can be read or not."""
    text = _CREDENTIALS.sub(r"\1:***@", text.strip())
    return re.sub(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)", r"\1***", text, flags=re.IGNORECASE)


def has_password(text: str) -> bool:
    """Whether an address holds a secret, and so must not stand on a command line."""
    return without_password(text) != text.strip()
