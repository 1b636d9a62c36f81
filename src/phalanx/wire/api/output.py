"""Records of jobs' results: history, logs, state changes, steps, files; and of uploaded blobs."""

from __future__ import annotations

from typing import Final

import msgspec

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.states import AttemptState, JobState

ARCHIVE_BYTES_HEADER: Final = "phalanx-archive-bytes"  # of an archive's reply: its expected length
ARCHIVE_TIME_HEADER: Final = "phalanx-archive-time"  # the head's clock when the archive was begun, in Unix seconds
BLOB_RECEIVED_HEADER: Final = (
    "phalanx-blob-received"  # of the answer that a blob is not there: bytes of an interrupted upload
)
ARCHIVE_SHA256: Final = "PHALANX.sha256"  # PAX key of an entry: SHA-256 of the whole file before it
ARCHIVE_OFFSET: Final = (
    "PHALANX.offset"  # PAX key of a file: the receiver has so many of its bytes, and the rest follows
)


class HistoryReply(msgspec.Struct, frozen=True, kw_only=True):
    """Lines with seq > `after`, oldest first; ask next with `after=last`."""

    history: list[HistoryLine] = msgspec.field(name="story")
    last: int = 0


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Text of one stream of one attempt, from byte `offset` to `end`. `rank` is None for a supervisor's notes."""

    epoch: Epoch
    stream: str
    rank: int | None
    offset: int
    end: int
    text: str


class LogsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks by epoch, then stream. `cursor` continues from here, also as Last-Event-ID; `more`: more is available now.

    `note`: why part of the job's output is missing; empty if it is complete.
    """

    chunks: list[LogChunk]
    cursor: str
    more: bool = False
    note: str = ""


class StateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A job's state: its first, and each change. `devices`: how many it holds on each of `nodes`; empty where it holds MIG slices."""

    job_id: JobId
    state: JobState
    reason: str = ""
    detail: str = ""
    epoch: Epoch = Epoch(0)
    generation: Generation = Generation(0)
    attempt_state: AttemptState | None = None
    nodes: list[NodeId] = []
    devices: list[int] = []


class EndEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The job has ended and all its output was sent; the stream ends."""

    job_id: JobId
    state: JobState
    exit_code: int | None = None


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One step as a rank reported it. `*_ns` are CLOCK_BOOTTIME of its node."""

    epoch: Epoch
    generation: Generation
    step: int
    rank: int = 0
    loss: float | None = None
    tokens: int | None = None
    begin_ns: int = 0
    end_ns: int = 0
    at_s: float = 0.0


class StepsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Steps by epoch, then in the order reported. `cursor` goes into `after`; `more`: more are available now."""

    steps: list[StepView]
    cursor: str
    more: bool = False


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of an output folder. `kind`: file, folder, link or other; `path` is relative to the folder's root."""

    path: str
    kind: str
    size_bytes: int = 0
    modified_s: float = 0.0


class FilesReply(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of one folder, folders first, then by name. `truncated`: the list is incomplete."""

    path: str
    entries: list[FileEntry]
    truncated: bool = False


class BlobReply(msgspec.Struct, frozen=True, kw_only=True):
    """The stored blob."""

    sha256: str
    bytes: int
