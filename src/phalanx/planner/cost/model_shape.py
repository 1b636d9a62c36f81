"""The shape of a transformer, which determines its parameters, work and traffic. No weights.

Counting, with d hidden, L layers, h heads of k features, g key-value heads, f width of the MLP, V vocabulary, s sequence length:
    attention     2 d h k + 2 d g k                              (queries and output; keys and values)
    MLP           2 d f, gated 3 d f; a mixture has this per expert, and a router of d E
    embedding     V d, and V d again for the output unless tied
Biases and norms are counted if the model has them (`biases`): they need little memory, but published counts include them.
Source: J. Kaplan et al., "Scaling Laws for Neural Language Models", 2020, table 1; for multi-head latent attention DeepSeek-AI,
"DeepSeek-V2", 2024, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys-values pass through a narrow latent vector.

    Attributes:
        query_rank, kv_rank: width of the latent vectors; `query_rank` 0 for queries made directly.
        rope_dim: features per head that carry the position, in addition to `head_dim` that do not.
        value_dim: features per head of the values.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWindow:
    """Sliding-window (or chunked) attention: in `layers` of the model, a token looks back at most `tokens`."""

    tokens: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Mixture of experts in the MLPs.

    Attributes:
        experts: routed experts per layer.
        per_token: routed experts that each token visits.
        ffn: width of one expert.
        shared_ffn: width of the shared experts, which every token visits; 0 for none.
        dense_layers: number of first layers with a plain MLP of the model's `ffn` instead.
        groups, group_limit: the experts lie in so many groups, and a token visits experts of at most so many of them, which limits its
            nodes; 1 group for no limit.
    """

    experts: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    groups: int = 1
    group_limit: int = 1

    @property
    def visited_ffn(self) -> int:
        """Total width of the experts that one token visits."""
        return self.shared_ffn + self.per_token * self.ffn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. Sizes are counts of features.

    Attributes:
        gated: the MLP has three matrices (such as SwiGLU) instead of two.
        tied: the output shares the input embedding.
        positions: number of learned position vectors; 0 for rotary or ALiBi.
        biases: linear layers carry biases.
        norm_vectors: vectors of `hidden` per norm: 1 for RMSNorm, 2 for LayerNorm.
        window: layers that look back over a limited number of tokens; None if every layer sees the whole context.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False
    norm_vectors: int = 1
    mixture: MixtureOfExperts | None = None
    latent: LatentAttention | None = None
    window: AttentionWindow | None = None

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer."""
        d, h, k = self.hidden, self.heads, self.head_dim
        if self.latent is not None:
            mla = self.latent
            wide = h * (k + mla.rope_dim)
            queries = d * mla.query_rank + mla.query_rank * wide if mla.query_rank else d * wide
            return (
                queries
                + d * (mla.kv_rank + mla.rope_dim)
                + mla.kv_rank * h * (k + mla.value_dim)
                + h * mla.value_dim * d
            )
        count = 2 * d * h * k + 2 * d * self.kv_heads * k
        return count + (h * k + 2 * self.kv_heads * k + d if self.biases else 0)

    @property
    def layer_matrices(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of each matrix of one layer, by name: those that LoRA adapts. Of a mixture, the experts that one token visits."""
        d, wide, narrow = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        ffn = self.ffn if self.mixture is None else self.mixture.visited_ffn
        gate = {"gate": (d, ffn)} if self.gated else {}
        return {
            "q": (d, wide),
            "k": (d, narrow),
            "v": (d, narrow),
            "o": (wide, d),
            **gate,
            "up": (d, ffn),
            "down": (ffn, d),
        }

    def adapter_parameters(self, rank: int, names: Iterable[str]) -> int:
        """Return the parameters of LoRA adapters of this rank at the named matrices. Source: E. Hu et al., "LoRA", 2021, section 4.1."""
        return self.layers * sum(rank * sum(self.layer_matrices[name]) for name in names if name in self.layer_matrices)

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices in one MLP."""
        return 3 if self.gated else 2

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of one plain MLP."""
        return self.mlp_matrices * self.hidden * self.ffn + (self.ffn + self.hidden if self.biases else 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        return self.layers if self.mixture is None else self.mixture.dense_layers

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts of one mixture layer."""
        return 0 if self.mixture is None else self.mixture.experts * self.mlp_matrices * self.hidden * self.mixture.ffn

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, the output unless tied, and the positions."""
        return self.hidden * (self.vocab * (1 if self.tied else 2) + self.positions)

    @property
    def norm_parameters(self) -> int:
        """Parameters of two norms per layer and one at the end."""
        return (2 * self.layers + 1) * self.hidden * self.norm_vectors

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return self._parameters(1.0)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token visits."""
        return self._parameters(0.0 if self.mixture is None else self.mixture.per_token / self.mixture.experts)

    def _parameters(self, share_of_experts: float) -> int:
        count = self.layers * self.attention_parameters + self.dense_layers * self.dense_mlp_parameters
        count += self.embedding_parameters + self.norm_parameters
        if self.mixture is not None:
            always = self.hidden * self.mixture.experts + self.mlp_matrices * self.hidden * self.mixture.shared_ffn
            routed = round(self.expert_parameters * share_of_experts)
            count += (self.layers - self.mixture.dense_layers) * (always + routed)
        return count

    def flops_per_token(self, seq: int, *, frozen: bool = False) -> float:
        """Return the model FLOPs per trained token, forward and backward, with half of the attention matrix (causal), without recomputation.

        6 per parameter in a matrix product (the input embedding is a look-up), 4 where the weights are frozen, and 6 L s h k for the
        scores and values of the s/2 positions that a token attends to on average.
        Source: A. Chowdhery et al., "PaLM", 2022, appendix B, with the causal half of T. Dao et al., "FlashAttention", 2022.
        """
        products = self.active_parameters - self.norm_parameters - self.hidden * self.positions
        products -= 0 if self.tied else self.hidden * self.vocab
        if self.latent is None:
            wide = 2 * self.head_dim
        else:
            wide = self.head_dim + self.latent.rope_dim + self.latent.value_dim
        return (4.0 if frozen else 6.0) * products + 3.0 * self.layers * self.attended(seq) * self.heads * wide

    def attended(self, seq: float) -> float:
        """Return the length at which attention without windows has as many pairs of positions as this model at `seq`, mean over the layers.

        A token at position i of a layer with a window w sees min(i, w) positions: w - w^2 / 2 s on average, against s / 2 without.
        """
        if self.window is None or self.window.tokens >= seq:
            return float(seq)
        tokens, share = self.window.tokens, self.window.layers / self.layers
        return seq * (1.0 - share) + (2.0 * tokens - tokens**2 / seq) * share
