"""Finds the URL of the head and the token: of the cluster that is chosen by name, else from the environment, else of the current cluster,
else from this user's state folder.
"""

from __future__ import annotations

import os
from typing import Any, Final

from phalanx.client.connection.clusters import CLUSTER_VARIABLE, chosen_cluster
from phalanx.client.input_files import read_small_json, read_small_text
from phalanx.core.errors import NotSignedIn, Unreachable
from phalanx.core.hints import Hint, HintCode
from phalanx.wire.head_url import split_url, split_urls

SYSTEM_HEAD_FOLDER: Final = "/var/lib/phalanx"  # of the head that runs as a system service
SYSTEM_NODE_FOLDER: Final = "/var/lib/phalanx-node"  # of the node that runs as a system service
_UP = Hint(HintCode.START_HEAD)


def state_folder(home: str | None = None) -> str:
    """Return the state folder: `home`, else PHALANX_HOME, else ~/.phalanx.

    For root without a ~/.phalanx: that of the head that is a system service here, else that of such a node.
    """
    chosen = home or os.environ.get("PHALANX_HOME")
    own = os.path.expanduser("~/.phalanx")
    if not chosen and os.geteuid() == 0 and not os.path.exists(own):
        marks = ((SYSTEM_HEAD_FOLDER, "cluster.json"), (SYSTEM_NODE_FOLDER, "joined/joined.json"))
        chosen = next((folder for folder, mark in marks if os.path.exists(os.path.join(folder, mark))), None)
    return os.path.abspath(chosen or own)


def find_urls(home: str | None = None) -> list[str]:
    """Return the URLs of the heads to try, in order: those of the cluster that PHALANX_CLUSTER names, else of PHALANX_URL (separated by
    commas), else of the current cluster, else those that this folder's head wrote, else those of the head that this server has joined.

    Raises:
        Unreachable: no head is known, or the head of this folder has died and recorded no other.
        NotFound: no such cluster is saved.
    """
    url = os.environ.get("PHALANX_URL", "")
    cluster = chosen_cluster() if home is None else None
    if cluster is not None:
        return split_urls(cluster.url)
    if url and home is None:
        return split_urls(url)
    path = os.path.join(state_folder(home), "head.json")
    try:
        record = read_small_json(path)
        url, pid, others = record["url"], int(record["pid"]), _others(record)
    except FileNotFoundError as error:
        held = lock_holder(state_folder(home))
        if held is not None:
            return [held[0]]
        if joined := membership_urls(home):
            return joined
        raise Unreachable(f"no head is running ({path} does not exist)", hint=_UP) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise Unreachable(f"{path} does not contain the URL of a head: {error}", hint=_UP) from error
    if _alive(pid):
        return [str(url).rstrip("/"), *others]
    if others:
        return others
    if joined := membership_urls(home):
        return joined
    raise Unreachable(f"the head (process {pid}) has died", hint=Hint(HintCode.RESTART_HEAD))


def membership_urls(home: str | None) -> list[str]:
    """Return the URLs of the heads that this server knows: those that `phalanx join` wrote, then those that its supervisor learned since.

    None if it is no member.
    """
    folder = f"{state_folder(home)}/joined"
    joined = _heads_in(f"{folder}/heads.json")
    if not joined:
        return []
    import glob

    learned = [
        url for path in sorted(glob.glob(f"{glob.escape(folder)}/nodes/*/heads.json")) for url in _heads_in(path)
    ]
    return list(dict.fromkeys([*joined, *learned]))


def _heads_in(path: str) -> list[str]:
    """Return the URLs in a file of heads; none if it is missing or damaged."""
    try:
        record = read_small_json(path)
        urls = [record.get("url"), *(record.get("heads") or [])]
    except (OSError, ValueError, TypeError, AttributeError):
        return []
    return [url.rstrip("/") for url in urls if isinstance(url, str) and url]


def own_ca_file(home: str | None, url: str) -> str | None:
    """Return the CA file of the state folder if `url` is its head or one of that head's peers, or the head that it joined; else None."""
    folder = state_folder(home)
    if url.rstrip("/") in membership_urls(home):
        return f"{folder}/joined/ca.pem"
    path = os.path.join(folder, "tls", "ca.pem")
    return path if _is_own_head(url, folder) and os.path.exists(path) else None


def lock_holder(folder: str) -> tuple[str, int] | None:
    """Return (URL, pid) of the head that holds this folder's lock, as written in the lock file; None if no live head holds it.

    The lock is tried only while the process named in it is alive, so that it is never held while a head is starting.
    """
    import fcntl

    path = os.path.join(folder, "head.lock")
    try:
        record = read_small_json(path)
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
    """Return the caller's token for the head at `url`, or for the first one of `find_urls`.

    The token in the state folder is an admin token of the head that runs there. It is never sent to another head.

    Raises:
        NotSignedIn: no token is known for this head.
    """
    cluster = chosen_cluster() if home is None else None
    token = os.environ.get("PHALANX_TOKEN") if home is None and not os.environ.get(CLUSTER_VARIABLE) else None
    if token is not None:
        return _checked_token(token.strip(), "PHALANX_TOKEN")
    if cluster is not None:
        if not cluster.token:
            raise NotSignedIn(
                f"no token for the cluster {cluster.name}", hint=Hint(HintCode.LOGIN, cluster=cluster.name)
            )
        return _checked_token(cluster.token, f"the saved cluster {cluster.name}")
    if url and url.rstrip("/") in membership_urls(home) and not _is_own_head(url, state_folder(home)):
        raise NotSignedIn(
            f"this server is a node of the head at {url}, and commands here need a token of yours",
            hint=Hint(HintCode.TAKE_TOKEN),
        )
    target = url or (split_urls(os.environ.get("PHALANX_URL", ""))[0] if home is None else "")
    if target and not _is_own_head(target, state_folder(home)):
        raise NotSignedIn(
            f"no token for {target}: PHALANX_TOKEN is not set",
            hint=f"set PHALANX_TOKEN; the token in {state_folder(home)} is only for the head that runs there",
        )
    path = os.path.join(state_folder(home), "token")
    try:
        token = read_small_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotSignedIn(f"no token: {path}: {error}", hint=Hint(HintCode.CREATE_TOKEN_FILE)) from error
    return _checked_token(token, path)


def _checked_token(token: str, where: str) -> str:
    """Return the token if it is well-formed.

    Raises:
        NotSignedIn: the token is empty, or not valid in an HTTP header.
    """
    if not token:
        raise NotSignedIn(f"{where} is empty", hint="set PHALANX_TOKEN to a token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise NotSignedIn(f"{where} does not contain a token", hint="a token is one word of ASCII letters and digits")
    return token


def _is_own_head(url: str, folder: str) -> bool:
    """Return whether `url` is the current or last address of this folder's head, or the address of one of its peers."""
    try:
        record = read_small_json(os.path.join(folder, "head.json"))
        known = [str(record["url"]), str(record.get("listen") or ""), *_others(record)]
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        held = lock_holder(folder)
        known = [] if held is None else [held[0]]
    wanted = split_url(url.rstrip("/"))
    return any(split_url(one.rstrip("/")) == wanted for one in known if one)


def _others(record: dict[str, Any]) -> list[str]:
    """Return the URLs of the peer heads in `record`, without the head that wrote it."""
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
