"""The head's address, and where to search if it does not answer: after a restart on another port, or when another head leads.

Shared by all connections of a supervisor. The first connection that finds a head silent or in standby moves all of them, and requests that
still wait there are cut: a poll of half a minute must not outlive the leader that it was sent to.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.durable_files import replace_file
from phalanx.wire.head_url import is_loopback, split_url

_SHUN_S: Final = 3.0  # ignore a standby's referral to a head that was just silent: the standby may not know yet
_HEADS_MAX: Final = 16  # known at once; a handful is usual


class HeadAddress:
    """The current address, out of those of all known heads.

    Args:
        urls: initial addresses, separated by commas.
        head_file: a JSON file with "url" and "heads" that the head of this machine writes; None without one.
        memory: a file of ours that stores the learned addresses; None stores them in memory only.
    """

    def __init__(self, urls: str, head_file: str | None, memory: str | None = None) -> None:
        self._lock = threading.Lock()
        self._file, self._memory = head_file, memory
        self._initial = [url.strip() for url in urls.split(",") if url.strip()]
        self._learned: list[str] = []  # from leaders
        self._in_file: list[str] = []  # from the head's file, when it was last read
        self._silent: dict[str, float] = {}  # url -> when it did not answer, monotonic clock
        self._movers: list[weakref.WeakMethod[Callable[[], None]]] = []
        if memory is not None:
            self._add(_read(memory))
        self._in_file = self._reread()
        self._url = next(iter(self._ring()), "")

    @property
    def url(self) -> str:
        """The current address."""
        with self._lock:
            return self._url

    def on_change(self, mover: Callable[[], None]) -> None:
        """Call this bound method, as long as its object lives, whenever the address changes."""
        self._movers = [known for known in self._movers if known() is not None]
        self._movers.append(weakref.WeakMethod(mover))

    def switch_head(self, failed: str | None = None) -> None:
        """No answer from `failed` (None: from the current address): switch to another known address, or to the one in the head's file."""
        with self._lock:
            before = self._url
            if failed is not None and failed != before:
                return  # another connection has switched already
            self._silent[before] = time.monotonic()
            fresh = self._reread()
            elsewhere = fresh[:1] != self._in_file[:1]  # the head of this machine restarted on another port
            self._in_file = fresh
            self._url = fresh[0] if elsewhere else self._next(before)
        self._moved(before)

    def follow_referral(self, asked: str, leader: str) -> None:
        """The head at `asked` is in standby and names `leader` as leader; empty if it knows none."""
        with self._lock:
            before = self._url
            if asked != before:
                return
            shunned = time.monotonic() - self._silent.get(leader, -_SHUN_S) < _SHUN_S
            if leader and leader != asked and not shunned and _is_acceptable(leader):
                self._add([leader])
                self._url = leader
            else:
                self._url = self._next(before)
        self._moved(before)

    def add_heads(self, urls: Iterable[str]) -> None:
        """Add addresses of heads, as reported by the leader."""
        with self._lock:
            if not self._add(urls) or self._memory is None:
                return
            known = list(self._learned)
        with contextlib.suppress(OSError):  # only a restarted supervisor needs the file
            replace_file("", self._memory, json.dumps({"heads": known}).encode())

    def _ring(self) -> list[str]:
        """All addresses, in search order. The head's file takes precedence over the initial addresses."""
        return list(dict.fromkeys([*(self._in_file or self._initial), *self._learned]))

    def _next(self, after: str) -> str:
        """The address after this one in the search order; the first if this one is no longer in it."""
        ring = self._ring()
        if not ring:
            return after
        return ring[(ring.index(after) + 1) % len(ring)] if after in ring else ring[0]

    def _reread(self) -> list[str]:
        found = [] if self._file is None else _read(self._file)
        return found or self._in_file

    def _add(self, urls: Iterable[str]) -> bool:
        """Add addresses; True if one of them is new."""
        new = [url for url in urls if url and url not in self._learned and _is_acceptable(url)]
        self._learned = [*self._learned, *new][-_HEADS_MAX:]
        return bool(new)

    def _moved(self, before: str) -> None:
        if self.url != before:
            for known in list(self._movers):
                mover = known()
                if mover is not None:
                    mover()


def _is_acceptable(url: str) -> bool:
    """Whether to follow an address received from elsewhere: plain HTTP only on this machine, where the peer can be checked."""
    try:
        secure, host, _ = split_url(url)
    except BadRequest:
        return False
    return secure or is_loopback(host)


def _read(path: str) -> list[str]:
    """The addresses in a head's file or ours; none if it is missing or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        urls = [found.get("url"), *(found.get("heads") or [])]
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    return list(dict.fromkeys(url for url in urls if isinstance(url, str) and url))
