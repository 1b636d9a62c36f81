"""Checkpoint interval: Young's and Daly's estimates of the optimum.

`phalanx.torch` calls `daly_interval_s` with the stall that it measured and the mean time between failures from the head. Pure arithmetic.

Symbols, as in the papers:
    delta  time for which one checkpoint stalls training, seconds; for an asynchronous checkpoint only the staging copy, not the write
    M      mean time between failures (MTBF) of the whole gang, seconds; failures are taken as a Poisson process of rate 1/M
    R      time from a failure until the gang computes again, seconds
    tau    computation between the end of one checkpoint and the start of the next, seconds

Sources:
    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, p. 530-531.
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
    22(3), 2006, p. 303-312, equation (37), and the complete cost function it minimises. Checked against the captions of its figures
    3 to 5, which print the optimum for delta = 5 min and M = 24 h, 6 h and 15 min.
"""

from __future__ import annotations

import math
from typing import Final

DEVICE_MTBF_S: Final = 54 * 86_400 * 16_384 / 419
"""Device-seconds per failure where the fleet's own rate is unknown: 419 unexpected interruptions in 54 days on 16,384 GPUs.

Source: A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.4 and table 5."""


def young_interval_s(*, stall_s: float, mtbf_s: float) -> float:
    """The first-order optimum, sqrt(2 delta M), in seconds.

    Raises:
        ValueError: `stall_s` is negative or `mtbf_s` is not positive.
    """
    _require(stall_s, mtbf_s)
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_interval_s(*, stall_s: float, mtbf_s: float) -> float:
    """The higher-order optimum of Daly's equation (37), in seconds.

    tau = sqrt(2 delta M) [1 + (1/3) (delta / 2M)^(1/2) + (1/9) (delta / 2M)] - delta   for delta < 2M
    tau = M                                                                             for delta >= 2M

    The result does not depend on R. It is 0 for a stall of 0: a checkpoint that costs nothing may be made at every step.

    Raises:
        ValueError: `stall_s` is negative or `mtbf_s` is not positive.
    """
    first_order = young_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2.0 * mtbf_s)
    return first_order * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_s


LONGEST_INTERVAL_S: Final = 1800.0
"""Failures that no rate includes (power, operators) must not cost more work than that."""
WRITE_SHARE: Final = 2.0
"""The interval is at least this multiple of the write, so that the disk is free half of the time."""


def checkpoint_interval_s(*, stall_s: float, write_s: float, mtbf_s: float) -> float:
    """The interval that phalanx.torch saves at: Daly's optimum within two bounds.

    Raises:
        ValueError: as for `daly_interval_s`.
    """
    return max(WRITE_SHARE * write_s, min(LONGEST_INTERVAL_S, daly_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)))


def expected_wall_s(*, work_s: float, interval_s: float, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Expected wall time of `work_s` seconds of computation with a checkpoint every `interval_s` of it.

    T = M exp(R/M) (exp((tau + delta)/M) - 1) Ts / tau, Daly's complete cost function, with Ts = `work_s`.

    Raises:
        ValueError: `interval_s` or `mtbf_s` is not positive, or `stall_s` is negative.
    """
    _require(stall_s, mtbf_s)
    if interval_s <= 0.0:
        raise ValueError(f"an interval of {interval_s} s; it must be positive")
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s) * work_s / interval_s


def gang_mtbf_s(*, device_mtbf_s: float = DEVICE_MTBF_S, devices: int) -> float:
    """M of a gang of `devices` devices that fail independently, any of which ends it: the device's own divided by their number.

    Raises:
        ValueError: `devices` is not positive.
    """
    if devices <= 0:
        raise ValueError(f"a gang of {devices} devices; it must have at least one")
    return device_mtbf_s / devices


def _require(stall_s: float, mtbf_s: float) -> None:
    if not stall_s >= 0.0:
        raise ValueError(f"a stall of {stall_s} s; it must not be negative")
    if not mtbf_s > 0.0:
        raise ValueError(f"a mean time between failures of {mtbf_s} s; it must be positive")
