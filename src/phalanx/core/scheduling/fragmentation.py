"""Packing by fragmentation: place a job where the free capacity of the fleet loses the least of its use for other jobs.

For a node and a kind of job, free device capacity is *lost* as a whole if the node cannot run such a job at all: too few devices with room, too few CPUs or too
little memory, or another GPU model. If it can, free capacity on devices with too little room for one of its parts is lost by half: smaller jobs fill
such rests about half. The fragmentation of a node is what is lost, averaged over the mix of jobs that users submit. A job goes where this
grows the least; ties go to the fewest free thousandths, then the fewest free CPUs, then the lowest number.

Source: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023. Two
changes: the paper counts too small devices in full (a weight of 1; between 0 and 0.75 the share of GPUs allocated hardly changes, at 1 it is lower), and
takes the mix from the trace that is replayed, where here it is learned from the jobs seen so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.work.share import MILLI_PER_DEVICE

TOO_SMALL_LOST: Final = 0.5  # share of a too small device that is lost for a job
MIX_GROWTH: Final = 2.0  # the mix is taken anew when this many times as many jobs have been seen
MIX_JOBS_MAX: Final = 1 << 16  # jobs in the mix; then all counts are halved, so that old habits are forgotten
MIX_DEMANDS_MAX: Final = 512  # distinct demands in the mix; the most frequent are kept
_TIE: Final = 1e-6
_NOWHERE: Final = np.inf
_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class Demand(NamedTuple):
    """What a job needs of one node.

    Attributes:
        cpus: any unit, the same for jobs and nodes.
        memory: any unit, the same for jobs and nodes.
        devices: whole ones; 0 with a share or for a job without GPUs.
        share_milli: thousandths of one device; 0 for none.
        models: numbers of the models that it accepts; None for any.
    """

    cpus: int
    memory: int
    devices: int
    share_milli: int
    models: frozenset[int] | None = None


class RequestMix:
    """How often each demand was seen."""

    __slots__ = ("_counts", "_next", "_seen")

    def __init__(self) -> None:
        self._counts: Counter[Demand] = Counter()
        self._seen = 0
        self._next = 1

    def observe(self, demand: Demand) -> bool:
        """Count a job; returns whether so many have come since the last time that readers should take the mix anew."""
        self._counts[demand] += 1
        self._seen += 1
        if self._seen > MIX_JOBS_MAX:
            self._counts = Counter({one: count // 2 for one, count in self._counts.items() if count > 1})
            self._seen = self._next = self._counts.total()
        if self._seen < self._next:
            return False
        self._next = int(self._seen * MIX_GROWTH)
        return True

    def most_common(self) -> list[tuple[Demand, int]]:
        """The most frequent demands with their counts."""
        return self._counts.most_common(MIX_DEMANDS_MAX)


class _MixArrays:
    """A mix as columns, one entry for each demand, and its shares, which sum to 1."""

    __slots__ = ("cpus", "memory", "models", "parts", "share", "size")

    def __init__(self, mix: Sequence[tuple[Demand, int]], models: int) -> None:
        self.cpus = np.array([one.cpus for one, _ in mix], dtype=np.int64)
        self.memory = np.array([one.memory for one, _ in mix], dtype=np.int64)
        self.parts = np.array([one.devices or (one.share_milli > 0) for one, _ in mix], dtype=np.int64)
        self.size = np.array([one.share_milli or MILLI_PER_DEVICE for one, _ in mix], dtype=np.int64)
        self.share = np.array([count for _, count in mix], dtype=np.float64)
        self.share /= max(1.0, self.share.sum())
        self.models = np.ones((models, len(mix)), dtype=np.bool_)
        for at, (one, _) in enumerate(mix):
            if one.models is not None:
                self.models[:, at] = [model in one.models for model in range(models)]

    def lost(self, cpus: _Ints, memory: _Ints, free: _Ints, model: _Ints) -> _Floats:
        """Fragmentation in thousandths of nodes with so much free; `free` is [node, device]."""
        has_room = free[:, None, :] >= self.size[None, :, None]
        runs = (cpus[:, None] >= self.cpus) & (memory[:, None] >= self.memory) & self.models[model]
        runs &= (has_room.sum(axis=2) >= self.parts) & (self.parts > 0)
        too_small = TOO_SMALL_LOST * np.where(has_room, 0, free[:, None, :]).sum(axis=2)
        found: _Floats = np.where(runs, too_small, free.sum(axis=1)[:, None]) @ self.share
        return found


class _Scores:
    """For one demand: how much fragmentation grows on each node, as of a number of changes."""

    __slots__ = ("growth", "seen")

    def __init__(self, nodes: int) -> None:
        self.growth = np.full(nodes, _NOWHERE)
        self.seen = -1


class FragmentationIndex:
    """The free capacity of nodes, and where a job fragments it the least.

    Scores are kept for each demand and computed again only for nodes that have changed. Cost of a decision: the nodes changed since the
    last equal demand, times the distinct demands of the mix.

    Attributes:
        cpus, memory: free, by node.
        free: free thousandths, [node, device].
        model: of each node.
    """

    __slots__ = (
        "_changed",
        "_clock",
        "_lost",
        "_mix",
        "_mix_arrays",
        "_models",
        "_outdated",
        "_scores",
        "cpus",
        "free",
        "memory",
        "model",
    )

    def __init__(
        self, cpus: Sequence[int], memory: Sequence[int], devices: Sequence[int], model: Sequence[int]
    ) -> None:
        """All free.

        Args:
            cpus: of each node.
            memory: of each node.
            devices: number of each node.
            model: number of each node's GPU model.
        """
        self.cpus = np.array(cpus, dtype=np.int64)
        self.memory = np.array(memory, dtype=np.int64)
        self.model = np.array(model, dtype=np.int64)
        self.free = np.zeros((len(cpus), max(devices, default=0)), dtype=np.int64)
        for node, count in enumerate(devices):
            self.free[node, :count] = MILLI_PER_DEVICE
        self._models = max(model, default=0) + 1
        self._mix = RequestMix()
        self._clock = 0
        self._changed = np.zeros(len(cpus), dtype=np.int64)
        self._outdated: set[int] = set()
        self._take_mix()

    def set_node(self, node: int, cpus: int, memory: int, free: Sequence[int]) -> None:
        """This much of the node is free now; `free` has a number for each device, in any order, and none above 1000."""
        self.cpus[node] = cpus
        self.memory[node] = memory
        known = free[
            : self.free.shape[1]
        ]  # a device that became unhealthy under its jobs is not among the node's any more
        self.free[node, : len(known)] = known
        self.free[node, len(known) :] = 0
        self._clock += 1
        self._changed[node] = self._clock
        self._outdated.add(node)

    def observe(self, demand: Demand) -> None:
        """Count a job that was submitted."""
        if self._mix.observe(demand):
            self._take_mix()

    def best(self, demand: Demand, allowed: NDArray[np.bool_] | None = None) -> int | None:
        """The node where fragmentation grows the least; None if it fits nowhere. A share takes the device with the least room that suffices.

        Args:
            demand: to place.
            allowed: nodes that may be used; None for all.
        """
        if self._outdated:
            changed = np.array(sorted(self._outdated))
            self._lost[changed] = self._lost_on(changed)
            self._outdated.clear()
        scores = self._scores.get(demand)
        if scores is None:
            scores = self._scores[demand] = _Scores(len(self.cpus))
        self._refresh(demand, scores)
        growth = scores.growth if allowed is None else np.where(allowed, scores.growth, _NOWHERE)
        least = growth.min(initial=_NOWHERE)
        if least == _NOWHERE:
            return None
        ties = np.nonzero(growth <= least + _TIE)[0]
        node = int(ties[0])
        if len(ties) > 1:
            node = int(ties[np.lexsort((self.cpus[ties], self.free[ties].sum(axis=1)))[0]])
        return node

    def _take_mix(self) -> None:
        self._mix_arrays = _MixArrays(self._mix.most_common(), self._models)
        self._lost = self._lost_on(np.arange(len(self.cpus)))
        self._outdated.clear()
        self._scores: dict[Demand, _Scores] = {}

    def _lost_on(self, nodes: _Ints) -> _Floats:
        return self._mix_arrays.lost(self.cpus[nodes], self.memory[nodes], self.free[nodes], self.model[nodes])

    def _refresh(self, demand: Demand, scores: _Scores) -> None:
        """Compute the scores of the nodes that have changed."""
        nodes = np.nonzero(self._changed > scores.seen)[0]
        scores.seen = self._clock
        scores.growth[nodes] = _NOWHERE
        fits = (self.cpus[nodes] >= demand.cpus) & (self.memory[nodes] >= demand.memory)
        if demand.models is not None:
            fits &= np.isin(self.model[nodes], list(demand.models))
        room = demand.share_milli or MILLI_PER_DEVICE
        fits &= (self.free[nodes] >= room).sum(axis=1) >= (1 if demand.share_milli else demand.devices)
        nodes = nodes[fits]
        if not len(nodes):
            return
        if demand.share_milli:
            self._score_shares(demand, scores, nodes)
        else:
            left = self.free[nodes]
            whole = left == MILLI_PER_DEVICE
            left[whole & (np.cumsum(whole, axis=1) <= demand.devices)] = 0
            scores.growth[nodes] = self._growth(demand, nodes, left)

    def _score_shares(self, demand: Demand, scores: _Scores, nodes: _Ints) -> None:
        left = self.free[nodes]
        device = np.where(left >= demand.share_milli, left, MILLI_PER_DEVICE + 1).argmin(axis=1)
        left[np.arange(len(nodes)), device] -= demand.share_milli
        scores.growth[nodes] = self._growth(demand, nodes, left)

    def _growth(self, demand: Demand, nodes: _Ints, left: _Ints) -> _Floats:
        cpus, memory = self.cpus[nodes] - demand.cpus, self.memory[nodes] - demand.memory
        return self._mix_arrays.lost(cpus, memory, left, self.model[nodes]) - self._lost[nodes]
