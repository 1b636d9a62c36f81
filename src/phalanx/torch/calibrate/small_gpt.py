"""A small GPT for the short trainings: a stage of its layers, split over a tensor parallel group, in plain torch.

Shapes: B sequences, S positions, D features, V vocabulary. The column-row split of each pair of products with one all-reduce forward
and one backward is that of M. Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from phalanx.planner.cost.model_shape import ModelShape


class _Enter(torch.autograd.Function):
    """Input of a split product: identity forward, all-reduce of the gradients backward."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Any, group: Any) -> Any:
        ctx.group = group
        return x_BSD

    @staticmethod
    def backward(ctx: Any, gradient_BSD: Any) -> Any:
        gradient_BSD = gradient_BSD.contiguous()
        dist.all_reduce(gradient_BSD, group=ctx.group)
        return gradient_BSD, None


class _Leave(torch.autograd.Function):
    """Output of a split product: all-reduce forward, identity backward."""

    @staticmethod
    def forward(_ctx: Any, part_BSD: Any, group: Any) -> Any:
        sum_BSD = part_BSD.contiguous()
        dist.all_reduce(sum_BSD, group=group)
        return sum_BSD

    @staticmethod
    def backward(_ctx: Any, gradient_BSD: Any) -> Any:
        return gradient_BSD, None


class GptBlock(nn.Module):
    """Attention and MLP, with `1 / ways` of the heads and of the width on this rank."""

    def __init__(self, model: ModelShape, group: Any, ways: int) -> None:
        super().__init__()
        self.group, self.heads, self.head_dim = group, model.heads // ways, model.head_dim
        wide = self.heads * self.head_dim
        self.attention_norm = nn.LayerNorm(model.hidden)
        self.qkv = nn.Linear(model.hidden, 3 * wide, bias=False)
        self.out = nn.Linear(wide, model.hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(model.hidden)
        self.up = nn.Linear(model.hidden, model.ffn // ways, bias=False)
        self.down = nn.Linear(model.ffn // ways, model.hidden, bias=False)

    def forward(self, x_BSD: Any) -> Any:
        """Return the output of the block."""
        x_BSD = x_BSD + self._leave(self.out(self._attend(self.qkv(self._enter(self.attention_norm(x_BSD))))))
        return x_BSD + self._leave(self.down(functional.gelu(self.up(self._enter(self.mlp_norm(x_BSD))))))

    def _attend(self, qkv: Any) -> Any:
        batch, seq, _ = qkv.shape
        q, k, v = qkv.view(batch, seq, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, seq, -1)

    def _enter(self, x_BSD: Any) -> Any:
        return x_BSD if self.group is None else _Enter.apply(x_BSD, self.group)

    def _leave(self, x_BSD: Any) -> Any:
        return x_BSD if self.group is None else _Leave.apply(x_BSD, self.group)


class GptStage(nn.Module):
    """Stage `number` of `stages`: its layers, with the embeddings in the first and the output in the last."""

    def __init__(self, model: ModelShape, *, number: int, stages: int, group: Any, ways: int) -> None:
        super().__init__()
        first, last = model.layers * number // stages, model.layers * (number + 1) // stages
        self.tokens = nn.Embedding(model.vocab, model.hidden) if number == 0 else None
        self.positions = nn.Embedding(model.positions, model.hidden) if number == 0 else None
        self.blocks = nn.Sequential(*(GptBlock(model, group, ways) for _ in range(first, last)))
        ends = number == stages - 1
        self.norm = nn.LayerNorm(model.hidden) if ends else None
        self.output = nn.Linear(model.hidden, model.vocab, bias=False) if ends else None

    def forward(self, given: Any, targets_BS: Any = None) -> Any:
        """Return activations, or the loss in the last stage. In the first stage, `given` are token numbers."""
        if self.tokens is not None and self.positions is not None:
            here_S = torch.arange(given.shape[1], device=given.device)
            given = self.tokens(given) + self.positions(here_S)
        x_BSD = self.blocks(given)
        if self.norm is None or self.output is None:
            return x_BSD
        logits_BSV = self.output(self.norm(x_BSD))
        return functional.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
