"""Where the head is, and where to look when it is not there: it came back on another port, or another head of several leads.

Shared by all connections of a supervisor. Whoever finds a head silent or standing by moves all on, and what still waits there is cut:
a poll of half a minute must not outlive the leader that it was sent to.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

_SHUN_S: Final = 3.0  # a head that was silent is not gone back to on a standby's word alone: that one may not know yet
_HEADS_MAX: Final = 16  # known at once; a handful is usual


class HeadAddress:
    """The newest address known, among those of all heads.

    Args:
        urls: where the head was at the start; several with commas.
        head_file: a JSON file with "url" and "heads" that the head of this machine writes; None without one.
        memory: a file of our own for the heads that we were told of; None keeps them in memory alone.
    """

    def __init__(self, urls: str, head_file: str | None, memory: str | None = None) -> None:
        self._lock = threading.Lock()
        self._file, self._memory = head_file, memory
        self._begun = [url.strip() for url in urls.split(",") if url.strip()]
        self._told: list[str] = []  # by leaders
        self._said: list[str] = []  # in the head's file, when it was read last
        self._silent: dict[str, float] = {}  # url -> when it was found silent, on the monotonic clock
        self._movers: list[weakref.WeakMethod[Callable[[], None]]] = []
        if memory is not None:
            self._add(_read(memory))
        self._said = self._reread()
        self._url = next(iter(self._ring()), "")

    @property
    def url(self) -> str:
        """The newest address known."""
        with self._lock:
            return self._url

    def on_move(self, mover: Callable[[], None]) -> None:
        """Call this bound method, as long as its object lives, whenever the address is another."""
        self._movers = [known for known in self._movers if known() is not None]
        self._movers.append(weakref.WeakMethod(mover))

    def look_again(self, failed: str | None = None) -> None:
        """Nobody answered at `failed` (None: at the present one): another that is known, or what the head's file says now."""
        with self._lock:
            before = self._url
            if failed is not None and failed != before:
                return  # somebody moved on since
            self._silent[before] = time.monotonic()
            fresh = self._reread()
            elsewhere = fresh[:1] != self._said[:1]  # the head of this machine came back on another port
            self._said = fresh
            self._url = fresh[0] if elsewhere else self._next(before)
        self._moved(before)

    def refer(self, asked: str, leader: str) -> None:
        """The head at `asked` stands by, and says that `leader` leads; empty where it knows of none."""
        with self._lock:
            before = self._url
            if asked != before:
                return
            shunned = time.monotonic() - self._silent.get(leader, -_SHUN_S) < _SHUN_S
            if leader and leader != asked and not shunned and _may_be_told(leader):
                self._add([leader])
                self._url = leader
            else:
                self._url = self._next(before)
        self._moved(before)

    def learn(self, urls: Iterable[str]) -> None:
        """Where heads are, in the leader's words."""
        with self._lock:
            if not self._add(urls) or self._memory is None:
                return
            known = list(self._told)
        with contextlib.suppress(OSError):  # it helps a supervisor that starts anew; this one knows
            with open(f"{self._memory}.new", "w", encoding="utf-8") as file:
                json.dump({"heads": known}, file)
            os.replace(f"{self._memory}.new", self._memory)

    def _ring(self) -> list[str]:
        """Where to look, in turn. Where the head's file speaks, it knows better than what we began with."""
        return list(dict.fromkeys([*(self._said or self._begun), *self._told]))

    def _next(self, after: str) -> str:
        """The one after this in the ring; the first where this is in it no more."""
        ring = self._ring()
        if not ring:
            return after
        return ring[(ring.index(after) + 1) % len(ring)] if after in ring else ring[0]

    def _reread(self) -> list[str]:
        found = [] if self._file is None else _read(self._file)
        return found or self._said

    def _add(self, urls: Iterable[str]) -> bool:
        """Whether there was one that is not known yet."""
        new = [url for url in urls if url and url not in self._told and _may_be_told(url)]
        self._told = [*self._told, *new][-_HEADS_MAX:]
        return bool(new)

    def _moved(self, before: str) -> None:
        if self.url != before:
            for known in list(self._movers):
                mover = known()
                if mover is not None:
                    mover()


def _may_be_told(url: str) -> bool:
    """Whether we would go there on somebody's word: to plain HTTP within this machine alone, where it is seen who answers."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname != "localhost":
            return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
    return parts.scheme in ("http", "https")


def _read(path: str) -> list[str]:
    """The addresses in a head's file or our own; a missing or torn one has none."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        urls = [found.get("url"), *(found.get("heads") or [])]
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    return list(dict.fromkeys(url for url in urls if isinstance(url, str) and url))
