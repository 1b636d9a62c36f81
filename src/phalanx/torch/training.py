"""A model under its layout: one training step, its loss, and its state for checkpoints.

A step is the same under every layout: the mean loss over the global batch, one backward pass, one optimizer step. Only the distribution of
the work over ranks differs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Axis, Layout
from phalanx.torch.context_parallel import SequenceShare, local_positions, localize_buffers

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """How to train a model, independent of its layout: the arguments of `phalanx.torch.parallelize`, which documents them."""

    loss: Loss
    optimizer: Callable[[Any], Any]
    clip: float | None
    initialize: Callable[[Any], None] | None
    seed: int
    sequence: int
    batch: int


class Training:
    """A model that is split over ranks; created by `phalanx.torch.parallelize`.

    Attributes:
        layout: how the model is split.
        mesh: the ranks by (pipeline, replicate, shard, context, tensor).
        model: the part on this rank, with the names of the whole model.
        optimizer: over the parameters of this rank.
        data_rank, data_ranks: index of this rank in the ranks with different samples, and their number.
        gradient_norm: norm over the whole model in the last step if gradients are clipped, else nan.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        mesh: Any,
        model: Any,
        optimizer: Any,
        compute: Any,
        schedule: Any,
        loss: Loss,
        clip: float | None,
        device: Any,
        first: bool,
        last: bool,
        pieces: SequenceShare | None,
        position_buffers: Sequence[tuple[Any, str]],
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.model = model
        self.optimizer = optimizer
        self.gradient_norm = math.nan
        self._compute = compute
        self._schedule = schedule
        self._loss = loss
        self._clip = clip
        self._device = device
        self._first, self._last = first, last
        self._pieces = pieces
        self._position_buffers = position_buffers
        self._length = 0
        place = layout.coordinates(dist.get_rank())
        self.data_ranks = layout.data
        self.data_rank = place[Axis.REPLICATE] * layout.shard + place[Axis.SHARD]

    def share(self, batch: int) -> range:
        """Return the indices of the samples of a global batch for this rank. Ranks that share a sample get the same ones.

        Raises:
            BadRequest: the batch does not divide evenly.
        """
        pieces = self.data_ranks * self.layout.micro_batches
        if batch % pieces:
            raise BadRequest(
                f"global batch {batch} is not divisible by {self.data_ranks} data-parallel ranks "
                f"x {self.layout.micro_batches} micro-batches",
                hint=f"use a multiple of {pieces}",
            )
        each = batch // self.data_ranks
        return range(self.data_rank * each, (self.data_rank + 1) * each)

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train one step with the share of this rank of the global batch. Collective.

        Args:
            inputs: (B, T, ...), the same on all ranks that share these samples.
            targets: second argument of the loss; also (B, T, ...), or (B, ...) without context parallel.

        Returns:
            The mean loss over the global batch, the same on every rank.
        """
        loss = self._backward(*self._placed(inputs, targets))
        self._complete_gradients()
        loss = self._reduce_and_clip(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, as `train_step` does, without training. Collective."""
        inputs, targets = self._placed(inputs, targets)
        if self._schedule is None:
            loss = torch.stack(
                [self._loss(self._compute(x), y) for x, y in self._micro_batches(inputs, targets)]
            ).mean()
        else:
            loss = self._through_pipeline(self._schedule.eval, inputs, targets)
        return self._mean(torch.stack((loss.float(), torch.zeros_like(loss, dtype=torch.float32))))[0]

    def live_state(self) -> dict[str, Any]:
        """Return the state of model and optimizer by name, sharing memory with them. The names are the same under every layout.

        Optimizer options are stored per parameter, because pipeline ranks have different parameters of one group. They are pairs, because
        a dict would add a dozen small objects per parameter to the checkpoint.
        """
        state = {"model": get_model_state_dict(self.model)}
        options = get_optimizer_state_dict(self.model, self.optimizer)
        groups = {
            name: [[key, value] for key, value in group.items() if key != "params"]
            for group in options["param_groups"]
            for name in group["params"]
        }
        return state | {"optimizer": {"state": options["state"], "groups": groups}}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state, which was loaded into the result of `live_state`."""
        set_model_state_dict(self.model, state["model"])
        saved = state["optimizer"]
        current = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        groups = [
            {**group, **dict(saved["groups"][group["params"][0]] if group["params"] else ()), "params": group["params"]}
            for group in current
        ]
        set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict={"state": saved["state"], "param_groups": groups}
        )

    def _placed(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move inputs and targets to the device, and select the positions of this rank."""
        count = self.layout.micro_batches
        if inputs.shape[0] % count or inputs.shape[0] == 0:
            raise BadRequest(
                f"{inputs.shape[0]} samples on a rank do not divide into {count} micro-batches",
                hint=f"give each data parallel rank a multiple of {count}",
            )
        inputs, targets = inputs.to(self._device), targets.to(self._device)
        if self._pieces is None:
            return inputs, targets
        self._split_positions(inputs.shape[1])
        return local_positions(inputs, self._pieces), local_positions(targets, self._pieces)

    def _split_positions(self, length: int) -> None:
        assert self._pieces is not None
        if length == self._length:
            return
        if self._length or length % (2 * self._pieces.ranks):
            raise BadRequest(
                f"context parallel over {self._pieces.ranks} ranks: a sequence of {length} positions cannot be split",
                hint=f"use one sequence length for the whole run, a multiple of {2 * self._pieces.ranks}",
            )
        localize_buffers(self._position_buffers, self._pieces, length)
        self._length = length

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute gradients in place; return the loss that this rank computed, else 0."""
        if self._schedule is not None:
            return self._through_pipeline(self._schedule.step, inputs, targets)
        count = self.layout.micro_batches
        total = torch.zeros((), device=self._device)
        for index, (x, y) in enumerate(self._micro_batches(inputs, targets)):
            with self._exchanging(last=index == count - 1):
                loss = self._loss(self._compute(x), y) / count
                loss.backward()
            total += loss.detach()
        return total

    def _micro_batches(self, inputs: torch.Tensor, targets: torch.Tensor) -> zip[tuple[torch.Tensor, torch.Tensor]]:
        count = self.layout.micro_batches
        return zip(inputs.chunk(count), targets.chunk(count), strict=True)

    def _through_pipeline(self, run: Callable[..., Any], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        given = (inputs,) if self._first else ()
        last = {"target": targets, "losses": losses} if self._last else {}
        run(*given, **last, return_outputs=False)
        return (
            torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros((), device=self._device)
        )

    def _exchanging(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Exchange gradients after the last micro-batch only, but sharded gradients (ZeRO 2, 3) after each, so that they stay sharded."""
        if isinstance(self._compute, FSDPModule):
            self._compute.set_is_last_backward(last)
            self._compute.set_requires_gradient_sync(last or self.layout.zero >= 2)
        elif hasattr(self._compute, "no_sync") and not last:
            return self._compute.no_sync()
        return contextlib.nullcontext()

    def _reduce_and_clip(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss over all ranks. Clip gradients here too, because that needs the same exchange."""
        square = self._square_of_gradients() if self._clip is not None else torch.zeros((), device=self._device)
        loss, square = self._mean(torch.stack((loss.float(), square.float())))
        if self._clip is not None:
            norm = square.sqrt()
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch.nn.utils.clip_grad_norm_
            for gradient in self._gradients():
                _local(gradient).mul_(factor)
            self.gradient_norm = float(norm)
        return loss

    def _mean(self, loss_and_square: torch.Tensor) -> torch.Tensor:
        """Return (mean loss, sum of squares) over all ranks from the share of each rank."""
        copies = self.layout.ranks // self.layout.pipeline
        # Only the last stage has a loss; the ranks of that stage have their own or an equal one.
        loss_and_square = loss_and_square / copies
        if dist.get_world_size() > 1:
            dist.all_reduce(loss_and_square)
        return loss_and_square

    def _complete_gradients(self) -> None:
        """Sum partial gradients over the tensor ranks, such as those of a norm over the positions or heads of a rank. One message."""
        partial = [parameter for parameter in self.model.parameters() if _is_partial(parameter.grad)]
        if not partial:
            return  # FSDP2 has summed its own
        flat = torch.cat([_local(parameter.grad).flatten() for parameter in partial])
        dist.all_reduce(flat, group=partial[0].grad.device_mesh.get_group())
        for parameter, whole in zip(partial, flat.split([parameter.numel() for parameter in partial]), strict=True):
            mesh = parameter.grad.device_mesh
            parameter.grad = DTensor.from_local(whole.view_as(parameter), mesh, parameter.placements, run_check=False)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _square_of_gradients(self) -> torch.Tensor:
        """Return the sum of squares, weighted so that the mean over the ranks of one stage counts every element once."""
        total = torch.zeros((), device=self._device)
        for gradient in self._gradients():
            pieces = 1
            if isinstance(gradient, DTensor):
                for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                    pieces *= 1 if placement.is_replicate() else size
            total += pieces * _local(gradient).float().square().sum()
        return total


def _is_partial(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
