"""Number of spare nodes, from the failure rate of nodes and the repair time.

Nodes fail independently, each at the rate 1/MTBF, and each is repaired on its own: by Little's law and the insensitivity of M/G/infinity,
the nodes under repair are a Poisson count of mean n R / MTBF, whatever the distribution of repair times. If this count exceeds the number
of spares with a probability of only 1 %, the jobs have all their nodes for 99 % of the time.

Source: L. Takacs, "Introduction to the Theory of Queues", 1962, chapter 3 (M/G/infinity is insensitive to the service distribution).
Failures are counted for the `nodes` in use; spares are idle and fail no job.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.recovery.bad_nodes import poisson_tail

SHORT_MAX: Final = 0.01  # share of the time in which a node may be missing
REPAIR_DEFAULT_S: Final = 3 * 86_400.0
"""Assumed: three days, with spare parts in stock and staff on working days. A reboot takes minutes, a returned board weeks."""
SPARES_MAX: Final = 100_000


def under_repair(nodes: int, *, node_mtbf_s: float, repair_s: float) -> float:
    """Nodes under repair on average: n R / MTBF.

    Raises:
        ValueError: a negative number of nodes or seconds, or an MTBF that is not positive.
    """
    if nodes < 0 or not repair_s >= 0.0 or not node_mtbf_s > 0.0:
        raise ValueError(f"{nodes} nodes, repair time {repair_s} s, MTBF {node_mtbf_s} s: all must be positive")
    return nodes * repair_s / node_mtbf_s


def spares(nodes: int, *, node_mtbf_s: float, repair_s: float, short: float = SHORT_MAX) -> int:
    """The smallest s with P(nodes under repair > s) < `short`.

    Raises:
        ValueError: as `under_repair`, or `short` is not between 0 and 1.
    """
    if not 0.0 < short < 1.0:
        raise ValueError(f"a share of {short}; it must lie between 0 and 1")
    mean = under_repair(nodes, node_mtbf_s=node_mtbf_s, repair_s=repair_s)
    if mean == 0.0:
        return 0
    if mean > SPARES_MAX:
        raise ValueError(f"{mean:.0f} nodes would be under repair at a time: are MTBF and repair time correct?")
    low, high = -1, 1  # P(K > low) >= short; search by doubling, then by bisection
    while poisson_tail(high + 1, mean) >= short:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if poisson_tail(middle + 1, mean) >= short else (low, middle)
    return high
