"""The interface between a rank and its supervisor: the lease page and the report pipe.

The page carries data from supervisor to rank, the pipe from rank to supervisor. `phalanx.torch` and `node` both import this module, but
not each other. Standard library only: every training process imports it.

Lease page: a 4096-byte file in the attempt's scratch folder (environment variable PHALANX_LEASE_PAGE), mapped shared by both
sides, written by the supervisor alone. Fields are aligned little-endian int64, so that each is written and read in one piece:

    index 0  magic            PAGE_MAGIC once the page is complete
    index 1  deadline_ns      CLOCK_BOOTTIME; a rank begins no step and commits nothing after it
    index 2  epoch            the epoch of this page
    index 3  generation       number of in-place restarts of the gang
    index 4  stop             a StopReason value, 0 while the job shall continue
    index 5  stop_by_ns       CLOCK_BOOTTIME at which SIGKILL follows; 0 while `stop` is 0
    index 6  job_deadline_ns  CLOCK_BOOTTIME at which the job's time limit ends; 0 without one
    index 7  checkpoint_now   counter; a rank saves at its next step after it has grown

Report pipe: a FIFO (PHALANX_REPORT_PIPE). Each report is one JSON object and one newline, at most REPORT_BYTES_MAX in all, written
with a single os.write (atomic on a pipe). Times are CLOCK_BOOTTIME in ns as integers under names ending in `_ns`; `at_s` is Unix time.
Every report carries `k` (a ReportKind value), `rank`, `epoch`, `generation`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import mmap
import os
import struct
import time
from typing import Any, Final

PAGE_BYTES: Final = 4096
PAGE_MAGIC: Final = 0x5048584C45415345  # "PHXLEASE"
REPORT_BYTES_MAX: Final = 4096  # PIPE_BUF on Linux: longer writes of several writers may interleave
LEASE_PAGE_VARIABLE: Final = "PHALANX_LEASE_PAGE"
REPORT_PIPE_VARIABLE: Final = "PHALANX_REPORT_PIPE"
EPOCH_VARIABLE: Final = "PHALANX_EPOCH"
GENERATION_VARIABLE: Final = "PHALANX_GENERATION"
STACKS_VARIABLE: Final = "PHALANX_STACKS"  # folder for a rank's stack dump
STACK_SIGNAL: Final = 43
"""Signal that requests a stack dump: SIGRTMIN + 9 of glibc. Real-time signals have no default meaning, and libraries use the first and last."""
MIG_PROFILE_VARIABLE: Final = (
    "PHALANX_MIG_PROFILE"  # set if each task of the job has a MIG slice, which is its CUDA device 0
)
LOCAL_CHECKPOINTS_VARIABLE: Final = (
    "PHALANX_CHECKPOINT_APART"  # set if each node of the gang has its own checkpoint folder
)


class RankStopReason(enum.IntEnum):
    """Why the ranks are asked to end; 0 means "continue"."""

    NONE = 0
    CANCELLED = 1
    PREEMPTED = 2
    DEADLINE = 3
    RESTART = 4
    DRAIN = 5
    SUPERSEDED = 6
    HANG = 7


class ReportKind(enum.StrEnum):
    """The kinds of reports, with their fields.

    STEP: step, begin_ns, end_ns, at_s, and optionally loss, tokens, and the seconds of it that waited for data (data_s) or for other ranks
        (communication_s).
    CHECKPOINT: step, path (absolute step folder), digest (sha256 of manifest.json), bytes, stall_s, write_s; sent by rank 0 only,
        after the rename is durable. `waited`: the ranks waited for it, as before a stop.
    SHARDS: step, path, digest, waited; sent by the first rank of every other node if each node has its own checkpoint folder, when the
        node's part of that checkpoint is durable.
    CHECKPOINT_FAILED: step, error.
    RESUMED: step, path, load_s.
    PLANNED: steps_total, and if known tokens_total; sent once, as the end of progress.
    BUSY: what ("save", "finished", or the user's word); no step comes for a while, which is not a hang. The next step ends it.
    STALL: seconds, cause ("save", "load", "fence"): time without steps.
    TOKENS: hour (Unix seconds of its beginning), requests, prompt_tokens, answer_tokens: all that a batch has answered in that hour so far.
    """

    STEP = "step"
    CHECKPOINT = "checkpoint"
    SHARDS = "shards"
    CHECKPOINT_FAILED = "checkpoint_failed"
    RESUMED = "resumed"
    PLANNED = "planned"
    BUSY = "busy"
    STALL = "stall"
    TOKENS = "tokens"


_SLOT = struct.Struct("<q")
_FIELDS: Final = (
    "magic",
    "deadline_ns",
    "epoch",
    "generation",
    "stop",
    "stop_by_ns",
    "job_deadline_ns",
    "checkpoint_now",
)
_INDEX: Final = {name: index for index, name in enumerate(_FIELDS)}


def boottime_ns() -> int:
    """Return CLOCK_BOOTTIME in nanoseconds, the clock of all leases: it also counts while the node sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stack_file(folder: str, rank: int, pid: int) -> str:
    """Return the file for a rank's stack dump. The pid distinguishes the processes of a task."""
    return os.path.join(folder, f"stack-{rank}.{pid}")


class LeasePage:
    """One mapped lease page. Open it with `create` (supervisor) or `attach` (rank)."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping

    @classmethod
    def create(
        cls,
        path: str,
        *,
        epoch: int,
        generation: int,
        deadline_ns: int,
        job_deadline_ns: int = 0,
        folder: int | None = None,
    ) -> LeasePage:
        """Create the page at `path`, replacing an older one by rename.

        Args:
            path: of the page.
            epoch: the epoch of the page.
            generation: the generation of the page.
            deadline_ns: end of the lease.
            job_deadline_ns: end of the job's time limit; 0 without one.
            folder: descriptor of the page's folder if another account owns it. That account may read the page, but not truncate it under our
                mapping, which would end us by SIGBUS; symbolic links in the folder are not followed.

        Raises:
            OSError: it cannot be created, for example on a full disk.
        """
        path = path if folder is None else os.path.basename(path)
        fresh = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=folder)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            if folder is not None:
                os.fchmod(fd, 0o444)
            _fill(fd)
            page = cls(mmap.mmap(fd, PAGE_BYTES))
        finally:
            os.close(fd)
        page.write(epoch=epoch, generation=generation, deadline_ns=deadline_ns, job_deadline_ns=job_deadline_ns)
        page.write(magic=PAGE_MAGIC)
        os.rename(fresh, path, src_dir_fd=folder, dst_dir_fd=folder)
        return page

    @classmethod
    def attach(cls, path: str) -> LeasePage:
        """Map an existing page read-only.

        Raises:
            OSError: there is no page at `path`.
            ValueError: the file is not a lease page.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            page = cls(mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        if page.read("magic") != PAGE_MAGIC:
            raise ValueError(f"{path} is not a lease page; its supervisor may have another version")
        return page

    def read(self, field: str) -> int:
        """Return the value of one field; see the module's table for its unit."""
        value: int = _SLOT.unpack_from(self._mapping, _INDEX[field] * _SLOT.size)[0]
        return value

    def write(self, **fields: int) -> None:
        """Set fields, each in one aligned store, in the order given."""
        for field, value in fields.items():
            _SLOT.pack_into(self._mapping, _INDEX[field] * _SLOT.size, value)

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._mapping.close()


def _fill(fd: int) -> None:
    """Allocate the page on disk: on a full disk, a store into an unallocated page ends the process by SIGBUS.

    Raises:
        OSError: the disk is full.
    """
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        if os.pwrite(fd, bytes(PAGE_BYTES), 0) < PAGE_BYTES:  # a file system without preallocation
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def encode_report(kind: ReportKind, *, rank: int, epoch: int, generation: int, **fields: Any) -> bytes:
    """Encode one report for a single write.

    JSON has no NaN and no infinity: such a value becomes null, and its field is named under `not_finite`.

    Raises:
        ValueError: it is longer than REPORT_BYTES_MAX and would not be atomic.
    """
    odd = [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]
    record = {"k": kind.value, "rank": rank, "epoch": epoch, "generation": generation, **fields}
    if odd:
        record |= {"not_finite": odd, **dict.fromkeys(odd)}
    line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(line) > REPORT_BYTES_MAX:
        raise ValueError(f"the report has {len(line)} bytes; at most {REPORT_BYTES_MAX} can be sent in one piece")
    return line
