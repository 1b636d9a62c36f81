"""Training under Phalanx: progress, checkpoints, stopping in time, and never a step past the lease.

Works in any script that is started with the variables of torch.distributed, with or without Phalanx; alone, a process is a gang of
one. Importing this package starts no thread and runs no tensor operation, so a warm process may import it and fork. `session` has
the shape of a training loop.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from phalanx.torch import session as _sessions
from phalanx.torch.environment import RankEnvironment
from phalanx.torch.parts import Parts
from phalanx.wire.rank import ReportKind, StopReason

if TYPE_CHECKING:
    from phalanx.core.work.layout import Layout
    from phalanx.torch.checkpointer import Checkpointer
    from phalanx.torch.state import Stateful
    from phalanx.torch.training import Loss, Training

__all__ = [
    "Parts",
    "Rank",
    "StopReason",
    "busy",
    "checkpoint",
    "fence",
    "finish",
    "init",
    "mesh",
    "parallelize",
    "plan",
    "report",
    "should_stop",
]


_BUSY_CHARS_MAX: Final = 100


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


def busy(what: str) -> None:
    """Say that no step will come for a while, as before an evaluation that takes long: the silence is then no hang for up to an hour.

    The next `report` ends it. One rank of a node is enough. Saves say so by themselves.

    Args:
        what: a word for it ("evaluation").
    """
    _sessions.current().pipe.send(ReportKind.BUSY, what=what[:_BUSY_CHARS_MAX])


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
        model: plain, DDP, FSDP2, or what `parallelize` returned, which has its optimizer in it.
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


def mesh(layout: Layout | str | None = None) -> Any:
    """The DeviceMesh over all ranks, with the names pipeline, replicate, shard, context, tensor. Collective; `parallelize` makes its own.

    Neighbours in the network are neighbours along the inner axes: tensor parallel ranks share a node, data parallel and pipeline ranks
    may lie apart.

    Args:
        layout: as for `parallelize`.

    Raises:
        BadRequest: the layout is for another number of ranks, or `auto`, which needs a model.
    """
    from phalanx.torch import building

    return building.mesh(_sessions.current(), layout)


def parallelize(
    model: Any,
    *,
    loss: Loss,
    optimizer: Callable[[Any], Any],
    layout: Layout | str | None = None,
    clip: float | None = None,
    initialize: Callable[[Any], None] | None = None,
    seed: int = 0,
    sequence: int = 0,
    batch: int = 0,
) -> Training:
    """Split a model that declares its parts over all ranks, as the layout says. Collective; the same call on any number of ranks.

    Args:
        model: built with the same seed on every rank, or on the meta device; it has a method `phalanx_parts`.
        loss: from the output of the last part and the targets to the mean loss.
        optimizer: from the parameters this rank holds (a module with the names of the whole model) to an optimizer over them.
        layout: by default the plan's (PHALANX_LAYOUT), else fully sharded data parallel over all ranks. `tp=2,pp=2` is understood.
        clip: bound on the norm of the gradients of the whole model.
        initialize: fills one part with values, if the model is on the meta device.
        seed: of what `initialize` draws; every part has its own, so that values do not depend on the layout.
        sequence: positions of a sample, 0 if unknown. With it and the batch a layout that cannot split them is refused here.
        batch: samples of one step over all ranks, 0 if unknown.

    Raises:
        BadRequest: this layout cannot split this model, in one line.
    """
    from phalanx.torch import building
    from phalanx.torch.training import Recipe

    recipe = Recipe(
        loss=loss,
        optimizer=optimizer,
        clip=clip,
        initialize=initialize,
        seed=seed,
        sequence=sequence,
        batch=batch,
    )
    return building.parallelize(_sessions.current(), model, layout, recipe)


def finish() -> None:
    """Wait until the last checkpoint is durable and leave the gang. Collective; call it at the end of the script."""
    _sessions.close_session()
