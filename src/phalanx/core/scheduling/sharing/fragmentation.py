"""Packing by fragmentation: place a job where the free capacity of the fleet loses the least of its use for other jobs.

For a node and a kind of job, free device capacity is *lost* as a whole if the node cannot run such a job at all: too few devices with room, too few CPUs or too
little memory, or another GPU model. If it can, two parts of the free capacity are lost by half: what is on devices with too little room
for one of the job's parts, since smaller jobs fill about half of it; and the devices for which the node's free CPUs and memory do not suffice
if jobs ask for as much as the mix does on average, since jobs that ask for less may come. The fragmentation of a node is what is lost, averaged over the mix of
jobs that users submit. A job goes where this grows the least; ties go to the fewest free thousandths, then the fewest free CPUs, then the
lowest number.

Source: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC 2023. Three
changes: the paper counts too small devices in full; it counts CPUs only where a job does not fit at all, so that GPUs are stranded on nodes that run
out of CPUs; and it takes the mix from the trace that is replayed, where here it is learned from the jobs seen so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.core.scheduling.sharing.request_mix import Demand, RequestMix, rounded
from phalanx.core.work.share import MILLI_PER_DEVICE

HALF_LOST: Final = 0.5  # between 0.25 and 0.75 the share of GPUs allocated hardly changes
_SCORED_DEMANDS_MAX: Final = 256  # demands whose scores are kept; with 12,500 nodes at most 50 MB
_ROWS_MAX: Final = 512  # nodes scored at once, so that the arrays stay in the cache
_TIE: Final = 1e-6
_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class FragmentationMeasure:
    """The fragmentation of nodes for one mix. Pure: it keeps the mix as columns and nothing about nodes."""

    __slots__ = (
        "_column_of_size",
        "_cpus",
        "_memory",
        "_milli",
        "_milli_per_cpu",
        "_milli_per_memory",
        "_models",
        "_parts",
        "_share",
        "_sizes",
    )

    def __init__(self, mix: Sequence[tuple[Demand, int]], models: int) -> None:
        """Take the mix.

        Args:
            mix: demands for GPUs, each with its count.
            models: number of GPU models of the fleet.
        """
        self._cpus = np.array([one.cpus for one, _ in mix], dtype=np.int64)
        self._memory = np.array([one.memory for one, _ in mix], dtype=np.int64)
        self._parts = np.array([max(1, one.devices) for one, _ in mix], dtype=np.int64)
        each = np.array([one.share_milli or MILLI_PER_DEVICE for one, _ in mix], dtype=np.int64)
        self._sizes, self._column_of_size = np.unique(each, return_inverse=True)
        self._milli = (self._parts * each).astype(np.float64)
        self._share = np.array([count for _, count in mix], dtype=np.float64)
        self._share /= max(1.0, self._share.sum())
        self._models = np.ones((models, len(mix)), dtype=np.bool_)
        for at, (one, _) in enumerate(mix):
            if one.models is not None:
                self._models[:, at] = [model in one.models for model in range(models)]
        milli = float(self._milli @ self._share)
        cpus, memory = float(self._cpus @ self._share), float(self._memory @ self._share)
        self._milli_per_cpu = milli / cpus if cpus else None
        self._milli_per_memory = milli / memory if memory else None

    def lost(self, cpus: _Ints, memory: _Ints, free: _Ints, model: _Ints) -> _Floats:
        """Fragmentation in thousandths of nodes with so much free; `free` is [node, device]."""
        found = np.empty(len(cpus))
        for start in range(0, len(cpus), _ROWS_MAX):
            rows = slice(start, start + _ROWS_MAX)
            found[rows] = self._lost_of_rows(cpus[rows], memory[rows], free[rows], model[rows])
        return found

    def _lost_of_rows(self, cpus: _Ints, memory: _Ints, free: _Ints, model: _Ints) -> _Floats:
        has_room = free[:, :, None] >= self._sizes
        rooms = has_room.sum(axis=1)[:, self._column_of_size]
        too_small = np.where(has_room, 0, free[:, :, None]).sum(axis=1)[:, self._column_of_size]
        total = free.sum(axis=1, dtype=np.float64)[:, None]
        usable = total - HALF_LOST * too_small
        # A single job may use more CPUs per device than the mix: one that fits counts in full.
        hosted = np.maximum(self._hosted(cpus, memory)[:, None], self._milli)
        usable -= HALF_LOST * np.maximum(0.0, usable - hosted)
        runs = (cpus[:, None] >= self._cpus) & (memory[:, None] >= self._memory) & self._models[model]
        runs &= rooms >= self._parts
        found: _Floats = total[:, 0] * self._share.sum() - np.where(runs, usable, 0.0) @ self._share
        return found

    def _hosted(self, cpus: _Ints, memory: _Ints) -> _Floats:
        """Thousandths of devices for which CPUs and memory suffice, if jobs ask for as much of them as the mix does on average."""
        found = np.full(len(cpus), np.inf)
        if self._milli_per_cpu is not None:
            found = np.minimum(found, cpus * self._milli_per_cpu)
        if self._milli_per_memory is not None:
            found = np.minimum(found, memory * self._milli_per_memory)
        return found


class _NodeStates:
    """The distinct states of nodes: CPUs, memory, free devices in descending order, and model. Nodes in one state have one score.

    Attributes:
        cpus, memory, free, model: by number of the state.
    """

    __slots__ = ("_number_of", "cpus", "free", "memory", "model")

    def __init__(self, devices_max: int) -> None:
        self._number_of: dict[tuple[int, ...], int] = {}
        self.cpus, self.memory, self.model = (np.empty(0, dtype=np.int64) for _ in range(3))
        self.free = np.empty((0, devices_max), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._number_of)

    def number_of(self, cpus: int, memory: int, model: int, free: Sequence[int]) -> int:
        """The number of this state, a new one if it has none."""
        ordered = sorted(free, reverse=True)
        key = (cpus, memory, model, *ordered)
        number = self._number_of.setdefault(key, len(self._number_of))
        if number == len(self.cpus):
            self._grow()
        if number == len(self._number_of) - 1:
            self.cpus[number], self.memory[number], self.model[number] = cpus, memory, model
            self.free[number] = ordered
        return number

    def _grow(self) -> None:
        more = max(64, len(self.cpus))
        self.cpus, self.memory, self.model = (
            np.concatenate((old, np.empty(more, dtype=np.int64))) for old in (self.cpus, self.memory, self.model)
        )
        self.free = np.concatenate((self.free, np.empty((more, self.free.shape[1]), dtype=np.int64)))


class FragmentationIndex:
    """The free capacity of nodes, and where a job fragments it the least.

    Scores are kept for each demand (rounded) and state of a node, and computed when first asked for. Cost of a decision: a few passes over
    the nodes, and the mix for each state that is new to this demand.

    Attributes:
        cpus, memory: free, by node.
        free: free thousandths, [node, device].
        model: of each node.
    """

    __slots__ = (
        "_lost",
        "_measure",
        "_mix",
        "_models",
        "_roomiest",
        "_scores",
        "_state",
        "_states",
        "_total",
        "_whole",
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
        own = np.array(devices, dtype=np.int64)
        width = max(devices, default=0)
        self.free = np.where(np.arange(width) < own[:, None], MILLI_PER_DEVICE, 0)
        self._total, self._whole = own * MILLI_PER_DEVICE, own.copy()
        self._roomiest = np.where(own > 0, MILLI_PER_DEVICE, 0)
        self._models = max(model, default=0) + 1
        self._mix = RequestMix()
        self._scores: OrderedDict[Demand, _Floats] = OrderedDict()
        self._lost: _Floats = np.empty(0)
        self._states = _NodeStates(width)
        number_of: dict[tuple[int, ...], int] = {}
        for one in set(zip(cpus, memory, model, devices, strict=True)):
            full = [MILLI_PER_DEVICE] * one[3] + [0] * (width - one[3])
            number_of[one] = self._states.number_of(*one[:3], full)
        alike = zip(cpus, memory, model, devices, strict=True)
        self._state = np.array([number_of[one] for one in alike], dtype=np.int64)
        self._take_mix()

    def set_node(self, node: int, cpus: int, memory: int, free: Sequence[int]) -> None:
        """This much of the node is free now; `free` has a number for each device, in any order, and none above 1000."""
        if len(self._states) > 2 * len(self.cpus) + _ROWS_MAX:
            self._drop_old_states()
        width = self.free.shape[1]
        known = list(free[:width])  # a device that became unhealthy under its jobs is not among the node's any more
        known += [0] * (width - len(known))
        self.cpus[node], self.memory[node], self.free[node] = cpus, memory, known
        self._total[node], self._roomiest[node] = sum(known), max(known, default=0)
        self._whole[node] = known.count(MILLI_PER_DEVICE)
        self._state[node] = self._states.number_of(cpus, memory, int(self.model[node]), known)

    def observe(self, demand: Demand) -> None:
        """Count a job that was submitted."""
        if self._mix.observe(demand):
            self._take_mix()

    def best(self, demand: Demand, allowed: _Ints | None = None) -> int | None:
        """The node where fragmentation grows the least; None if it fits nowhere. A share takes the device with the least room that suffices.

        Args:
            demand: to place.
            allowed: the nodes that may be used and have the devices, ascending, at the cost of these nodes only; None to look at all nodes.
        """
        nodes = self._fitting(demand, allowed)
        if not len(nodes):
            return None
        growth = self._growth(rounded(demand), self._state[nodes])
        ties = nodes[growth <= growth.min() + _TIE]
        if len(ties) == 1:
            return int(ties[0])
        return int(ties[np.lexsort((self.cpus[ties], self._total[ties]))[0]])

    def _fitting(self, demand: Demand, allowed: _Ints | None) -> _Ints:
        found: _Ints
        if allowed is not None:
            found = allowed[(self.cpus[allowed] >= demand.cpus) & (self.memory[allowed] >= demand.memory)]
            return found
        fits = (self.cpus >= demand.cpus) & (self.memory >= demand.memory)
        if demand.share_milli:
            fits &= self._roomiest >= demand.share_milli
        elif demand.devices:
            fits &= self._whole >= demand.devices
        if demand.models is not None:
            fits &= np.array([model in demand.models for model in range(self._models)])[self.model]
        found = np.nonzero(fits)[0]
        return found

    def _growth(self, demand: Demand, states: _Ints) -> _Floats:
        """By how much fragmentation grows in nodes of these states."""
        scores = self._scores.pop(demand, None)
        if scores is None:
            scores = np.full(len(self._states.cpus), np.nan)
            if len(self._scores) >= _SCORED_DEMANDS_MAX:
                self._scores.popitem(last=False)
        self._scores[demand] = scores = _lengthened(scores, len(self._states.cpus))
        found: _Floats = scores[states]
        unknown = np.isnan(found)
        if unknown.any():
            new = np.unique(states[unknown])
            scores[new] = self._growth_in(demand, new)
            found = scores[states]
        return found

    def _growth_in(self, demand: Demand, states: _Ints) -> _Floats:
        # The demand is rounded down: a node that holds the job holds this.
        known = self._states
        left = known.free[states]
        if demand.share_milli:
            device = (left >= demand.share_milli).sum(axis=1) - 1  # in descending order
            left[np.arange(len(left)), device] -= demand.share_milli
        elif demand.devices:
            left[:, : demand.devices] = 0
        cpus, memory, model = (
            known.cpus[states] - demand.cpus,
            known.memory[states] - demand.memory,
            known.model[states],
        )
        return self._measure.lost(cpus, memory, left, model) - self._lost_in(states)

    def _lost_in(self, states: _Ints) -> _Floats:
        known = self._states
        self._lost = lost = _lengthened(self._lost, len(known.cpus))
        new = states[np.isnan(lost[states])]
        lost[new] = self._measure.lost(known.cpus[new], known.memory[new], known.free[new], known.model[new])
        found: _Floats = lost[states]
        return found

    def _take_mix(self) -> None:
        self._measure = FragmentationMeasure(self._mix.most_common(), self._models)
        self._lost = np.full(len(self._states.cpus), np.nan)
        self._scores.clear()

    def _drop_old_states(self) -> None:
        """Number the states of today's nodes from 0, and keep their scores."""
        old = self._states
        self._states = _NodeStates(self.free.shape[1])
        kept, self._state = np.unique(self._state, return_inverse=True)
        for number in kept.tolist():
            self._states.number_of(
                int(old.cpus[number]), int(old.memory[number]), int(old.model[number]), old.free[number].tolist()
            )
        size = len(self._states.cpus)
        for demand, scores in self._scores.items():
            self._scores[demand] = _lengthened(_lengthened(scores, len(old.cpus))[kept], size)
        self._lost = _lengthened(_lengthened(self._lost, len(old.cpus))[kept], size)


def _lengthened(values: _Floats, size: int) -> _Floats:
    if len(values) == size:
        return values
    return np.concatenate((values, np.full(size - len(values), np.nan)))
