"""One replica of a served model: how it is divided, its weights, and its cache of keys and values.

Cache per token and layer, with g key-value heads of k features and b bytes per number:
    grouped queries   2 g k b               (g = heads: multi-head; g = 1: multi-query)
    latent attention  (r + p) b             r the latent rank, p the features with the position
    sliding window    as grouped queries, of at most w tokens in the layers that have a window
Tensor parallel ranks divide the heads; more ranks than key-value heads hold copies, and every rank holds the whole latent cache.
Sources: J. Ainslie et al., "GQA", 2023; DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2; A. Jiang et al., "Mistral 7B", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from phalanx.planner.cost.model_shape import ModelShape

WEIGHT_BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 4.25 / 8.0, "nvfp4": 4.5 / 8.0, "mxfp4": 4.25 / 8.0}
)
"""Bytes of one weight of a matrix. int4: groups of 64 with a scale of 16 bits, as GPTQ and AWQ store them; nvfp4: blocks of 16, mxfp4: blocks of
32, each with a scale of 8 bits (E. Alvarez et al., "Introducing NVFP4", NVIDIA, 2025; OCP Microscaling Formats 1.0, section 5.2)."""
CACHE_BYTES: Final[Mapping[str, float]] = MappingProxyType({"bf16": 2.0, "fp16": 2.0, "fp8": 1.0})
PRODUCT_PRECISION: Final[Mapping[str, str]] = MappingProxyType(
    {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "int4": "bf16", "nvfp4": "nvfp4", "mxfp4": "bf16"}
)
"""The precision in which products are computed: weights of 4 bits are unpacked to 16, but for nvfp4, which the GPU must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model with its precision when it answers. `weights` and `cache` are keys of `WEIGHT_BYTES` and `CACHE_BYTES`."""

    shape: ModelShape
    weights: str = "bf16"
    cache: str = "bf16"

    @property
    def head_parameters(self) -> int:
        """Parameters of the output matrix."""
        return self.shape.hidden * self.shape.vocab

    @property
    def unquantised_parameters(self) -> int:
        """Parameters that keep 16 bits: embeddings, output and norms."""
        return self.shape.embedding_parameters + self.shape.norm_parameters

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        wide = self.unquantised_parameters
        return (self.shape.parameters - wide) * WEIGHT_BYTES[self.weights] + wide * 2.0

    @property
    def layer_weights(self) -> tuple[float, float]:
        """Parameters in matrices of all layers: those that every token visits, and those of the routed experts."""
        shape = self.shape
        always = shape.layers * shape.attention_parameters + shape.dense_layers * shape.dense_mlp_parameters
        if shape.mixture is None:
            return float(always), 0.0
        mixed = shape.layers - shape.mixture.dense_layers
        always += mixed * shape.hidden * (shape.mixture.experts + shape.mlp_matrices * shape.mixture.shared_ffn)
        return float(always), float(mixed * shape.expert_parameters)

    def token_bytes(self, ranks: int = 1) -> float:
        """Bytes of keys and values that one more token adds on one of `ranks` tensor parallel ranks, in layers without a window."""
        return self._layer_bytes(ranks) * (
            self.shape.layers - (0 if self.shape.window is None else self.shape.window.layers)
        )

    def context_bytes(self, tokens: float, ranks: int = 1) -> float:
        """Bytes of keys and values of one request with so many tokens, on one of `ranks` ranks."""
        whole = self.token_bytes(ranks) * tokens
        if self.shape.window is not None:
            whole += self._layer_bytes(ranks) * self.shape.window.layers * min(tokens, self.shape.window.tokens)
        return whole

    def _layer_bytes(self, ranks: int) -> float:
        shape, size = self.shape, CACHE_BYTES[self.cache]
        if shape.latent is not None:
            return (shape.latent.kv_rank + shape.latent.rope_dim) * size
        return 2.0 * -(-shape.kv_heads // ranks) * shape.head_dim * size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """How one replica is divided: `tensor` ranks share each matrix, `stages` share the layers."""

    tensor: int = 1
    stages: int = 1

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tensor * self.stages


def cache_room_bytes(
    model: ServedModel, layout: ReplicaLayout, memory_bytes: float, *, share: float, overhead_bytes: float
) -> float:
    """Return the bytes that one GPU has left for keys and values; negative if the weights do not fit.

    Args:
        model: the model.
        layout: of the replica.
        memory_bytes: of one GPU.
        share: of the memory that an engine takes.
        overhead_bytes: beside weights and cache: context, buffers of collectives, activations.
    """
    return memory_bytes * share - model.weight_bytes / layout.gpus - overhead_bytes


def cache_tokens(model: ServedModel, layout: ReplicaLayout, room_bytes: float, context: float) -> float:
    """Return how many tokens of requests with `context` tokens each fit into the room of every GPU."""
    each = model.context_bytes(context, layout.tensor) / layout.stages
    return max(0.0, room_bytes) / each * context
