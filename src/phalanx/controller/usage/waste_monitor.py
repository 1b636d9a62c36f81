"""Finds waste in the ledger of states, on its thread: alarms for people, and jobs to which an idle policy of their queue or their own applies.

Time is an argument, in Unix milliseconds. One look costs some microseconds for each device, so that it is taken every few seconds only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from phalanx.controller.host_activity import HostActivityTracker
from phalanx.controller.usage.usage_accounting import UsageAccountant
from phalanx.core.accounting.state_ledger import Part
from phalanx.core.accounting.usage_alarms import Seen, Spell, SpellTracker, WastedPart, WasteSighting
from phalanx.core.accounting.usage_states import FOREIGN_USE, UsageState
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import JobId, NodeId, QueueId
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.state.records import QUEUES, RecordKind
from phalanx.core.state.reports import IdleJob, IdleJobsObserved
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue, alarm_after_s, idle_policy
from phalanx.core.work.states import AttemptState
from phalanx.core.work.usage.waste_terms import ALARM_AFTER_S, CRASHES_MIN, WasteKind

LOOK_EVERY_MS: Final = 5000  # an alarm begins at most so late, and 10 s for the sample that shows it
_KIND_OF: Final[Mapping[UsageState, WasteKind]] = {
    UsageState(kind.value): kind for kind in WasteKind if kind is not WasteKind.CRASH_LOOP
}


# Of a job that runs: one that starts to compute, or will, uses its CPUs meanwhile.
_NO_GPU_WORK: Final = (UsageState.IDLE, UsageState.UNOCCUPIED, UsageState.STARTING)


class _Held(NamedTuple):
    node: NodeId
    part: Part


@dataclass(slots=True)
class _Failures:
    """Failures of a job since its last progress. `retries`: how many of its own retries came before that, as far as known."""

    progress_step: int
    retries: int
    count: int = 0
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class WasteNow:
    """What is wasted now, the most first. `begun`: alarms since the head started, by kind."""

    at_ms: int = 0
    spells: tuple[Spell[WasteSighting], ...] = ()
    begun: Mapping[str, int] = field(default_factory=dict)
    alarms: dict[JobId, Spell[WasteSighting]] = field(init=False)  # of each job that has one, that which lost the most

    def __post_init__(self) -> None:
        found = {spell.newest.job.id: spell for spell in reversed(self.spells) if spell.alarmed and spell.newest.job}
        object.__setattr__(self, "alarms", found)


class WasteMonitor:
    """See the module. `now` is replaced as a whole, so that other threads may read it."""

    def __init__(self, accountant: UsageAccountant, hosts: HostActivityTracker) -> None:
        self.now = WasteNow()
        self._hosts = hosts
        self._limited: dict[JobId, int] = {}  # jobs with an idle limit of their own, and when they used a GPU last
        self._accountant = accountant
        self._queues: dict[QueueId, Queue] = {}
        self._failures: dict[JobId, _Failures] = {}
        self._alarms: SpellTracker[WasteSighting] = SpellTracker(lambda seen: seen.kind.value)
        self._idle: SpellTracker[IdleJob] = SpellTracker(lambda _: "idle")
        self._looked_ms = 0

    def apply(
        self,
        records: Iterable[Any],
        removed: Iterable[tuple[RecordKind[Any, Any], Any]],
        now_ms: int,
        *,
        stored: bool = False,
    ) -> None:
        """Take committed records, in their order. `stored`: an earlier head stored them, so which retries followed the last progress is unknown."""
        for record in records:
            if isinstance(record, Job):
                self._put_job(record, now_ms, stored=stored)
            elif isinstance(record, Queue):
                self._queues[record.id] = record
        for kind, key in removed:
            if kind is QUEUES:
                self._queues.pop(key, None)

    def look(self, now_ms: int) -> IdleJobsObserved | None:
        """Look at every device if it is time; return the jobs to which an idle policy may apply, or None if it is not time."""
        if now_ms - self._looked_ms < LOOK_EVERY_MS:
            return None
        self._looked_ms = now_ms
        held, free = self._parts()
        seen = [*self._wasting_jobs(held), *self._wasting_nodes(free, held), *self._crash_loops(held, now_ms)]
        spells = self._alarms.update((one for each in seen if (one := self._seen(each)) is not None), now_ms)
        self.now = WasteNow(now_ms, spells, dict(self._alarms.begun))
        idle = self._idle.update(self._idle_jobs(held), now_ms)
        jobs = (replace(one.newest, since_ms=one.since_ms, paused=one.seen_ms != now_ms) for one in idle)
        self._hosts.prune()
        return IdleJobsObserved(
            at_ms=now_ms,
            jobs=tuple(sorted(jobs, key=lambda one: one.job_id)),
            quiet=tuple(self._quiet_jobs(held, now_ms)),
        )

    def _put_job(self, job: Job, now_ms: int, *, stored: bool) -> None:
        if job.state.terminal:
            self._failures.pop(job.id, None)
            self._limited.pop(job.id, None)
            return
        if job.spec.idle_s is not None:
            self._limited.setdefault(job.id, 0)
        failed = job.charged_restarts + job.user_retries
        known = self._failures.get(job.id)
        if known is None and not failed:
            return  # most jobs never fail
        if known is None or job.progress_step > known.progress_step:
            known = self._failures[job.id] = _Failures(job.progress_step, job.user_retries if known or stored else 0)
        count = job.charged_restarts + job.user_retries - known.retries
        if count and not known.count:
            known.since_ms = now_ms
        known.count = count

    # ---- one look -----------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[dict[JobId, list[_Held]], dict[NodeId, list[Part]]]:
        """The parts that jobs hold, and those of each node that no job can use: broken or fragmented ones."""
        ledger = self._accountant.ledger
        held: dict[JobId, list[_Held]] = {}
        free: dict[NodeId, list[Part]] = {}
        for node_id in ledger.nodes:
            for _, key, part in ledger.parts(node_id):
                if key:
                    held.setdefault(JobId(key), []).append(_Held(node_id, part))
                state = part.state.state
                if state is UsageState.BROKEN or (
                    state is UsageState.FRAGMENTED and part.state.note != FOREIGN_USE and not key
                ):
                    free.setdefault(node_id, []).append(part)
        return held, free

    def _wasting_jobs(self, held: Mapping[JobId, list[_Held]]) -> Iterator[WasteSighting]:
        for job_id, parts in held.items():
            job = self._accountant.job(job_id)
            kinds: dict[WasteKind, list[_Held]] = {}
            for one in parts:
                kind = _KIND_OF.get(one.part.state.state)
                if kind is not None and kind is not WasteKind.BROKEN:
                    kinds.setdefault(kind, []).append(one)
            for kind, wasted in kinds.items() if job is not None else ():
                yield self._sighting(kind, job, wasted, parts)

    def _sighting(
        self, kind: WasteKind, job: Job | None, wasted: Sequence[_Held], parts: Iterable[_Held]
    ) -> WasteSighting:
        nodes = tuple(sorted({one.node for one in wasted}))
        return WasteSighting(
            kind=kind,
            job=job,
            nodes=nodes,
            parts=tuple(WastedPart(one.part.milli, one.part.since_ms or 0) for one in wasted),
            held_milli=sum(one.part.milli for one in parts),
            model=wasted[0].part.account.model,
            node_gpus=min(len(self._accountant.ledger.device_indices(node_id)) for node_id in nodes),
        )

    def _crash_loops(self, held: Mapping[JobId, list[_Held]], now_ms: int) -> Iterator[WasteSighting]:
        """Jobs that fail again and again. Between two starts they hold nothing, and are in the loop all the same."""
        for job_id, failures in self._failures.items():
            job, parts = self._accountant.job(job_id), held.get(job_id, [])
            if failures.count < CRASHES_MIN or job is None or not (parts or job.not_before_s * 1000 > now_ms):
                continue
            yield WasteSighting(
                kind=WasteKind.CRASH_LOOP,
                job=job,
                nodes=tuple(sorted({one.node for one in parts})),
                parts=(
                    WastedPart(0, failures.since_ms),
                    *(WastedPart(one.part.milli, failures.since_ms) for one in parts),
                ),
                held_milli=sum(one.part.milli for one in parts),
                model=parts[0].part.account.model if parts else "",
            )

    def _wasting_nodes(
        self, free: Mapping[NodeId, list[Part]], held: Mapping[JobId, list[_Held]]
    ) -> Iterator[WasteSighting]:
        on: dict[NodeId, Counter[JobId]] = {}
        if free:
            for job_id, parts in held.items():
                for one in parts:
                    on.setdefault(one.node, Counter())[job_id] += one.part.milli
        for node_id, found in free.items():
            node = self._accountant.node(node_id)
            for kind in (WasteKind.BROKEN, WasteKind.FRAGMENTED):
                broken = [part for part in found if part.state.state is UsageState(kind.value)]
                if broken:
                    holders = on.get(node_id, Counter())
                    yield WasteSighting(
                        kind=kind,
                        job=None,
                        nodes=(node_id,),
                        parts=tuple(WastedPart(part.milli, part.since_ms or 0) for part in broken),
                        held_milli=MILLI_PER_DEVICE * (0 if node is None else len(node.devices)),
                        model=broken[0].account.model,
                        holders=tuple(sorted(holders, key=lambda job_id: (holders[job_id], job_id))),
                        why=_fault(node) if kind is WasteKind.BROKEN else "",
                        down=node is not None and node.state is NodeState.DOWN,
                        cordoned=node is not None and node.cordon is not None,
                    )

    def _seen(self, seen: WasteSighting) -> Seen[WasteSighting] | None:
        queue = None if seen.job is None else seen.job.queue
        after_s = ALARM_AFTER_S[seen.kind] if queue is None else alarm_after_s(self._queues, queue, seen.kind)
        return None if after_s is None else Seen(seen.key, seen, seen.parts, after_s)

    def _idle_jobs(self, held: Mapping[JobId, list[_Held]]) -> Iterator[Seen[IdleJob]]:
        """The jobs that use none of their GPUs, in queues that have an idle policy."""
        for job_id, parts in held.items():
            job = self._accountant.job(job_id)
            policy = None if job is None else idle_policy(self._queues, job.queue)
            if job is None or policy is None:
                continue
            kinds = {_KIND_OF.get(one.part.state.state) for one in parts}
            if not kinds <= set(policy.states):
                continue
            since_ms = max(one.part.since_ms or 0 for one in parts)
            state = max(policy.states, key=lambda kind: sum(one.part.state.state.value == kind for one in parts))
            idle = IdleJob(job_id=job_id, epoch=job.epoch, state=state, since_ms=since_ms)
            yield Seen((job_id, job.epoch), idle, (WastedPart(0, since_ms),), policy.after_s)

    def _quiet_jobs(self, held: Mapping[JobId, list[_Held]], now_ms: int) -> Iterator[IdleJob]:
        """The jobs with an idle limit of their own that use no GPU now, and since when they use no CPU and have no input."""
        for job_id, busy_ms in list(self._limited.items()):
            attempt = self._accountant.live_attempt(job_id)
            if attempt is None or attempt.state is not AttemptState.RUNNING:
                continue
            if any(one.part.state.state not in _NO_GPU_WORK for one in held.get(job_id, ())):
                self._limited[job_id] = now_ms
                continue
            since_ms = self._hosts.quiet_since_ms(attempt, now_ms)
            if since_ms is not None:
                yield IdleJob(job_id=job_id, epoch=attempt.epoch, state=WasteKind.IDLE, since_ms=max(since_ms, busy_ms))


def _fault(node: Node | None) -> str:
    if node is None:
        return ""
    if node.state is NodeState.DOWN:
        return node.down_cause
    if node.cordon is not None:
        return node.cordon.why
    sick = [f"GPU {device.index}" for device in node.devices if not device.healthy]
    return f"{', '.join(sick)} of {node.id} unhealthy" if sick else ""
