"""Training under Phalanx: progress, checkpoints, stopping in time, and no step after the lease has expired.

Works in any script that is started with the variables of torch.distributed, with or without Phalanx; without them, a process is a gang
of one. Importing this package starts no thread and runs no tensor operation, so a warm process may import it and fork. `session` shows
a training loop.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from phalanx.torch import session as _session
from phalanx.torch.environment import RankEnvironment
from phalanx.torch.parts import Parts
from phalanx.wire.rank import RankStopReason as StopReason
from phalanx.wire.rank import ReportKind

if TYPE_CHECKING:
    from phalanx.core.work.layouts.layout import Layout
    from phalanx.torch.checkpointer import Checkpointer
    from phalanx.torch.sampling import ElasticSampler as ElasticSampler
    from phalanx.torch.sampling import ElasticShards as ElasticShards
    from phalanx.torch.sampling import sampler as sampler
    from phalanx.torch.sampling_adapters import RankBatches as RankBatches
    from phalanx.torch.sampling_adapters import litdata_shards as litdata_shards
    from phalanx.torch.training import Loss, Training
    from phalanx.torch.training_state import Stateful

__all__ = [
    "ElasticSampler",
    "ElasticShards",
    "Parts",
    "Rank",
    "RankBatches",
    "StopReason",
    "busy",
    "checkpoint",
    "fence",
    "finish",
    "init",
    "litdata_shards",
    "mesh",
    "parallelize",
    "plan",
    "report",
    "sampler",
    "should_stop",
]


_SAMPLING: Final = {
    **dict.fromkeys(("ElasticSampler", "ElasticShards", "sampler"), "phalanx.torch.sampling"),
    **dict.fromkeys(("RankBatches", "litdata_shards"), "phalanx.torch.sampling_adapters"),
}


def __getattr__(name: str) -> Any:
    """Import what feeds a training on its first use.

    Raises:
        AttributeError: any other name.
    """
    if name in _SAMPLING:
        import importlib

        return getattr(importlib.import_module(_SAMPLING[name]), name)
    raise AttributeError(f"module 'phalanx.torch' has no attribute {name!r}; it exports: {', '.join(__all__)}")


_BUSY_CHARS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """This process in its gang. `device` is a torch.device; `output_dir` survives the job and is None outside Phalanx."""

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
    """Join the gang: process group, device, supervisor. Collective; a second call returns an equal `Rank`.

    Args:
        backend: of torch.distributed; by default NCCL and gloo if this rank has a CUDA device, else gloo. An existing process group is
            used unchanged.
        timeout_s: timeout of one collective; by default PHALANX_COLLECTIVE_TIMEOUT_S.

    Raises:
        RuntimeError: there is no device for this local rank, or the lease page of the supervisor is missing.
    """
    environment = RankEnvironment.read(os.environ)
    session = _session.open_session(lambda: _session.start_session(environment, backend=backend, timeout_s=timeout_s))
    atexit.unregister(_session.wait_at_exit)
    atexit.register(_session.wait_at_exit)
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
    """Report the length of the training, so that Phalanx can show its progress. Only the call of rank 0 has an effect."""
    session = _session.current_session()
    if session.rank == 0:
        known = {} if tokens_total is None else {"tokens_total": tokens_total}
        session.pipe.send(ReportKind.PLANNED, steps_total=steps_total, **known)


def report(
    *,
    step: int,
    loss: float | None = None,
    tokens: int | None = None,
    mfu: float | None = None,
    data_s: float | None = None,
    communication_s: float | None = None,
) -> None:
    """Report the end of step `step`. Call it in every rank after every step; it is not a collective.

    Blocks while the lease has expired, and ends the process if a newer epoch has replaced it.

    Args:
        step: number of the finished step; the first is 1.
        loss: loss of this step. Waits for a tensor on a device.
        tokens: tokens of the whole gang in this step.
        mfu: model FLOP/s over peak, if the script knows it.
        data_s: seconds of this step that waited for the loader; `phalanx report usage` shows them.
        communication_s: seconds of this step that waited for other ranks, likewise.
    """
    measured = {"tokens": tokens, "mfu": mfu, "data_s": data_s, "communication_s": communication_s}
    _session.current_session().report(step=step, loss=loss, measured=measured)


def busy(what: str) -> None:
    """Report work without steps, such as a long evaluation, so that it does not count as a hang for up to an hour.

    The next `report` ends it. One rank of a node is enough. Saves report themselves.

    Args:
        what: name of the work ("evaluation").
    """
    _session.current_session().pipe.send(ReportKind.BUSY, what=what[:_BUSY_CHARS_MAX])


def fence() -> int:
    """Block while the lease has expired. `report` and `should_stop` do so too; call it before other work that must not run twice.

    Returns:
        The time at which the lease was valid, in ns of CLOCK_BOOTTIME. The following work counts as begun at that time: a node that stops
        between this check and the first instruction resumes work that was in progress.
    """
    return _session.current_session().pass_fence()


def should_stop() -> StopReason:
    """Return why the training should stop now; StopReason.NONE, which is false, while it should continue.

    All ranks get the same answer at the same call. Reasons: preemption, cancellation, a drain, SIGTERM, or a time limit that leaves
    just enough time to save. Collective: call it once per step in every rank. It does not wait for other ranks (see `agreement`), so
    the answer comes about half a second after the first rank sees the reason.
    """
    session = _session.current_session()
    session.handle_sigterm()
    stop = session.agreed_stop(session.exchange_requests("should_stop"))
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
        model: plain, DDP, FSDP2, or the result of `parallelize`, which contains its optimizer.
        optimizer: none, one or several.
        directory: folder of the checkpoints; by default PHALANX_CHECKPOINT_DIR. Without both, nothing is saved.
        stateful: further objects with state_dict and load_state_dict, by name; saved per rank.
        every_steps: save after this number of steps instead of at the interval of `cadence`.
        mtbf_s: mean time between failures of this gang; by default PHALANX_MTBF_S, else from a published rate per device.
    """
    # Imported here: a script without checkpoints saves half a second.
    from phalanx.torch.checkpointer import Checkpointer

    return Checkpointer(
        _session.current_session(),
        model,
        tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,),
        directory=directory,
        stateful=stateful or {},
        every_steps=every_steps,
        mtbf_s=mtbf_s,
    )


def mesh(layout: Layout | str | None = None) -> Any:
    """Return the DeviceMesh over all ranks, with the names pipeline, replicate, shard, context, tensor. Collective.

    `parallelize` creates its own mesh. Neighbours along the inner axes are near in the network: tensor parallel ranks share a node, data
    parallel and pipeline ranks may be far apart.

    Args:
        layout: as for `parallelize`.

    Raises:
        BadRequest: the layout is for another number of ranks, or `auto`, which needs a model.
    """
    from phalanx.torch import parallelism

    return parallelism.mesh(_session.current_session(), layout)


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
    """Split a model that declares its parts over all ranks according to a layout. Collective; the same call for any number of ranks.

    Args:
        model: built with the same seed on every rank, or on the meta device; it has a method `phalanx_parts`.
        loss: maps the output of the last part and the targets to the mean loss.
        optimizer: maps the parameters of this rank (a module with the names of the whole model) to their optimizer.
        layout: a `Layout` or a text such as `tp=2,pp=2`; by default the layout of the plan (PHALANX_LAYOUT), else fully sharded data
            parallel over all ranks.
        clip: bound on the norm of the gradients of the whole model.
        initialize: fills one part with values, if the model is on the meta device.
        seed: seed of `initialize`; every part gets its own, so that values do not depend on the layout.
        sequence: positions of a sample, 0 if unknown. With `sequence` and `batch`, a layout that cannot split them is rejected here.
        batch: samples of one step over all ranks, 0 if unknown.

    Raises:
        BadRequest: this layout cannot split this model.
    """
    from phalanx.torch import parallelism
    from phalanx.torch.training import TrainingRecipe

    recipe = TrainingRecipe(
        loss=loss,
        optimizer=optimizer,
        clip=clip,
        initialize=initialize,
        seed=seed,
        sequence=sequence,
        batch=batch,
    )
    return parallelism.parallelize(_session.current_session(), model, layout, recipe)


def finish() -> None:
    """Wait until the last checkpoint is durable and leave the gang. Collective; call it at the end of the script."""
    _session.close_session()
