"""What `nodes test` found out about one node, and the tests before: the history that the head stores for each node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.ids import NodeId, UserId

TESTS_MAX: Final = 20  # of one node; about 1 KB each


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRate:
    """One measured rate in FLOP/s or bytes/s, and what it was compared with.

    Attributes:
        what: "matmul bf16", "memory", "all-reduce within", "link".
        table: the figure of the facts table for this model; None if it has none.
        median: of the nodes of this kind; None if fewer were measured than a median needs.
        why: why it fails; empty if it passes or was not compared.
    """

    what: str
    value: float
    table: float | None = None
    median: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTest:
    """One test of a node. `threshold`: the share below the median that fails; `peers`: nodes in the median, itself included."""

    at_s: float
    by: UserId
    job: str
    gpu: str
    devices: int
    threshold: float
    peers: int
    rates: tuple[NodeRate, ...]

    @property
    def why(self) -> str:
        """Why the node fails; empty if it passes."""
        return "; ".join(rate.why for rate in self.rates if rate.why)

    @property
    def compared(self) -> bool:
        """Whether any rate had something to be compared with."""
        return any(rate.table is not None or rate.median is not None for rate in self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTestHistory:
    """The tests of one node, oldest first."""

    id: NodeId
    tests: tuple[NodeTest, ...] = ()

    def add(self, test: NodeTest) -> NodeTestHistory:
        """Add a test; the oldest beyond TESTS_MAX are dropped. Idempotent by job."""
        kept = tuple(one for one in self.tests if one.job != test.job)
        return replace(self, tests=(*kept, test)[-TESTS_MAX:])
