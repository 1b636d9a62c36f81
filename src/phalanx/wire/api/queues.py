"""Records of queues: their current state, and their settings."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import QueueId, UserId
from phalanx.core.work.queue import BUDGET_PERIOD_S
from phalanx.core.work.states import WaitReasonCode
from phalanx.core.work.usage.waste_terms import IDLE_STATES, IdleAction, WasteKind
from phalanx.wire.api.jobs import ImpossibleJobView


class IdleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An idle policy: as `core.work.usage.waste_terms.IdlePolicy`."""

    action: IdleAction
    after_s: float = 0.0
    grace_s: float | None = None
    states: tuple[WasteKind, ...] = IDLE_STATES
    exempt: str = ""


class QueueWait(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one queue that wait for the same reason; `detail` is that of the first."""

    reason: WaitReasonCode
    jobs: int
    gpus: int | float
    detail: str = ""


class UserShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a user of a queue has used lately: GPU-seconds, halved every half-life; `factor`, in (0, 1]: a higher one starts jobs sooner."""

    user: UserId
    gpu_s: float
    factor: float


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue. GPU counts include all queues below; `pending`, `running`, `pending_gpus` and `waiting` count its own jobs.

    Attributes:
        quota_gpus, borrow_gpus, lend_gpus, gpus_per_user, jobs_per_user, budget_gpu_h: as in core.work.queue.Queue; None: no limit.
        other_quotas, other_borrow, other_lend, other_per_user: the same for CPUs ("cpus"), memory ("memory") and extras; sizes in bytes.
        other_used, other_room: of these resources, held by jobs now, and usable now without reclaiming.
        gpu_s, other_s: used since the budget period began, running jobs counted up to now: GPU-seconds, and amount-seconds of CPUs, memory and
            extras by name.
        right_gpus: its quota, or without one the sum of the quotas below.
        used_gpus: held by jobs.
        borrowed_gpus: held beyond `right_gpus`; 0 where no queue has a quota.
        lent_gpus: of `right_gpus`, now held by other queues; it would have to reclaim them.
        room_gpus: GPUs that it may use now without reclaiming: as many as its quota allows, and at most those that are free.
        idle: what happens to its jobs that do not use their GPUs; None: as in the queue above.
        alarms: seconds of waste after which it is an alarm, by kind; None for never.
        burst: when its jobs order nodes that cost money, as a queue file has it; None: as in the queue above.
        min_stay_s: least time between two moves of one of its jobs; None: as in the queue above.
        fair_users: whether users who used less lately go first; None: as in the queue above.
        half_life_s: in which use halves for the fair share; None: the default. Only at the top.
        factor: fair share, in (0, 1]; a higher factor starts jobs sooner.
        users: of its own jobs, by user, where `fair_users` holds; the most use first.
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
    other_quotas: dict[str, int] = {}
    other_borrow: dict[str, int] = {}
    other_lend: dict[str, int] = {}
    other_per_user: dict[str, int] = {}
    budget_gpu_h: float | None = None
    budget_period_s: float = BUDGET_PERIOD_S
    budget_left_gpu_h: float | None = None
    right_gpus: int | float = 0
    used_gpus: int | float = 0
    borrowed_gpus: int | float = 0
    lent_gpus: int | float = 0
    room_gpus: int | float = 0
    pending_gpus: int | float = 0
    other_used: dict[str, int] = {}
    other_room: dict[str, int] = {}
    gpu_s: float = 0.0
    other_s: dict[str, float] = {}
    idle: IdleSettings | None = None
    alarms: dict[WasteKind, float | None] = {}
    burst: str | None = None
    min_stay_s: float | None = None
    fair_users: bool | None = None
    half_life_s: float | None = None
    factor: float = 1.0
    users: list[UserShare] = []
    waiting: list[QueueWait] = []


class QueueList(msgspec.Struct, frozen=True, kw_only=True):
    """All queues by id."""

    queues: list[QueueView]
    next: str = ""


class QueueReply(msgspec.Struct, frozen=True, kw_only=True):
    """One queue."""

    queue: QueueView


class QueueBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A queue's settings; absent fields of an existing queue stay unchanged."""

    priority: int | None = None
    open: bool | None = None


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a queue: absent fields take their default, except `open`, which stays unchanged."""

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
    other_quotas: dict[str, int] = {}
    other_borrow: dict[str, int] = {}
    other_lend: dict[str, int] = {}
    other_per_user: dict[str, int] = {}
    budget_gpu_h: float | None = None
    budget_period_s: float = BUDGET_PERIOD_S
    idle: IdleSettings | None = None
    alarms: dict[WasteKind, float | None] = {}
    burst: str | None = None
    min_stay_s: float | None = None
    fair_users: bool | None = None
    half_life_s: float | None = None


class QueuesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queues to set in one step. `prune`: remove all others except `default`. `dry_run`: only report the changes."""

    queues: list[QueueSettings]
    prune: bool = False
    dry_run: bool = False


QueueSetting = str | int | float | bool | dict[str, int] | None


class QueueChange(msgspec.Struct, frozen=True, kw_only=True):
    """The changed settings of one queue, by field name of QueueSettings."""

    id: QueueId
    before: dict[str, QueueSetting]
    after: dict[str, QueueSetting]


class QueuesApplied(msgspec.Struct, frozen=True, kw_only=True):
    """The changes made, or with `dry_run` the changes to make.

    `impossible`: the waiting jobs that can never start with them but could before, at most 100; `impossible_more` counts the others.
    """

    added: list[QueueId] = []
    changed: list[QueueChange] = []
    removed: list[QueueId] = []
    unchanged: int = 0
    impossible: list[ImpossibleJobView] = []
    impossible_more: int = 0
