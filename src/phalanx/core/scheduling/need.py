"""What a job asks of the fleet, reduced to numbers: equal requests are one `Need`, which is looked for, judged and explained once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """A gang of `nodes` parts of `devices` devices each, and `tail` devices on one node more (0 for none).

    Attributes:
        kinds: numbers of the pools it may be in, in order of preference; the whole gang goes into one.
        cpus, memory_bytes: of each part.
        within: topology level (number, outermost 0) whose single domain must hold it; -1 for any.
        required: `within` is a must; else tried first.
        slice_nodes, slice_within: every so many parts, in rank order, inside one domain of that level; 0 and -1 for no slices.
        shut: bitset of nodes whose devices will not do, though they are of the kind.
        nodes_max: elastic: takes up to so many parts; equal to `nodes` for a fixed gang.
    """

    nodes: int
    devices: int
    tail: int = 0
    kinds: tuple[int, ...] = (0,)
    cpus: int = 0
    memory_bytes: int = 0
    within: int = -1
    required: bool = False
    slice_nodes: int = 0
    slice_within: int = -1
    nodes_max: int = 0
    shut: int = 0

    @property
    def gpus(self) -> int:
        """Devices in all, of the smallest gang that will do."""
        return self.nodes * self.devices + self.tail

    @property
    def plain(self) -> bool:
        """Whether device counts alone decide: no CPUs, memory or topology asked for."""
        return not (self.cpus or self.memory_bytes or self.within >= 0 or self.slice_nodes or self.shut)
