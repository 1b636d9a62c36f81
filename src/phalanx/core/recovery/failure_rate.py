"""How often nodes fail: a prior from published fleets, corrected by what this fleet has seen."""

from __future__ import annotations

from typing import Final

# 6.5 failures per 1,000 node-days. Source: A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
# Clusters", HPCA 2025, section on mean time to failure (RSC-1).
PRIOR_FAILURES_PER_NODE_DAY: Final = 6.5e-3
PRIOR_WEIGHT_NODE_DAYS: Final = (
    1000.0  # as if the prior had been seen over this exposure, so that a small fleet's first failure
)
# shifts the estimate without owning it
_DAY_S: Final = 86400.0


def node_mtbf_s(failures: int, node_seconds: float) -> float:
    """Mean time between failures of one node, in seconds: the mean of the gamma posterior over its failure rate.

    Args:
        failures: node failures seen.
        node_seconds: exposure, summed over nodes.

    Formula: (w + T) / (r * w + f), with w the prior's weight, r its rate, T the exposure in node-days, f the failures.
    """
    exposure_days = max(0.0, node_seconds) / _DAY_S
    rate = (PRIOR_FAILURES_PER_NODE_DAY * PRIOR_WEIGHT_NODE_DAYS + failures) / (PRIOR_WEIGHT_NODE_DAYS + exposure_days)
    return _DAY_S / rate
