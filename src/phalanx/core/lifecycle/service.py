"""Reconciles a service: which replicas to start and stop so that the wanted number of its revision serves. Pure.

The controller calls `reconcile` when the service or one of its replicas changed, and when `due_in_s` has passed. It never ends the last
ready replica of a service that shall serve, unless another one is ready.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.state.fast_replace import replace
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt, SleepPhase
from phalanx.core.work.job import Job
from phalanx.core.work.services.canary import Canary
from phalanx.core.work.services.service import NO_REVISION, Revision, Service, ServiceState, with_served
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode

SURGE: Final = 1  # replicas that a rollout starts beyond the wanted number
ROOM_WAIT_S: Final = 15.0  # a new replica that waits this long for devices counts as having no room beside the old ones
SLEEP_RETRY_S: Final = 60.0  # from a sleep hook that failed to the next try
ROLLOUT_RESTARTS_MAX: Final = 3  # failures of a new replica that stop a rollout
_FAILING: Final = (WaitReasonCode.CRASH, WaitReasonCode.START_FAIL)


class ReplicaCondition(enum.Enum):
    """What a replica does, as far as its service is concerned."""

    SERVING = enum.auto()
    UNREADY = enum.auto()  # its ranks run, and its port does not answer yet
    NO_ROOM = enum.auto()  # it waits for devices
    STARTING = enum.auto()  # it is placed, is stopping, runs a sleep or wake hook, or waits after a failure
    ASLEEP = enum.auto()  # it gave its devices back, or is about to
    WAITING = enum.auto()  # it shall wake, and waits for the devices that it gave back


_SLEEP_CONDITIONS: Final = {
    SleepPhase.FALLING_ASLEEP: ReplicaCondition.ASLEEP,
    SleepPhase.ASLEEP: ReplicaCondition.ASLEEP,
    SleepPhase.WAITING: ReplicaCondition.WAITING,
    SleepPhase.WAKING: ReplicaCondition.STARTING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A live replica that has not been stopped. `since_s`: how many seconds ago its condition began."""

    job: Job
    attempt: Attempt | None
    since_s: float = 0.0

    @property
    def condition(self) -> ReplicaCondition:
        """What it does."""
        if self.attempt is None:
            waits = self.job.state is JobState.PENDING and self.job.reason not in _FAILING
            return ReplicaCondition.NO_ROOM if waits else ReplicaCondition.STARTING
        if self.attempt.state is not AttemptState.RUNNING:
            return ReplicaCondition.STARTING
        if self.attempt.sleep is not None:
            return _SLEEP_CONDITIONS[self.attempt.sleep.phase]
        return ReplicaCondition.SERVING if self.attempt.ready else ReplicaCondition.UNREADY

    @property
    def serving(self) -> bool:
        """Whether it may get requests."""
        return self.condition is ReplicaCondition.SERVING

    @property
    def gave_devices_back(self) -> bool:
        """Whether it sleeps without its devices."""
        return self.attempt is not None and self.attempt.gave_devices_back

    @property
    def may_sleep(self) -> bool:
        """Whether it may be asked to sleep now."""
        refused = self.attempt is not None and bool(self.attempt.sleep_refusal)
        return self.serving and (not refused or self.since_s >= SLEEP_RETRY_S)

    @property
    def revision(self) -> int:
        """The revision that it runs."""
        assert self.job.replica is not None  # only replicas become one
        return self.job.replica.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStep:
    """What follows from the present state.

    Attributes:
        service: its record; the same object if nothing changed.
        start: number of replicas to create, of `service.revision`; `start_stable`: of the revision that it replaces.
        stop: replicas to cancel, each with the reason.
        sleep, wake: replicas to ask.
        news: what happened to the service, in words that every user may read.
        due_in_s: reconcile again after this time even if nothing happens.
    """

    service: Service
    start: int = 0
    start_stable: int = 0
    stop: tuple[tuple[JobId, str], ...] = ()
    sleep: tuple[JobId, ...] = ()
    wake: tuple[JobId, ...] = ()
    news: tuple[str, ...] = ()
    due_in_s: float = math.inf


def reconcile(
    service: Service, revisions: Mapping[int, Revision], replicas: Sequence[Replica], now_s: float
) -> ServiceStep:
    """Decide the next step of a service.

    Args:
        service: its record.
        revisions: its revisions, at least the current one and the one that served last.
        replicas: its live replicas that are not stopped, in submit order.
        now_s: Unix time, for records only.
    """
    if service.stopped_by:
        return _stop_all(service, replicas)
    news: list[str] = []
    why = _rollout_failure(service, revisions[service.revision], replicas)
    before, failed = service, service.revision
    if why:
        service = sent_back(service, f"revision {failed} was not rolled out: {why}")
        news.append(f"revision {failed} was not rolled out; back to revision {service.revision}")
    terms = revisions[service.revision].terms
    desired = desired_replicas(service, revisions[service.revision])
    new = [one for one in replicas if one.revision == service.revision]
    old = [one for one in replicas if one.revision != service.revision]
    asleep = min(service.asleep, desired) if terms.sleep else 0
    canary = service.canary
    beside = canary is not None and canary.revision == service.revision and not canary.completing
    if canary is not None and beside:
        start, start_stable, stop = _canary_changes(service, canary, desired, asleep, new, old)
    else:
        start, stop = _rollout_changes(service, desired, asleep, new, old)
        start_stable = 0
    stopped = {job_id for job_id, _ in stop}
    served, replaced = service.served_revision, not beside and all(one.job.id in stopped for one in old)
    if _settled(new, asleep) >= desired > 0 and replaced:
        served = service.revision
        if service.served_revision != served or service.rollout_s is not None:
            news.append(f"revision {served} serves with {desired} of {desired} replicas")
    rolling = not replaced or served not in (service.revision, NO_REVISION)
    history = with_served(service.serving_history, served) if served != NO_REVISION else ()
    if canary is not None and not beside:
        ends = served == service.revision if canary.completing else all(one.revision != canary.revision for one in old)
        canary = None if ends else canary
    service = replace(service, served_revision=served, serving_history=history, desired=desired, canary=canary)
    sleepers = old if beside else new
    to_sleep, to_wake = _sleep_changes([one for one in sleepers if one.job.id not in stopped], asleep, desired - asleep)
    serving = sum(one.serving for one in replicas if one.job.id not in stopped and one.job.id not in to_sleep)
    state = _state(service, desired - asleep, serving, rolling=rolling)
    service = replace(
        service,
        state=state,
        detail=_detail(new, old, desired - asleep),
        rollout_s=(service.rollout_s or now_s) if state is ServiceState.UPDATING else None,
    )
    if state is not before.state:
        news.append(f"{before.state} -> {state}: {serving} of {desired - asleep} replicas ready")
    return ServiceStep(
        service=before if service == before else service,
        start=start,
        start_stable=start_stable,
        stop=stop,
        sleep=to_sleep,
        wake=to_wake,
        news=tuple(news),
        due_in_s=_due_in_s(new, terms.ready_within_s),
    )


def sent_back(service: Service, failure: str) -> Service:
    """The service after its rollout was stopped: it returns to the revision that served before. No session goes to the other one any more."""
    canary = None if service.canary is None else replace(service.canary, share=0, planned=0, completing=False)
    return replace(service, revision=service.served_revision, failure=failure, canary=canary)


def _stop_all(service: Service, replicas: Sequence[Replica]) -> ServiceStep:
    """The step of a service that was stopped."""
    after = replace(service, state=ServiceState.STOPPED, desired=0, detail="", rollout_s=None)
    return ServiceStep(
        service=service if after == service else after,
        stop=tuple((one.job.id, f"service {service.id} was stopped") for one in replicas),
    )


def _rollout_changes(
    service: Service, desired: int, asleep: int, new: Sequence[Replica], old: Sequence[Replica]
) -> tuple[int, tuple[tuple[JobId, str], ...]]:
    """How many replicas of the revision to start, and which to stop, while it replaces all others."""
    # Each replica that cannot wake is replaced by a fresh one; whichever is ready first stays.
    stuck = sum(one.condition is ReplicaCondition.WAITING and one.since_s >= ROOM_WAIT_S for one in new)
    spare = stuck if _settled(new, asleep) < desired else 0
    gone = _sent_back_replicas(service, (*new, *old))
    stop = gone + _replaced(service, desired, asleep, new, _without(old, gone))
    stop += _surplus(new, len(new) - desired - spare, f"{desired} replicas are wanted")
    left = len(new) + len(old) - len(stop)
    room = desired + spare + SURGE - left if len(old) > 0 else desired
    return max(0, min(desired + spare - len(new), room)), stop


def _sent_back_replicas(service: Service, replicas: Sequence[Replica]) -> tuple[tuple[JobId, str], ...]:
    """The replicas of a canary that was sent back. They end at once, unless nothing else serves."""
    canary = service.canary
    if canary is None or canary.revision == service.revision:
        return ()
    gone = [one.job.id for one in replicas if one.revision == canary.revision]
    if not any(one.serving for one in replicas if one.revision != canary.revision):
        return ()
    return tuple((job_id, f"revision {canary.revision} was sent back") for job_id in gone)


def _without(replicas: Sequence[Replica], stopped: tuple[tuple[JobId, str], ...]) -> Sequence[Replica]:
    ids = {job_id for job_id, _ in stopped}
    return [one for one in replicas if one.job.id not in ids] if ids else replicas


def _canary_changes(
    service: Service, canary: Canary, desired: int, asleep: int, new: Sequence[Replica], old: Sequence[Replica]
) -> tuple[int, int, tuple[tuple[JobId, str], ...]]:
    """How many replicas to start of the new revision and of the stable one, and which to stop, while both serve beside each other.

    All stable replicas stay, so that the way back costs nothing; one ends if there is no room for a new one.
    """
    stable = [one for one in old if one.revision == canary.stable]
    wanted, wants = canary.replicas(desired - asleep), f"{desired} replicas are wanted"
    stop = _surplus(stable, len(stable) - desired, wants) + _surplus(new, len(new) - wanted, wants)
    serving = sum(one.serving for one in (*new, *stable))
    if serving or not desired:  # of another rollout that was given up
        stop += tuple(
            (one.job.id, f"revision {service.revision} replaces it") for one in old if one.revision != canary.stable
        )
    settled = sum(one.serving for one in new)
    if not stop and _lacks_room(new) and len(stable) + settled >= desired + (settled > 0):
        holders = [one for one in stable if not one.gave_devices_back]
        ready_left = serving - all(one.serving for one in holders)
        stop = _surplus(
            holders, int(ready_left >= max(1, desired - asleep - 1)), f"revision {service.revision} needs room"
        )
    return max(0, wanted - len(new)), max(0, desired - len(stable) - len(new)), stop


def _due_in_s(new: Sequence[Replica], ready_within_s: float) -> float:
    """Time until one of the replicas has been in its condition for so long that something follows."""
    limits_s = {
        ReplicaCondition.NO_ROOM: ROOM_WAIT_S,
        ReplicaCondition.WAITING: ROOM_WAIT_S,
        ReplicaCondition.UNREADY: ready_within_s,
    }
    waits = [limits_s[one.condition] - one.since_s for one in new if one.condition in limits_s]
    waits += [SLEEP_RETRY_S - one.since_s for one in new if one.serving and not one.may_sleep]
    return min((wait for wait in waits if wait > 0), default=math.inf)


def desired_replicas(service: Service, revision: Revision) -> int:
    """The number of replicas wanted: that of `phalanx scale` within the range, else the lower bound, or more if the load needs them.

    A scale of 0 ends all.
    """
    terms = revision.terms
    if service.scale == 0:
        return 0
    least = replicas_min(service, revision)
    return least if terms.scale is None else min(terms.replicas_max, max(least, service.load_replicas or 0))


def replicas_min(service: Service, revision: Revision) -> int:
    """The number of replicas wanted without any load."""
    return revision.terms.replicas_min if service.scale is None else revision.terms.clamp(service.scale)


def _rollout_failure(service: Service, revision: Revision, replicas: Sequence[Replica]) -> str:
    """Why the current rollout cannot go on; "" if it can, or if there is no revision to return to."""
    if service.served_revision in (NO_REVISION, service.revision):
        return ""
    within_s = revision.terms.ready_within_s
    for one in replicas:
        if one.revision != service.revision or one.serving:
            continue
        if one.job.charged_restarts >= ROLLOUT_RESTARTS_MAX:
            return f"replica {one.job.id} failed {one.job.charged_restarts} times: {one.job.detail}"
        if one.condition is ReplicaCondition.UNREADY and one.since_s >= within_s:
            return f"replica {one.job.id} did not become ready within {format_duration(within_s)}"
    return ""


def _sleep_changes(new: Sequence[Replica], asleep: int, awake: int) -> tuple[tuple[JobId, ...], tuple[JobId, ...]]:
    """The replicas to ask to sleep, newest first, and those to ask to wake, oldest first.

    A ready replica falls asleep only if so many others serve as shall be awake. One that waits to wake sleeps on at once.
    """
    sleeping = [one.job.id for one in new if one.condition is ReplicaCondition.ASLEEP]
    waiting = [one.job.id for one in new if one.condition is ReplicaCondition.WAITING]
    missing = asleep - len(sleeping)
    if missing <= 0:
        return (), tuple(sleeping[: -missing or None]) if missing else ()
    serving = sum(one.serving for one in new)
    ready = [one.job.id for one in reversed(new) if one.may_sleep][: max(0, serving - awake)]
    return tuple((*reversed(waiting), *ready)[:missing]), ()


def _replaced(
    service: Service, desired: int, asleep: int, new: Sequence[Replica], old: Sequence[Replica]
) -> tuple[tuple[JobId, str], ...]:
    """The replicas of other revisions to stop: one for each settled new one, and one more if there is no room for both."""
    settled_new = _settled(new, asleep)
    why = f"revision {service.revision} replaces it"
    if service.served_revision == NO_REVISION:  # no revision ever served: its replicas only hold devices
        idle = tuple((one.job.id, why) for one in old if not one.serving)
        return idle + _surplus([one for one in old if one.serving], len(old) - len(idle) - (desired - settled_new), why)
    surplus = len(old) - max(0, desired - settled_new)
    if surplus <= 0 and len(old) + settled_new >= desired and _lacks_room(new):
        holders = [one for one in old if not one.gave_devices_back]  # the end of another makes no room
        ready_left = sum(one.serving for one in (*new, *old)) - all(one.serving for one in holders)
        return _surplus(holders, int(ready_left >= max(1, desired - asleep - 1)), why)
    return _surplus(old, surplus, why)


def _settled(new: Sequence[Replica], asleep: int) -> int:
    """The replicas that are as they shall be: those that serve, and as many that sleep as shall sleep."""
    sleeping = sum(one.condition is ReplicaCondition.ASLEEP for one in new)
    return sum(one.serving for one in new) + min(sleeping, asleep)


def _lacks_room(new: Sequence[Replica]) -> bool:
    return any(one.condition is ReplicaCondition.NO_ROOM and one.since_s >= ROOM_WAIT_S for one in new)


def _surplus(replicas: Sequence[Replica], count: int, why: str) -> tuple[tuple[JobId, str], ...]:
    """The replicas to stop so that `count` fewer remain: first sleeping ones, then others that do not serve, then the newest."""
    order = sorted(replicas, key=lambda one: (one.serving, not one.gave_devices_back, -one.job.seq))
    return tuple((one.job.id, why) for one in order[: max(0, count)])


def _state(service: Service, awake: int, serving: int, *, rolling: bool) -> ServiceState:
    if service.desired == 0:
        return ServiceState.SLEEPING
    if service.served_revision == NO_REVISION:
        return ServiceState.STARTING
    if rolling:
        return ServiceState.UPDATING
    if not awake and not serving:
        return ServiceState.SLEEPING
    if serving >= awake:
        return ServiceState.READY
    woken = service.state in (ServiceState.STARTING, ServiceState.SLEEPING)
    return ServiceState.STARTING if woken else ServiceState.DEGRADED


def _detail(new: Sequence[Replica], old: Sequence[Replica], awake: int) -> str:
    """What the service waits for."""
    for one in new:
        sleep = None if one.attempt is None else one.attempt.sleep
        if sleep is not None and sleep.why:
            return f"replica {one.job.id} waits to wake: {sleep.why}"
    for one in new:
        if one.serving and one.attempt is not None and one.attempt.sleep_refusal:
            return f"replica {one.job.id} did not fall asleep: {one.attempt.sleep_refusal}"
    if not _lacks_room(new):
        return ""
    waiting = next(one.job.id for one in new if one.condition is ReplicaCondition.NO_ROOM)
    serving = sum(one.serving for one in (*new, *old))
    last = bool(old) and serving <= max(1, awake - 1)
    reason = "; the last ready replica of the earlier revision keeps running" if last else ""
    return f"replica {waiting} waits for devices{reason}"
