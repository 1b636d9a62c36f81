"""What `why` and dry runs answer: JSON bodies, as records. Rules as in wire.api.

GET    /v1/jobs/{id}/why             -> WhyReply
POST   /v1/jobs/dry-run              job mapping -> DryRunReply (nothing is written)
"""

from __future__ import annotations

import msgspec

from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.work.job import JobState


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What all records here have in common."""


class StartView(View, frozen=True, kw_only=True):
    """When it is expected to start, as Unix seconds. None: no such bound is known; `unknown` says why the later one is not."""

    earliest_s: float | None = None
    latest_s: float | None = None
    unknown: str = ""


class RunView(View, frozen=True, kw_only=True):
    """How long it is expected to run, in seconds: four of five of its likes ended between the two. `high_s` None: nobody knows.

    `ends` and `likes`: from how many ended jobs this is known, and what they have in common with it.
    """

    low_s: float = 0.0
    high_s: float | None = None
    ends: int = 0
    likes: str = ""


class BlockerView(View, frozen=True, kw_only=True):
    """A job in the way: one that holds what this one needs, stands before it, or must end first. `end`: when it is expected to."""

    id: JobId
    user: UserId
    name: str
    state: JobState
    gpus: int
    since_s: float | None = None
    end: StartView | None = None


class ChangeView(View, frozen=True, kw_only=True):
    """A change with which it would start now, tried on a copy of the state. `operator`: its owner cannot make it.

    `command` is empty where there is nothing to type.
    """

    kind: str
    text: str
    command: str = ""
    operator: bool = False


class WhyReply(View, frozen=True, kw_only=True):
    """Why a job waits; of one that runs since when and where, of one that is over how it ended.

    Attributes:
        headline: all of it in one line.
        reason, detail: the dominant reason as a word and a sentence; empty for one that does not wait.
        blockers: who is in the way, at most eight; `blockers_more` others.
        changes: smallest first.
    """

    job_id: JobId
    state: JobState
    now_s: float
    headline: str
    reason: str = ""
    detail: str = ""
    blockers: list[BlockerView] = []
    blockers_more: int = 0
    start: StartView | None = None
    changes: list[ChangeView] = []
    nodes: list[NodeId] = []
    since_s: float | None = None


class DryRunReply(View, frozen=True, kw_only=True):
    """What a submit would meet now.

    Attributes:
        starts: at once, on `nodes`.
        jobs: how many it would make; of an array the first element is spoken of.
        gpu_hours_low, gpu_hours_high: for all of them; None where nobody knows how long they run.
        notes: shape and number of tasks, as a submit tells them.
    """

    now_s: float
    starts: bool
    gpus: int
    jobs: int = 1
    nodes: list[NodeId] = []
    start: StartView | None = None
    run: RunView | None = None
    gpu_hours_low: float | None = None
    gpu_hours_high: float | None = None
    reason: str = ""
    detail: str = ""
    blockers: list[BlockerView] = []
    blockers_more: int = 0
    changes: list[ChangeView] = []
    notes: list[str] = []
