"""What is known of the cluster: pods and nodes, kept up to date by watches. Readers get consistent copies; writers are the watches' threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from phalanx.core.errors import PhalanxError

Record = TypeVar("Record")


@dataclass(slots=True)
class ObjectTable(Generic[Record]):
    """The records of one kind, by key. It handles a watch.

    Args:
        parse: makes the record of an object; the object itself is not kept.
        changed_hook: called after each change, in the watch's thread.
        failed_hook: called with the error when the server cannot be followed; with None when it answers.
    """

    parse: Callable[[dict[str, Any]], Record]
    changed_hook: Callable[[], None]
    failed_hook: Callable[[PhalanxError | None], None]
    listed: bool = False
    _records: dict[str, Record] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def replaced(self, items: list[dict[str, Any]]) -> None:
        """Take over a complete list."""
        records = {_key(item): self.parse(item) for item in items}
        with self._lock:
            self._records = records
            self.listed = True
        self.changed_hook()

    def changed(self, item: dict[str, Any]) -> None:
        """Take over one object."""
        record = self.parse(item)
        with self._lock:
            same = self._records.get(_key(item)) == record
            self._records[_key(item)] = record
        if not same:  # a doubled event, or a change of what is not kept
            self.changed_hook()

    def deleted(self, item: dict[str, Any]) -> None:
        """Drop one object."""
        with self._lock:
            gone = self._records.pop(_key(item), None)
        if gone is not None:
            self.changed_hook()

    def answered(self) -> None:
        """Report that the server is followed."""
        self.failed_hook(None)

    def failed(self, error: PhalanxError) -> None:
        """Report that the server cannot be followed."""
        self.failed_hook(error)

    def current(self) -> Mapping[str, Record]:
        """Return all records by key: `namespace/name`, or the name of what has no namespace."""
        with self._lock:
            return dict(self._records)


def _key(item: Mapping[str, Any]) -> str:
    about = item.get("metadata") or {}
    return f"{about['namespace']}/{about['name']}" if about.get("namespace") else str(about.get("name") or "")
