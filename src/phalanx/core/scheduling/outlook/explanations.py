"""Explanations for users: why each job waits, as one dominant reason computed on demand, and why one was stopped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from phalanx.core.ids import JobId
from phalanx.core.resources import amount_text
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import (
    Decision,
    DecisionKind,
    JobClass,
    JobEntry,
    StopReason,
)
from phalanx.core.scheduling.estimates.device_speeds import speed_ratio_text
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.node_filter import unmountable_text
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.pool import DevicePool
from phalanx.core.scheduling.sharing.mig_pool import MigPool
from phalanx.core.state.plan import PlannedStop, WaitReason
from phalanx.core.units import GIB, format_duration
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.dependency import describe_dependencies
from phalanx.core.work.job import BACKOFF_MAX_S, Job, dependency_reason
from phalanx.core.work.queue import Queue
from phalanx.core.work.share import gpus_text
from phalanx.core.work.states import JobState, WaitReasonCode


class SchedulerView(Protocol):
    """A view of the scheduler; see `scheduler.Scheduler` for its attributes."""

    policy: Policy
    board: Board
    fleet_index: FleetIndex
    entries: dict[JobId, JobEntry]
    job_id_by_seq: dict[int, JobId]
    ineligible: dict[JobId, WaitReason]
    cached_reasons: dict[tuple[int, int, int], WaitReason]
    more_due: bool

    @property
    def now_s(self) -> float:
        """The time of the last plan."""

    @property
    def pending_placements(self) -> Collection[JobId]:
        """Started by the policy, not yet placed."""

    def wait_reason(self, job: Job) -> WaitReason | None:
        """Why the pending job waits."""

    def kept_off(self, job: Job) -> int:
        """The nodes that cost money and on which the rule of its queue or project lets it not run, as a bitset."""

    def explain_reservation(self, job: Job) -> str:
        """The reservation that keeps the job off its nodes."""


ELIGIBLE: Final = None
_NAMED_MAX: Final = 3  # names listed in one sentence


def ineligibility(job: Job, queue: Queue | None, now_s: float) -> WaitReason | None:
    """Why the job may not start regardless of free capacity; ELIGIBLE if it may."""
    if job.parked_s is not None:
        return WaitReason(
            reason=WaitReasonCode.PARKED, detail=f"parked {format_duration(max(0.0, now_s - job.parked_s))} ago"
        )
    if job.held:
        why = job.detail if job.reason is WaitReasonCode.HELD else ""  # of an idle policy; a hold by a user has none
        return WaitReason(reason=WaitReasonCode.HELD, detail=why or f"job {job.id} is held")
    if queue is not None and not queue.open:
        return WaitReason(reason=WaitReasonCode.QUEUE_CLOSED, detail=f"queue {queue.id} is closed")
    if job.unmet_dependencies:
        unmet = job.unmet_dependencies
        return WaitReason(reason=dependency_reason(unmet), detail=describe_dependencies(unmet))
    begin_s = job.spec.begin_s
    if begin_s is not None and now_s < begin_s:
        return WaitReason(
            reason=WaitReasonCode.BEGIN_TIME, detail=f"requested begin time is in {format_duration(begin_s - now_s)}"
        )
    # A larger difference means that the clock was set back meanwhile.
    if 0 < job.not_before_s - now_s <= BACKOFF_MAX_S:
        if job.reason is WaitReasonCode.ENGINE_LIMIT:
            return WaitReason(reason=WaitReasonCode.ENGINE_LIMIT, detail=job.detail)
        return WaitReason(reason=WaitReasonCode.BACKOFF, detail="waits shortly after a failed start")
    return ELIGIBLE


def explain_wait(scheduler: SchedulerView, job: Job, entry: JobEntry) -> WaitReason | None:
    """Why an eligible job does not run; None if it does."""
    if job.id in scheduler.pending_placements and scheduler.more_due:
        return WaitReason(
            reason=WaitReasonCode.BACKOFF, detail="starts in the next cycle: this one reached its limit of placements"
        )
    if job.id in scheduler.pending_placements:
        return _claimed(scheduler, entry)
    if entry.started_s >= 0.0:
        return None
    alone = entry.seq if entry.lost_nodes else 0  # it has rights of its own
    key = entry.job_class.number, entry.avoided_nodes, alone
    known = scheduler.cached_reasons.get(key)
    if known is None:
        known = scheduler.cached_reasons[key] = _why_class_waits(scheduler, job, entry)
    return known


def _why_class_waits(scheduler: SchedulerView, job: Job, entry: JobEntry) -> WaitReason:
    """The same for all jobs of a class that did not lose their nodes: computed once until something changes."""
    board, klass = scheduler.board, entry.job_class
    throttle = klass.throttle
    if throttle is not None and throttle.running >= throttle.running_max:
        return WaitReason(
            reason=WaitReasonCode.ARRAY_LIMIT,
            detail=f"{throttle.running} {'element of its array runs' if throttle.running == 1 else 'elements of its array run'}; at most {throttle.running_max} may",
        )
    refusal = board.refusal_of(klass)
    # If no device is free in the whole fleet, the quota is not the reason.
    if refusal is not None and (refusal.queue or board.find(entry) is not None):
        return WaitReason(reason=refusal.reason, detail=refusal.describe() + _later_stops_text(scheduler, entry))
    name = board.lacking_licence(klass.licences)
    if name:
        return WaitReason(
            reason=WaitReasonCode.LICENCE, detail=_licence_text(scheduler, name, dict(klass.licences)[name])
        )
    if board.find(entry) is not None:
        return _behind_others(scheduler, entry)
    kept_off = scheduler.kept_off(job)
    left_out = scheduler.fleet_index.left_out_by(job.spec) | kept_off
    if klass.excluded & ~left_out and any(board.find_need(need, left_out) is not None for need in klass.needs):
        said = scheduler.explain_reservation(job)
        full = f"reservation {job.spec.reservation} has not enough free capacity now" if job.spec.reservation else ""
        return WaitReason(
            reason=WaitReasonCode.RESERVATION, detail=said or full or "the nodes that it fits on are reserved"
        )
    if kept_off and any(board.find_need(need, klass.excluded & ~kept_off) is not None for need in klass.needs):
        return WaitReason(
            reason=WaitReasonCode.RESOURCES,
            detail="only rented nodes have room now, and the rule of its queue or project keeps it off them",
        )
    unmountable = scheduler.fleet_index.unmountable_by(job.spec)
    others = klass.excluded & ~unmountable
    if unmountable and any(board.find_need(need, others) is not None for need in klass.needs):
        return WaitReason(reason=WaitReasonCode.RESOURCES, detail=_mounts_text(scheduler, unmountable & ~others))
    if left_out and any(board.find_need(need) is not None for need in klass.needs):
        nodes = sorted(node.id for at, node in enumerate(scheduler.fleet_index.nodes) if not left_out >> at & 1)
        return WaitReason(
            reason=WaitReasonCode.RESOURCES,
            detail=f"only nodes that it leaves out have room now; it may use {_names_text(nodes) or 'no node that is here'}",
        )
    wait = _lacks_room(scheduler, klass)
    later = _later_moves_text(scheduler, entry) or _later_stops_text(scheduler, entry)
    return replace(wait, detail=wait.detail + later + _fair_users_text(board, klass))


def _mounts_text(scheduler: SchedulerView, unmountable: int) -> str:
    nodes = {node.id: node for at, node in enumerate(scheduler.fleet_index.nodes) if unmountable >> at & 1}
    named = unmountable_text(nodes.values())
    return f"only nodes that cannot mount object stores have room now: {named}; with mode: stage it would start there"


def _fair_users_text(board: Board, klass: JobClass) -> str:
    """The users of its queue with waiting jobs who go first, since they have used less; empty if there are none."""
    before = [] if board.quotas is None else board.quotas.users_before(klass.queue, klass.user)
    if not before:
        return ""
    return f"; {_names_text(before)} used less of the queue lately and go{'es' * (len(before) == 1)} first"


def _later_moves_text(scheduler: SchedulerView, entry: JobEntry) -> str:
    """The jobs that make room by a move, or by giving nodes back, once they have stayed for long enough; empty if that makes none."""
    moves = scheduler.policy.later_moves(entry, scheduler.now_s)
    if not moves:
        return ""
    named = _names_text([f"job {scheduler.job_id_by_seq[other.seq]}" for other, _ in moves])
    stay = format_duration(max(at_s - other.placed_s for other, at_s in moves))
    s = "s" * (len(moves) == 1)
    does = f"give{s} nodes back" if all(other.may_shrink for other, _ in moves) else f"move{s}"
    return f"; it fits when {named} {does}, which may be {stay} after a start or move"


_RIGHTS: Final = {
    StopReason.PRIORITY: "its priority is higher",
    StopReason.RECLAIM: "its queue takes lent quota back",
    StopReason.REPAIR: "it lost its nodes",
}


def _later_stops_text(scheduler: SchedulerView, entry: JobEntry) -> str:
    """The jobs that it may stop once they have run for their guaranteed time, and by which right; empty if it has none."""
    later = scheduler.policy.later_stops(entry, scheduler.now_s)
    if not later.jobs or later.reason not in _RIGHTS:
        return ""
    named = _names_text([f"job {scheduler.job_id_by_seq[other.seq]}" for other in later.jobs])
    their = "its start" if len(later.jobs) == 1 else "their starts"
    return f"; it may stop {named} {format_duration(later.after_s)} after {their}: {_RIGHTS[later.reason]}"


def _lacks_room(scheduler: SchedulerView, klass: JobClass) -> WaitReason:
    """Why no alternative of the class fits."""
    board = scheduler.board
    if not klass.uneven_needs:
        return _lacks_capacity(scheduler, klass.needs[0], klass.gpus, klass.excluded)
    allowed = [need for need in klass.needs if board.admits_need(klass, need)] or klass.needs
    waits = [_lacks_capacity(scheduler, need, need.gpus, klass.excluded) for need in allowed]
    texts = [f"{_kinds_text(scheduler, need)}: {one.detail}" for need, one in zip(allowed, waits, strict=True)]
    left = len(klass.needs) - len(allowed)
    quota = f"; quotas leave no room for {left} other alternative{'s' if left > 1 else ''}" if left else ""
    return replace(waits[0], detail=f"needs one of its alternatives. {'; '.join(texts)}{quota}")


def _kinds_text(scheduler: SchedulerView, need: Need) -> str:
    return ",".join(scheduler.fleet_index.device_models[kind] for kind in need.kinds)


def _claimed(scheduler: SchedulerView, entry: JobEntry) -> WaitReason:
    named = _names_text(sorted({scheduler.fleet_index.nodes[number].id for number, _ in entry.places}))
    return WaitReason(reason=WaitReasonCode.CLAIMED, detail=f"waits for running jobs on {named} to save and stop")


def _names_text(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED_MAX]) + ("" if len(names) <= _NAMED_MAX else f" and {len(names) - _NAMED_MAX} more")


def _behind_others(scheduler: SchedulerView, entry: JobEntry) -> WaitReason:
    ahead = sum(
        other.job_class.rank > entry.job_class.rank for other in tuple(scheduler.board.waiting.values())[:10_000]
    )
    first = (
        f"{ahead} jobs of higher priority are ahead"
        if ahead
        else "earlier jobs wait, and this policy does not let later jobs overtake them"
        if not scheduler.policy.overtakes
        else "the next scheduling round considers it"
    )
    return WaitReason(reason=WaitReasonCode.PRIORITY, detail=f"fits now; {first}")


def _licence_text(scheduler: SchedulerView, name: str, seats: int) -> str:
    """The seats that are free, and the jobs that hold the most."""
    board = scheduler.board
    holders = sorted(
        (-amount, entry.seq) for entry in board.running.values() if (amount := dict(entry.held.extras).get(name, 0))
    )
    free, total = max(0, board.free_licences.get(name, 0)), board.licences.get(name, 0)
    text = f"needs {seats} of licence {name}; {free} of {total} {'is' if free == 1 else 'are'} free"
    if not holders:
        return text
    named = [f"job {scheduler.job_id_by_seq[seq]} holds {-amount}" for amount, seq in holders[:_NAMED_MAX]]
    more = len(holders) - _NAMED_MAX
    return f"{text}; {', '.join(named)}" + (f", {more} more jobs hold the rest" if more > 0 else "")


def _host_text(need: Need) -> str:
    """What a part of the need takes besides devices."""
    words = [f"{need.cpus} CPUs"] * (need.cpus > 0) + [f"{need.memory_bytes / GIB:g} GiB"] * (need.memory_bytes > 0)
    return " and ".join([*words, *(f"{amount_text(amount)} of {name}" for name, amount in need.extras)])


def _free_extras_text(board: Board, need: Need) -> str:
    """The most that is free on one node of each extra that no node has enough of; empty if all suffice somewhere."""
    most = {name: max(board.extras.get(name, [0]), default=0) for name, _ in need.extras}
    short = [f"{amount_text(max(0, most[name]))} of {name}" for name, amount in need.extras if most[name] < amount]
    return f"; at most {' and '.join(short)} is free on one node" if short else ""


def _lacks_capacity(scheduler: SchedulerView, need: Need, gpus: int, excluded: int) -> WaitReason:
    board = scheduler.board
    if need.others:
        return _lacks_room_for_roles(scheduler, need, excluded)
    pools = [board.pools[kind] for kind in need.kinds]
    if not need.milli:
        return WaitReason(
            reason=WaitReasonCode.RESOURCES,
            detail=f"needs {_host_text(need)} on {need.nodes} node{'' if need.nodes == 1 else 's'};"
            f" not enough are free{_free_extras_text(board, need)}",
        )
    devices_alone = replace(need, cpus=0, memory_bytes=0, extras=())
    if need.asks_host and board.find_need(devices_alone, excluded) is not None:
        where = "its node" if need.nodes == 1 else f"each of {need.nodes} nodes"
        detail = f"needs {_host_text(need)} on {where}: enough GPUs are free, but not enough of these"
        detail += _free_extras_text(board, need)
        return WaitReason(reason=WaitReasonCode.RESOURCES, detail=detail)
    free = sum(pool.free_total for pool in pools)
    if need.mig_profile:
        return _lacks_room_for_slices(scheduler, pools, need, excluded)
    if need.share_milli:
        return _lacks_room_for_share(pools, need, free)
    most = max((pool.capacity_for(need, excluded).node_free_max for pool in pools), default=0)
    shape = f"{need.nodes} x {need.devices}{f' + {need.last_node_devices}' if need.last_node_devices else ''} GPUs"
    if free >= gpus and need.within >= 0 and need.required:
        level = (
            board.tree.levels[need.within]
            if board.tree is not None and need.within < len(board.tree.levels)
            else "node"
        )
        inside = max((pool.capacity_for(need, excluded).largest_domain for pool in pools), default=0)
        return WaitReason(
            reason=WaitReasonCode.TOPOLOGY,
            detail=f"needs {shape} in one {level}; {free} free in total, at most {inside} such nodes in one {level}",
        )
    return WaitReason(
        reason=WaitReasonCode.RESOURCES,
        detail=f"needs {shape}; {free} free in total, at most {most} on one node{_foreign_usage(scheduler, need)}",
    )


def _lacks_room_for_roles(scheduler: SchedulerView, need: Need, excluded: int) -> WaitReason:
    """The first role of a gang that does not fit alone; if each does, that their nodes are not free at once."""
    roles = need.roles
    for number, role in enumerate(roles):
        if scheduler.board.find_need(role, excluded) is None:
            alone = _lacks_capacity(scheduler, role, role.gpus, excluded)
            return replace(alone, detail=f"role {number} of {len(roles)} {alone.detail}")
    nodes = sum(role.parts for role in roles)
    return WaitReason(
        reason=WaitReasonCode.RESOURCES,
        detail=f"each of its {len(roles)} roles fits alone; {nodes} nodes that hold all of them at once are not free",
    )


def _lacks_room_for_share(pools: Sequence[DevicePool], need: Need, free: int) -> WaitReason:
    rooms = [pool.shared.room_by_group() for pool in pools]
    mine = max((room.get(need.share_group, 0) for room in rooms), default=0)
    others = sum(group != need.share_group for room in rooms for group in room)
    where = "" if need.nodes == 1 else f" on each of {need.nodes} nodes"
    shared = f"at most {gpus_text(mine)} of one shared GPU is left" if mine else "no GPU that it may share has room"
    kept = "; GPUs shared by other projects, or in another way, do not count" if others else ""
    return WaitReason(
        reason=WaitReasonCode.RESOURCES,
        detail=f"needs {gpus_text(need.share_milli)} of a GPU{where}; {free} free in total, {shared}{kept}",
    )


def _lacks_room_for_slices(
    scheduler: SchedulerView, pools: Sequence[DevicePool], need: Need, excluded: int
) -> WaitReason:
    """How much room the divided GPUs have left for the profile, and where the most of it is."""
    rooms = {
        node: pool.slices.room(node, need.mig_profile)
        for pool in pools
        if isinstance(pool, MigPool)
        for node in pool.slices.devices
        if node not in pool.removed_nodes and not (excluded | need.excluded) >> node & 1
    }
    divided = sum(len(scheduler.fleet_index.divisible.get(node, ())) for node in rooms)
    gpus = f"{divided} GPU{' has' if divided == 1 else 's have'} MIG mode on"
    where = "" if need.nodes == 1 else f" on each of {need.nodes} nodes"
    wanted = f"needs {need.mig_slices} x {need.mig_profile}{where}"
    best = max(rooms, key=lambda node: (rooms[node], -node), default=None)
    if best is None or not rooms[best]:
        left = "none has room for such a slice"
    else:
        left = f"room for {sum(rooms.values())} in total, at most {rooms[best]} on one node ({scheduler.fleet_index.nodes[best].id})"
    return WaitReason(reason=WaitReasonCode.RESOURCES, detail=f"{wanted}; {gpus}, {left}")


def _foreign_usage(scheduler: SchedulerView, need: Need) -> str:
    """Usage outside Phalanx of the kinds needed, as a sentence; empty without such usage."""
    fit = scheduler.fleet_index
    shared = {
        node.id: node.foreign_usage
        for number, node in enumerate(fit.nodes)
        if fit.model_of_node[number] in need.kinds and node.foreign_usage.devices
    }
    if not shared:
        return ""
    count = sum(len(others.devices) for others in shared.values())
    who = list(dict.fromkeys(name for others in shared.values() for name in others.owners))
    named = ", ".join(who[:_NAMED_MAX]) + ("" if len(who) <= _NAMED_MAX else f" and {len(who) - _NAMED_MAX} more")
    return f"; {count} in use outside Phalanx" + (f" by {named}" if named else "")


_REASON_TEXT: Final = {
    StopReason.VALUE: ", which is expected to end sooner on the same GPUs",
    StopReason.PRIORITY: ", which has a higher priority",
    StopReason.RECLAIM: ", whose queue reclaims the GPUs it had lent",
    StopReason.OVERDUE: ", which has waited past its limit",
    StopReason.REPAIR: ", which lost a node and gets its place back",
    StopReason.SHRINK: ": an elastic job shrinks",
    StopReason.GROW: ": more nodes are idle",
    StopReason.FASTER: "",
    StopReason.SWAP: ", which gains more there than this job loses",
    StopReason.HOME: "",
    StopReason.MAKESPAN: ": so that the last of all jobs ends earlier",
}


class WaitReasons(Mapping[JobId, WaitReason]):
    """Why each pending job waits, computed on demand."""

    def __init__(self, scheduler: SchedulerView, jobs: Mapping[JobId, Job]) -> None:
        self._scheduler, self._jobs = scheduler, jobs

    def __getitem__(self, job_id: JobId) -> WaitReason:
        job = self._jobs.get(job_id)
        why = None if job is None or job.state is not JobState.PENDING else self._scheduler.wait_reason(job)
        if why is None:
            raise KeyError(job_id)
        return why

    def __iter__(self) -> Iterator[JobId]:
        scheduler, jobs = self._scheduler, self._jobs
        waiting = [scheduler.job_id_by_seq[seq] for seq in scheduler.board.waiting]
        known = [
            (job_id, jobs.get(job_id)) for job_id in (*scheduler.ineligible, *waiting, *scheduler.pending_placements)
        ]
        # The board is ahead of the records: a job that a plan stops or moves already waits there, but still runs here.
        return iter([job_id for job_id, job in known if job is not None and job.state is JobState.PENDING])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def planned_stop_of(scheduler: SchedulerView, job_id: JobId, decision: Decision, speed_source: str = "") -> PlannedStop:
    """A stop or a move as the plan states it, with the other job and the reason. `speed_source`: how the new speed is known."""
    other = None if decision.beneficiary is None else scheduler.job_id_by_seq.get(decision.beneficiary.seq)
    reason_text = _REASON_TEXT.get(decision.reason, "") if decision.reason is not None else ""
    if decision.kind is DecisionKind.MOVE:
        names = ", ".join(scheduler.fleet_index.nodes[number].id for number, _ in decision.places[:4])
        other_text = f" to make room for job {other}" if other is not None else ""
        reason_text += _speed_text(scheduler, decision) + (f" ({speed_source})" if speed_source else "")
        return PlannedStop(
            job_id=job_id,
            cause=EndCause.MOVED,
            why=f"moved to {names}{other_text}{reason_text}",
            preempted_by=other,
        )
    other_text = f" by job {other}" if other is not None else ""
    return PlannedStop(
        job_id=job_id, cause=EndCause.PREEMPTED, why=f"preempted{other_text}{reason_text}", preempted_by=other
    )


def _speed_text(scheduler: SchedulerView, decision: Decision) -> str:
    """How much faster or slower the moved job runs at its new place; empty if equally fast."""
    if decision.speedup == 1.0 or not decision.places:
        return ""
    fit = scheduler.fleet_index
    model = fit.device_models[fit.model_of_node[decision.places[0][0]]]
    return f"; {speed_ratio_text(decision.speedup)} on {model}"
