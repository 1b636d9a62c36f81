"""Records of jobs and their attempts, and of requests that change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from phalanx.core.ids import Epoch, Generation, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.units import format_bytes, format_duration
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import AttemptState, JobState

_STAGING_MAX: Final = 3  # nodes in one line
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the training, from reports of rank 0. Rates are over the newest steps; `saving`: a checkpoint is being written.

    `checkpoint_step` is the newest saved step reported since the head started.
    """

    epoch: Epoch
    generation: Generation
    step: int
    at_s: float
    steps_total: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    saving: bool = False
    checkpoint_step: int | None = None


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A published checkpoint."""

    epoch: Epoch
    step: int
    path: str
    bytes: int = 0
    saved_s: float = 0.0


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role of a gang with several: the GPUs as requested, CPUs and memory of each node, and its nodes while the job runs."""

    gpus: str
    cpus: int = 0
    memory_bytes: int = 0
    nodes: list[NodeId] = []


class JobWasteView(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm: the job wastes GPUs. `kind`: as in `wire.api.waste`; `gpus`: how many of those that it holds; `since_s`: Unix time."""

    kind: str
    gpus: int | float
    since_s: float
    gpu_hours: float


class WebPortView(msgspec.Struct, frozen=True, kw_only=True):
    """A port on which a program of the job serves web pages. `path`: its pages at the head; `url`: the same, filled in by the command line."""

    port: int
    path: str
    name: str = ""
    url: str = ""


class JobLinkView(msgspec.Struct, frozen=True, kw_only=True):
    """A link to the run of the job at a tracker. `name`: of the tracker."""

    name: str
    url: str


class StagingView(msgspec.Struct, frozen=True, kw_only=True):
    """How far a node is that copies a dataset of a job before its start. `eta_s`: None while the rate is not known."""

    node: NodeId
    name: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    eta_s: float | None
    from_peers_bytes: int = 0


def staging_text(staging: Sequence[StagingView]) -> str:
    """Return how far the copies of a job's data are, the slowest node first; empty if none is made now."""
    slowest = sorted(staging, key=lambda one: one.done_bytes / max(1, one.total_bytes))
    parts = []
    for one in slowest[:_STAGING_MAX]:
        rate = f", {format_bytes(int(one.bytes_per_s))}/s" if one.bytes_per_s else ""
        ends = f", {format_duration(one.eta_s)} left" if one.eta_s else ""
        size = f"{format_bytes(one.done_bytes)} of {format_bytes(one.total_bytes)}"
        parts.append(f"{one.node} copies {one.name}: {size}{rate}{ends}")
    more = len(slowest) - _STAGING_MAX
    return "; ".join(parts) + (f"; {more} more nodes" if more > 0 else "")


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job.

    Attributes:
        seq: submit order, for paging by `before_seq`.
        reason, detail: why it waits, as a word and a sentence; for an ended job only the sentence, why it ended.
        gpus: as requested, "4xh200:8"; `gpu_count` is the number. `shape` is "nodes x GPUs per node", of the live attempt or as requested.
        nodes: names, of the live or last attempt, by node rank.
        epoch: of the newest attempt, which is also the number of attempts (`attempts`).
        restarts: attempts after the first, and in-place restarts.
        utilization: 0..1, mean over its devices; None if unknown.
        attempt_state: of the live attempt; None without one.
        staging: nodes that copy its data before its start, now.
        resume_step: the step from which the newest attempt started.
        waste: its alarm, if it wastes GPUs now; of several, the one that wastes most.
        virtual: its devices are slots on CPU.
        parked_s: since when it is parked; None if it is not. It is then held too.
        idle_s: parked after so long without work and without a client. `terminal`: its first rank runs on a terminal.
        unmet: dependencies it waits for, "afterok:17". `begin_s`: earliest start.
        terms: constraints and preferences beyond its GPUs, in words: "within one rack".
        plan: how its model is split: "auto", or a layout as "tp=2,fsdp=4"; "" if not set.
        budgets: restart budgets used so far, in words: "2 of 5 restarts without progress"; empty if none is used.
        array_id, array_index, array_size, array_max: its place in an array, and how many elements may run at once.
        elements: for a view of several elements, which: "40-99". `states`: number of elements of the whole array by state;
            `state_elements`: their numbers.
        paces: how fast its steps ran on each model of GPU, as its attempts reported, newest last: "0.21 s a step on a100, 8 ranks".
        speeds: of a single job, how fast it runs on the models of the fleet and how that is known, the fastest first; empty if it is not.
        service, revision: of a replica. `port`: on its first node, 0 before it is chosen; `ready`: it answers there.
        sleep: of a replica that is not awake, "asleep", "falling asleep", "waiting to wake" or "waking"; `sleep_why`: what it waits for.
    """

    id: JobId
    seq: int
    name: str
    state: JobState
    user: UserId
    project: ProjectId
    queue: QueueId
    submit_s: float
    reason: str = ""
    detail: str = ""
    priority: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    gpus: str = "0"
    gpu_count: int | float = 0
    shape: str = ""
    nodes: list[NodeId] = []
    epoch: Epoch = Epoch(0)
    generation: Generation = Generation(0)
    attempts: int = 0
    restarts: int = 0
    attempt_state: AttemptState | None = None
    staging: list[StagingView] = []
    resume_step: int | None = None
    progress: Progress | None = None
    utilization: float | None = None
    command: str = ""
    workdir: str = ""
    output_dir: str = ""
    held: bool = False
    parked_s: float | None = None
    time_limit_s: float | None = None
    idle_s: float | None = None
    terminal: bool = False
    checkpoints: list[CheckpointView] = []
    cancelled_by: str = ""
    waste: JobWasteView | None = None
    virtual: bool = False
    labels: dict[str, str] = {}
    unmet: list[str] = []
    begin_s: float | None = None
    terms: list[str] = []
    plan: str = ""
    resources: dict[str, int] = {}
    licences: dict[str, int] = {}
    roles: list[RoleView] = []
    budgets: list[str] = []
    array_id: str = ""
    array_index: int | None = None
    array_size: int = 0
    array_max: int | None = None
    elements: str = ""
    states: dict[JobState, int] = {}
    paces: list[str] = []
    speeds: list[str] = []
    state_elements: dict[JobState, str] = {}
    service: str = ""
    revision: int | None = None
    port: int = 0
    web_ports: list[WebPortView] = []
    links: list[JobLinkView] = []
    notify: str = ""
    on_end: str = ""
    ready: bool = False
    sleep: str = ""
    sleep_why: str = ""

    @property
    def pending_word(self) -> str:
        """The state of a waiting job in one word: pending, held or parked."""
        return "parked" if self.parked_s is not None else "held" if self.held else "pending"


class ImpossibleJobView(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting job that a change of the queues or nodes made impossible, and why."""

    id: JobId
    why: str


class GrantedSliceView(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG slice of an attempt: the device's index on the node, the profile, and the memory slices that it occupies."""

    device: int
    profile: str
    start: int
    memory_slices: int


class GrantView(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of an attempt. `slices`: MIG slices, by local rank; empty for other grants."""

    node_id: NodeId
    node_rank: int
    devices: list[int]
    first_rank: int
    tasks: int
    slices: list[GrantedSliceView] = []


class ExitView(msgspec.Struct, frozen=True, kw_only=True):
    """How one task ended; `by_us`: Phalanx had asked it to end."""

    rank: int
    node_id: NodeId
    code: int | None
    signal: int | None
    by_us: bool
    at_s: float
    note: str = ""


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. `causes`: of its ended generations, in order; `cause`: the last of them, once the attempt ended."""

    job_id: JobId
    epoch: Epoch
    state: AttemptState
    generation: Generation
    placed_s: float
    cause: EndCause | None = None
    causes: list[EndCause] = []
    running_s: float | None = None
    first_running_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    why: str = ""
    resume_step: int | None = None
    resume_epoch: Epoch | None = None
    grants: list[GrantView] = []
    exits: list[ExitView] = []


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True):
    """The job as committed, and notes for the user: "2 nodes x 8 = 16 GPUs", "16 tasks: ...".

    For an array, `job` is the first element, and `array_id` names the array. `warnings`: why nothing here now can run it, or why it can
    never start although it was accepted. `tasks`: number of tasks of the job; None if its placement decides.
    """

    job: JobView
    tasks: int | None = None
    notes: list[str] = []
    warnings: list[str] = []
    array_id: str = ""


class JobReply(msgspec.Struct, frozen=True, kw_only=True):
    """One job."""

    job: JobView


class JobDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One job with its attempts, oldest first. `archived`: the month of the archive that has it; empty if it is in the store."""

    job: JobView
    attempts: list[AttemptView]
    archived: str = ""


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of jobs.

    Attributes:
        next: goes into `before_seq` for the next page of a list that is newest first; None at the end.
        after: goes into `after` for the next page in any order; empty at the end.
    """

    jobs: list[JobView]
    next: int | None = None
    after: str = ""


class JobBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job mapping: the keys of a job file (docs/jobfile), checked by `core.work.job_file.request.spec_from_mapping` alone.

    It documents the API; a value may have any type that a job file allows for its key.
    """

    run: str | list[str]
    name: str | None = None
    gpus: int | str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None
    memory: int | float | str | None = None
    resources: str | dict[str, Any] | None = None
    image: str | None = None
    workdir: str | None = None
    env: dict[str, Any] | list[str] | None = None
    secrets: str | list[str] | None = None
    ports: int | str | list[int | str] | dict[str, int | str] | None = None
    idle: str | float | None = None
    terminal: bool | None = None
    notify: str | list[str] | dict[str, str | list[str]] | None = None
    on_end: str | dict[str, str] | None = None
    setup: str | None = None
    requirements: str | None = None
    software: dict[str, Any] | None = None
    data: dict[str, Any] | list[str] | None = None
    tasks_per_node: int | None = None
    priority: int | None = None
    queue: str | None = None
    project: str | None = None
    time: str | None = None
    retry: int | None = None
    checkpoint: str | None = None
    outputs: str | None = None
    warm: bool | None = None
    hold: bool | None = None
    allow_never: bool | None = None
    grace: str | None = None
    collective_timeout: str | None = None
    upload: str | None = None
    labels: dict[str, Any] | None = None
    depends_on: int | str | list[int | str] | None = None
    array: int | str | None = None
    begin: int | float | str | None = None
    plan: str | None = None
    speeds: dict[str, Any] | None = None
    planned_speeds: dict[str, Any] | None = None
    nodelist: str | None = None
    exclude: str | None = None
    slurm: dict[str, str] | None = None
    type: str | None = None
    replicas: int | str | None = None
    port: int | str | None = None
    ready: str | None = None
    ready_within: str | None = None
    sleep: str | None = None
    wake: str | None = None
    scale: dict[str, Any] | None = None


class JobKeysReply(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that would submit a job or service again.

    Attributes:
        keys: as in a job file, without those that have their default.
        hidden_env: variables whose values only the owner sees; they are not in `keys`.
        copy_lost: the head no longer has the copy of the working directory that `upload` names.
    """

    keys: dict[str, Any]
    hidden_env: list[str] = []
    copy_lost: bool = False


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to a job, or to all live elements of an array; absent fields stay unchanged. `time` and `begin` as in a job file."""

    name: str | None = None
    priority: int | None = None
    time: str | None = None
    queue: QueueId | None = None
    begin: int | float | str | None = None


class WhyBody(msgspec.Struct, frozen=True, kw_only=True):
    """A reason, recorded in the job's history."""

    why: str = ""


class CancelBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs to cancel, all in one step; `why` is recorded in the history of each."""

    jobs: list[JobId]
    why: str = ""


class JobsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in the order of the request, each once."""

    jobs: list[JobView]
