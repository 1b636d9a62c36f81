"""The ranks of a calibration and their process groups."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

import phalanx.torch
from phalanx.torch.calibrate.timing import burst_times_s, time_once_s

BUDGET_S: Final = 1.0
"""Time for the repeats of one measurement; a tenth of it with `quick`. Our choice: fifty measurements take a minute."""
TRIES: Final = 5  # of which the shortest gives the number of runs in a burst
REPEATS_MIN, REPEATS_MAX = 3, 50
"""Repeats of one measurement: a median needs three, and more than fifty do not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationGang:
    """All ranks, from the view of one of them.

    Attributes:
        device: a torch.device.
        places: node rank and local rank, by rank.
        within: group of the node of this rank.
        between: group of the ranks with this local rank, one per node; None if a node has fewer ranks.
    """

    rank: int
    device: Any
    places: tuple[tuple[int, int], ...]
    within: Any
    between: Any
    quick: bool

    @classmethod
    def join(cls, me: phalanx.torch.Rank, *, quick: bool) -> CalibrationGang:
        """Exchange the places of all ranks and create the groups. Collective."""
        mine = (int(os.environ.get("PHALANX_NODE_RANK", os.environ.get("GROUP_RANK", "0"))), me.local_rank)
        # NCCL connects a group at its first collective. The first one below may be an exchange of pairs without all ranks.
        dist.all_reduce(torch.zeros(1, device=me.device))
        places: list[Any] = [None] * me.world_size
        dist.all_gather_object(places, mine)
        nodes = sorted({node for node, _ in places})
        within = between = None
        for node in nodes:  # all ranks must create every group
            ranks = [rank for rank, place in enumerate(places) if place[0] == node]
            group = dist.new_group(ranks)
            within = group if me.rank in ranks else within
        for local in range(min(sum(place[0] == node for place in places) for node in nodes)):
            ranks = [rank for rank, place in enumerate(places) if place[1] == local]
            group = dist.new_group(ranks)
            between = group if me.rank in ranks else between
        return cls(rank=me.rank, device=me.device, places=tuple(places), within=within, between=between, quick=quick)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def node_rank(self) -> int:
        """The node rank of this rank."""
        return self.places[self.rank][0]

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.places[self.rank][1] == 0

    @property
    def on_cuda(self) -> bool:
        """Whether the device is an accelerator."""
        return bool(self.device.type == "cuda")

    @property
    def devices(self) -> tuple[int, ...]:
        """Number of ranks of each node, by node rank."""
        nodes = [node for node, _ in self.places]
        return tuple(nodes.count(node) for node in range(max(nodes) + 1))

    @property
    def budget_s(self) -> float:
        """Time for the repeats of one measurement."""
        return BUDGET_S / 10 if self.quick else BUDGET_S

    def leader(self, node: int) -> int:
        """Return the first rank of a node."""
        return self.places.index((node, 0))

    def maximum(self, value: float) -> float:
        """Return the largest value of all ranks. Collective."""
        worst = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def barrier(self) -> None:
        """Wait for all ranks. Collective. Uses a tensor, because a barrier of NCCL needs the device."""
        self.maximum(0.0)

    def gather(self, mine: Sequence[Any]) -> list[Any]:
        """Return the samples of all ranks in rank order on rank 0; an empty list on others. Collective."""
        lists: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(list(mine), lists)
        return [] if lists is None else [sample for samples in lists for sample in samples]

    def median_time_s(self, work: Callable[[], object], *, burst_s: float = 0.0) -> float:
        """Return the median time of `work`, which all ranks repeat equally often. The first run, which includes set-up, is not counted.

        Collective, even if `work` is not.

        Args:
            work: the work to time.
            burst_s: minimum length of a timed burst, for devices that are shared in time slices: a shorter burst could run within one
                slice.
        """
        work()
        self.barrier()
        # One run that was interrupted would make bursts too short to show that the others are too.
        tries = TRIES if burst_s else 1
        once_s = max(self.maximum(min(time_once_s(work, self.device) for _ in range(tries))), 1e-9)
        burst = max(1, math.ceil(burst_s / once_s))
        repeats = min(REPEATS_MAX, max(REPEATS_MIN, int(self.budget_s / (once_s * burst))))
        self.barrier()
        return statistics.median(burst_times_s(work, self.device, repeats, burst))
