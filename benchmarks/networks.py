"""Networks of published training rows, as small as their papers allow: a ResNet and a ViT. Started by `benchmarks.counted_networks`.

Sources: K. He et al., "Deep Residual Learning for Image Recognition", 2016, table 1 (the stride of a stage in its 3 x 3 convolution);
A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, table 1 (mean of the patches instead of a class token).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class _Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and width_in == out
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )
        self.end = nn.ReLU(inplace=True)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.end(self.body(x_bchw) + self.short(x_bchw))
        return found


class ResNet(nn.Module):
    """A ResNet of bottlenecks for 1,000 classes."""

    def __init__(self, blocks: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        width_in, body = 64, []
        for width, count, stride in zip((64, 128, 256, 512), blocks, (1, 2, 2, 2), strict=True):
            for place in range(count):
                body.append(_Bottleneck(width_in, width, stride if place == 0 else 1))
                width_in = 4 * width
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(width_in, 1000)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return the logits of B images."""
        found: torch.Tensor = self.head(self.body(self.stem(x_bchw)).mean((2, 3)))
        return found


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x_btd.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x_btd)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x_btd = x_btd + self.out(mixed)
        found: torch.Tensor = x_btd + self.down(functional.gelu(self.up(self.norm2(x_btd))))
        return found


class VisionTransformer(nn.Module):
    """A ViT for images of 224 x 224 and 1,000 classes."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, 1000)

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        """Return the logits of B images."""
        x_btd = self.patches(x_bchw).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_btd = block(x_btd)
        found: torch.Tensor = self.head(x_btd.mean(1))
        return found


def resnet50() -> nn.Module:
    """Return ResNet-50."""
    return ResNet((3, 4, 6, 3))


def resnet101() -> nn.Module:
    """Return ResNet-101."""
    return ResNet((3, 4, 23, 3))


def resnet152() -> nn.Module:
    """Return ResNet-152."""
    return ResNet((3, 8, 36, 3))


def vit_small() -> nn.Module:
    """Return ViT-S/16."""
    return VisionTransformer(384, 12, 6)


def vit_base() -> nn.Module:
    """Return ViT-B/16."""
    return VisionTransformer(768, 12, 12)
