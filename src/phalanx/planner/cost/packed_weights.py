"""Formats of frozen 4-bit weights, and what it costs to unpack a matrix to 16 bits before each product.

    nf4, nf4-dq   bitsandbytes: 4 bits, and a 32-bit scale for 64 weights; `-dq` packs the scales to 8 bits as well, with a scale for 256 of them.
                  One kernel unpacks a matrix, forward and again backward. Until version 0.41 autograd kept the input of every product too
    gptq          auto-gptq's path for training, torch operations: 4 bits, and for 128 inputs of an output a 16-bit scale and a 4-bit zero. Per weight,
                  the words are shifted into 32-bit integers (4.5 bytes moved) and cut to 8 bits (5), masked (2), zeros gathered (2) and subtracted
                  (3), scales gathered (4) and multiplied (5). Autograd keeps the product, so the backward pass does not unpack again, and under
                  recomputation a whole layer is unpacked at once
Sources: T. Dettmers et al., "QLoRA", 2023, section 3; github:bitsandbytes-foundation/bitsandbytes autograd/_functions.py, MatMul4Bit;
github:AutoGPTQ/AutoGPTQ auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py and its trainable variant (0.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """One format. All bytes are per weight.

    Attributes:
        weight_bytes: stored.
        moved_bytes: moved by the kernels that unpack; None if `Physics.unpack` times what is read and written says it.
        kernels: issued by the host to unpack one matrix.
        temporary_bytes: on the device at once while one matrix is unpacked, its 16-bit result included.
        is_kept: autograd keeps the unpacked matrix.
    """

    name: str
    weight_bytes: float
    kernels: int
    temporary_bytes: float = 2.0
    moved_bytes: float | None = None
    is_kept: bool = False


PACKED_FORMATS: Final[Mapping[str, PackedFormat]] = {
    one.name: one
    for one in (
        PackedFormat(name="nf4", weight_bytes=0.5 + 4.0 / 64.0, kernels=2),
        PackedFormat(name="nf4-dq", weight_bytes=4.127 / 8.0, kernels=4),
        PackedFormat(
            name="gptq",
            weight_bytes=0.5 + 2.5 / 128.0,
            kernels=8,
            temporary_bytes=6.0,
            moved_bytes=25.5,
            is_kept=True,
        ),
    )
}
"""By name. Kernels: nf4 unpacks and casts; `-dq` unpacks its scales and adds their mean before; gptq as counted above, with the product's copy."""

KERNEL_S: Final = 1e-5
"""Time of the host to issue one operation of eager torch. Source: our estimate, as for `Stack.host_s` (50 operations of 10 us a layer)."""
