"""Context parallel: ranks share the positions of one sequence, and only attention uses positions of other ranks.

Each rank has two pieces of the sequence, one from the front and its mirror from the back: with a causal mask all ranks then have the
same work. Attention gathers the keys and values of all ranks and computes its own queries against the preceding ones. That moves
2 g k s elements per layer, less than the queries if there are few key-value heads, and works with any attention kernel.
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

_SEQUENCE = 1  # the dimension of positions in the input of a model: (B, T, ...)
_HEADS_SEQUENCE = -2  # and in the inputs of attention: (B, H, T, K)


class SequenceShare:
    """The positions of this rank: pieces `place` and `2 ranks - 1 - place` of `2 ranks` equal ones."""

    def __init__(self, ranks: int, place: int) -> None:
        self.ranks = ranks
        self.mine = (place, 2 * ranks - 1 - place)

    def take(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the share of this rank along the dimension."""
        pieces = whole.chunk(2 * self.ranks, dim=dimension)
        return torch.cat([pieces[index] for index in self.mine], dim=dimension)

    def join(self, shares: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
        """Return the whole dimension in order, from the shares of all ranks."""
        halves = [share.chunk(2, dim=dimension) for share in shares]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=dimension)


class ContextAttention(TorchFunctionMode):
    """While active, makes `F.scaled_dot_product_attention` use the keys and values of all context ranks."""

    def __init__(self, pieces: SequenceShare, group: Any) -> None:
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
                "context parallel supports only causal or full attention, but attention was called with a mask",
                hint="use is_causal=True, or a layout without cp",
            )
        keys, values = (self.pieces.join(_Gather.apply(part, self.group), _HEADS_SEQUENCE) for part in (key, value))
        if not is_causal:
            return F.scaled_dot_product_attention(query, keys, values, dropout_p=dropout_p, **options)
        outputs = []
        for index, queries in zip(self.pieces.mine, query.chunk(2, dim=_HEADS_SEQUENCE), strict=True):
            length = queries.shape[_HEADS_SEQUENCE]
            visible = (index + 1) * length  # keys up to the end of the piece
            mask = causal_lower_right(length, visible)
            outputs.append(
                F.scaled_dot_product_attention(
                    queries,
                    keys.narrow(_HEADS_SEQUENCE, 0, visible),
                    values.narrow(_HEADS_SEQUENCE, 0, visible),
                    attn_mask=mask,
                    dropout_p=dropout_p,
                    **options,
                )
            )
        return torch.cat(outputs, dim=_HEADS_SEQUENCE)


class _Gather(torch.autograd.Function):
    """All-gather the tensors of all ranks in order; the backward pass sums the gradients of all ranks."""

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


def attach_attention(module: Any, mode: ContextAttention) -> None:
    """Activate `mode` whenever the module computes, also when it is recomputed in the backward pass. In place."""
    module.forward = _with_mode(module.forward, mode)


def localize_buffers(buffers: Iterable[tuple[Any, str]], pieces: SequenceShare, length: int) -> None:
    """Reduce buffers per position (such as rotary tables) to the positions of this rank, for sequences of `length`. In place.

    Raises:
        BadRequest: a buffer has fewer positions.
    """
    for module, name in buffers:
        whole = getattr(module, name)
        if whole.shape[0] < length:
            raise BadRequest(f"buffer {name!r} has {whole.shape[0]} positions, but a sequence has {length}")
        setattr(module, name, pieces.take(whole[:length], 0))


def local_positions(batch: torch.Tensor, pieces: SequenceShare) -> torch.Tensor:
    """Return the positions of this rank from the input of all context ranks; tensors without positions are unchanged."""
    return batch if batch.dim() <= _SEQUENCE else pieces.take(batch, _SEQUENCE)


def _with_mode(forward: Callable[..., Any], mode: ContextAttention) -> Callable[..., Any]:
    @functools.wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return inside
