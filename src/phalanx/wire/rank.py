"""What a rank and its supervisor tell each other: the lease page and the report pipe.

The page runs from supervisor to rank, the pipe from rank to supervisor. `phalanx.torch` and `node` both import this module and
nothing of each other. Standard library only: it is imported inside every training process.

Lease page: a 4096-byte file in the attempt's scratch folder (environment variable PHALANX_LEASE_PAGE), mapped shared by both
sides, written by the supervisor alone. Fields are aligned little-endian int64, so that each is written and read in one piece:

    index 0  magic            PAGE_MAGIC once the page is whole
    index 1  deadline_ns      CLOCK_BOOTTIME; a rank begins no step and commits nothing past it
    index 2  epoch            the epoch this page speaks for
    index 3  generation       in-place restarts of the gang so far
    index 4  stop             a StopReason value, 0 while the job shall go on
    index 5  stop_by_ns       CLOCK_BOOTTIME at which SIGKILL follows; 0 while `stop` is 0
    index 6  job_deadline_ns  CLOCK_BOOTTIME at which the job's time limit ends; 0 without one
    index 7  checkpoint_now   counter; a rank that sees it grow saves at its next step

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
REPORT_BYTES_MAX: Final = 4096  # PIPE_BUF on Linux: a longer write may be torn between writers
LEASE_PAGE_VARIABLE: Final = "PHALANX_LEASE_PAGE"
REPORT_PIPE_VARIABLE: Final = "PHALANX_REPORT_PIPE"
EPOCH_VARIABLE: Final = "PHALANX_EPOCH"
GENERATION_VARIABLE: Final = "PHALANX_GENERATION"
STACKS_VARIABLE: Final = "PHALANX_STACKS"  # folder in which a rank that dumps its stacks when asked keeps its file
STACK_SIGNAL: Final = 43
"""On which it does: SIGRTMIN + 9 of glibc. Real-time signals have no meaning of their own, and libraries take the first and last few."""
APART_VARIABLE: Final = "PHALANX_CHECKPOINT_APART"  # set where each node of the gang has a checkpoint folder of its own


class StopReason(enum.IntEnum):
    """Why the ranks are asked to end; 0 is "go on"."""

    NONE = 0
    CANCELLED = 1
    PREEMPTED = 2
    DEADLINE = 3
    RESTART = 4
    DRAIN = 5
    SUPERSEDED = 6
    HANG = 7


class ReportKind(enum.StrEnum):
    """What a rank reports.

    STEP: step, begin_ns, end_ns, at_s, and where given loss, tokens.
    CHECKPOINT: step, path (absolute step folder), digest (sha256 of manifest.json), bytes, stall_s, write_s; sent by rank 0 only,
        after the rename is durable. `waited`: the ranks waited for it, as before a stop.
    SHARDS: step, path, digest, waited; sent by the first rank of every other node, where each node has a checkpoint folder of its own: its
        part of that checkpoint is durable there.
    CHECKPOINT_FAILED: step, error.
    RESUMED: step, path, load_s.
    PLANNED: steps_total, and where known tokens_total; sent once, so that progress has an end.
    BUSY: what ("save", "finished", or a word of the user's); no step will come for a while, and that is no hang. The next step ends it.
    STALL: seconds, cause ("save", "load", "fence"): time in which no step was made.
    """

    STEP = "step"
    CHECKPOINT = "checkpoint"
    SHARDS = "shards"
    CHECKPOINT_FAILED = "checkpoint_failed"
    RESUMED = "resumed"
    PLANNED = "planned"
    BUSY = "busy"
    STALL = "stall"


_SLOT = struct.Struct("<q")
_FIELDS: Final = (
    "magic", "deadline_ns", "epoch", "generation", "stop", "stop_by_ns", "job_deadline_ns", "checkpoint_now",
)  # fmt: skip
_INDEX: Final = {name: index for index, name in enumerate(_FIELDS)}


def boottime_ns() -> int:
    """Nanoseconds of CLOCK_BOOTTIME, the clock of every lease: it goes on while the node sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stack_file(folder: str, rank: int, pid: int) -> str:
    """Where a rank dumps its stacks. The pid tells which of a task's processes does."""
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
        """Make the page whole at `path`, replacing an older one by rename.

        Raises:
            OSError: it cannot be made, as where the disk is full.

        `folder`: descriptor of the folder it lies in, where that is another account's: its owner may read the page, not shorten it under our
        mapping (that would end us by SIGBUS), and no link that it puts there is followed.
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
            ValueError: the file there is no lease page.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            page = cls(mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        if page.read("magic") != PAGE_MAGIC:
            raise ValueError(f"{path} is not a lease page; the supervisor that made it speaks another version")
        return page

    def read(self, field: str) -> int:
        """The value of one field; see the module's table for its unit."""
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
    """Have the disk keep all of a page: the first store into a hole ends whoever makes it by SIGBUS where the disk is full.

    Raises:
        OSError: it has no room.
    """
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        if os.pwrite(fd, bytes(PAGE_BYTES), 0) < PAGE_BYTES:  # a file system that keeps no room in advance
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def encode_report(kind: ReportKind, *, rank: int, epoch: int, generation: int, **fields: Any) -> bytes:
    """One report as bytes for a single write.

    JSON knows no NaN and no infinity: such a value travels as null, and its field is named under `not_finite`.

    Raises:
        ValueError: it is longer than REPORT_BYTES_MAX and would not be atomic.
    """
    odd = [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]
    record = {"k": kind.value, "rank": rank, "epoch": epoch, "generation": generation, **fields}
    if odd:
        record |= {"not_finite": odd, **dict.fromkeys(odd)}
    line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    if len(line) > REPORT_BYTES_MAX:
        raise ValueError(f"a report of {len(line)} bytes; at most {REPORT_BYTES_MAX} reach the supervisor whole")
    return line
