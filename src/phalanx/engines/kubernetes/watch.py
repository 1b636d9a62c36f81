"""Follows one kind of objects: list, then watch from that version; again from the last version after every break, and a new list when that is too old.

The server's own end of a watch, a silent connection and a lost event all end in the same way: the next watch, or the next list, brings
what was missed. So a handler needs no other way to notice it.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from phalanx.core.errors import PhalanxError
from phalanx.engines.kubernetes.errors import KubernetesError, error_of_event
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath

WATCH_S: Final = 120.0  # the server ends a watch after this time, between once and twice it
SILENCE_S: Final = 15.0  # beyond that time without a byte, the connection is dead
PAUSE_MIN_S: Final = 0.2
PAUSE_MAX_S: Final = 10.0
QUIET_PAUSE_MAX_S: Final = 1.0  # between two watches that brought nothing
LINE_MAX: Final = 16 << 20  # the server's own limit for an object is 1.5 MiB
_log = logging.getLogger("phalanx.engines.kubernetes")


class WatchHandler(Protocol):
    """What `ObjectWatch` calls, in its thread."""

    def replaced(self, items: list[dict[str, Any]]) -> None:
        """Handle a complete list: objects that it lacks are gone."""
        ...

    def changed(self, item: dict[str, Any]) -> None:
        """Handle a new or changed object. The same one may come twice."""
        ...

    def deleted(self, item: dict[str, Any]) -> None:
        """Handle the end of an object, with its last state."""
        ...

    def answered(self) -> None:
        """Handle that the server has accepted a watch; called for each."""
        ...

    def failed(self, error: PhalanxError) -> None:
        """Handle that the server cannot be followed; called once for each try."""
        ...


@dataclass(slots=True, kw_only=True)
class ObjectWatch:
    """Follows the objects in a thread of the caller, by `run`, until `close`.

    Args:
        api: of the cluster.
        path: the kind.
        handler: gets the objects.
        labels: selector.
        watch_s, silence_s: see the constants.
        shrink: makes the record of an object that the list keeps until it is complete.
    """

    api: KubernetesApi
    path: ResourcePath
    handler: WatchHandler
    labels: str = ""
    watch_s: float = WATCH_S
    silence_s: float = SILENCE_S
    shrink: Callable[[dict[str, Any]], dict[str, Any]] = lambda item: item
    random: random.Random = field(default_factory=random.Random)
    _ended: threading.Event = field(default_factory=threading.Event)
    _connection: http.client.HTTPConnection | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Follow until `close` is called."""
        version, pause_s = "", PAUSE_MIN_S
        while not self._ended.is_set():
            try:
                if not version:
                    version = self._list()
                before, version = version, self._watch(version)
                if version != before:
                    pause_s = PAUSE_MIN_S
                    continue
                # The server, or a proxy before it, may end every watch at once.
                self._ended.wait(pause_s * self.random.uniform(0.5, 1.0))
                pause_s = min(2.0 * pause_s, QUIET_PAUSE_MAX_S)
            except KubernetesError as error:
                if error.is_expired:  # compacted: what happened since is in a new list only
                    version = ""
                    self._ended.wait(PAUSE_MIN_S)
                    continue
                pause_s = self._rest(error, max(pause_s, error.retry_after_s or 0.0))
            except PhalanxError as error:
                pause_s = self._rest(error, pause_s)

    def close(self) -> None:
        """End `run`, also while it waits for the server. A second call does nothing."""
        self._ended.set()
        with self._lock:
            if self._connection is not None and self._connection.sock is not None:
                try:
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is closed already

    def _rest(self, error: PhalanxError, pause_s: float) -> float:
        if not self._ended.is_set():
            self.handler.failed(error)
        # Many heads that lost the same server do not come back at once.
        self._ended.wait(pause_s * self.random.uniform(0.5, 1.0))
        return min(2.0 * pause_s, PAUSE_MAX_S)

    def _list(self) -> str:
        items: list[dict[str, Any]] = []
        version = ""
        for page, listed in self.api.pages(self.path, labels=self.labels):
            items += map(self.shrink, page)
            version = listed
        self.handler.replaced(items)
        return version

    def _watch(self, version: str) -> str:
        """Watch until the server or the connection ends it; return the version of the last event."""
        seconds = self.watch_s * self.random.uniform(1.0, 2.0)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, int(seconds))),
            **({"labelSelector": self.labels} if self.labels else {}),
        }
        connection, answer = self.api.open_watch(self.path.url(query=query), seconds + self.silence_s)
        with self._lock:
            self._connection = connection
        self.handler.answered()
        try:
            while not self._ended.is_set():
                line = answer.readline(LINE_MAX)
                if not line.endswith(b"\n"):
                    return version  # the end, also in the middle of a line
                version = self._handle(line, version)
        except (OSError, http.client.HTTPException, ValueError) as error:
            _log.debug("watch of %s ended: %r", self.path.plural, error)
        finally:
            with self._lock:
                self._connection = None
            connection.close()
        return version

    def _handle(self, line: bytes, version: str) -> str:
        event = json.loads(line)
        item = event.get("object") or {}
        match event.get("type"):
            case "ADDED" | "MODIFIED":
                self.handler.changed(item)
            case "DELETED":
                self.handler.deleted(item)
            case "ERROR":
                raise error_of_event(item)
            case _:
                pass  # BOOKMARK brings a version only
        return str((item.get("metadata") or {}).get("resourceVersion") or version)
