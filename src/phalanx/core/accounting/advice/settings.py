"""Writes the keys of a job file that advice names, each with its value. Front ends write them as their options."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from phalanx.core.units import GIB, MIB
from phalanx.core.work.gpus import GpuRequest

MARGIN: Final = 1.2
"""Requests are so much above the highest use. Source: the e-mails of Job Defense Shield ("an extra 20 % for safety")."""
Setting = tuple[str, str]
_MINUTE_S, _HOUR_S = 60.0, 3600.0


def gpus_setting(request: GpuRequest, total: int, *, nodes: int | None = None) -> Setting:
    """`gpus` for so many whole GPUs of the same kind, on so many nodes; None leaves the shape to Phalanx."""
    if not total:
        return "gpus", "0"
    per_node = None if nodes is None else total // nodes
    return "gpus", str(replace(request, total=total, nodes=nodes, per_node=per_node))


def same_kind_setting(request: GpuRequest, amount: str) -> Setting:
    """`gpus` for an amount of the same kind: `4`, or `1/4` of one."""
    kinds = request.kinds_text
    return "gpus", f"{kinds + ':' if kinds else ''}{amount}"


def memory_setting(peak_bytes: float) -> Setting:
    """`memory` with the margin above a peak: whole GiB, below one GiB steps of 128 MiB from 512 MiB on."""
    wanted = peak_bytes * MARGIN
    if wanted <= GIB:
        return "memory", f"{max(4, ceil(wanted / (128 * MIB))) * 128}MiB"
    return "memory", f"{ceil(wanted / GIB)}GiB"


def time_setting(run_s: float) -> Setting:
    """`time` with the margin above a run: steps of 5 minutes, half hours from 1 h on, hours from 12 h on."""
    wanted = run_s * MARGIN
    step = 5 * _MINUTE_S if wanted <= _HOUR_S else _HOUR_S / 2 if wanted <= 12 * _HOUR_S else _HOUR_S
    minutes = int(ceil(wanted / step) * step // _MINUTE_S)
    return "time", f"{minutes // 60}h" if minutes % 60 == 0 else f"{minutes}m"


def cpus_setting(cpus: float) -> Setting:
    """`cpus` for so many on each node."""
    return "cpus", str(max(1, ceil(cpus)))


def percent(share: float) -> str:
    """A share in percent: `12%`; with a digit below ten."""
    return f"{share * 100:.0f}%" if share >= 0.0995 or not share else f"{share * 100:.1f}%"
