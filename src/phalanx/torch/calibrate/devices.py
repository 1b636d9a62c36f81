"""Measure single devices while all devices work: matrix products by precision, and memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from phalanx.planner.calibration.samples import CopySample, ProductSample
from phalanx.torch.calibrate.gang import CalibrationGang

_CUDA_SIZES: Final = (4096, 8192, 12288)  # the widths of models of 7 to 200 billion parameters
_CPU_SIZES: Final = (256, 512, 768)  # a third of a gigaFLOP at most: tens of milliseconds on one slow core
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CUDA_COPY_BYTES: Final = 1 << 30  # larger than every cache; an H100 has 50 MB
_CPU_COPY_BYTES: Final = 64 << 20  # larger than the cache of one core, small compared with the memory of a virtual node
_BURST_S: Final = 0.04
"""Virtual devices share cores in time slices of a few milliseconds, so a burst covers ten slices. On an accelerator it averages the clock."""
_FP8_SINCE: Final = (8, 9)  # compute capability: Ada and Hopper. Source: NVIDIA, CUDA C++ Programming Guide, 2024


def measure_products(gang: CalibrationGang) -> list[ProductSample]:
    """Measure square products of each size in each supported precision. Collective."""
    sizes = _CUDA_SIZES if gang.on_cuda else _CPU_SIZES
    return [
        ProductSample(
            node_rank=gang.node_rank,
            rank=gang.rank,
            precision=precision,
            size=size,
            flops_per_s=2.0 * size**3 / gang.median_time_s(_product(precision, size, gang.device), burst_s=_BURST_S),
        )
        for precision in _precisions(gang)
        for size in (sizes[:2] if gang.quick else sizes)
    ]


def measure_memory(gang: CalibrationGang) -> list[CopySample]:
    """Measure a copy within device memory, in read plus written bytes. Collective."""
    count = (_CUDA_COPY_BYTES if gang.on_cuda else _CPU_COPY_BYTES) // 4
    source, target = torch.ones(count, device=gang.device), torch.empty(count, device=gang.device)
    seconds = gang.median_time_s(lambda: target.copy_(source), burst_s=_BURST_S)
    return [CopySample(node_rank=gang.node_rank, rank=gang.rank, bytes_per_s=2.0 * 4 * count / seconds)]


def _precisions(gang: CalibrationGang) -> list[str]:
    """Return the precisions that the devices of all ranks support, so that all ranks measure the same in the same order."""
    if not gang.on_cuda:
        return ["fp32", "bf16"]
    lacks_fp8 = gang.maximum(float(torch.cuda.get_device_capability(gang.device) < _FP8_SINCE))
    return ["fp32", "fp16", "bf16"] + ([] if lacks_fp8 else ["fp8"])


def _product(precision: str, size: int, device: Any) -> Callable[[], object]:
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    if precision == "fp8":
        one = torch.ones((), device=device)
        # Tensor cores read the right matrix by columns.
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001  # the only fp8 product of torch
    a, b = left.to(_DTYPES[precision]), right.to(_DTYPES[precision])
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)
