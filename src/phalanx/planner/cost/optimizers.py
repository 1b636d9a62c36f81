"""Optimizers, and where their states are: on the device, in pages that leave it, or on the host.

    32-bit Adam     two moments of 4 bytes for each parameter
    8-bit Adam      two moments of one byte, and a 32-bit scale for each block of 256 of them
    4-bit Adam      two moments of half a byte, and a 32-bit scale for each block of 128 of them
    paged           the states are in managed memory: those without room on the device move to the host while activations need it, and come
                    back for the update
    offload         the states, and with `PARAMETERS` the weights too, stay on the host, where the CPU updates them
Sources: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, section 2 and table 5; block size: bitsandbytes 0.45 and
github:pytorch/ao torchao/optim; 4 bits: B. Li et al., "Memory Efficient Optimizers with 4-bit States", 2023, as torchao has them; pages: T. Dettmers et al., "QLoRA", 2023, section 3; offload: J. Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

import enum
from typing import Final

from phalanx.planner.cost.coefficients import Stack

BLOCK: Final = 256
"""8-bit numbers of a moment that share a scale."""
BLOCK_4BIT: Final = 128
"""The same for 4-bit ones."""
NARROW_UPDATE_SHARE: Final = 47.0 / 63.0
"""Time of an 8-bit update relative to a fused 32-bit one: 47 and 63 ms for a billion parameters. Source: T. Dettmers et al., "8-bit
Optimizers", table 5, from memory, not re-read. ViT-H of 630M parameters on an RTX 4070 Ti SUPER, github:pytorch/ao torchao/optim/README.md:
7 ms a step saved, and 8 ms by this share. With 4 bits torchao takes as long as with 8 there (42.4 and 42.5 images/s)."""


class OptimizerKind(enum.StrEnum):
    """The optimizer, by the size and the place of its moments."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"
    ADAMW_4BIT = "adamw4bit"
    PAGED_ADAMW = "paged-adamw"
    PAGED_ADAMW_8BIT = "paged-adamw8bit"

    @property
    def is_narrow(self) -> bool:
        """Whether moments have 8 or 4 bits."""
        return self.moments_bytes is not None

    @property
    def moments_bytes(self) -> float | None:
        """Bytes of both moments of a parameter with their scales; None for those that the training program has."""
        if self is OptimizerKind.ADAMW_4BIT:
            return 2.0 * (0.5 + 4.0 / BLOCK_4BIT)
        narrow = self in {OptimizerKind.ADAMW_8BIT, OptimizerKind.PAGED_ADAMW_8BIT}
        return 2.0 * (1.0 + 4.0 / BLOCK) if narrow else None

    @property
    def is_paged(self) -> bool:
        """Whether states leave the device when it has no room."""
        return self in {OptimizerKind.PAGED_ADAMW, OptimizerKind.PAGED_ADAMW_8BIT}


class Offload(enum.StrEnum):
    """What lies in the memory of the host."""

    NONE = "none"
    OPTIMIZER = "optimizer"  # states, and what the stack moves with them of gradients
    PARAMETERS = "parameters"  # those and the weights, which come to the device layer by layer


def optimizer_state_bytes(stack: Stack, optimizer: OptimizerKind) -> float:
    """Return the bytes of the states of one parameter, with the master copy."""
    moments = stack.moment_bytes if optimizer.moments_bytes is None else optimizer.moments_bytes
    return stack.state_bytes - stack.moment_bytes + moments
