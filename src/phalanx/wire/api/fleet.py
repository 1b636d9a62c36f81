"""Records of the fleet by columns: small enough to send the state of every GPU at once."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import JobId, NodeId


class FleetFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The state of every GPU. Item `i` of each list is about node `i`.

    Attributes:
        nodes: by place, then by id. `places`: the path of each in the topology, as "leaf l1, rack r3"; empty without labels.
        states: "up", "down", "cordoned" or "draining".
        cells: one letter for each GPU, by index (cell_states).
        jobs: the job of each GPU, empty for none; of several that share it, the first. One item stands for all GPUs, none for no job.
        counts: number of jobs that run and that wait, by state.
    """

    now_s: float
    nodes: list[NodeId]
    places: list[str]
    states: list[str]
    cells: list[str]
    jobs: list[list[JobId]]
    counts: dict[str, int]

    @property
    def sizes(self) -> list[int]:
        """The number of GPUs of each node."""
        return [len(letters) for letters in self.cells]


class FleetDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What changed since the frame or delta before.

    Attributes:
        nodes: (number of the node, state, cells, jobs) as in a frame.
        changed: jobs that changed, at most 200; `changed_more`: others changed too.
    """

    now_s: float
    nodes: list[tuple[int, str, str, list[JobId]]]
    counts: dict[str, int]
    changed: list[JobId] = []
    changed_more: bool = False
