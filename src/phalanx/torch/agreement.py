"""Make all ranks take the same decision at the same step: stop, save, or continue.

Each rank reads its own lease page, clock and signals, and two ranks may read different values around the same step. A rank that
stopped alone would leave the others in a collective for ever. So one all_reduce(MAX) of a few integers merges the requests of all ranks,
on a separate gloo group with CPU tensors, which does not use the stream of the device.

The exchange is overlapped and rare, to stay under 1 % of a step. The all_reduce is launched at one tick and read at the next. By then
every rank has launched it, because the step between has its own collectives, so reading does not wait. The next exchange follows after
EXCHANGE_S at the pace of the slowest rank, counted in ticks so that all ranks launch it at the same tick. All ranks act on a request
within EXCHANGE_S plus two steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

import torch
import torch.distributed as dist

EXCHANGE_S: Final = 0.5
"""One exchange takes 0.4 ms of CPU per rank with 2 ranks and 1.1 ms with 4, on 2 busy cores (measured November 2026, gloo over loopback).
With 4 ranks that is 2.2 ms of both cores, 0.45 % of this interval. A grace period is several seconds."""
_TICKS_MAX: Final = 256
"""Largest gap between exchanges. It limits the delay of a stop when steps suddenly take longer; for the same reason a gap at most doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """The requests of one rank, or of all ranks: the maximum of each field.

    Attributes:
        stop: a StopReason value.
        checkpoints_requested: counter of the lease page.
        save_due: 1 when the checkpoint interval has passed.
        saving: 1 while an earlier checkpoint is being written.
        tick_us: mean length of the ticks of this rank since the last exchange.
    """

    stop: int = 0
    checkpoints_requested: int = 0
    save_due: int = 0
    saving: int = 0
    tick_us: int = 0


_WISH_FIELDS: Final = tuple(field.name for field in fields(RankRequest))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedRequest:
    """The merged requests and the tick at which the ranks made them. They do not reflect actions at or after that tick."""

    request: RankRequest
    requested_at_tick: int


class RankAgreement:
    """Merges the requests of all ranks. `advance` is collective: all ranks must call it equally often.

    Args:
        group: a gloo group of all ranks with no other use; None in a gang of one.
    """

    def __init__(self, group: Any | None) -> None:
        self._group = group
        self._tick = 0
        self._launch_at = 1
        self._launched_at = 0
        self._launched_s = time.monotonic()
        self._gap = 1
        self._pending: tuple[Any, Any] | None = None
        self.latest = AgreedRequest(request=RankRequest(), requested_at_tick=0)

    @property
    def tick(self) -> int:
        """Number of calls of `advance`; equal on all ranks."""
        return self._tick

    def advance(self, make_request: Callable[[int], RankRequest]) -> AgreedRequest:
        """Do one tick: read the last exchange, and launch the next one if it is due. Only then is `make_request` called, with `tick_us`."""
        self._tick += 1
        self.finish_exchange()
        if self._tick >= self._launch_at:
            now_s = time.monotonic()
            tick_us = int((now_s - self._launched_s) * 1e6) // (self._tick - self._launched_at)
            self._launched_s, self._launched_at = now_s, self._tick
            self._launch(make_request(tick_us))
        return self.latest

    def finish_exchange(self) -> None:
        """Wait for the exchange in progress, if any, and store its result."""
        if self._pending is None:
            return
        (work, tensor), self._pending = self._pending, None
        work.wait()
        self._store(RankRequest(**dict(zip(_WISH_FIELDS, tensor.tolist(), strict=True))))

    def leave(self) -> None:
        """Finish the exchange in progress and leave the group: later requests are this rank's own. Ends the group's threads (`Session.finish`)."""
        try:
            self.finish_exchange()
        except RuntimeError:  # another rank has left already; the result of this last exchange is not needed
            pass
        self._group = None

    def _launch(self, submission: RankRequest) -> None:
        if self._group is None:
            self._store(submission)
            return
        tensor = torch.tensor(astuple(submission), dtype=torch.int64)
        self._pending = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True), tensor
        self._launch_at = self._tick + _TICKS_MAX  # the next tick settles it and sets the final value

    def _store(self, submission: RankRequest) -> None:
        self.latest = AgreedRequest(request=submission, requested_at_tick=self._launched_at)
        ticks = math.ceil(EXCHANGE_S * 1e6 / max(1, submission.tick_us))
        self._gap = min(ticks, 2 * self._gap, _TICKS_MAX)
        self._launch_at = self._launched_at + self._gap
