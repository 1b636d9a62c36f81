"""A byte-level GPT that declares its parts, so that Phalanx can split it under any layout. The model does not depend on the layout.

Legend of shapes: B samples, T positions, D width, H heads on this rank (all of them, or a share), K width of a head, V = 256.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import phalanx.torch

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Queries, keys and values are three layers, so that each splits by head."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.query_norm = nn.RMSNorm(self.head_width)
        self.key_norm = nn.RMSNorm(self.head_width)
        self.register_buffer("rotary", rotary_table(length, self.head_width), persistent=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        rotary = self.rotary[: x_BTD.shape[1]]
        q_BHTK, k_BHTK = rotate(self.query_norm(q_BHTK), rotary), rotate(self.key_norm(k_BHTK), rotary)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, length)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, *, width: int = 144, layers: int = 4, heads: int = 8, length: int = 128) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def phalanx_parts(self) -> phalanx.torch.Parts:
        """Declare the model as a chain, and how tensor parallel ranks share its layers."""
        return phalanx.torch.Parts(
            chain=("embed", "blocks", "norm", "head"),
            tensor={
                "blocks.*.attention.query": "columns",
                "blocks.*.attention.key": "columns",
                "blocks.*.attention.value": "columns",
                "blocks.*.attention.*_norm": "shared",
                "blocks.*.attention.out": "rows",
                "blocks.*.mlp.up": "columns",
                "blocks.*.mlp.down": "rows",
                "head": "columns",
            },
            heads=self.heads,
            positions=("blocks.*.attention.rotary",),
        )

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(bytes_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def rotary_table(length: int, head_width: int) -> torch.Tensor:
    """Return cosine and sine of rotary positions with base 10,000, (length, 2, head_width / 2).

    Source: Su et al., "RoFormer", 2021, equation (15).
    """
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x_BHTK: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of features by the angle of its position."""
    cosine, sine = rotary.to(x_BHTK.dtype).unbind(1)
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def initialize(part: nn.Module) -> None:
    """Initialize a part that was built on the meta device with small random weights."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Attention):
            module.rotary.copy_(rotary_table(module.rotary.shape[0], module.head_width))
