"""Asynchronous checkpoints: training stands still while its state is copied to host memory, and goes on while that is written.

One save, on all ranks together:
    1. stage (training waits; this is the measured stall): sharded state of model and optimizer copied to host memory, with this
       rank's own state beside it.
    2. write (a thread, on a gloo group of its own): DCP writes one file per rank into a temporary folder; each rank fsyncs and
       checksums what it wrote.
    3. commit (rank 0): manifest, fence, rename, fsync of the parent; then the report to the supervisor. The head publishes it.
A failure in 2 or 3, a full disk for one, is the same on all ranks: the temporary folder goes, CHECKPOINT_FAILED is reported, and
training goes on.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from phalanx.core.recovery.interval import gang_mtbf_s
from phalanx.torch import folder, state
from phalanx.torch.cadence import Cadence
from phalanx.torch.session import Session
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import CheckpointInvalid, ManifestFile
from phalanx.wire.rank import ReportKind

_ERROR_CHARACTERS: Final = 500
"""Of an error in a report; a DCP traceback of all ranks would not fit a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where training stands. `step` is the last step contained, 0 at a fresh start; `extra` is what the save was given."""

    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Save:
    """One checkpoint on its way to disk. `digest` and `error` are set when the thread ends, equal on all ranks."""

    step: int
    temporary: str
    final: str
    staged: Mapping[str, Any]
    own: Mapping[str, Any]
    stall_s: float
    waited: bool = False
    digest: str | None = None
    error: str | None = None
    size_bytes: int = 0
    write_s: float = 0.0


class Checkpointer:
    """Saves and resumes one training state; made by `phalanx.torch.checkpoint`. All public methods but `saving` are collective."""

    def __init__(
        self,
        session: Session,
        model: Any,
        optimizers: tuple[Any, ...],
        *,
        directory: str | None,
        stateful: Mapping[str, state.Stateful],
        every_steps: int | None,
        mtbf_s: float | None,
    ) -> None:
        environment = session.environment
        self._session = session
        self._model = model
        self._optimizers = optimizers
        self._stateful = stateful
        self._layout = state.layout_of(model)
        self._directory = directory or environment.checkpoint_dir
        # A folder of the caller's own is the caller's: it must be one that all nodes share.
        self._apart = environment.apart and directory is None
        self._leads = session.rank == 0 or (self._apart and environment.local_rank == 0)
        self._every_steps = every_steps
        known_mtbf_s = mtbf_s or environment.mtbf_s or gang_mtbf_s(devices=session.world_size)
        self._cadence = Cadence(mtbf_s=known_mtbf_s, since_s=time.monotonic())
        self._group = session.new_background_group()
        self._stager = DefaultStager(_staging(session.device))
        self._thread: threading.Thread | None = None
        self._current: _Save | None = None
        self._saved_step = 0
        self._saved_tick = 0
        self._asked = session.fence.checkpoints_asked()
        self.durable_step = 0
        self._prepare_directory()
        session.savers.append(self)

    @property
    def saving(self) -> bool:
        """Whether this rank's write is still going on."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def save_s(self) -> float:
        """Measured seconds from the decision to save until the checkpoint is durable."""
        return self._cadence.save_s

    @property
    def interval_s(self) -> float:
        """Seconds between two checkpoints at present; grows and shrinks with the measured stall."""
        return self._cadence.interval_s

    def due(self) -> bool:
        """Whether this rank's clock says that the interval is over. Local; the ranks agree on rank 0's."""
        return self._directory is not None and self._every_steps is None and self._cadence.due(time.monotonic())

    def resume(self) -> Resumed:
        """Load the newest valid checkpoint into model, optimizer and `stateful`, whatever the world size and layout that wrote it.

        Generators and the state of `stateful` are each rank's own when world size and layout are the same; else objects get rank 0's
        and generators stay as they are. Under Phalanx the supervisor names the checkpoint; alone, the newest valid one is looked for.

        Raises:
            CheckpointInvalid: the checkpoint the supervisor named is not whole.
        """
        began_s = time.monotonic()
        path, step, writers = self._find()
        if path is None:
            self._session.pass_fence()
            return Resumed()
        live = state.live_state(self._model, self._optimizers)
        dcp.load(live, checkpoint_id=path, process_group=self._group)
        state.restore_state(self._model, self._optimizers, live)
        same = writers == self._session.world_size and self._layout == state.written_layout(
            os.path.join(path, state.rank_file(0))
        )
        own = os.path.join(path, state.rank_file(self._session.rank if same else 0))
        extra, costs = state.restore_rank_state(own, self._stateful, self._session.device, generators=same)
        load_s = time.monotonic() - began_s
        self._saved_step = self.durable_step = step
        self._cadence.since_s = time.monotonic()
        self._cadence.stall_s, self._cadence.write_s = costs
        if self._session.rank == 0:
            self._session.pipe.send(ReportKind.RESUMED, step=step, path=path, load_s=load_s)
        self._session.pipe.send(ReportKind.STALL, seconds=load_s, cause="load")
        self._session.pass_fence()
        return Resumed(step=step, extra=extra)

    def save_if_due(self, step: int, *, extra: Mapping[str, Any] | None = None) -> bool:
        """Begin a checkpoint after step `step` when it is due; call it once per step, before `should_stop`.

        Due are: the interval's end, every_steps, the supervisor's request, and the stop of the job; at a stop it returns only when
        the checkpoint is durable. Returns whether one was begun.
        """
        if self._directory is None:
            self._session.pass_fence()
            return False
        self.wait(timeout_s=0.0)
        agreed = self._session.tick("checkpoint")
        stop = bool(self._session.stop_agreed(agreed))
        asked = agreed.wish.checkpoints_asked > self._asked
        # What the ranks wished before the last save began is answered by it.
        interval_over = bool(agreed.wish.save_due) and not agreed.wish.saving and agreed.uttered_at > self._saved_tick
        counted = self._every_steps is not None and step % self._every_steps == 0
        begun = step > self._saved_step and (stop or asked or interval_over or counted)
        if begun:
            self._asked = max(self._asked, agreed.wish.checkpoints_asked)
            self.save(step, extra=extra, wait=stop)
        elif stop:
            self.wait()
        self._session.pass_fence()
        return begun

    def save(self, step: int, *, extra: Mapping[str, Any] | None = None, wait: bool = False) -> None:
        """Begin a checkpoint of the state after step `step` now; with `wait`, return when it is durable or has failed.

        Waits for an earlier one first: two at once would share the staging memory.

        Raises:
            TypeError: `extra` or the state of an object holds what could not be loaded again.
        """
        if self._directory is None:
            return
        began_s = time.monotonic()
        self._session.pipe.send(ReportKind.BUSY, what="save")
        self.wait()
        costs = (self._cadence.stall_s, self._cadence.write_s)
        own = state.rank_state(self._stateful, extra or {}, self._session.device, costs=costs, layout=self._layout)
        staged = self._stager.stage(state.live_state(self._model, self._optimizers))
        now_s = time.monotonic()
        self._cadence.staged(now_s, stall_s=now_s - began_s)
        self._saved_step, self._saved_tick = step, self._session.agreement.tick
        self._session.pipe.send(ReportKind.STALL, seconds=now_s - began_s, cause="save")
        epoch, generation = self._session.environment.epoch, self._session.environment.generation
        self._current = _Save(
            step=step,
            temporary=folder.temporary_folder(self._directory, step, epoch=epoch, generation=generation),
            final=folder.step_folder(self._directory, step),
            staged=staged,
            own=own,
            stall_s=now_s - began_s,
            waited=wait,
        )
        # A daemon: when this rank dies of an exception its peers may be gone, and the write could wait for them for an hour.
        self._thread = threading.Thread(target=self._write, args=(self._current,), name="checkpoint", daemon=True)
        self._thread.start()
        if wait:
            self.wait()
        self._session.pass_fence()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the write in progress, if any. Returns the step of the newest checkpoint known to be durable, 0 if none."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
                self._take(self._current)
                self._current = None
        return self.durable_step

    def _take(self, save: _Save | None) -> None:
        """Learn from a finished save, in the training thread."""
        if save is not None and save.digest is not None:
            self.durable_step = save.step
            self._cadence.written(write_s=save.write_s)

    def _write(self, save: _Save) -> None:
        """The background half; never raises."""
        began_s = time.monotonic()
        try:
            self._write_files(save)
            save.write_s = time.monotonic() - began_s
            if self._leads:
                self._announce(save)
        except Exception as error:  # noqa: BLE001 - a peer died in mid-save; training will notice by itself, and better
            save.error = _brief(error)
            self._failed(save)

    def _write_files(self, save: _Save) -> None:
        """Steps 2 and 3 of the module's text. Every rank takes part in every exchange, whatever failed before."""
        error = self._agreed(self._begin(save))
        if error is None:
            sealed = self._write_shard(save)
            if self._apart:
                save.digest, save.size_bytes, error = self._commit_apart(save, sealed)
            else:
                outcome = self._commit(save, self._gathered(sealed))
                save.digest, save.size_bytes, error = self._from_rank_0(outcome)
        save.error = error
        if error is not None:
            self._failed(save)

    def _begin(self, save: _Save) -> str | None:
        if not self._leads:
            return None
        try:
            folder.begin(save.temporary)
        except OSError as error:
            return _brief(error)
        return None

    def _write_shard(self, save: _Save) -> list[ManifestFile] | str:
        """This rank's files, written and durable, or why not."""
        try:
            writer = dcp.FileSystemWriter(save.temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
            dcp.save(save.staged, storage_writer=writer, process_group=self._group)
            rank = self._session.rank
            state.write_durably(save.own, os.path.join(save.temporary, state.rank_file(rank)))
            return [folder.seal(save.temporary, name) for name in state.own_files(save.temporary, rank)]
        except CheckpointException as error:  # a BaseException; DCP has told it to all ranks
            return "; ".join(f"rank {rank}: {_brief(cause[0])}" for rank, cause in sorted(error.failures.items()))
        except (OSError, RuntimeError) as error:  # torch.save wraps a failing write in a RuntimeError
            return f"rank {self._session.rank}: {_brief(error)}"

    def _commit(self, save: _Save, shards: list[list[ManifestFile] | str]) -> tuple[str | None, int, str | None]:
        """Rank 0: manifest, fence, rename. Returns digest, bytes and error; elsewhere nothing."""
        if self._session.rank != 0:
            return None, 0, None
        failures = [shard for shard in shards if isinstance(shard, str)]
        if failures:
            return None, 0, failures[0]
        files = [file for shard in shards if not isinstance(shard, str) for file in shard]
        try:
            digest = folder.write_manifest(save.temporary, self._manifest(save, files))
            folder.check_sizes(save.temporary)  # a rank of another release may have written elsewhere
            self._session.fence.pass_()  # nothing is committed past the lease
            digest = folder.commit(save.temporary, save.final) or digest
        except (OSError, CheckpointInvalid) as error:
            return None, 0, _brief(error)
        return digest, sum(file.size_bytes for file in files), None

    def _manifest(self, save: _Save, files: list[ManifestFile]) -> bytes:
        epoch, world_size = self._session.environment.epoch, self._session.world_size
        return folder.manifest_of(step=save.step, epoch=epoch, world_size=world_size, files=files)

    def _commit_apart(self, save: _Save, sealed: list[ManifestFile] | str) -> tuple[str | None, int, str | None]:
        """Where each node has a folder of its own: every node gets the manifest of all, and renames its part.

        A gang restarted in place makes the same steps again. The head may hold the first of two already, so that one stays if every
        node still has its part of it.
        """
        shards = self._gathered(sealed)
        failures = [shard for shard in shards if isinstance(shard, str)]
        files = [file for shard in shards if not isinstance(shard, str) for file in shard]
        size_bytes = sum(file.size_bytes for file in files)
        encoded, size_bytes, error = self._from_rank_0(
            (b"", 0, failures[0]) if failures else (self._manifest(save, files), size_bytes, None)
        )
        if error is not None:
            return None, 0, error
        own = [] if isinstance(sealed, str) else sealed
        before = self._gathered(folder.held(save.final, own))
        stays = self._from_rank_0(before[0] if before and len(set(before)) == 1 else None)
        error = self._agreed(self._rename_part(save, encoded, stays=stays is not None))
        return (None, 0, error) if error is not None else (stays or manifests.digest(encoded), size_bytes, None)

    def _rename_part(self, save: _Save, encoded: bytes, *, stays: bool) -> str | None:
        if not self._leads:
            return None
        try:
            if stays:
                shutil.rmtree(save.temporary)
            else:
                self._session.fence.pass_()  # nothing is committed past the lease
                folder.commit_part(save.temporary, save.final, encoded)
        except OSError as error:
            return f"rank {self._session.rank}: {_brief(error)}"
        return None

    def _announce(self, save: _Save) -> None:
        if save.digest is None:
            return
        if self._session.rank != 0:
            self._session.pipe.send(
                ReportKind.SHARDS, step=save.step, path=save.final, digest=save.digest, waited=save.waited
            )
            return
        self._session.pipe.send(
            ReportKind.CHECKPOINT,
            step=save.step,
            path=save.final,
            digest=save.digest,
            bytes=save.size_bytes,
            stall_s=save.stall_s,
            write_s=save.write_s,
            waited=save.waited,
        )
        if not self._session.environment.supervised and self._directory is not None:
            folder.retain(self._directory)

    def _failed(self, save: _Save) -> None:
        """Leave no temporary folder behind and say so once, by rank 0."""
        if self._leads:
            shutil.rmtree(save.temporary, ignore_errors=True)
        if self._session.rank != 0:
            return
        message = f"phalanx: the checkpoint of step {save.step} failed and training goes on: {save.error}"
        print(message, file=sys.stderr, flush=True)
        self._session.pipe.send(ReportKind.CHECKPOINT_FAILED, step=save.step, error=save.error)

    def _prepare_directory(self) -> None:
        """The first rank of a folder sweeps what a killed process left. The others may go on: nobody writes before a save, which it begins."""
        if self._directory is None:
            return
        self._directory = os.path.abspath(self._directory)
        if self._leads:
            folder.sweep(self._directory)

    def _find(self) -> tuple[str | None, int, int]:
        """The checkpoint to load with its step and the number of ranks that wrote it, chosen by rank 0 for all.

        The path is the node's own where nodes have folders of their own: its supervisor has brought the checkpoint there.
        """
        path, step, writers = self._from_rank_0(self._choose() if self._session.rank == 0 else (None, 0, 0))
        own = self._session.environment.resume_from
        return (own if self._apart and path is not None and own is not None else path), step, writers

    def _choose(self) -> Any:
        environment = self._session.environment
        if environment.resume_from is not None:
            try:
                manifest = folder.check_sizes(environment.resume_from)
            except CheckpointInvalid as error:
                return error
            return environment.resume_from, manifest.step, manifest.world_size
        if environment.supervised or self._directory is None:
            return None, 0, 0
        path = folder.newest_valid(self._directory)
        if path is None:
            return None, 0, 0
        manifest, _ = manifests.read(path)
        return path, manifest.step, manifest.world_size

    def _from_rank_0(self, value: Any) -> Any:
        """Rank 0's `value` on all ranks; an exception is raised on all."""
        box = [value]
        if self._session.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self._group)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def _agreed(self, error: str | None) -> str | None:
        """The first rank's trouble, on all ranks; None where no rank has any."""
        if not self._apart:
            return self._from_rank_0(error)
        found = [one for one in self._gathered(error) if one is not None]
        return self._from_rank_0(found[0] if found else None)

    def _gathered(self, value: Any) -> list[Any]:
        """The ranks' values at rank 0, in order; an empty list elsewhere."""
        if self._session.world_size == 1:
            return [value]
        everybody = [None] * self._session.world_size if self._session.rank == 0 else None
        dist.gather_object(value, everybody, dst=0, group=self._group)
        return everybody or []


def _staging(device: Any) -> StagingOptions:
    """Plain copies on the CPU; pinned memory and overlapping copies from a CUDA device.

    Never in the background: the copy is the point at which the state is consistent, so training waits for it.
    """
    cuda = device.type == "cuda"
    return StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
    )


def _brief(error: BaseException) -> str:
    """One line of an error, without DCP's tracebacks."""
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [""])[0][:_ERROR_CHARACTERS] or type(error).__name__
