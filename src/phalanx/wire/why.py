"""Replies of `why` and of dry runs: JSON bodies, as records. Rules as in wire.api.

GET    /v1/jobs/{id}/why             -> WhyReply
POST   /v1/jobs/dry-run              job mapping -> DryRunReply (without changing state)
POST   /v1/what-if                   WhatIfBody -> WhatIfReply (without changing state)
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from phalanx.core.ids import JobId, NodeId, QueueId, UserId
from phalanx.core.work.states import JobState

ADDED_NODES_MAX: Final = 1000


class WhyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of these records."""


class StartView(WhyRecord, frozen=True, kw_only=True):
    """The expected start, as Unix seconds. None: no such bound is known; `unknown` explains why `latest_s` is not."""

    earliest_s: float | None = None
    latest_s: float | None = None
    unknown: str = ""


class RunTimeView(WhyRecord, frozen=True, kw_only=True):
    """The expected run time in seconds: four of five similar jobs ended between the two. `high_s` None: unknown.

    `ends` and `likes`: how many ended jobs this is based on, and what they have in common with this one.
    """

    low_s: float = 0.0
    high_s: float | None = None
    ends: int = 0
    likes: str = ""


class BurstView(WhyRecord, frozen=True, kw_only=True):
    """What speaks for and against nodes of pools that cost money, by the rule of the job's queue or project. Times in seconds from now, US dollars.

    Attributes:
        pools: the nodes that it would order, by pool.
        here_s: expected start on the fleet as it is; None if it is unknown, or if it cannot run there (`here_never`).
        there_s: start on those nodes, without their boot time where that is not known yet (`boot_known`).
        run_s: rest of its run; None if unknown. `price`: of that run there; None if unknown. `per_h`: of the nodes.
        there: the rule chose those nodes. `refusal`: else the condition that does not hold.
    """

    pools: dict[str, int]
    rule: str
    there: bool
    here_s: float | None = None
    here_never: bool = False
    there_s: float = 0.0
    boot_known: bool = False
    run_s: float | None = None
    price: float | None = None
    per_h: float = 0.0
    refusal: str = ""


class BlockerView(WhyRecord, frozen=True, kw_only=True):
    """A blocking job: it holds what this one needs, is ahead of it, or must end first. `end`: its expected end."""

    id: JobId
    user: UserId
    name: str
    state: JobState
    gpus: int | float
    since_s: float | None = None
    end: StartView | None = None


class SuggestedChangeView(WhyRecord, frozen=True, kw_only=True):
    """A change with which the job would start now, tested on a copy of the state. `operator`: only an operator can make it.

    `hint`: how to make the change, in plain words; `hint_code`, `hint_args`: the code of core.hints and its arguments. All are empty if
    the job waits for others. `command`: the same in the words of a front end, which sets it; the head sends it empty.
    """

    kind: str
    text: str
    hint: str = ""
    hint_code: str = ""
    hint_args: dict[str, str] = {}
    command: str = ""
    operator: bool = False


class WhyReply(WhyRecord, frozen=True, kw_only=True):
    """Why a job waits; for a running job since when and where, for an ended job how it ended.

    Attributes:
        headline: the summary in one line.
        reason, detail: the dominant reason as a word and a sentence; empty for a job that does not wait.
        never: it can never start: the reason is then `never`, the detail the arithmetic, and `limit` the name of the limit.
        blockers: at most eight blocking jobs; `blockers_more` counts the others.
        changes: smallest first.
        speeds: how fast it runs on the models of the fleet and how that is known, the fastest first; empty if it is not.
        burst: both sides, if the rule of its queue or project was asked.
    """

    job_id: JobId
    state: JobState
    now_s: float
    headline: str
    reason: str = ""
    detail: str = ""
    never: bool = False
    limit: str = ""
    blockers: list[BlockerView] = []
    blockers_more: int = 0
    start: StartView | None = None
    changes: list[SuggestedChangeView] = []
    speeds: list[str] = []
    nodes: list[NodeId] = []
    since_s: float | None = None
    burst: BurstView | None = None


class DryRunReply(WhyRecord, frozen=True, kw_only=True):
    """The result that a submit would have now.

    Attributes:
        starts: it would start immediately, on `nodes`.
        jobs: how many jobs it would create; for an array the other fields describe the first element.
        gpu_hours_low, gpu_hours_high: of all jobs; None if the run time is unknown.
        starting: other waiting jobs that start now, at most eight.
        burst: both sides, if the rule of its queue or project was asked.
        notes, warnings: shape and number of tasks, and whether nothing here now can run it, as in the reply to a submit.
    """

    now_s: float
    starts: bool
    gpus: int | float
    jobs: int = 1
    nodes: list[NodeId] = []
    start: StartView | None = None
    run: RunTimeView | None = None
    gpu_hours_low: float | None = None
    gpu_hours_high: float | None = None
    reason: str = ""
    detail: str = ""
    blockers: list[BlockerView] = []
    blockers_more: int = 0
    changes: list[SuggestedChangeView] = []
    starting: list[JobId] = []
    burst: BurstView | None = None
    notes: list[str] = []
    warnings: list[str] = []


class WhatIfBody(WhyRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job, and changes of the fleet and its queues under which its start is compared with the present.

    Attributes:
        job: the keys of a job file.
        add_nodes: so many free nodes more, like the node `like`; without it, like the first node that has GPUs.
        drain: nodes that take no new jobs, as a host list: gpu[001-004].
        quotas: quota in GPUs by queue.
    """

    job: dict[str, Any]
    add_nodes: Annotated[int, msgspec.Meta(ge=0, le=ADDED_NODES_MAX)] = 0
    like: NodeId | None = None
    drain: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    quotas: dict[QueueId, Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]] = {}


class WhatIfCurves(WhyRecord, frozen=True, kw_only=True):
    """How many GPUs jobs hold and how many jobs wait from `begin_s` on, every `step_s`, as things are and with the changes.

    Jobs are assumed to run as long as the later bound of their forecast; later jobs and failures are not in it. A value is None where the
    projection was not finished in time. The lists of the changes are empty without changes.

    Attributes:
        fleet_now, fleet_then: healthy GPUs of all nodes, also of cordoned ones.
        left_out: waiting jobs, the last in line, that are not in it.
    """

    begin_s: float
    step_s: float
    fleet_now: int
    gpus_now: list[float | None]
    waiting_now: list[int | None]
    fleet_then: int = 0
    gpus_then: list[float | None] = []
    waiting_then: list[int | None] = []
    left_out: int = 0


class WhatIfReply(WhyRecord, frozen=True, kw_only=True):
    """What would happen to the job as things are, and with the changes; None without changes. `changes`: each in words."""

    now: DryRunReply
    then: DryRunReply | None = None
    changes: list[str] = []
    curves: WhatIfCurves | None = None
