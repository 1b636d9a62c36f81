"""What a dialect of a cloud is, and its calls and answers; `dialect_server` serves one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.clouds.cloud_faults import CloudFaults


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectCall:
    """A request. `path`: decoded, without the query; `headers`: names in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    base: str


@dataclass(frozen=True, slots=True)
class DialectAnswer:
    """An answer in JSON; bytes are text."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


class Dialect(Protocol):
    """How one cloud answers."""

    faults: CloudFaults

    def name_of(self, call: DialectCall) -> tuple[str, bool, bool]:
        """Return what the call is, whether it changes something, and whether no fault hits it."""
        ...

    def answer(self, call: DialectCall) -> DialectAnswer:
        """Carry out the call."""
        ...

    def throttled(self) -> DialectAnswer:
        """Answer a call that is refused for its rate."""
        ...

    def leftovers(self) -> list[str]:
        """Names of what costs money beside machines, such as disks without one."""
        ...
