"""A byte-level GPT: pre-norm, rotary positions, squared-ReLU MLP. The input of each position is its last few bytes.

Legend of shapes: B samples, T positions, D width, H heads, K width of a head, V = 256 byte values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256
LOOK_BACK = 3
"""Bytes in the input of a position: its own and two before it. Attention need not learn that, which saves 100 steps of a short run."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in self.qkv(x_BTD).split(D, dim=2)
        )
        y_BHTK = F.scaled_dot_product_attention(rotate(q_BHTK, rotary), rotate(k_BHTK, rotary), v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        return x_BTD + self.narrow(F.relu(self.widen(self.mlp_norm(x_BTD))).square())


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.heads = heads
        self.embeddings = nn.ModuleList(nn.Embedding(BYTES, width) for _ in range(LOOK_BACK))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def initialize(self) -> None:
        """Set small random weights. The branches into the stream and the head start at zero, so the first loss is ln 256 = 5.545."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.0 / math.sqrt(module.in_features))
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=1.0 / math.sqrt(LOOK_BACK))
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.narrow.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        rotary = rotary_tables(bytes_BT.shape[1], self.width // self.heads, bytes_BT.device)
        x_BTD = self.embed(bytes_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        return self.head(self.norm(x_BTD))

    def embed(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        """Return the sum of the embeddings of each byte and the ones before it, each from its own table; zeros before the start."""
        x_BTD = self.embeddings[0](bytes_BT)
        for back in range(1, LOOK_BACK):
            earlier_BTD = self.embeddings[back](bytes_BT[:, :-back])
            x_BTD = x_BTD + F.pad(earlier_BTD, (0, 0, back, 0))
        return x_BTD


def rotary_tables(length: int, head_width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, each (length, head_width / 2), of rotary positions with base 10,000.

    Source: Su et al., "RoFormer", 2021, equation (15).
    """
    frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate each pair of features by the angle of its position."""
    cosine, sine = rotary
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
