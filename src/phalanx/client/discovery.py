"""Where the head is and with which token: from the environment, else from the state folder of this user."""

from __future__ import annotations

import json
import os

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
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        url, pid = record["url"], int(record["pid"])
    except FileNotFoundError as error:
        raise Unreachable(f"no head is running ({path} is not there)", hint=_UP) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{path} does not say where the head is: {error}", hint=_UP) from error
    if not _alive(pid):
        raise Unreachable(f"the head (process {pid}) has died", hint="phalanx up brings it back; running jobs go on")
    return str(url).rstrip("/")


def find_token(home: str | None = None) -> str:
    """The caller's token.

    Raises:
        NotSignedIn: none is known.
    """
    token = os.environ.get("PHALANX_TOKEN", "")
    if token and home is None:
        return token.strip()
    path = os.path.join(state_folder(home), "token")
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotSignedIn(f"no token: {path}: {error}", hint="phalanx up makes it, or set PHALANX_TOKEN") from error
    if not token:
        raise NotSignedIn(f"{path} is empty", hint="set PHALANX_TOKEN")
    return token


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


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
