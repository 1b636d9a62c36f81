"""A job's request in numbers: equal requests are one `Need`, which is searched, priced and explained once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """A gang of `nodes` parts of `devices` devices each, and `tail` devices on one more node (0 for none).

    Attributes:
        kinds: numbers of the pools it may use, in order of preference; the whole gang goes into one.
        cpus, memory_bytes: of each part.
        within: topology level (number, outermost 0) of which a single domain must hold it; -1 for any.
        required: `within` is required; else preferred.
        slice_nodes, slice_within: every slice of this many parts, in rank order, inside one domain of that level; 0 and -1 for no slices.
        shut: bitset of nodes of the kind whose devices are too small.
        nodes_max: elastic: up to this many parts; equal to `nodes` or 0 for a fixed gang.
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
        """Total devices of the smallest acceptable gang."""
        return self.nodes * self.devices + self.tail

    @property
    def plain(self) -> bool:
        """Whether device counts alone decide: no CPUs, memory or topology requested."""
        return not (self.cpus or self.memory_bytes or self.within >= 0 or self.slice_nodes or self.shut)
