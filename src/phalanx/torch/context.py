"""Context parallel: the positions of one sequence are shared by ranks, and only attention looks across.

Each rank holds two pieces of the sequence, one from the front and its mirror from the back: with a causal mask every rank then has the
same work. Attention gathers keys and values of all ranks and computes its own queries against what lies before them. That moves
2 g k s elements per layer, less than the queries where key-value heads are few, and needs nothing of the attention kernel.
Source: A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2 (all-gather based context parallelism).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from phalanx.core.errors import BadRequest

_SEQUENCE = 1  # the dimension of positions in what a model is given: (B, T, ...)
_HEADS_SEQUENCE = -2  # and in what attention is given: (B, H, T, K)


class Pieces:
    """Which positions this rank holds: pieces `place` and `2 ranks - 1 - place` of `2 ranks` equal ones."""

    def __init__(self, ranks: int, place: int) -> None:
        self.ranks = ranks
        self.mine = (place, 2 * ranks - 1 - place)

    def take(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's share of the dimension."""
        pieces = whole.chunk(2 * self.ranks, dim=dimension)
        return torch.cat([pieces[index] for index in self.mine], dim=dimension)

    def join(self, shares: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
        """The whole dimension in order, from the shares of all ranks in theirs."""
        halves = [share.chunk(2, dim=dimension) for share in shares]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=dimension)


class ContextAttention(TorchFunctionMode):
    """While it is entered, `F.scaled_dot_product_attention` looks at the keys and values of all context ranks."""

    def __init__(self, pieces: Pieces, group: Any) -> None:
        super().__init__()
        self.pieces = pieces
        self.group = group

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise BadRequest(
                "context parallel: attention was given a mask, and only causal or full attention can be cut",
                hint="use is_causal=True, or a layout without cp",
            )
        keys, values = (self.pieces.join(_Gather.apply(part, self.group), _HEADS_SEQUENCE) for part in (key, value))
        if not is_causal:
            return F.scaled_dot_product_attention(query, keys, values, dropout_p=dropout_p, **options)
        outputs = []
        for index, queries in zip(self.pieces.mine, query.chunk(2, dim=_HEADS_SEQUENCE), strict=True):
            length = queries.shape[_HEADS_SEQUENCE]
            seen = (index + 1) * length  # keys up to and with the piece itself
            mask = causal_lower_right(length, seen)
            outputs.append(
                F.scaled_dot_product_attention(
                    queries,
                    keys.narrow(_HEADS_SEQUENCE, 0, seen),
                    values.narrow(_HEADS_SEQUENCE, 0, seen),
                    attn_mask=mask,
                    dropout_p=dropout_p,
                    **options,
                )
            )
        return torch.cat(outputs, dim=_HEADS_SEQUENCE)


class _Gather(torch.autograd.Function):
    """Everybody's tensor, in order of ranks; the gradient of each comes back as the sum of what all ranks made of it."""

    @staticmethod
    def forward(context: Any, share: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        context.group = group
        shares = [
            torch.empty_like(share, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(shares, share.contiguous(), group=group)
        return tuple(shares)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        mine = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(mine, [gradient.contiguous() for gradient in gradients], group=context.group)
        return mine, None


def look_across(module: Any, mode: ContextAttention) -> None:
    """Let the module compute with `mode` entered, also when it is computed again in the backward pass. In place."""
    module.forward = _within(module.forward, mode)


def share_positions(buffers: Iterable[tuple[Any, str]], pieces: Pieces, length: int) -> None:
    """Cut what a model keeps per position (rotary tables) as its input is cut, for sequences of `length`. In place.

    Raises:
        BadRequest: a buffer holds fewer positions.
    """
    for module, name in buffers:
        whole = getattr(module, name)
        if whole.shape[0] < length:
            raise BadRequest(f"buffer {name!r} holds {whole.shape[0]} positions, and a sequence has {length}")
        setattr(module, name, pieces.take(whole[:length], 0))


def take_sequence(batch: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """This rank's positions of what all context ranks were given; tensors without positions stay."""
    return batch if batch.dim() <= _SEQUENCE else pieces.take(batch, _SEQUENCE)


def _within(forward: Callable[..., Any], mode: ContextAttention) -> Callable[..., Any]:
    @functools.wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return inside
