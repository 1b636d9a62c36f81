"""Training under Phalanx: progress, checkpoints, stopping in time, and never a step past the lease.

Works in any script that is started with the variables of torch.distributed, with or without Phalanx; alone, a process is a gang of
one. Importing this package starts no thread and runs no tensor operation, so a warm process may import it and fork. `session` has
the shape of a training loop.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.torch import session as _sessions
from phalanx.torch.environment import RankEnvironment
from phalanx.wire.rank import ReportKind, StopReason

if TYPE_CHECKING:
    from phalanx.torch.checkpointer import Checkpointer
    from phalanx.torch.state import Stateful

__all__ = ["Rank", "StopReason", "checkpoint", "fence", "finish", "init", "plan", "report", "should_stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """This process in its gang. `device` is a torch.device; `output_dir` outlives the job, None outside Phalanx."""

    rank: int
    world_size: int
    local_rank: int
    device: Any
    epoch: int
    generation: int
    restart_count: int
    resume_from: str | None
    output_dir: str | None


def init(backend: str | None = None, timeout_s: float | None = None) -> Rank:
    """Join the gang: process group, device, supervisor. Collective; a second call returns the same.

    Args:
        backend: of torch.distributed; by default NCCL beside gloo where this rank has a CUDA device, else gloo. A process group that
            exists already is used as it is.
        timeout_s: of one collective; by default PHALANX_COLLECTIVE_TIMEOUT_S.

    Raises:
        RuntimeError: there is no device for this local rank, or the supervisor's lease page is missing.
    """
    environment = RankEnvironment.read(os.environ)
    session = _sessions.open_session(lambda: _sessions.start(environment, backend=backend, timeout_s=timeout_s))
    atexit.unregister(_sessions.wait_at_exit)
    atexit.register(_sessions.wait_at_exit)
    return Rank(
        rank=session.rank,
        world_size=session.world_size,
        local_rank=environment.local_rank,
        device=session.device,
        epoch=environment.epoch,
        generation=environment.generation,
        restart_count=environment.restart_count,
        resume_from=environment.resume_from,
        output_dir=environment.output_dir,
    )


def plan(*, steps_total: int, tokens_total: int | None = None) -> None:
    """Say how long the training is, so that its progress has an end. Rank 0's word counts."""
    session = _sessions.current()
    if session.rank == 0:
        known = {} if tokens_total is None else {"tokens_total": tokens_total}
        session.pipe.send(ReportKind.PLANNED, steps_total=steps_total, **known)


def report(*, step: int, loss: float | None = None, tokens: int | None = None, mfu: float | None = None) -> None:
    """End step `step` and let the next begin. Call it in every rank after every step; it is no collective.

    Blocks while the lease is over, and ends the process if a newer epoch has taken its place.

    Args:
        step: number of the step just made; the first is 1.
        loss: of this step. A tensor on a device is waited for.
        tokens: of the whole gang in this step.
        mfu: model FLOP/s over peak, if the script knows it.
    """
    _sessions.current().report(step=step, loss=loss, tokens=tokens, mfu=mfu)


def fence() -> int:
    """Block while the lease is over. `report` and `should_stop` do it too; call it before other work that must not happen twice.

    Returns:
        The instant at which the lease was found to hold, in ns of CLOCK_BOOTTIME. What follows counts as begun then: a node that is
        stopped after it and before the work's first instruction wakes in work that was under way.
    """
    return _sessions.current().pass_fence()


def should_stop() -> StopReason:
    """Whether to leave the loop now, and why; StopReason.NONE, which is false, while training goes on.

    All ranks get the same answer at the same call. True for preemption, cancellation, a drain, SIGTERM, and when the time limit leaves
    just enough time to save. Collective: call it once per step in every rank. It waits for nobody (see `agreement`) and answers
    about half a second after the wish.
    """
    session = _sessions.current()
    session.heed_signals()
    stop = session.stop_agreed(session.tick("should_stop"))
    session.pass_fence()
    return stop


def checkpoint(
    model: Any,
    optimizer: Any = (),
    *,
    directory: str | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    every_steps: int | None = None,
    mtbf_s: float | None = None,
) -> Checkpointer:
    """Prepare asynchronous, atomic checkpoints of `model` and `optimizer`. Collective; call it after wrapping and before the loop.

    Args:
        model: plain, DDP or FSDP2.
        optimizer: one or several; may be left out.
        directory: where checkpoints go; by default PHALANX_CHECKPOINT_DIR. With neither, nothing is saved.
        stateful: further objects with state_dict and load_state_dict, by name; saved per rank.
        every_steps: save every so many steps instead of at the interval of `cadence`.
        mtbf_s: mean time between failures of this gang; by default PHALANX_MTBF_S, else from a published rate per device.
    """
    # Here, not above: half a second of imports that a script without checkpoints saves.
    from phalanx.torch.checkpointer import Checkpointer

    return Checkpointer(
        _sessions.current(),
        model,
        tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,),
        directory=directory,
        stateful=stateful or {},
        every_steps=every_steps,
        mtbf_s=mtbf_s,
    )


def finish() -> None:
    """Wait until the last checkpoint is durable and leave the gang. Collective; call it at the end of the script."""
    _sessions.close_session()
