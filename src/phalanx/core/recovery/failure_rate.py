"""Failure rate of nodes: a prior from published fleets, updated by this fleet's own failures."""

from __future__ import annotations

import math
from typing import Final

# 6.5 failures per 1,000 node-days. Source: A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
# Clusters", HPCA 2025, section on mean time to failure (RSC-1).
PRIOR_FAILURES_PER_NODE_DAY: Final = 6.5e-3
# As if the prior had been observed over this exposure, so that a small fleet's first failure does not dominate the estimate.
PRIOR_WEIGHT_NODE_DAYS: Final = 1000.0
_DAY_S: Final = 86400.0


def node_mtbf_s(failures: int, node_seconds: float) -> float:
    """Mean time between failures of one node, in seconds: the mean of the gamma posterior over its failure rate.

    Args:
        failures: observed node failures.
        node_seconds: exposure, summed over nodes.

    Formula: (w + T) / (r * w + f), with w the prior's weight, r its rate, T the exposure in node-days, f the failures.
    """
    exposure_days = max(0.0, node_seconds) / _DAY_S
    rate = (PRIOR_FAILURES_PER_NODE_DAY * PRIOR_WEIGHT_NODE_DAYS + failures) / (PRIOR_WEIGHT_NODE_DAYS + exposure_days)
    return _DAY_S / rate


# Factors by which a gang's failure rate may exceed its fleet's, and their prior probabilities. No fleet publishes these; with these weights
# one gang in thirty has an increased rate, and two failures within an hour are taken for one.
_REGIMES: Final = ((1.0, 0.97), (10.0, 0.02), (100.0, 0.007), (1_000.0, 0.002), (10_000.0, 0.001))
_PRIOR_FACTOR: Final = sum(m * w for m, w in _REGIMES) / sum(w for _, w in _REGIMES)


def gang_mtbf_s(node_mtbf: float, *, nodes: int, losses: int, exposure_s: float) -> float:
    """Mean time between failures of one gang, in seconds, given the gang's own failures.

    A fleet's mean hides bad hours: a gang that lost three nodes in ten minutes must save every minute, whatever the fleet's monthly rate.
    So the rate is the posterior mean over regimes, each the fleet's rate times a factor.

    Args:
        node_mtbf: of one node of this fleet, in seconds.
        nodes: of the gang.
        losses: crashes and lost nodes of this job.
        exposure_s: how long it has been running.

    Formula: sum(w_i r_i L_i) / sum(w_i L_i), with r_i = m_i n / node_mtbf and the Poisson likelihood L_i = r_i^k exp(-r_i T).
    """
    base = max(1, nodes) / node_mtbf
    exposure_s = max(0.0, exposure_s)
    if not losses and not exposure_s:
        return 1.0 / (base * _PRIOR_FACTOR)  # no observation, L_i = 1: at every job's first start
    logs = [math.log(w) + losses * math.log(m * base) - m * base * exposure_s for m, w in _REGIMES]
    top = max(logs)
    shares = [math.exp(value - top) for value in logs]
    rate = sum(share * m * base for share, (m, _) in zip(shares, _REGIMES, strict=True)) / sum(shares)
    return 1.0 / rate
