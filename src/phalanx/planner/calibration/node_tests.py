"""Judge measured nodes: against the facts table of their model, and against the other nodes of their kind. Pure.

A rate fails if it is less than half of the table's figure, or if it is further below the median of its kind than both the threshold and the usual
spread of the nodes. Half, because the table has peaks, which no program reaches: good matrix products come to 60 to 80 % of them. Less than a
quarter of the median counts as unusual however widely the nodes differ: of three nodes, two that differ by a quarter would hide a third that
nearly stands still.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_tests import NodeRate, NodeTest
from phalanx.core.ids import UserId
from phalanx.planner.calibration.profile import Profile, rates_of_node

THRESHOLD: Final = 0.3
"""Default share below the median that fails. Bad GPUs take up to 1.5 times the median time, which is a rate 33 % lower; healthy ones of one kind
differ by 8 %. Source: P. Sinha et al., "Not All GPUs Are Created Equal", 2022 (arXiv 2208.11035)."""
TABLE_SHARE: Final = 0.5
UNUSUAL_SHARE: Final = 0.25  # of the median; below that no spread of the others excuses a node
PEERS_MIN: Final = 3  # with two nodes the median lies between them, and either may be at fault
SPREAD: Final = 3.0 * 1.4826
"""Median absolute deviations below the median that count as unusual: three standard deviations of normally distributed values.
Source: C. Leys et al., "Detecting outliers", Journal of Experimental Social Psychology 49 (2013)."""
RECENT_S: Final = 30 * 86400.0  # an older test of another node is no peer: drivers and firmware change


def judge_nodes(profile: Profile, known: Iterable[NodeTest], *, threshold: float, by: UserId) -> dict[str, NodeTest]:
    """Return the test of each node of the profile.

    Args:
        profile: what one job measured.
        known: the last test of each other node.
        threshold: share below the median, 0.3 for 30 %.
        by: who tested.
    """
    found: dict[str, NodeTest] = {}
    for node in profile.nodes:
        kind = [one for one in profile.nodes if (one.gpu, one.devices) == (node.gpu, node.devices)]
        peers = [rates_of_node(one) for one in kind]
        if not node.virtual:  # virtual nodes share the cores of one machine: rates of another hour depend on its load
            peers += [
                {rate.what: rate.value for rate in test.rates}
                for test in known
                if (test.gpu, test.devices) == (node.gpu, node.devices) and profile.at_s - test.at_s < RECENT_S
            ]
        table = {} if node.virtual else table_rates(node.gpu)
        found[node.node] = NodeTest(
            at_s=profile.at_s,
            by=by,
            job=profile.job,
            gpu=node.gpu,
            devices=node.devices,
            threshold=threshold,
            peers=len(peers),
            rates=tuple(
                _judge(what, value, table.get(what), [one[what] for one in peers if what in one], threshold)
                for what, value in rates_of_node(node).items()
            ),
        )
    return found


def table_rates(gpu: str) -> Mapping[str, float]:
    """Return the figures of the facts table for a model, by the names of the rates; empty for an unknown model."""
    from phalanx.planner.facts.gpus import find_gpu

    try:
        entry = find_gpu(gpu)
    except BadRequest:
        return {}
    figures = {f"matmul {precision}": flops for precision, flops in entry.gpu.flops.items()}
    figures["memory"] = entry.gpu.memory_bytes_per_s
    figures["all-reduce within"] = entry.gpu.link_bytes_per_s or entry.gpu.pcie_bytes_per_s
    figures["link"] = entry.network_bytes_per_s
    return {what: figure for what, figure in figures.items() if figure}


def _judge(what: str, value: float, table: float | None, peers: Sequence[float], threshold: float) -> NodeRate:
    median = statistics.median(peers) if len(peers) >= PEERS_MIN else None
    why = ""
    if median is not None:
        spread = statistics.median(abs(one - median) for one in peers)
        usual = max(median - SPREAD * spread, UNUSUAL_SHARE * median)
        if value < min((1.0 - threshold) * median, usual):
            why = f"{what} {1.0 - value / median:.0%} below the median of {len(peers)} nodes"
    if not why and table is not None and value < TABLE_SHARE * table:
        why = f"{what} at {value / table:.0%} of the model's figure"
    return NodeRate(what=what, value=value, table=table, median=median, why=why)
