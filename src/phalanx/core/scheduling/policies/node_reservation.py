"""The nodes that are kept free of new work for an urgent gang that does not fit yet."""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.needs import Need


class ReservedNodes:
    """The nodes kept free for one gang at a time.

    Attributes:
        entry: the gang; None if no nodes are kept.
    """

    __slots__ = ("_nodes", "board", "entry")

    def __init__(self, board: Board) -> None:
        self.board = board
        self.entry: JobEntry | None = None
        self._nodes: list[int] = []

    def reserve(self, entry: JobEntry) -> None:
        """Keep nodes for the gang, if there are enough whose jobs may be stopped."""
        self._nodes = _nodes_to_reserve(self.board, entry)
        self.entry = entry if self._nodes else None
        self.close()

    def release(self) -> None:
        """Keep none."""
        self.open()
        self._nodes = []
        self.entry = None

    def open(self) -> None:
        """Let searches find the nodes, until `close`."""
        for node in self._nodes:
            if node not in self.board.closed_nodes:
                self.board.pools[self.board.pool_of_node[node]].restore_node(node)

    def close(self) -> None:
        """Hide the nodes from searches."""
        for node in self._nodes:
            self.board.pools[self.board.pool_of_node[node]].remove_node(node)


def _nodes_to_reserve(board: Board, entry: JobEntry) -> list[int]:
    """Return the nodes whose jobs may be stopped the soonest: within the guaranteed run they become free for the gang. Empty if they are too few.

    Not nodes of jobs that are never stopped, such as replicas of services: they may never become free, and would idle.
    """
    found: list[int] = []
    for need in entry.job_class.needs[0].roles:
        nodes = _soonest_free(board, entry, need, excluded=board.nodes_of((node, 0) for node in found))
        if len(nodes) < need.parts:
            return []
        found += nodes[: need.parts]
    return found


def _soonest_free(board: Board, entry: JobEntry, need: Need, excluded: int) -> list[int]:
    """The nodes for the need whose jobs may be stopped, the soonest first."""
    ready: list[tuple[float, int]] = []
    for node, entries in enumerate(board.jobs_on_node):
        fits = (
            board.pool_of_node[node] in need.kinds
            and board.devices_of_node[node] >= need.devices
            and not (entry.job_class.excluded | need.excluded | excluded) >> node & 1
        )
        if (
            fits
            and node not in board.pools[board.pool_of_node[node]].removed_nodes
            and not any(other.overdue or other.never_stopped for other in entries)
        ):
            ready.append((max((other.protected_until_s for other in entries), default=0.0), node))
    return [node for _, node in sorted(ready)]
