"""Where the head is and with which token: from the environment, else from the state folder of this user."""

from __future__ import annotations

import os
from typing import Any

from phalanx.client.given import small_json, small_text
from phalanx.core.errors import BadRequest, NotSignedIn, Unreachable

_UP = "phalanx up starts one here; PHALANX_URL and PHALANX_TOKEN name one elsewhere"


def state_folder(home: str | None = None) -> str:
    """The state folder: as given, PHALANX_HOME, or ~/.phalanx."""
    return os.path.abspath(home or os.environ.get("PHALANX_HOME") or os.path.expanduser("~/.phalanx"))


def find_url(home: str | None = None) -> str:
    """The head's URL; of several heads the nearest.

    Raises:
        Unreachable: none is known, or the one that was here has died.
    """
    return find_urls(home)[0]


def find_urls(home: str | None = None) -> list[str]:
    """Where to look for a head, in this order: PHALANX_URL, which may name several with commas, else what this folder's head wrote.

    Raises:
        Unreachable: none is known, or the one that was here has died and knew of no other.
    """
    url = os.environ.get("PHALANX_URL", "")
    if url and home is None:
        return split_urls(url)
    path = os.path.join(state_folder(home), "head.json")
    try:
        record = small_json(path)
        url, pid, others = record["url"], int(record["pid"]), _others(record)
    except FileNotFoundError as error:
        held = lock_holder(state_folder(home))
        if held is not None:
            return [held[0]]
        raise Unreachable(f"no head is running ({path} is not there)", hint=_UP) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise Unreachable(f"{path} does not say where the head is: {error}", hint=_UP) from error
    if _alive(pid):
        return [str(url).rstrip("/"), *others]
    if others:
        return others
    raise Unreachable(f"the head (process {pid}) has died", hint="phalanx up brings it back; running jobs go on")


def split_urls(text: str) -> list[str]:
    """The URLs in a list with commas, each once."""
    return list(dict.fromkeys(url for word in text.split(",") if (url := word.strip().rstrip("/")))) or [text]


def authority(home: str | None, url: str) -> str | None:
    """The CA's file in the state folder, for the heads that its own one stands among; None for any other."""
    folder = state_folder(home)
    path = os.path.join(folder, "tls", "ca.pem")
    return path if _ours(url, folder) and os.path.exists(path) else None


def lock_holder(folder: str) -> tuple[str, int] | None:
    """(URL, pid) of the head that holds this folder's lock, as it wrote them into it; None where no live head does.

    The lock is tried only while the process named in it lives: a head that is just starting must not find it taken by us.
    """
    import fcntl

    path = os.path.join(folder, "head.lock")
    try:
        record = small_json(path)
        url, pid = str(record["url"]).rstrip("/"), int(record["pid"])
        if not url or pid <= 0 or not _alive(pid):
            return None
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return url, pid
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
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
    asked = url or (split_urls(os.environ.get("PHALANX_URL", ""))[0] if home is None else "")
    if asked and not _ours(asked, state_folder(home)):
        raise NotSignedIn(
            f"no token for {asked}: PHALANX_TOKEN is not set",
            hint=f"set PHALANX_TOKEN; the token in {state_folder(home)} is only for the head that runs there",
        )
    path = os.path.join(state_folder(home), "token")
    try:
        token = small_text(path).strip()
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


def _ours(url: str, folder: str) -> bool:
    """Whether this folder's head is, or last was, at this URL, or stands among others of which one is there."""
    try:
        record = small_json(os.path.join(folder, "head.json"))
        known = [str(record["url"]), str(record.get("listen") or ""), *_others(record)]
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        held = lock_holder(folder)
        known = [] if held is None else [held[0]]
    wanted = split_url(url.rstrip("/"))
    return any(split_url(one.rstrip("/")) == wanted for one in known if one)


def _others(record: dict[str, Any]) -> list[str]:
    """The heads among which the one that wrote this stands, itself left out."""
    heads = [str(url).rstrip("/") for url in record.get("heads") or []]
    return [url for url in heads if url not in (str(record["url"]).rstrip("/"), str(record.get("listen") or ""))]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
