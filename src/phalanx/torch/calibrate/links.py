"""Measure links: collectives within and between nodes, and every pair of nodes, to find slow ones."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from phalanx.planner.calibration.samples import (
    Collective,
    CollectiveSample,
    CollectiveScope,
    PairSample,
    tournament_rounds,
)
from phalanx.torch.calibrate.gang import CalibrationGang

_KIB, _MIB = 1 << 10, 1 << 20
_CUDA_SIZES: Final = (8 * _KIB, 256 * _KIB, 8 * _MIB, 64 * _MIB, 256 * _MIB)  # from latency alone to bandwidth alone
_CPU_SIZES: Final = (1 * _KIB, 32 * _KIB, 512 * _KIB, 4 * _MIB, 16 * _MIB)  # gloo copies each message through the host
_PAIR_BYTES: Final = {"cuda": 64 * _MIB, "cpu": 4 * _MIB}
_ROUNDS_MAX, _ROUNDS_LEAST, _PAIRS_TWICE = 63, 8, 8192
"""Rounds of the tournament: all pairs of up to 64 nodes; for more nodes as many rounds as yield 4,096 pairs, so that the profile stays small,
but at least 8: the median of eight links of a node still describes the node."""


def measure_collective(gang: CalibrationGang, collective: Collective, scope: CollectiveScope) -> list[CollectiveSample]:
    """Measure several sizes, with all groups of the scope at once, as in training. One rank of each group returns samples. Collective."""
    group = gang.within if scope is CollectiveScope.WITHIN else gang.between
    ranks = 1 if group is None else dist.get_world_size(group)
    first = group is not None and dist.get_rank(group) == 0
    groups = len(gang.devices) if scope is CollectiveScope.WITHIN else min(gang.devices)
    samples = []
    for size in (_CUDA_SIZES if gang.on_cuda else _CPU_SIZES)[: 4 if gang.quick else None]:
        each = max(1, size // 4 // ranks)
        work = _work(collective, group, each * ranks, gang.device)
        seconds = gang.median_time_s(work)
        if first and (scope is CollectiveScope.WITHIN or gang.is_leader):
            samples.append(
                CollectiveSample(
                    collective=collective,
                    scope=scope,
                    node_rank=gang.node_rank if scope is CollectiveScope.WITHIN else 0,
                    ranks=ranks,
                    groups=groups,
                    bytes=each * ranks * 4,
                    seconds=seconds,
                )
            )
    return samples


def measure_pairs(gang: CalibrationGang) -> list[PairSample]:
    """Measure pairs of nodes, in rounds in which each node has one partner. Collective.

    The first rank of each node sends and receives at once; the others wait.
    """
    size = _PAIR_BYTES[gang.device.type]
    outgoing = torch.ones(size // 4, device=gang.device)
    incoming = torch.empty_like(outgoing)
    samples = []
    nodes = len(gang.devices)
    most = min(_ROUNDS_MAX, max(_ROUNDS_LEAST, _PAIRS_TWICE // nodes))
    for pairs in tournament_rounds(nodes, most):
        mine = next((pair for pair in pairs if gang.is_leader and gang.node_rank in pair), None)
        partner = None if mine is None else gang.leader(mine[0] if gang.node_rank == mine[1] else mine[1])
        seconds = gang.median_time_s(lambda partner=partner: _exchange(outgoing, incoming, partner))  # type: ignore[misc]  # bound now
        if mine is not None and gang.node_rank == mine[0]:
            samples.append(PairSample(first=mine[0], second=mine[1], bytes=size, seconds=seconds))
    return samples


def _work(collective: Collective, group: Any, count: int, device: Any) -> Any:
    if group is None:  # a node has no rank with this local rank
        return lambda: None
    tensor = torch.ones(count, device=device)
    if collective is Collective.ALL_REDUCE:
        tensor.zero_()  # sums of ones would overflow with the repeats
        return lambda: dist.all_reduce(tensor, group=group)
    received = torch.empty_like(tensor)
    return lambda: dist.all_to_all_single(received, tensor, group=group)


def _exchange(outgoing: Any, incoming: Any, partner: int | None) -> None:
    if partner is None:
        return
    both = [dist.P2POp(dist.isend, outgoing, partner), dist.P2POp(dist.irecv, incoming, partner)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
