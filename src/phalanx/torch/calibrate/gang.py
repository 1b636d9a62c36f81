"""Who takes part in a calibration, and the groups that they talk in."""

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
from phalanx.torch.calibrate.stopwatch import time_once_s, times_s

BUDGET_S: Final = 1.0
"""Spent on the repeats of one measurement; a tenth with `quick`. Of our choosing: fifty of those are a minute."""
LEAST, MOST = 3, 50
"""Repeats of one measurement: a median needs three; past fifty it moves no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """All ranks, seen from one of them.

    Attributes:
        device: a torch.device.
        places: node rank and local rank, by rank.
        within: group of this rank's node.
        between: group of the ranks with this local rank, one of each node; None where some node has fewer ranks.
    """

    rank: int
    device: Any
    places: tuple[tuple[int, int], ...]
    within: Any
    between: Any
    quick: bool

    @classmethod
    def join(cls, me: phalanx.torch.Rank, *, quick: bool) -> Gang:
        """Learn where everybody is and make the groups. Collective."""
        mine = (int(os.environ.get("PHALANX_NODE_RANK", os.environ.get("GROUP_RANK", "0"))), me.local_rank)
        # NCCL joins a group at its first collective, and the first here may be an exchange of pairs, in which not all take part.
        dist.all_reduce(torch.zeros(1, device=me.device))
        places: list[Any] = [None] * me.world_size
        dist.all_gather_object(places, mine)
        nodes = sorted({node for node, _ in places})
        within = between = None
        for node in nodes:  # every rank takes part in the making of every group
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
        """Ranks in all."""
        return len(self.places)

    @property
    def node_rank(self) -> int:
        """This rank's node."""
        return self.places[self.rank][0]

    @property
    def leads(self) -> bool:
        """Whether it is its node's first rank."""
        return self.places[self.rank][1] == 0

    @property
    def on_cuda(self) -> bool:
        """Whether there is an accelerator."""
        return bool(self.device.type == "cuda")

    @property
    def devices(self) -> tuple[int, ...]:
        """Ranks of each node, by node rank."""
        nodes = [node for node, _ in self.places]
        return tuple(nodes.count(node) for node in range(max(nodes) + 1))

    @property
    def budget_s(self) -> float:
        """For the repeats of one measurement."""
        return BUDGET_S / 10 if self.quick else BUDGET_S

    def leader(self, node: int) -> int:
        """The rank that leads a node."""
        return self.places.index((node, 0))

    def worst(self, value: float) -> float:
        """The largest of all ranks' values. Collective."""
        worst = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def barrier(self) -> None:
        """Wait until all are here. Collective. By a tensor, for a barrier of NCCL would need to be told the device."""
        self.worst(0.0)

    def gathered(self, mine: Sequence[Any]) -> list[Any]:
        """Everybody's samples in rank order, in rank 0; elsewhere nothing. Collective."""
        lists: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(list(mine), lists)
        return [] if lists is None else [sample for samples in lists for sample in samples]

    def together_s(self, work: Callable[[], object], *, burst_s: float = 0.0) -> float:
        """Median time of `work`, which all ranks do as often as each other; the first time, which sets things up, is left out.

        Collective, whether or not `work` is.

        Args:
            work: what is timed.
            burst_s: time it in bursts at least so long, for work that shares its device in turns: between two turns a short one
                would see the device all its own.
        """
        work()
        self.barrier()
        once_s = max(self.worst(time_once_s(work, self.device)), 1e-9)
        burst = max(1, math.ceil(burst_s / once_s))
        repeats = min(MOST, max(LEAST, int(self.budget_s / (once_s * burst))))
        self.barrier()
        return statistics.median(times_s(work, self.device, repeats, burst))
