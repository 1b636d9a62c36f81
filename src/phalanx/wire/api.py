"""What users and the head say to each other: JSON bodies of the routes under /v1/, as records. The head encodes them, the CLI decodes them.

A field added later has a default, and unknown fields are ignored, so that a release understands the one before and after it.
Times are Unix seconds (`_s`), amounts carry their unit. Bytes travel as base64.

    GET    /v1/health                    -> Health            (no token)
    GET    /v1/me                        -> Me
    POST   /v1/jobs                      job mapping -> Submitted (201; header Idempotency-Key)
    GET    /v1/jobs ?state=&user=&project=&queue=&name=&before_seq=&limit=&fold=  -> JobList       (`state` may be repeated)
    GET    /v1/jobs/{id}                 -> JobDetail       (of an array too: the whole as one job; so do the verbs that change)
    PATCH  /v1/jobs/{id}                 UpdateBody -> JobReply
    POST   /v1/jobs/{id}/cancel|hold|release|requeue   WhyBody or nothing -> JobReply
    POST   /v1/jobs/cancel               CancelBody -> JobsReply (all at once, in the order named)
    GET    /v1/jobs/{id}/why             -> wire.why.WhyReply;  POST /v1/jobs/dry-run  job mapping -> wire.why.DryRunReply
    GET    /v1/jobs/{id}/story ?after=&limit=  -> StoryReply
    GET    /v1/jobs/{id}/logs ?rank=all|K|supervisor&epoch=&cursor=&limit_bytes=&tail_bytes=  -> LogsReply
           with ?follow=1 or Accept: text/event-stream an SSE stream: `log` LogChunk, `state` StateEvent, `end` EndEvent
    GET    /v1/jobs/{id}/events ?after=  SSE: `story` StoryLine, `state` StateEvent, `end` EndEvent; /v1/events the same of all
    GET    /v1/jobs/{id}/steps ?after=CURSOR&rank=0|all&limit=  -> StepsReply
    GET    /v1/jobs/{id}/receipt         -> core.accounting.receipt.Receipt
    GET    /v1/jobs/{id}/files ?path=    -> FilesReply;  /v1/jobs/{id}/files/archive ?path= -> tar
    POST   /v1/jobs/{id}/exec            ExecBody -> ExecOpened
    GET    /v1/exec/{s}/output ?after=&wait_s=  -> ExecOutputReply
    POST   /v1/exec/{s}/input            ExecInputBody -> ExecInputReply;  /v1/exec/{s}/resize ExecResizeBody -> ExecOpened;  DELETE /v1/exec/{s} -> 204
    GET    /v1/nodes                     -> NodeList;  GET /v1/nodes/{id} -> NodeReply
    GET    /v1/reservations              -> ReservationList
    PUT    /v1/reservations/{id}         ReservationBody -> ReservationReply;  DELETE -> 204
    GET    /v1/profile                   -> ProfileReply;  PUT  profile mapping -> ProfileReply
    PATCH  /v1/nodes                     LabelsBody -> NodeList (of those named)
    POST   /v1/nodes/{id}/drain          DrainBody -> NodeReply;  /undrain -> NodeReply;  DELETE /v1/nodes/{id} -> 204
    GET    /v1/users|projects|queues     -> UserList|ProjectList|QueueList
    GET|PUT /v1/users|projects|queues/{id}   UserBody|ProjectBody|QueueBody -> UserReply|ProjectReply|QueueReply
    PUT    /v1/queues                    QueuesBody -> QueuesApplied (all or nothing)
    GET    /v1/tokens                    -> TokenList (one's own; all for an admin);  POST TokenBody -> TokenMade (201)
    DELETE /v1/tokens/{id}               -> 204
    HEAD|PUT /v1/blobs/{sha256}          raw bytes -> BlobReply
    GET    /v1/overview                  -> Overview
    POST   /v1/stop                      StopBody -> StopReply

Errors always are an ErrorReply with the HTTP status of the core.errors class whose `code` it carries.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import (
    Epoch,
    Generation,
    JobId,
    NodeId,
    ProjectId,
    QueueId,
    ReservationId,
    SupervisorId,
    TokenId,
    UserId,
)
from phalanx.core.state.story import StoryLine
from phalanx.core.work.attempt import AttemptState, Cause
from phalanx.core.work.job import JobState, Reason
from phalanx.core.work.people import Action, UserRole
from phalanx.core.work.queue import BUDGET_PERIOD_S

API_VERSION: Final = 1
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the head shows or hears. Records alone, no behaviour."""


# ---- errors and the head itself ---------------------------------------------------------------------------------------


class ErrorBody(View, frozen=True, kw_only=True):
    """`code` is that of a class in core.errors; `retry`: the same request may go through later."""

    code: str
    message: str
    hint: str = ""
    retry: bool = False


class ErrorReply(View, frozen=True, kw_only=True):
    """The one shape of every refusal."""

    error: ErrorBody


class Health(View, frozen=True, kw_only=True):
    """Open to all: says that a head answers, and which."""

    status: str
    version: str
    head_id: str


class Me(View, frozen=True, kw_only=True):
    """Whose token this is and what it may do."""

    user: UserId
    role: UserRole
    token_id: TokenId
    projects: list[ProjectId] = []
    admin_of: list[ProjectId] = []
    scope: list[Action] = []
    actions: list[Action] = []


class StopBody(View, frozen=True, kw_only=True):
    """Refused while jobs run unless one of the two is set. `cancel_jobs`: ask again until `stopping`."""

    keep_jobs: bool = False
    cancel_jobs: bool = False


class StopReply(View, frozen=True, kw_only=True):
    """`stopping`: the head exits now. Otherwise `running` jobs are still being cancelled."""

    stopping: bool
    running: int = 0


# ---- jobs ---------------------------------------------------------------------------------------------------------------


class Progress(View, frozen=True, kw_only=True):
    """How far training is, by the reports of rank 0. Rates are over the newest steps; `saving`: a checkpoint is being written.

    `checkpoint_step` is the newest step saved that the head heard of in this life.
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


class Checkpoint(View, frozen=True, kw_only=True):
    """A published checkpoint."""

    epoch: Epoch
    step: int
    path: str
    bytes: int = 0
    saved_s: float = 0.0


class JobView(View, frozen=True, kw_only=True):
    """A job as people see it.

    Attributes:
        seq: submit order; pages by `before_seq`.
        reason, detail: why it waits, as a word and a sentence; of an ended job only the sentence, why it ended so.
        gpus: as asked, "4xh200:8"; `gpu_count` is the number. `shape` is "nodes x GPUs a node", of the live attempt or as asked.
        nodes: names, of the live or last attempt, by node rank.
        epoch: of the newest attempt, which is also how many there were (`attempts`).
        restarts: attempts beyond the first and in-place restarts.
        utilization: 0..1, mean over its devices; None when unknown.
        attempt_state: of the live attempt; None without one.
        resume_step: the step the newest attempt started from.
        virtual: its devices are slots on CPU.
        unmet: what it waits for of other jobs, "afterok:17". `begin_s`: it starts no earlier.
        terms: what it insists on or wishes beyond its GPUs, in words: "within one rack".
        plan: how its model is split: "auto", or a layout as "tp=2,fsdp=4"; "" where nothing was said.
        array_id, array_index, array_size, array_max: its place in an array, and how many may run at once.
        elements: where the view stands for several elements, which: "40-99". `states`: how many of the whole array are in each state.
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
    gpu_count: int = 0
    shape: str = ""
    nodes: list[NodeId] = []
    epoch: Epoch = Epoch(0)
    generation: Generation = Generation(0)
    attempts: int = 0
    restarts: int = 0
    attempt_state: AttemptState | None = None
    resume_step: int | None = None
    progress: Progress | None = None
    utilization: float | None = None
    command: str = ""
    workdir: str = ""
    output_dir: str = ""
    held: bool = False
    time_limit_s: float | None = None
    checkpoints: list[Checkpoint] = []
    cancelled_by: str = ""
    virtual: bool = False
    labels: dict[str, str] = {}
    unmet: list[str] = []
    begin_s: float | None = None
    terms: list[str] = []
    plan: str = ""
    array_id: str = ""
    array_index: int | None = None
    array_size: int = 0
    array_max: int | None = None
    elements: str = ""
    states: dict[JobState, int] = {}


class GrantView(View, frozen=True, kw_only=True):
    """One node's part of an attempt."""

    node_id: NodeId
    node_rank: int
    devices: list[int]
    first_rank: int
    tasks: int


class ExitView(View, frozen=True, kw_only=True):
    """How one task ended; `by_us`: it had been asked to."""

    rank: int
    node_id: NodeId
    code: int | None
    signal: int | None
    by_us: bool
    at_s: float
    note: str = ""


class AttemptView(View, frozen=True, kw_only=True):
    """One attempt. `causes` are those of its generations that ended, in order; `cause` is the last of them once it ended."""

    job_id: JobId
    epoch: Epoch
    state: AttemptState
    generation: Generation
    placed_s: float
    cause: Cause | None = None
    causes: list[Cause] = []
    running_s: float | None = None
    first_running_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    why: str = ""
    resume_step: int | None = None
    resume_epoch: Epoch | None = None
    grants: list[GrantView] = []
    exits: list[ExitView] = []


class Submitted(View, frozen=True, kw_only=True):
    """The job as committed, and what the user is told before it starts: "2 nodes x 8 = 16 GPUs", "16 tasks: ...".

    Of an array `job` is the first element; `array_id` names the whole.
    """

    job: JobView
    notes: list[str] = []
    array_id: str = ""


class JobReply(View, frozen=True, kw_only=True):
    """One job."""

    job: JobView


class JobDetail(View, frozen=True, kw_only=True):
    """One job with its attempts, oldest first."""

    job: JobView
    attempts: list[AttemptView]


class JobList(View, frozen=True, kw_only=True):
    """Newest first; `next` goes into `before_seq` for the next page, None at the end."""

    jobs: list[JobView]
    next: int | None = None


class JobBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job mapping: the keys of a job file (docs/jobfile), checked by `core.work.request.spec_from_mapping` alone.

    Here for the description of the API; a value may have any of the types that a job file allows for its key.
    """

    run: str | list[str]
    name: str | None = None
    gpus: int | str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None
    memory: int | float | str | None = None
    image: str | None = None
    workdir: str | None = None
    env: dict[str, Any] | list[str] | None = None
    setup: str | None = None
    tasks_per_node: int | None = None
    priority: int | None = None
    queue: str | None = None
    project: str | None = None
    time: str | None = None
    retry: int | None = None
    checkpoint: str | None = None
    warm: bool | None = None
    hold: bool | None = None
    grace: str | None = None
    collective_timeout: str | None = None
    upload: str | None = None
    labels: dict[str, Any] | None = None
    depends_on: int | str | list[int | str] | None = None
    array: int | str | None = None
    begin: int | float | str | None = None
    plan: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    slurm: dict[str, str] | None = None


class UpdateBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may change of a job, or of all live elements of an array; an absent field stays. `time` and `begin` as in a job file."""

    name: str | None = None
    priority: int | None = None
    time: str | None = None
    queue: QueueId | None = None
    begin: int | float | str | None = None


class WhyBody(View, frozen=True, kw_only=True):
    """A reason for people, kept in the story."""

    why: str = ""


class CancelBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs to end for good, all in one step; `why` is for people, kept in the story of each."""

    jobs: list[JobId]
    why: str = ""


class JobsReply(View, frozen=True, kw_only=True):
    """Jobs, in the order they were named, each once."""

    jobs: list[JobView]


# ---- story, logs, steps, files --------------------------------------------------------------------------------------------


class StoryReply(View, frozen=True, kw_only=True):
    """Lines with seq > `after`, oldest first; ask on with `after=last`."""

    story: list[StoryLine]
    last: int = 0


class LogChunk(View, frozen=True, kw_only=True):
    """Text of one stream of one attempt: its bytes `offset` to `end`. `rank` is None for a supervisor's notes."""

    epoch: Epoch
    stream: str
    rank: int | None
    offset: int
    end: int
    text: str


class LogsReply(View, frozen=True, kw_only=True):
    """Chunks by epoch, then stream. `cursor` asks on from here, for more logs or as Last-Event-ID; `more`: at once."""

    chunks: list[LogChunk]
    cursor: str
    more: bool = False


class StateEvent(View, frozen=True, kw_only=True):
    """A job's state has changed (or is told first)."""

    job_id: JobId
    state: JobState
    reason: str = ""
    detail: str = ""
    epoch: Epoch = Epoch(0)
    generation: Generation = Generation(0)
    attempt_state: AttemptState | None = None
    nodes: list[NodeId] = []


class EndEvent(View, frozen=True, kw_only=True):
    """The job is over and all its output was sent; nothing follows."""

    job_id: JobId
    state: JobState
    exit_code: int | None = None


class StepView(View, frozen=True, kw_only=True):
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


class StepsReply(View, frozen=True, kw_only=True):
    """In the order reported: by epoch, then as written. `cursor` goes into `after`; `more`: at once."""

    steps: list[StepView]
    cursor: str
    more: bool = False


class FileEntry(View, frozen=True, kw_only=True):
    """One entry of an output folder. `kind`: file, folder, link or other; `path` is relative to the folder's root."""

    path: str
    kind: str
    size_bytes: int = 0
    modified_s: float = 0.0


class FilesReply(View, frozen=True, kw_only=True):
    """Entries of one folder, folders first, then by name. `truncated`: there are more than are shown."""

    path: str
    entries: list[FileEntry]
    truncated: bool = False


class BlobReply(View, frozen=True, kw_only=True):
    """The blob as kept."""

    sha256: str
    bytes: int


# ---- exec -------------------------------------------------------------------------------------------------------------------


class ExecBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command beside a job's ranks, on one of its nodes."""

    argv: list[str]
    tty: bool = False
    rows: int = 24
    cols: int = 80
    node_rank: int = 0


class ExecOpened(View, frozen=True, kw_only=True):
    """The session's name, for the calls that follow."""

    session: str


class ExecOutputReply(View, frozen=True, kw_only=True):
    """Output from byte `after` on. `end`: ask next with `after=end`. `done`: the command is over and this is the last of it."""

    data: bytes
    end: int
    done: bool = False
    exit_code: int | None = None
    error: str = ""


class ExecInputBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user typed, from byte `offset` of the whole input on; sent twice it counts once."""

    offset: int
    data: bytes = b""
    closed: bool = False


class ExecInputReply(View, frozen=True, kw_only=True):
    """Input up to byte `end` is taken; go on from there."""

    end: int


class ExecResizeBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The terminal's new size."""

    rows: int
    cols: int


# ---- nodes ------------------------------------------------------------------------------------------------------------------


class DeviceView(View, frozen=True, kw_only=True):
    """A device, what holds it and its newest sample. `ranks` are those placed on it, where that is known; `outside`: others hold it."""

    index: int
    uuid: str
    model: str
    memory_bytes: int
    virtual: bool = False
    healthy: bool = True
    job_id: JobId | None = None
    ranks: list[int] = []
    counter: str = ""
    utilization: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: list[str] = []
    outside: bool = False


class CordonView(View, frozen=True, kw_only=True):
    """Who keeps new work off a node, and why."""

    by: str
    why: str
    since_s: float
    drain: bool = False


class ReservedView(View, frozen=True, kw_only=True):
    """What a node is set aside for, from `start_s` up to `end_s`. `holders`: "ada and queue nlp", or "maintenance"; `begun`: it is so now."""

    id: ReservationId
    start_s: float
    end_s: float
    holders: str
    begun: bool = False
    why: str = ""


class NodeView(View, frozen=True, kw_only=True):
    """A node. `jobs` hold something on it; `reserved`: now or later, first to begin first; `sampled_s` is when its devices were last heard of, None if never in this life; `outside`: who holds some of it on a shared engine."""

    id: NodeId
    state: NodeState
    engine: str
    devices: list[DeviceView]
    cpus: int
    memory_bytes: int
    address: str = ""
    hostname: str = ""
    virtual: bool = False
    labels: dict[str, str] = {}
    cordon: CordonView | None = None
    reserved: list[ReservedView] = []
    jobs: list[JobId] = []
    joined_s: float = 0.0
    changed_s: float = 0.0
    down_cause: str = ""
    failures: int = 0
    slow: str = ""
    supervisor_id: SupervisorId | None = None
    sampled_s: float | None = None
    load_1m: float | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    outside: list[str] = []


class NodeList(View, frozen=True, kw_only=True):
    """All nodes by id."""

    nodes: list[NodeView]


class NodeReply(View, frozen=True, kw_only=True):
    """One node."""

    node: NodeView


class LabelsBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels by node; an empty text takes one away. All of them or, if one is wrong, none."""

    labels: dict[NodeId, dict[str, str]]


class DrainBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cordon_only`: running jobs stay where they are."""

    why: str = ""
    cordon_only: bool = False


class ReservationView(View, frozen=True, kw_only=True):
    """Nodes set aside from `start_s` up to `end_s`. With neither users nor queues it is `maintenance`: nobody may use them."""

    id: ReservationId
    nodes: list[NodeId]
    start_s: float
    end_s: float
    users: list[UserId] = []
    queues: list[QueueId] = []
    maintenance: bool = False
    begun: bool = False
    why: str = ""
    by: str = ""


class ReservationList(View, frozen=True, kw_only=True):
    """All that have not ended, first to begin first."""

    reservations: list[ReservationView]


class ReservationReply(View, frozen=True, kw_only=True):
    """One reservation."""

    reservation: ReservationView


class ReservationBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `maintenance`, or the users and queues the nodes are for. `time` is how long, as "4h"; without `start_s` from now on."""

    nodes: list[NodeId]
    time: str
    start_s: float | None = None
    users: list[UserId] = []
    queues: list[QueueId] = []
    maintenance: bool = False
    why: str = ""


class ProfileReply(View, frozen=True, kw_only=True):
    """What the last calibration found, as `core.performance.profile` writes it; None where there was none.

    Attributes:
        stale: why it should be made again.
        slow: nodes that gave less than their peers.
    """

    profile: dict[str, Any] | None = None
    by: str = ""
    stored_s: float | None = None
    stale: list[str] = []
    slow: list[str] = []


# ---- users, projects, queues, tokens ----------------------------------------------------------------------------------------


class UserView(View, frozen=True, kw_only=True):
    """A user."""

    id: UserId
    role: UserRole
    created_s: float = 0.0
    disabled: bool = False


class UserList(View, frozen=True, kw_only=True):
    """All users by id."""

    users: list[UserView]


class UserReply(View, frozen=True, kw_only=True):
    """One user."""

    user: UserView


class UserBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user is; absent fields of an existing user stay."""

    role: UserRole | None = None
    disabled: bool | None = None


class ProjectView(View, frozen=True, kw_only=True):
    """A project: who pays."""

    id: ProjectId
    members: list[UserId]
    admins: list[UserId]
    created_s: float = 0.0


class ProjectList(View, frozen=True, kw_only=True):
    """All projects by id."""

    projects: list[ProjectView]


class ProjectReply(View, frozen=True, kw_only=True):
    """One project."""

    project: ProjectView


class ProjectBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a project is; absent fields of an existing project stay."""

    members: list[UserId] | None = None
    admins: list[UserId] | None = None


class QueueWait(View, frozen=True, kw_only=True):
    """Jobs of one queue that wait for one reason; `detail` of the first of them."""

    reason: Reason
    jobs: int
    gpus: int
    detail: str = ""


class QueueView(View, frozen=True, kw_only=True):
    """A queue. GPUs count with all queues below; `pending`, `running`, `pending_gpus` and `waiting` are of its own jobs.

    Attributes:
        quota_gpus, borrow_gpus, lend_gpus, gpus_per_user, jobs_per_user, budget_gpu_h: as in core.work.queue.Queue; None: no limit.
        right_gpus: its quota, or without one the sum of the quotas below.
        used_gpus: held by jobs.
        borrowed_gpus: held past its right.
        lent_gpus: of its right, held by others now: it would have to reclaim them.
        room_gpus: that it may take now, without reclaiming.
        factor: fair share, in (0, 1]; the higher, the sooner.
    """

    id: QueueId
    priority: int = 0
    open: bool = True
    pending: int = 0
    running: int = 0
    parent: QueueId | None = None
    quota_gpus: int | None = None
    borrow_gpus: int | None = None
    lend_gpus: int | None = None
    weight: float = 1.0
    gpus_per_user: int | None = None
    jobs_per_user: int | None = None
    budget_gpu_h: float | None = None
    budget_period_s: float = BUDGET_PERIOD_S
    budget_left_gpu_h: float | None = None
    right_gpus: int = 0
    used_gpus: int = 0
    borrowed_gpus: int = 0
    lent_gpus: int = 0
    room_gpus: int = 0
    pending_gpus: int = 0
    factor: float = 1.0
    waiting: list[QueueWait] = []


class QueueList(View, frozen=True, kw_only=True):
    """All queues by id."""

    queues: list[QueueView]


class QueueReply(View, frozen=True, kw_only=True):
    """One queue."""

    queue: QueueView


class QueueBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a queue is; absent fields of an existing queue stay."""

    priority: int | None = None
    open: bool | None = None


class QueueFacts(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A queue as it shall be: what is absent takes its default, but `open`, which stays."""

    id: QueueId
    parent: QueueId | None = None
    priority: int = 0
    open: bool | None = None
    quota_gpus: int | None = None
    borrow_gpus: int | None = None
    lend_gpus: int | None = None
    weight: float = 1.0
    gpus_per_user: int | None = None
    jobs_per_user: int | None = None
    budget_gpu_h: float | None = None
    budget_period_s: float = BUDGET_PERIOD_S


class QueuesBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queues put at once. `prune`: those not named are removed, but `default`. `dry_run`: only say what would change."""

    queues: list[QueueFacts]
    prune: bool = False
    dry_run: bool = False


class QueueChange(View, frozen=True, kw_only=True):
    """What differs of one queue, by the names of QueueFacts."""

    id: QueueId
    before: dict[str, str | int | float | bool | None]
    after: dict[str, str | int | float | bool | None]


class QueuesApplied(View, frozen=True, kw_only=True):
    """What was, or on a dry run would be, done."""

    added: list[QueueId] = []
    changed: list[QueueChange] = []
    removed: list[QueueId] = []
    unchanged: int = 0


class TokenView(View, frozen=True, kw_only=True):
    """A token without its bits."""

    id: TokenId
    user: UserId
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    scope: list[Action] = []
    note: str = ""


class TokenList(View, frozen=True, kw_only=True):
    """Tokens, oldest first."""

    tokens: list[TokenView]


class TokenBody(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to make. `user` other than oneself takes an admin; `expires`: "30d", absent for never; `scope`: actions, empty for all."""

    user: UserId | None = None
    expires: str | None = None
    scope: list[Action] = []
    note: str = ""


class TokenMade(View, frozen=True, kw_only=True):
    """The only time that the secret is shown."""

    secret: str
    token: TokenView


# ---- overview ---------------------------------------------------------------------------------------------------------------


class Overview(View, frozen=True, kw_only=True):
    """All that `top` and the demo draw, from one moment. `recent` are the newest jobs that ended."""

    now_s: float
    head_id: str
    version: str
    nodes: list[NodeView]
    running: list[JobView]
    pending: list[JobView]
    recent: list[JobView]
    counts: dict[JobState, int]
