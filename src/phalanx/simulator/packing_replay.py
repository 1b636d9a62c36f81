"""Fill a fleet with jobs drawn from a trace, of which none leaves, and measure how much of its GPUs is allocated in the end.

The jobs are drawn with replacement until the GPUs asked for pass a multiple of the fleet's. A job that fits nowhere is dropped. Parts of
devices, CPUs and memory all count, and jobs without GPUs are placed too. Weng et al., ATC 2023, measure packing in nearly this way: see
`draw_trace_first` and docs/simulate.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.pool import DevicePool
from phalanx.core.scheduling.sharing.fragmentation import FragmentationIndex
from phalanx.core.scheduling.sharing.request_mix import Demand
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.trace import TraceJob, normalize_model

PACKING_POLICIES: Final = ("default", "fgd", "best-fit", "packing", "dot-product", "random")
UNLIMITED: Final = 1 << 40  # CPUs and memory of a node whose inventory does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingResult:
    """One fill of the fleet.

    Attributes:
        jobs: drawn, in their order.
        node_of: number of the node of each; -1 for one that was dropped.
        allocated_milli, fleet_milli: thousandths of GPUs.
    """

    seed: int
    jobs: tuple[TraceJob, ...]
    node_of: tuple[int, ...]
    allocated_milli: int
    fleet_milli: int

    @property
    def drawn(self) -> int:
        """Number of jobs."""
        return len(self.jobs)

    @property
    def placed(self) -> int:
        """Number of jobs that found a place."""
        return sum(node >= 0 for node in self.node_of)

    @property
    def share(self) -> float:
        """Share of the fleet's GPUs that is allocated, 0 to 1."""
        return self.allocated_milli / self.fleet_milli


def replay_packing(
    jobs: Sequence[TraceJob],
    nodes: Sequence[TraceNode],
    policy: str,
    *,
    inflate: float,
    seed: int,
    trace_first: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PackingResult:
    """Fill the fleet once.

    Args:
        jobs: to draw from.
        nodes: of the fleet.
        policy: one of `PACKING_POLICIES`.
        inflate: GPUs asked for, as a multiple of the fleet's.
        seed: of the draw, and of the policy `random`.
        trace_first: draw as the paper does, with `draw_trace_first`.
        on_progress: called with jobs placed or dropped so far, and all.

    Raises:
        BadRequest: there is no such policy, no GPU, or no job that asks for one.
    """
    if policy not in PACKING_POLICIES:
        raise BadRequest(f"--inflate has no policy {policy!r}", hint=f"one of {', '.join(PACKING_POLICIES)}")
    fleet_milli = sum(node.gpus for node in nodes) * MILLI_PER_DEVICE
    if not fleet_milli or not any(job.gpus or job.share_milli for job in jobs):
        raise BadRequest("neither the fleet nor the trace may be without GPUs")
    drawn = (draw_trace_first if trace_first else draw_jobs)(jobs, inflate * fleet_milli, seed)
    return place_in_order(drawn, nodes, policy, seed=seed, on_progress=on_progress)


def place_in_order(
    jobs: Sequence[TraceJob],
    nodes: Sequence[TraceNode],
    policy: str = "default",
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> PackingResult:
    """Place these jobs one after the other. Arguments and what is dropped: as in `replay_packing`."""
    models = {name: number for number, name in enumerate(sorted({normalize_model(node.model) for node in nodes}))}
    place = (_LiveBoard if policy == "default" else _Index)(nodes, models, policy, seed).place
    node_of: list[int] = []
    allocated = 0
    for done, job in enumerate(jobs):
        accepted = frozenset(models[name] for name in job.models if name in models) if job.models else None
        demand = Demand(job.cpu_milli, job.memory_mib, job.gpus, job.share_milli, accepted)
        node_of.append(place(demand))
        if node_of[-1] >= 0:
            allocated += _milli(job)
        if on_progress is not None and done % 100 == 0:
            on_progress(done, len(jobs))
    return PackingResult(
        seed=seed,
        jobs=tuple(jobs),
        node_of=tuple(node_of),
        allocated_milli=allocated,
        fleet_milli=sum(node.gpus for node in nodes) * MILLI_PER_DEVICE,
    )


def draw_jobs(jobs: Sequence[TraceJob], until_milli: float, seed: int) -> list[TraceJob]:
    """Draw with replacement until the GPUs asked for pass `until_milli` thousandths."""
    dice, drawn, asked = random.Random(seed), [], 0
    while asked <= until_milli:
        job = jobs[dice.randrange(len(jobs))]
        drawn.append(job)
        asked += _milli(job)
    return drawn


def draw_trace_first(jobs: Sequence[TraceJob], until_milli: float, seed: int) -> list[TraceJob]:
    """Draw as Weng et al.: each job of the trace once, shuffled, then copies drawn with replacement up to the first that would pass `until_milli`.

    A trace that asks for more loses random jobs until it does not.
    """
    dice, drawn = random.Random(seed), list(jobs)
    dice.shuffle(drawn)
    asked = sum(map(_milli, drawn))
    while asked > until_milli:
        asked -= _milli(drawn.pop(dice.randrange(len(drawn))))
    while True:
        job = jobs[dice.randrange(len(jobs))]
        asked += _milli(job)
        if asked > until_milli:
            return drawn
        drawn.append(job)


def _milli(job: TraceJob) -> int:
    return job.gpus * MILLI_PER_DEVICE + job.share_milli


class _LiveBoard:
    """Places jobs as the live scheduler does: the first call of the board that every policy uses."""

    def __init__(self, nodes: Sequence[TraceNode], models: Mapping[str, int], policy: str, seed: int) -> None:
        del policy, seed
        sizes, kinds = [node.gpus for node in nodes], _models_of(nodes, models)
        cpus, memory = _host_resources(nodes)
        pools = [
            DevicePool(
                [size if kind == own else -1 for size, kind in zip(sizes, kinds, strict=True)], cpus=cpus, memory=memory
            )
            for own in range(len(models))
        ]
        self._board = Board(sizes, pools=pools, pool_of_node=kinds, cpus=cpus, memory=memory)
        self._kinds = tuple(range(len(models)))
        self._jobs = 0

    def place(self, demand: Demand) -> int:
        """Start the job, or drop it; returns its node, -1 if it was dropped."""
        board, self._jobs = self._board, self._jobs + 1
        need = Need(
            nodes=1,
            devices=demand.devices,
            kinds=self._kinds if demand.models is None else tuple(sorted(demand.models)),
            cpus=demand.cpus,
            memory_bytes=demand.memory,
            share_milli=demand.share_milli,
        )
        entry = JobEntry(seq=self._jobs, job_class=board.job_class((need,)), submit_s=0.0)
        board.add_waiting(entry)
        found = board.find(entry)
        if found is None:
            board.withdraw([entry])
            return -1
        board.start(entry, *found, 0.0)
        board.take_decisions()
        return found[1][0][0]


class _Index:
    """Places jobs by the score alone, or by the rule of a peer."""

    def __init__(self, nodes: Sequence[TraceNode], models: Mapping[str, int], policy: str, seed: int) -> None:
        cpus, memory = _host_resources(nodes)
        self._index = FragmentationIndex(cpus, memory, [node.gpus for node in nodes], _models_of(nodes, models))
        self._policy = policy
        self._dice = random.Random(seed)

    def place(self, demand: Demand) -> int:
        """Place the job, or drop it; returns its node, -1 if it was dropped."""
        node = self._choose(demand)
        if node is None:
            return -1
        index = self._index
        free = index.free[node].copy()
        if demand.share_milli:
            free[np.where(free >= demand.share_milli, free, MILLI_PER_DEVICE + 1).argmin()] -= demand.share_milli
        else:
            free[np.nonzero(free == MILLI_PER_DEVICE)[0][: demand.devices]] = 0
        cpus, memory = int(index.cpus[node]) - demand.cpus, int(index.memory[node]) - demand.memory
        index.set_node(node, cpus, memory, free.tolist())
        return node

    def _choose(self, demand: Demand) -> int | None:
        if self._policy == "fgd":
            self._index.observe(demand)
            return self._index.best(demand)
        nodes = _fitting(self._index, demand)
        if not len(nodes):
            return None
        if self._policy == "random":
            return int(nodes[self._dice.randrange(len(nodes))])
        return int(nodes[int(np.argmin(_order(self._policy, self._index, demand, nodes)))])


def _models_of(nodes: Sequence[TraceNode], models: Mapping[str, int]) -> list[int]:
    return [models[normalize_model(node.model)] for node in nodes]


def _host_resources(nodes: Sequence[TraceNode]) -> tuple[list[int], list[int]]:
    """CPUs in thousandths, and MiB of memory."""
    return [node.cpu_milli or UNLIMITED for node in nodes], [node.memory_mib or UNLIMITED for node in nodes]


def _fitting(index: FragmentationIndex, demand: Demand) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    room = demand.share_milli or MILLI_PER_DEVICE
    fits = (index.cpus >= demand.cpus) & (index.memory >= demand.memory)
    fits &= (index.free >= room).sum(axis=1) >= (demand.devices or (demand.share_milli > 0))
    if demand.models is not None:
        fits &= np.isin(index.model, list(demand.models))
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.nonzero(fits)[0]
    return found


def _order(
    policy: str, index: FragmentationIndex, demand: Demand, nodes: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What each policy makes as small as it can. Free amounts are relative to the largest node."""
    gpus = index.free[nodes].sum(axis=1) / max(1, index.free.shape[1] * MILLI_PER_DEVICE)
    cpus = index.cpus[nodes] / max(1, index.cpus.max())
    memory = index.memory[nodes] / max(1, index.memory.max())
    if policy == "best-fit":
        return np.asarray(gpus + cpus + memory)
    if policy == "packing":  # shared devices first, then nodes in use, then the rest
        shared = ((index.free[nodes] > 0) & (index.free[nodes] < MILLI_PER_DEVICE)).any(axis=1)
        in_use = (index.free[nodes] < MILLI_PER_DEVICE).any(axis=1)
        return np.asarray(np.where(shared & (demand.share_milli > 0), 0, np.where(in_use, 1, 2)) + gpus)
    milli = demand.devices * MILLI_PER_DEVICE + demand.share_milli
    asked = milli / max(1, index.free.shape[1] * MILLI_PER_DEVICE)
    return np.asarray(
        gpus * asked
        + cpus * demand.cpus / max(1, index.cpus.max())
        + memory * demand.memory / max(1, index.memory.max())
    )
