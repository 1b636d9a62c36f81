"""What is recorded of nodes and devices, and how a value becomes a small integer. The unit of each metric is the error that history has.

A value is rounded to half a unit at most; -1 stands for unknown. Network rates span nine orders of magnitude, so their code is a logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UNKNOWN: Final = -1
CODE_MAX: Final = 32_767
_RATE_FLOOR: Final = 1000.0  # bytes per second that one code near zero stands for
_RATE_STEPS: Final = 200.0  # codes per doubling: a step is 0.35 %

THROTTLE_REASONS: Final = (  # by bit; `node.probes.nvml` names them
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
_OTHER_REASON: Final = 1 << len(THROTTLE_REASONS)

Codes = npt.NDArray[np.int16]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit`: value of one code; `rate`: the code is logarithmic; `reasons`: the code is a set of throttle reasons."""

    name: str
    unit: float = 1.0
    rate: bool = False
    reasons: bool = False


DEVICE_METRICS: Final = (
    Metric("utilization", 1 / 200),
    Metric("memory_used_bytes", float(16 << 20)),
    Metric("power_w"),
    Metric("temperature_c"),
    Metric("throttled", 1 / 200, reasons=True),
)
NODE_METRICS: Final = (
    Metric("cpu_utilization", 1 / 200),
    Metric("memory_used_bytes", float(256 << 20)),
    Metric("network_received_bytes_per_s", rate=True),
    Metric("network_sent_bytes_per_s", rate=True),
)


@lru_cache(maxsize=64)
def metrics_of(devices: int) -> tuple[Metric, ...]:
    """The metrics of the rows of a node with this many devices, in order."""
    return NODE_METRICS + DEVICE_METRICS * devices


def encode(values: Any, metrics: tuple[Metric, ...], *, sets: bool = False) -> Codes:
    """Codes of values, one row for each metric; NaN becomes UNKNOWN. Throttle reasons are shares of time, or with `sets` their codes."""
    values = np.asarray(values, np.float64)
    units, rates = _shape(metrics, values.ndim)
    if sets:
        units = np.where(_column(reason_rows(metrics), values.ndim), 1.0, units)
    with np.errstate(invalid="ignore"):
        logarithms = _RATE_STEPS * np.log2(1 + np.maximum(values, 0) / _RATE_FLOOR)
        codes = np.clip(np.rint(np.where(rates, logarithms, values / units)), 0, CODE_MAX)
    return np.where(np.isnan(values), UNKNOWN, codes).astype(np.int16)


def decode(codes: Codes, metrics: tuple[Metric, ...]) -> Values:
    """Values of codes, one row for each metric; UNKNOWN becomes NaN."""
    units, rates = _shape(metrics, codes.ndim)
    found = codes.astype(np.float64)
    values = np.where(rates, _RATE_FLOOR * (np.exp2(found / _RATE_STEPS) - 1), found * units)
    return np.where(codes < 0, np.nan, values)


def reasons_code(reasons: tuple[str, ...]) -> int:
    """The code of a set of throttle reasons; those of a later release count as one."""
    code = 0
    for reason in reasons:
        code |= 1 << THROTTLE_REASONS.index(reason) if reason in THROTTLE_REASONS else _OTHER_REASON
    return code


def reasons_named(code: int) -> list[str]:
    """The throttle reasons of a code."""
    if code < 0:
        return []
    named = [reason for bit, reason in enumerate(THROTTLE_REASONS) if code >> bit & 1]
    return [*named, "other"] if code & _OTHER_REASON else named


@lru_cache(maxsize=64)
def reason_rows(metrics: tuple[Metric, ...]) -> npt.NDArray[np.bool_]:
    """Which rows hold throttle reasons."""
    return np.array([metric.reasons for metric in metrics], np.bool_)


@lru_cache(maxsize=64)
def _rows(metrics: tuple[Metric, ...]) -> tuple[Values, npt.NDArray[np.bool_]]:
    return np.array([metric.unit for metric in metrics]), np.array([metric.rate for metric in metrics], np.bool_)


def _shape(metrics: tuple[Metric, ...], dimensions: int) -> tuple[Values, npt.NDArray[np.bool_]]:
    units, rates = _rows(metrics)
    return _column(units, dimensions), _column(rates, dimensions)


def _column(rows: npt.NDArray[Any], dimensions: int) -> Any:
    return rows.reshape(-1, *(1,) * (dimensions - 1))
