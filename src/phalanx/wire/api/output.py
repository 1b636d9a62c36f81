"""Records of what jobs leave behind: story, logs, changes of state, steps, files; and of the blobs they are given."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state.story import StoryLine
from phalanx.core.work.attempt import AttemptState
from phalanx.core.work.job import JobState


class StoryReply(msgspec.Struct, frozen=True, kw_only=True):
    """Lines with seq > `after`, oldest first; ask on with `after=last`."""

    story: list[StoryLine]
    last: int = 0


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Text of one stream of one attempt: its bytes `offset` to `end`. `rank` is None for a supervisor's notes."""

    epoch: Epoch
    stream: str
    rank: int | None
    offset: int
    end: int
    text: str


class LogsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks by epoch, then stream. `cursor` asks on from here, for more logs or as Last-Event-ID; `more`: at once.

    `note`: why there is less than the job wrote; empty where there is all of it.
    """

    chunks: list[LogChunk]
    cursor: str
    more: bool = False
    note: str = ""


class StateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A job's state has changed (or is told first)."""

    job_id: JobId
    state: JobState
    reason: str = ""
    detail: str = ""
    epoch: Epoch = Epoch(0)
    generation: Generation = Generation(0)
    attempt_state: AttemptState | None = None
    nodes: list[NodeId] = []


class EndEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The job is over and all its output was sent; nothing follows."""

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
    """In the order reported: by epoch, then as written. `cursor` goes into `after`; `more`: at once."""

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
    """Entries of one folder, folders first, then by name. `truncated`: there are more than are shown."""

    path: str
    entries: list[FileEntry]
    truncated: bool = False


class BlobReply(msgspec.Struct, frozen=True, kw_only=True):
    """The blob as kept."""

    sha256: str
    bytes: int
