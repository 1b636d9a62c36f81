"""Asynchronous checkpoints: training pauses while its state is copied to host memory, and continues while it is written.

One save, on all ranks together:
    1. stage (training waits; this is the measured stall): the sharded state of model and optimizer is copied to host memory, with
       the state of this rank.
    2. write (a thread, on its own gloo group): DCP writes one file per rank into a temporary folder; each rank fsyncs and
       checksums its files.
    3. commit (rank 0): manifest, fence, rename, fsync of the parent; then the report to the supervisor. The head publishes it.
A failure in 2 or 3, such as a full disk, is the same on all ranks: the temporary folder is removed, CHECKPOINT_FAILED is reported, and
training continues.
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
from phalanx.torch import checkpoint_folder, training_state
from phalanx.torch.checkpoint_timer import CheckpointTimer
from phalanx.torch.session import RankSession
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import CheckpointInvalid, ManifestFile
from phalanx.wire.rank import ReportKind

_ERROR_CHARACTERS: Final = 500
"""Limit for an error in a report: a DCP traceback of all ranks would not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The state of training after a resume. `step` is the last step contained, 0 without a checkpoint; `extra` is from the save."""

    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Save:
    """One checkpoint being written. `digest` and `error` are set when the thread ends, equal on all ranks."""

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
    """Saves and resumes one training state; created by `phalanx.torch.checkpoint`. Its methods are collective, except `is_due`."""

    def __init__(
        self,
        session: RankSession,
        model: Any,
        optimizers: tuple[Any, ...],
        *,
        directory: str | None,
        stateful: Mapping[str, training_state.Stateful],
        every_steps: int | None,
        mtbf_s: float | None,
    ) -> None:
        environment = session.environment
        self._session = session
        self._model = model
        self._optimizers = optimizers
        self._stateful = stateful
        self._layout = training_state.layout_of(model)
        self._directory = directory or environment.checkpoint_dir
        # A folder given by the caller must be shared by all nodes.
        self._apart = environment.node_local_checkpoints and directory is None
        self._leads = session.rank == 0 or (self._apart and environment.local_rank == 0)
        self._every_steps = every_steps
        known_mtbf_s = mtbf_s or environment.mtbf_s or gang_mtbf_s(devices=session.world_size)
        self._cadence = CheckpointTimer(mtbf_s=known_mtbf_s, last_save_s=time.monotonic())
        self._group = session.new_background_group()
        self._stager = DefaultStager(_staging(session.device))
        self._thread: threading.Thread | None = None
        self._current: _Save | None = None
        self._saved_step = 0
        self._saved_tick = 0
        self._asked = session.fence.checkpoints_requested()
        self.durable_step = 0
        self._prepare_directory()
        session.checkpointers.append(self)

    @property
    def saving(self) -> bool:
        """Whether the write of this rank is in progress."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def save_s(self) -> float:
        """Measured seconds from the decision to save until the checkpoint is durable."""
        return self._cadence.save_s

    @property
    def interval_s(self) -> float:
        """Current seconds between two checkpoints; depends on the measured stall."""
        return self._cadence.interval_s

    def is_due(self) -> bool:
        """Return whether the interval has passed on the clock of this rank. Local; the value of rank 0 counts."""
        return self._directory is not None and self._every_steps is None and self._cadence.is_due(time.monotonic())

    def resume(self) -> ResumePoint:
        """Load the newest valid checkpoint into model, optimizer and `stateful`. World size and layout may differ from the writer's.

        With the same world size and layout, each rank restores its own random generators and `stateful` objects. Otherwise the objects
        get the state of rank 0, and generators are not restored. Under Phalanx the supervisor names the checkpoint; without, the newest
        valid one is used.

        Raises:
            CheckpointInvalid: the checkpoint that the supervisor named is incomplete.
        """
        began_s = time.monotonic()
        path, step, writers = self._find()
        if path is None:
            self._session.pass_fence()
            return ResumePoint()
        live = training_state.live_state(self._model, self._optimizers)
        dcp.load(live, checkpoint_id=path, process_group=self._group)
        training_state.restore_state(self._model, self._optimizers, live)
        same = writers == self._session.world_size and self._layout == training_state.written_layout(
            os.path.join(path, training_state.rank_file(0))
        )
        own = os.path.join(path, training_state.rank_file(self._session.rank if same else 0))
        extra, costs = training_state.restore_rank_state(own, self._stateful, self._session.device, generators=same)
        load_s = time.monotonic() - began_s
        self._saved_step = self.durable_step = step
        self._cadence.last_save_s = time.monotonic()
        self._cadence.stall_s, self._cadence.write_s = costs
        if self._session.rank == 0:
            self._session.pipe.send(ReportKind.RESUMED, step=step, path=path, load_s=load_s)
        self._session.pipe.send(ReportKind.STALL, seconds=load_s, cause="load")
        self._session.pass_fence()
        return ResumePoint(step=step, extra=extra)

    def save_if_due(self, step: int, *, extra: Mapping[str, Any] | None = None) -> bool:
        """Start a checkpoint after step `step` if it is due; call it once per step, before `should_stop`.

        A checkpoint is due at the end of the interval, at `every_steps`, on request of the supervisor, and when the job stops; then it
        returns only when the checkpoint is durable. Returns whether one was started.
        """
        if self._directory is None:
            self._session.pass_fence()
            return False
        self.wait(timeout_s=0.0)
        agreed = self._session.exchange_requests("checkpoint")
        stop = bool(self._session.agreed_stop(agreed))
        asked = agreed.request.checkpoints_requested > self._asked
        # The last save satisfies requests that the ranks made before it.
        interval_over = (
            bool(agreed.request.save_due) and not agreed.request.saving and agreed.requested_at_tick > self._saved_tick
        )
        counted = self._every_steps is not None and step % self._every_steps == 0
        begun = step > self._saved_step and (stop or asked or interval_over or counted)
        if begun:
            self._asked = max(self._asked, agreed.request.checkpoints_requested)
            self.save(step, extra=extra, wait=stop)
        elif stop:
            self.wait()
        self._session.pass_fence()
        return begun

    def save(self, step: int, *, extra: Mapping[str, Any] | None = None, wait: bool = False) -> None:
        """Start a checkpoint of the state after step `step` now; with `wait`, return when it is durable or has failed.

        Waits for an earlier one first, because two would share the staging memory.

        Raises:
            TypeError: `extra` or the state of an object contains a value that could not be loaded again.
        """
        if self._directory is None:
            return
        began_s = time.monotonic()
        self._session.pipe.send(ReportKind.BUSY, what="save")
        self.wait()
        costs = (self._cadence.stall_s, self._cadence.write_s)
        own = training_state.collect_rank_state(
            self._stateful, extra or {}, self._session.device, costs=costs, layout=self._layout
        )
        staged = self._stage(training_state.live_state(self._model, self._optimizers))
        now_s = time.monotonic()
        self._cadence.record_stall(now_s, stall_s=now_s - began_s)
        self._saved_step, self._saved_tick = step, self._session.agreement.tick
        self._session.pipe.send(ReportKind.STALL, seconds=now_s - began_s, cause="save")
        epoch, generation = self._session.environment.epoch, self._session.environment.generation
        self._current = _Save(
            step=step,
            temporary=checkpoint_folder.temporary_folder(self._directory, step, epoch=epoch, generation=generation),
            final=checkpoint_folder.step_folder(self._directory, step),
            staged=staged,
            own=own,
            stall_s=now_s - began_s,
            waited=wait,
        )
        # A daemon thread: after an exception in this rank, the write could wait an hour for ranks that have ended.
        self._thread = threading.Thread(target=self._write, args=(self._current,), name="checkpoint", daemon=True)
        self._thread.start()
        if wait:
            self.wait()
        self._session.pass_fence()

    def _stage(self, live: dict[str, Any]) -> Mapping[str, Any]:
        """Copy the state to the CPU. The stager of torch 2.11 closes itself with each copy (pytorch#183413), so a closed one is replaced."""
        staged: Mapping[str, Any] = self._stager.stage(live)
        if not getattr(getattr(self._stager, "_state_dict_stager", None), "_deepcopy_dispatch", True):
            self._stager = DefaultStager(_staging(self._session.device))
        return staged

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the write in progress, if any. Return the step of the newest durable checkpoint, 0 without one."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
                self._finish_save(self._current)
                self._current = None
        return self.durable_step

    def close(self) -> None:
        """Wait for the write in progress, and leave the group of the ranks: nothing can be saved or loaded any more."""
        self.wait()
        self._group = None

    def _finish_save(self, save: _Save | None) -> None:
        """Record a finished save, in the training thread."""
        if save is not None and save.digest is not None:
            self.durable_step = save.step
            self._cadence.record_write(write_s=save.write_s)

    def _write(self, save: _Save) -> None:
        """Write and commit a save in the background; never raises."""
        began_s = time.monotonic()
        try:
            self._write_files(save)
            save.write_s = time.monotonic() - began_s
            if self._leads:
                self._announce(save)
        except Exception as error:  # noqa: BLE001 - a peer died during the save; training detects that by itself
            save.error = _brief(error)
            self._report_failure(save)

    def _write_files(self, save: _Save) -> None:
        """Do steps 2 and 3 of the module docstring. Every rank takes part in every exchange, even after a failure."""
        error = self._any_error(self._begin(save))
        if error is None:
            sealed = self._write_shard(save)
            if self._apart:
                save.digest, save.size_bytes, error = self._commit_per_node(save, sealed)
            else:
                outcome = self._commit(save, self._gathered(sealed))
                save.digest, save.size_bytes, error = self._from_rank_0(outcome)
        save.error = error
        if error is not None:
            self._report_failure(save)

    def _begin(self, save: _Save) -> str | None:
        if not self._leads:
            return None
        try:
            checkpoint_folder.create_temporary(save.temporary)
        except OSError as error:
            return _brief(error)
        return None

    def _write_shard(self, save: _Save) -> list[ManifestFile] | str:
        """Write the files of this rank durably; return their manifest entries, or the error."""
        try:
            writer = dcp.FileSystemWriter(save.temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
            dcp.save(save.staged, storage_writer=writer, process_group=self._group)
            rank = self._session.rank
            training_state.write_durably(save.own, os.path.join(save.temporary, training_state.rank_file(rank)))
            return [
                checkpoint_folder.seal_file(save.temporary, name)
                for name in training_state.files_of_rank(save.temporary, rank)
            ]
        except CheckpointException as error:  # a BaseException that DCP raises on all ranks
            return "; ".join(f"rank {rank}: {_brief(cause[0])}" for rank, cause in sorted(error.failures.items()))
        except (OSError, RuntimeError) as error:  # torch.save wraps a failing write in a RuntimeError
            return f"rank {self._session.rank}: {_brief(error)}"

    def _commit(self, save: _Save, shards: list[list[ManifestFile] | str]) -> tuple[str | None, int, str | None]:
        """On rank 0: write the manifest, check the fence, rename. Return digest, bytes and error; on other ranks nothing."""
        if self._session.rank != 0:
            return None, 0, None
        failures = [shard for shard in shards if isinstance(shard, str)]
        if failures:
            return None, 0, failures[0]
        files = [file for shard in shards if not isinstance(shard, str) for file in shard]
        try:
            digest = checkpoint_folder.write_manifest(save.temporary, self._manifest(save, files))
            checkpoint_folder.check_sizes(save.temporary)  # a rank of another release may use another folder name
            self._session.fence.wait_for_lease()  # no commit after the lease has expired
            digest = checkpoint_folder.commit(save.temporary, save.final) or digest
        except (OSError, CheckpointInvalid) as error:
            return None, 0, _brief(error)
        return digest, sum(file.size_bytes for file in files), None

    def _manifest(self, save: _Save, files: list[ManifestFile]) -> bytes:
        epoch, world_size = self._session.environment.epoch, self._session.world_size
        return checkpoint_folder.encode_manifest(step=save.step, epoch=epoch, world_size=world_size, files=files)

    def _commit_per_node(self, save: _Save, sealed: list[ManifestFile] | str) -> tuple[str | None, int, str | None]:
        """Commit if each node has its own folder: every node writes the whole manifest and renames its part.

        A gang that restarts in place repeats steps. The head may have published the first of two checkpoints of a step, so the first one
        is kept if every node still has its part of it.
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
        existing = self._gathered(checkpoint_folder.existing_digest(save.final, own))
        kept = self._from_rank_0(existing[0] if existing and len(set(existing)) == 1 else None)
        error = self._any_error(self._rename_part(save, encoded, keep_existing=kept is not None))
        return (None, 0, error) if error is not None else (kept or manifests.digest(encoded), size_bytes, None)

    def _rename_part(self, save: _Save, encoded: bytes, *, keep_existing: bool) -> str | None:
        if not self._leads:
            return None
        try:
            if keep_existing:
                shutil.rmtree(save.temporary)
            else:
                self._session.fence.wait_for_lease()  # no commit after the lease has expired
                checkpoint_folder.commit_part(save.temporary, save.final, encoded)
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
            checkpoint_folder.delete_old_checkpoints(self._directory)

    def _report_failure(self, save: _Save) -> None:
        """Remove the temporary folder; rank 0 reports the failure."""
        if self._leads:
            shutil.rmtree(save.temporary, ignore_errors=True)
        if self._session.rank != 0:
            return
        message = f"phalanx: the checkpoint of step {save.step} failed, training continues: {save.error}"
        print(message, file=sys.stderr, flush=True)
        self._session.pipe.send(ReportKind.CHECKPOINT_FAILED, step=save.step, error=save.error)

    def _prepare_directory(self) -> None:
        """Remove temporary folders of a killed process, on the first rank of a folder. The others need not wait: that rank begins every save."""
        if self._directory is None:
            return
        self._directory = os.path.abspath(self._directory)
        if self._leads:
            checkpoint_folder.remove_leftovers(self._directory)

    def _find(self) -> tuple[str | None, int, int]:
        """Return the checkpoint to load, its step and the number of ranks that wrote it. Rank 0 chooses for all.

        If each node has its own folder, the path is local: the supervisor has copied the checkpoint there.
        """
        path, step, writers = self._from_rank_0(self._choose() if self._session.rank == 0 else (None, 0, 0))
        own = self._session.environment.resume_from
        return (own if self._apart and path is not None and own is not None else path), step, writers

    def _choose(self) -> Any:
        environment = self._session.environment
        if environment.resume_from is not None:
            try:
                manifest = checkpoint_folder.check_sizes(environment.resume_from)
            except CheckpointInvalid as error:
                return error
            return environment.resume_from, manifest.step, manifest.world_size
        if environment.supervised or self._directory is None:
            return None, 0, 0
        path = checkpoint_folder.newest_valid(self._directory)
        if path is None:
            return None, 0, 0
        manifest, _ = manifests.read(path)
        return path, manifest.step, manifest.world_size

    def _from_rank_0(self, value: Any) -> Any:
        """Return the `value` of rank 0 on all ranks; raise it if it is an exception."""
        box = [value]
        if self._session.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self._group)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def _any_error(self, error: str | None) -> str | None:
        """Return the first error of any rank on all ranks; None without errors."""
        if not self._apart:
            return self._from_rank_0(error)
        found = [one for one in self._gathered(error) if one is not None]
        return self._from_rank_0(found[0] if found else None)

    def _gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, in order; an empty list on other ranks."""
        if self._session.world_size == 1:
            return [value]
        values = [None] * self._session.world_size if self._session.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []


def _staging(device: Any) -> StagingOptions:
    """Return plain copies for the CPU; pinned memory and overlapping copies for a CUDA device.

    Never in the background: the copied state must be consistent, so training waits for the copy.
    """
    cuda = device.type == "cuda"
    return StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
    )


def _brief(error: BaseException) -> str:
    """Return the first line of an error, without the tracebacks of DCP."""
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)
    return (text.splitlines() or [""])[0][:_ERROR_CHARACTERS] or type(error).__name__
