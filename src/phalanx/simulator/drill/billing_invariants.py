"""Invariant 18: attempts are billed, queues charged, and ledgers summed correctly. Called by `invariants`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.controller.step_result import ControllerTime
from phalanx.core.accounting.ledger import attempt_ledgers, span_us
from phalanx.core.ids import Epoch, JobId, QueueId
from phalanx.core.resources import Extras
from phalanx.core.state.records import Record
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.queue import QueueUsage
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.states import JobState
from phalanx.simulator.drill.protocols import ObservedCluster
from phalanx.simulator.drill.violations import InvariantBroken

TOLERANCE_S: Final = 1e-3  # GPU-seconds; sums of floats near 1e9 have errors of about 1e-6


@dataclass(frozen=True, slots=True)
class _Charge:
    """What an attempt costs its queues: its start, its GPU-seconds, and the amount-seconds of other resources."""

    begun_s: float
    gpu_s: float
    others: dict[str, float]


class BillingChecker:
    """Computes the charges a second time, from attempts alone."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self._begun: dict[tuple[JobId, Epoch], tuple[float, float]] = {}  # CLOCK_BOOTTIME and the wall's offset
        self._others: dict[tuple[JobId, Epoch], Extras] = {}  # CPUs, memory and so on at the placement
        # Devices at the placement, sum of finished sleeps, start of the present one (CLOCK_BOOTTIME), and the wall's offset.
        self._sleeps: dict[tuple[JobId, Epoch], tuple[int, float, float | None, float]] = {}
        self._charged: dict[QueueId, float] = {}
        self._charged_others: dict[QueueId, dict[str, float]] = {}
        self._periods: dict[QueueId, float] = {}

    def check(self, records: Sequence[Record], now: ControllerTime) -> None:
        """Check the records of a commit made at `now`, in order."""
        charged: dict[QueueId, list[_Charge]] = {}
        newest: dict[QueueId, QueueUsage] = {}
        for record in records:
            if isinstance(record, Attempt):
                self._attempt(record, charged, now)
            elif isinstance(record, QueueUsage):
                newest[record.queue] = record
            elif isinstance(record, Job) and record.state.terminal:
                self._ended(record)
        for queue in {**charged, **newest}:
            fresh = charged.get(queue, [])
            if queue in newest:
                self._spent(newest[queue], fresh)
            elif sum(one.gpu_s for one in fresh) > TOLERANCE_S:
                raise InvariantBroken(18, f"queue {queue} is not charged for its attempts: {fresh}")

    def _attempt(self, attempt: Attempt, charged: dict[QueueId, list[_Charge]], now: ControllerTime) -> None:
        place, offset_s = (attempt.job_id, attempt.epoch), now.wall_s - now.boot_s
        if attempt.holds_allocation:
            self._begun.setdefault(place, (now.boot_s, offset_s))
            self._count_sleep(attempt, now)
            return
        begun = self._begun.pop(place, None)
        if begun is None or attempt.ended_s is None:
            raise InvariantBroken(18, f"attempt {attempt.epoch} of job {attempt.job_id} ends without start or end time")
        if abs(begun[1] - offset_s) < TOLERANCE_S:
            span_s, held_s = attempt.ended_s - attempt.placed_s, now.boot_s - begun[0]
            if abs(span_s - held_s) > TOLERANCE_S:
                raise InvariantBroken(
                    18, f"job {attempt.job_id} held its devices for {held_s:.3f} s and is billed {span_s:.3f} s"
                )
        asleep_s = self._check_sleep(attempt, now)
        queues = self._cluster.store.queues()
        parents = {queue.id: queue.parent for queue in queues}
        job = self._cluster.store.job(attempt.job_id)
        at: QueueId | None = None if job is None else job.queue
        while at is not None:
            held_s = max(0.0, attempt.ended_s - attempt.placed_s)
            others = {name: amount * held_s for name, amount in attempt.allocation.resources.besides_gpus()}
            gpu_s = attempt.allocation.milli / MILLI_PER_DEVICE * max(0.0, held_s - asleep_s)
            charged.setdefault(at, []).append(_Charge(attempt.placed_s, gpu_s, others))
            at = parents.get(at)

    def _count_sleep(self, attempt: Attempt, now: ControllerTime) -> None:
        """Sum the time in which a live attempt held none of the devices that it was placed on. It keeps all else (1)."""
        place, offset_s = (attempt.job_id, attempt.epoch), now.wall_s - now.boot_s
        held = sum(len(grant.devices) for grant in attempt.allocation.grants)
        others = attempt.allocation.resources.besides_gpus()
        if self._others.setdefault(place, others) != others:
            raise InvariantBroken(1, f"job {attempt.job_id} was placed with {self._others[place]} and holds {others}")
        whole, asleep_s, since, known_offset_s = self._sleeps.get(place, (held, 0.0, None, offset_s))
        if since is not None and held == whole:
            asleep_s, since = asleep_s + now.boot_s - since, None
        elif since is None and held < whole:
            since = now.boot_s
        # A clock that was set while it slept: the sum by the wall's clock is not known here.
        known_offset_s = offset_s if abs(known_offset_s - offset_s) < TOLERANCE_S else math.nan
        self._sleeps[place] = (whole, asleep_s, since, known_offset_s)

    def _check_sleep(self, attempt: Attempt, now: ControllerTime) -> float:
        """Check the time for which an ended attempt is not billed for devices, and return it."""
        whole, asleep_s, since, offset_s = self._sleeps.pop((attempt.job_id, attempt.epoch), (0, 0.0, None, 0.0))
        asleep_s += 0.0 if since is None else now.boot_s - since
        self._others.pop((attempt.job_id, attempt.epoch), None)
        held = sum(len(grant.devices) for grant in attempt.allocation.grants)
        if held != whole:
            raise InvariantBroken(18, f"job {attempt.job_id} is billed for {held} devices and was placed on {whole}")
        if abs(offset_s - (now.wall_s - now.boot_s)) < TOLERANCE_S and abs(asleep_s - attempt.asleep_s) > TOLERANCE_S:
            raise InvariantBroken(
                18, f"job {attempt.job_id} slept for {asleep_s:.3f} s and is not billed for {attempt.asleep_s:.3f} s"
            )
        return attempt.asleep_s

    def _spent(self, spent: QueueUsage, fresh: list[_Charge]) -> None:
        """Check a queue's charge. `fresh`: of each attempt that ended in this commit. A new period starts at 0."""
        same = self._periods.get(spent.queue, spent.period_s) == spent.period_s
        known = self._charged.get(spent.queue, 0.0) if same else 0.0
        others = dict(self._charged_others.get(spent.queue, {})) if same else {}
        self._periods[spent.queue], self._charged[spent.queue] = spent.period_s, spent.gpu_s
        self._charged_others[spent.queue] = dict(spent.other_s)
        if any(one.begun_s < spent.period_s for one in fresh):
            return  # part of it belongs to another period
        for one in fresh:
            for name, amount_s in one.others.items():
                others[name] = others.get(name, 0.0) + amount_s
        for name, amount_s in others.items():
            billed = dict(spent.other_s).get(name, 0.0)
            if abs(billed - amount_s) > TOLERANCE_S * max(1.0, amount_s / 1e6):
                raise InvariantBroken(
                    18, f"queue {spent.queue} is charged {billed:.3f} of {name}; its attempts sum to {amount_s:.3f}"
                )
        due = known + sum(one.gpu_s for one in fresh)
        if abs(due - spent.gpu_s) > TOLERANCE_S:
            raise InvariantBroken(
                18, f"queue {spent.queue} is charged {spent.gpu_s:.3f} GPU-s; its attempts sum to {due:.3f}"
            )

    def _ended(self, job: Job) -> None:
        attempts = [one for one in self._cluster.store.attempts(job.id) if not one.holds_allocation]
        if not attempts:
            return
        ledgers = attempt_ledgers(
            attempts, {}, (), succeeded=job.state is JobState.SUCCEEDED, now_s=self._cluster.now.wall_s
        )
        for attempt in attempts:
            begin_us, end_us = span_us(attempt, now_s=self._cluster.now.wall_s)
            if ledgers[attempt.epoch].total != end_us - begin_us:
                raise InvariantBroken(
                    18,
                    f"the ledger of attempt {attempt.epoch} of job {job.id} sums to {ledgers[attempt.epoch].total} us of {end_us - begin_us}",
                )
