"""Where the head is and with which token: from the environment, else from the state folder of this user."""

from __future__ import annotations

import json
import os
from typing import Any

from phalanx.core.errors import BadRequest, NotSignedIn, Unreachable

_UP = "phalanx up starts one here; PHALANX_URL and PHALANX_TOKEN name one elsewhere"


def state_folder(home: str | None = None) -> str:
    """The state folder: as given, PHALANX_HOME, or ~/.phalanx."""
    return os.path.abspath(home or os.environ.get("PHALANX_HOME") or os.path.expanduser("~/.phalanx"))


def find_url(home: str | None = None) -> str:
    """The head's URL.

    Raises:
        Unreachable: none is known, or the one that was here has died.
    """
    url = os.environ.get("PHALANX_URL", "")
    if url and home is None:
        return url.rstrip("/")
    path = os.path.join(state_folder(home), "head.json")
    try:
        record = _read(path)
        url, pid = record["url"], int(record["pid"])
    except FileNotFoundError as error:
        held = lock_holder(state_folder(home))
        if held is not None:
            return held[0]
        raise Unreachable(f"no head is running ({path} is not there)", hint=_UP) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{path} does not say where the head is: {error}", hint=_UP) from error
    if not _alive(pid):
        raise Unreachable(f"the head (process {pid}) has died", hint="phalanx up brings it back; running jobs go on")
    return str(url).rstrip("/")


def lock_holder(folder: str) -> tuple[str, int] | None:
    """(URL, pid) of the head that holds this folder's lock, as it wrote them into it; None where no live head does.

    The lock is tried only while the process named in it lives: a head that is just starting must not find it taken by us.
    """
    import fcntl

    path = os.path.join(folder, "head.lock")
    try:
        record = _read(path)
        url, pid = str(record["url"]).rstrip("/"), int(record["pid"])
        if not url or pid <= 0 or not _alive(pid):
            return None
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return url, pid
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def find_token(home: str | None = None, url: str | None = None) -> str:
    """The caller's token for the head at `url`, or for the one that `find_url` finds.

    The state folder's token is an admin's of the head that runs there: no other head is shown it.

    Raises:
        NotSignedIn: none is known for this head.
    """
    given = os.environ.get("PHALANX_TOKEN") if home is None else None
    if given is not None:
        return _sound(given.strip(), "PHALANX_TOKEN")
    asked = url or (os.environ.get("PHALANX_URL", "") if home is None else "")
    if asked and not _same_head(asked, _local_url(state_folder(home))):
        raise NotSignedIn(
            f"no token for {asked}: PHALANX_TOKEN is not set",
            hint=f"set PHALANX_TOKEN; the token in {state_folder(home)} is only for the head that runs there",
        )
    path = os.path.join(state_folder(home), "token")
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotSignedIn(f"no token: {path}: {error}", hint="phalanx up makes it, or set PHALANX_TOKEN") from error
    return _sound(token, path)


def split_url(url: str) -> tuple[bool, str, int]:
    """(with TLS, name, port) of a head's URL.

    Raises:
        BadRequest: it is no http(s) URL of a head.
    """
    scheme, colon, rest = url.partition("://")
    name, slash, path = rest.partition("/")
    host, colon_port, port = name.rpartition(":") if not name.endswith("]") else (name, "", "")
    if not colon_port:
        host, port = name, "443" if scheme == "https" else "7600"
    if scheme not in ("http", "https") or not colon or not host or not port.isdecimal() or (slash and path):
        raise BadRequest(f"{url!r} is not the URL of a head", hint="http://127.0.0.1:7600, for example")
    return scheme == "https", host.strip("[]"), int(port)


def _sound(token: str, where: str) -> str:
    """The token, if it can be one.

    Raises:
        NotSignedIn: it is empty, or no header can carry it.
    """
    if not token:
        raise NotSignedIn(f"{where} is empty", hint="set PHALANX_TOKEN to a token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise NotSignedIn(f"{where} holds no token", hint="a token is one word of ASCII letters and digits")
    return token


def _local_url(folder: str) -> str:
    """Where the head of this folder is or last was; "" where none ever was."""
    try:
        return str(_read(os.path.join(folder, "head.json"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        held = lock_holder(folder)
        return "" if held is None else held[0]


def _same_head(url: str, local: str) -> bool:
    return bool(local) and split_url(url.rstrip("/")) == split_url(local.rstrip("/"))


def _read(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    return record


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
