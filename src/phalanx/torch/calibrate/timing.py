"""Time work on a device: with CUDA events, because the host only queues the work, or on a CPU with the host clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def burst_times_s(work: Callable[[], object], device: Any, repeats: int, burst: int = 1) -> list[float]:
    """Return the seconds of one `work` in each of `repeats` bursts."""
    if device.type == "cuda":
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in marks:
            begin.record()
            for _ in range(burst):
                work()
            end.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) / 1e3 / burst for begin, end in marks]
    taken = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for _ in range(burst):
            work()
        taken.append((time.perf_counter() - began_s) / burst)
    return taken


def time_once_s(work: Callable[[], object], device: Any) -> float:
    """Return the seconds of one run by the host clock, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s
