"""Whether a model fits the GPUs of a replica, and how many would do. An estimate before anything starts: weights, one long request, and what an engine needs besides. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.units import GIB

FLOOR_TOKENS: Final = 8192  # of one request whose keys and values must fit; less if the model allows no more
# On each GPU, beside weights and cache: CUDA context, buffers of NCCL, activations and CUDA graphs. About what vLLM reports for 7B to 70B.
OVERHEAD_BYTES: Final = 2 * GIB
GPUS_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What a model needs. Zero for what is not known.

    Attributes:
        weights_bytes: of its files.
        kv_bytes: keys and values of one token, on all GPUs together.
        kv_parts: the most GPUs between which they are divided; more GPUs hold copies.
        heads: attention heads.
        tokens_max: longest text that it takes.
    """

    weights_bytes: int
    kv_bytes: int = 0
    kv_parts: int = 1
    heads: int = 0
    tokens_max: int = 0

    @property
    def floor_tokens(self) -> int:
        """Tokens of the request that must fit."""
        return min(FLOOR_TOKENS, self.tokens_max or FLOOR_TOKENS)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of that request."""
        return self.kv_bytes * self.floor_tokens


def fits(needs: ModelNeeds, gpus: int, memory_bytes: int, share: float, *, nodes: int = 1) -> bool:
    """Whether so many GPUs on each of the nodes hold it, of whose memory an engine uses `share`. Nodes divide its layers, GPUs its heads."""
    cache = needs.cache_bytes / (max(1, min(gpus, needs.kv_parts)) * nodes)
    return needs.weights_bytes / (gpus * nodes) + cache + OVERHEAD_BYTES <= memory_bytes * share


def divides_heads(needs: ModelNeeds, gpus: int) -> bool:
    """Whether so many GPUs can take equal shares of the attention heads; true if their number is not known."""
    return needs.heads == 0 or needs.heads % gpus == 0


def fewest_gpus(needs: ModelNeeds, memory_bytes: int, share: float, *, splits_heads: bool, nodes: int = 1) -> int:
    """The smallest number of GPUs on each of the nodes that hold it; 0 if none does. With `splits_heads` they divide the heads."""
    for gpus in range(1, GPUS_MAX // nodes + 1):
        if (not splits_heads or divides_heads(needs, gpus)) and fits(needs, gpus, memory_bytes, share, nodes=nodes):
            return gpus
    return 0
