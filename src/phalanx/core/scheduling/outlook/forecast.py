"""Forecasts when a waiting job starts: a range, and the reason if a bound is unknown.

Running jobs are assumed to end between the quantiles of their predictions (`predict`). The earliest start is the time at which enough
devices for its shape are free if all jobs end early and no other job takes them; the latest, if all end late and all jobs ahead in line
(by priority, then submit time) get their place first. Each device is a point in time: a list schedule on the nodes, without the policy.
Later jobs, and devices that the policy frees by stopping others, are not modelled.

Cost: linear in the running jobs, plus one partition of the nodes for each job ahead (at most AHEAD_MAX).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.core.ids import JobId
from phalanx.core.resources import GPUS, quantity
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.estimates.run_time_prediction import RunTimePrediction, RunTimePredictor, traits_of
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.node_bitsets import bitset_of
from phalanx.core.scheduling.outlook.slice_times import slices_free_at_s
from phalanx.core.scheduling.outlook.what_if import Trial
from phalanx.core.work.dependency import DependencyKind
from phalanx.core.work.job import Job
from phalanx.core.work.quotas.quota_tree import FLEET, QuotaRefusal
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.states import AttemptState, WaitReasonCode

JOBS_AHEAD_MAX: Final = 256  # jobs ahead that are simulated; with more of them no latest start is given
DEPENDENCY_DEPTH_MAX: Final = 4  # length to which a chain of dependencies is followed
NEVER: Final = float("inf")
_UNKNOWN_TEXT: Final = {
    WaitReasonCode.HELD: "the job is held",
    WaitReasonCode.PARKED: "the job is parked",
    WaitReasonCode.QUEUE_CLOSED: "its queue is closed",
    WaitReasonCode.NO_NODES: "no node accepts work",
    WaitReasonCode.NODES_DOWN: "the nodes that it needs are not up now",
    WaitReasonCode.TOPOLOGY: "no node has the topology labels that it needs",
}
# [node number, device]: seconds from now until this many devices of the node are free, ascending.
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStart:
    """The start in seconds from now. None: the bound is unknown; `unknown` says why the later one is."""

    earliest_s: float | None
    latest_s: float | None
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingTime:
    """Remaining run time of a running job in seconds: with a probability of 80 % between the two; `high_s` infinite if unknown."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingLimit:
    """A quota or limit that blocks a job.

    Attributes:
        excess: GPUs, or the amount of `resource` (jobs, with `counts_jobs`), that must be released first.
        holders: running jobs that count against it.
        refusal: from the quota tree; None for an array's own limit.
        impossible: the job alone exceeds it.
        resource: what is limited, as in `Resources.amount_of`.
    """

    excess: float
    holders: tuple[JobEntry, ...]
    counts_jobs: bool = False
    refusal: QuotaRefusal | None = None
    impossible: bool = False
    resource: str = GPUS

    def share_of(self, holder: JobEntry) -> float:
        """What the end of the holder releases."""
        if self.counts_jobs:
            return 1
        return quantity(self.resource, holder.held.amount_of(self.resource))


class Forecast:
    """Ends of running jobs, and the times at which devices become free, based on one trial.

    Attributes:
        expected: later bounds are what is expected, not what is exceeded once in ten times: jobs run as long as the median of similar ones.
    """

    def __init__(self, trial: Trial, predictor: RunTimePredictor, *, expected: bool = False) -> None:
        self.trial = trial
        self.expected = expected
        self.predictor = predictor
        self.now_s = trial.snapshot.now_s
        self.remaining_times: dict[JobId, RemainingTime] = {
            job_id: self._left_of(job_id) for job_id in trial.snapshot.attempts if job_id in trial.snapshot.jobs
        }

    def start_of(self, job: Job, *, depth: int = 0) -> ExpectedStart:
        """When the job starts."""
        scheduler = self.trial.scheduler
        parked = scheduler.ineligible.get(job.id)
        low_s = high_s = 0.0
        unknown = ""
        if parked is not None:
            match parked.reason:
                case WaitReasonCode.BEGIN_TIME if job.spec.begin_s is not None:
                    low_s = high_s = max(0.0, job.spec.begin_s - self.now_s)
                case WaitReasonCode.BACKOFF:
                    low_s = high_s = max(0.0, job.not_before_s - self.now_s)
                case WaitReasonCode.DEPENDENCY | WaitReasonCode.STAGING:
                    low_s, high_s, unknown = self._after_parents(job, depth)
                case _:
                    return ExpectedStart(
                        earliest_s=None, latest_s=None, unknown=_UNKNOWN_TEXT.get(parked.reason, parked.detail)
                    )
        entry = scheduler.entries.get(job.id)
        if entry is not None and entry.started_s >= 0.0:
            return ExpectedStart(earliest_s=0.0, latest_s=self._cleared_s(job.id))
        needs = scheduler.needs_of(job) if entry is None else entry.job_class.needs
        if not needs:
            return ExpectedStart(
                earliest_s=None, latest_s=None, unknown="the nodes that accept work now cannot hold it"
            )
        if entry is not None:
            early, late, why = self._admitted(entry)
            low_s, high_s, unknown = max(low_s, early), max(high_s, late), unknown or why
        early, late, why = self._capacity(needs, entry)
        low_s, high_s, unknown = max(low_s, early), max(high_s, late), unknown or why
        return ExpectedStart(
            earliest_s=None if low_s == NEVER else low_s,
            latest_s=None if high_s == NEVER else high_s,
            unknown=unknown if high_s == NEVER else "",
        )

    def line_starts_s(self) -> dict[JobId, float]:
        """The later bounds of the starts of all jobs in line, in seconds from now, in one pass; NEVER if unknown.

        Jobs beyond JOBS_AHEAD_MAX have the bound of the last one before. Cost: one partition of the nodes for each of the first ones.
        """
        scheduler = self.trial.scheduler
        times: Times | None = None
        found: dict[JobId, float] = {}
        parts: dict[int, float] = {}  # of classes for parts of devices: such a job is forecast alone
        last_s = 0.0
        line = sorted(
            scheduler.board.waiting.values(), key=lambda entry: (-entry.job_class.rank, entry.submit_s, entry.seq)
        )
        for number, entry in enumerate(line):
            klass, job_id = entry.job_class, scheduler.job_id_by_seq[entry.seq]
            if number < JOBS_AHEAD_MAX:
                admitted = [need for need in klass.needs if scheduler.board.admits_need(klass, need)] or klass.needs
                needs = [need for need in admitted if need.milli and not (need.share_milli or need.mig_profile)]
                if needs:
                    times = self._times(needs[0], high=True) if times is None else times
                    returning = self._returning_nodes(entry)
                    start_s = min(self._place(times, need, klass.excluded, returning)[0] for need in needs)
                    last_s = max(start_s, self._admitted(entry)[1])
                    self._place_ahead(times, entry)
                else:
                    if klass.number not in parts:
                        latest_s = self.start_of(self.trial.snapshot.jobs[job_id]).latest_s
                        parts[klass.number] = NEVER if latest_s is None else latest_s
                    last_s = parts[klass.number]
            found[job_id] = last_s
        return found

    def run_time_of(self, job: Job) -> tuple[float, float | None, int, str]:
        """The run time of the job once started: low and high in seconds (None: unknown), the number of ended jobs it is based on, and which."""
        predicted = self.predictor.predict(traits_of(job), ran_s=0.0, run_max_s=job.spec.time_limit_s)
        return predicted.p10_s, self._late_s(predicted), predicted.sample_count, predicted.similarity

    def _late_s(self, predicted: RunTimePrediction) -> float | None:
        return predicted.p50_s if self.expected else predicted.p90_s

    # ---------------------------------------------------------------- ends

    def _left_of(self, job_id: JobId) -> RemainingTime:
        job, attempt = self.trial.snapshot.jobs[job_id], self.trial.snapshot.attempts[job_id]
        if attempt.state is AttemptState.STOPPING:
            return RemainingTime(low_s=0.0, high_s=job.spec.grace_s)
        held_s = max(0.0, self.now_s - attempt.placed_s)
        ran_s = max(0.0, job.attained_s + held_s)
        limit_s = job.spec.time_limit_s
        predicted = self.predictor.predict(
            traits_of(job), ran_s=ran_s, run_max_s=None if limit_s is None else max(ran_s, job.attained_s + limit_s)
        )
        late_s = self._late_s(predicted)
        return RemainingTime(
            low_s=max(0.0, predicted.p10_s - ran_s),
            high_s=NEVER if late_s is None else max(0.0, late_s - ran_s),
        )

    def _cleared_s(self, job_id: JobId) -> float:
        """Zero if it starts now; else the longest grace period of the jobs that are stopping on its nodes."""
        trial = self.trial
        if trial.plan.placement(job_id) is not None:
            return 0.0
        nodes = {trial.scheduler.fleet_index.nodes[number].id for number, _ in trial.scheduler.entries[job_id].places}
        return max(
            (
                trial.snapshot.jobs[other].spec.grace_s
                for other, attempt in trial.snapshot.attempts.items()
                if other in trial.snapshot.jobs and any(grant.node_id in nodes for grant in attempt.allocation.grants)
            ),
            default=0.0,
        )

    def _after_parents(self, job: Job, depth: int) -> tuple[float, float, str]:
        low_s = high_s = 0.0
        unknown = ""
        for one in job.unmet_dependencies:
            parent = self.trial.snapshot.jobs.get(one.job_id)
            if one.kind is DependencyKind.DATA:
                return low_s, NEVER, "only its nodes know how long the copy of its data takes"
            if (
                one.kind in (DependencyKind.SINGLETON, DependencyKind.AFTER_NOT_OK)
                or parent is None
                or depth >= DEPENDENCY_DEPTH_MAX
            ):
                return low_s, NEVER, f"it waits for {one}, whose time is unknown"
            left = self.remaining_times.get(parent.id)
            if left is None:
                begins = self.start_of(parent, depth=depth + 1)
                run_low_s, run_high_s, _, _ = self.run_time_of(parent)
                early = (begins.earliest_s or 0.0) + run_low_s
                late = NEVER if begins.latest_s is None or run_high_s is None else begins.latest_s + run_high_s
                unknown = unknown or begins.unknown
            else:
                early, late = left.low_s, left.high_s
            if late == NEVER:
                unknown = (
                    unknown
                    or f"it waits for job {parent.id}, which has no time limit, and too few similar jobs have finished"
                )
            low_s, high_s = max(low_s, early), max(high_s, late)
        return low_s, high_s, unknown

    # ---------------------------------------------------------------- quotas and limits

    def blocking_limit(self, entry: JobEntry) -> BlockingLimit | None:
        """The limit that blocks the job, with the running jobs that count against it; None if no limit does."""
        board, klass = self.trial.scheduler.board, entry.job_class
        running, throttle, quotas = board.running.values(), klass.throttle, board.quotas
        if throttle is not None and throttle.running >= throttle.running_max:
            over = throttle.running - throttle.running_max + 1
            return BlockingLimit(
                excess=over,
                counts_jobs=True,
                holders=tuple(other for other in running if other.job_class.throttle is throttle),
            )
        refusal = board.refusal_of(klass)
        if refusal is None or quotas is None:
            return self._lacking_licence(entry)
        asked = 1 if refusal.counts_jobs else refusal.requested
        node = quotas.subtree_node(refusal.queue) if refusal.queue else FLEET
        return BlockingLimit(
            excess=asked + refusal.in_use - refusal.limit,
            counts_jobs=refusal.counts_jobs,
            resource=refusal.resource,
            refusal=refusal,
            impossible=not refusal.may_pass,
            holders=tuple(
                other
                for other in running
                if node in quotas.paths[other.job_class.queue]
                and (not refusal.user or other.job_class.user == refusal.user)
            ),
        )

    def _lacking_licence(self, entry: JobEntry) -> BlockingLimit | None:
        board, licences = self.trial.scheduler.board, entry.job_class.licences
        name = board.lacking_licence(licences)
        if not name:
            return None
        return BlockingLimit(
            excess=dict(licences)[name] - board.free_licences.get(name, 0),
            resource=name,
            holders=tuple(other for other in board.running.values() if dict(other.held.extras).get(name)),
        )

    def remaining_time(self, entry: JobEntry) -> RemainingTime:
        """Remaining run time of a job that runs, or that the trial has started."""
        job_id = self.trial.scheduler.job_id_by_seq[entry.seq]
        left = self.remaining_times.get(job_id)
        if left is None:
            low_s, high_s, _, _ = self.run_time_of(self.trial.snapshot.jobs[job_id])
            left = self.remaining_times[job_id] = RemainingTime(low_s=low_s, high_s=NEVER if high_s is None else high_s)
        return left

    def _admitted(self, entry: JobEntry) -> tuple[float, float, str]:
        """When quotas and limits admit it: once enough jobs that count against the same limit have ended."""
        limit = self.blocking_limit(entry)
        if limit is None:
            return 0.0, 0.0, ""
        refusal = limit.refusal
        if refusal is not None and refusal.reason is WaitReasonCode.BUDGET:
            wait_s = max(0.0, refusal.until_s - self.now_s)
            return wait_s, wait_s, ""
        if refusal is not None and limit.impossible:
            return NEVER, NEVER, refusal.describe()
        ends = [(self.remaining_time(other), limit.share_of(other)) for other in limit.holders]
        early = _freed_at_s([(left.low_s, weight) for left, weight in ends], limit.excess)
        late = _freed_at_s([(left.high_s, weight) for left, weight in ends], limit.excess)
        return (
            early,
            late,
            "jobs that count against the same limit have no known end" if late == NEVER else "",
        )

    # ---------------------------------------------------------------- capacity

    def _capacity(self, needs: Sequence[Need], entry: JobEntry | None) -> tuple[float, float, str]:
        """When enough devices are free for its shape."""
        if not needs[0].milli:
            found = entry is not None and self.trial.scheduler.board.find(entry) is not None
            return 0.0, 0.0 if found else NEVER, "it needs no GPUs: CPUs, memory and extras are not forecast"
        excluded = 0 if entry is None else entry.job_class.excluded
        returning = 0 if entry is None else self._returning_nodes(entry)
        if entry is not None:  # quotas may allow only the smaller alternatives
            board = self.trial.scheduler.board
            needs = [need for need in needs if board.admits_need(entry.job_class, need)] or needs
        ahead = [] if entry is None else self.jobs_ahead(entry)
        slices = [need for need in needs if need.mig_profile]
        needs = [need for need in needs if not need.mig_profile]
        early, late = self._slice_capacity(slices, excluded, ahead) if slices else (NEVER, NEVER)
        # Of a device in use, the part that is free counts for shares of its group only.
        for share in dict.fromkeys((need.share_milli, need.share_group) for need in needs):
            alike = [need for need in needs if (need.share_milli, need.share_group) == share]
            times = self._times(alike[0], high=False)
            early = min(early, *(self._place(times, need, excluded, returning)[0] for need in alike))
            times = self._times(alike[0], high=True)
            for other in ahead[:JOBS_AHEAD_MAX]:
                self._place_ahead(times, other)
            late = min(late, *(self._place(times, need, excluded, returning)[0] for need in alike))
        if len(ahead) > JOBS_AHEAD_MAX:
            return early, NEVER, f"{len(ahead)} jobs are ahead of it"
        if late < NEVER:
            return early, late, ""
        needs = [*slices, *needs]
        return early, late, self._unknown_end(needs, excluded, reserved=returning)

    def _slice_capacity(self, needs: Sequence[Need], excluded: int, ahead: Sequence[JobEntry]) -> tuple[float, float]:
        """When the MIG slices are free. Jobs ahead for slices of the same kinds get theirs first, in the later bound."""
        board = self.trial.scheduler.board
        kinds = {kind for need in needs for kind in need.kinds}
        before = [
            one
            for one in ahead
            if any(need.mig_profile and not kinds.isdisjoint(need.kinds) for need in one.job_class.needs)
        ]
        early = slices_free_at_s(board, needs, excluded, [], lambda one: self.remaining_time(one).low_s)
        if len(before) > JOBS_AHEAD_MAX:
            return early, NEVER
        return early, slices_free_at_s(board, needs, excluded, before, lambda one: self.remaining_time(one).high_s)

    def _times(self, need: Need, *, high: bool) -> Times:
        """When each device of each node has room for the need, sorted by node: a whole device is free once all that share it have ended."""
        scheduler = self.trial.scheduler
        board = scheduler.board
        unit = max(1, board.node_devices_max)
        times = np.zeros((len(board.devices_of_node), unit))
        sizes = np.array(board.devices_of_node)
        times[np.arange(unit)[None, :] >= sizes[:, None]] = NEVER
        ends: list[list[float]] = [[] for _ in board.devices_of_node]
        run_s: dict[int, float] = {}
        for seq, other in board.running.items():
            left = self.remaining_time(other)
            run_s[seq] = left.high_s if high else left.low_s
        for number in range(len(ends)):
            for holders, count in board.whole_holders(number) if sizes[number] else ():
                if holders[0].shared_devices:
                    ends[number].append(_room_at_s(holders, run_s, need))
                else:
                    ends[number] += [run_s[holders[0].seq]] * count
        for number, count in board.foreign_devices.items():
            ends[number] += [NEVER] * count
        for number, found in enumerate(ends):
            if found:
                times[number, : len(found)] = found[:unit]
        times[sorted(board.closed_nodes)] = NEVER
        for number, until_s in self._reserved():
            times[number] = np.maximum(times[number], until_s)
        times.sort(axis=1)
        return times

    def _reserved(self) -> list[tuple[int, float]]:
        """Nodes reserved now, and for how long: admissions are ignored, so that the range errs towards late."""
        active = [one for one in self.trial.snapshot.reservations.values() if one.is_active(self.now_s)]
        return [(number, one.end_s - self.now_s) for one in active for number in self._numbers_in(one)]

    @cached_property
    def _reservation_ends_s(self) -> dict[int, float]:
        """When the last reservation of each node that has one ends, in seconds from now."""
        ends: dict[int, float] = {}
        for one in self.trial.snapshot.reservations.values():
            for number in self._numbers_in(one):
                ends[number] = max(ends.get(number, 0.0), one.end_s - self.now_s)
        return ends

    def _numbers_in(self, reservation: Reservation) -> list[int]:
        """The numbers of the reserved nodes."""
        numbers = self.trial.scheduler.fleet_index.numbers_of_node
        return [number for node_id in reservation.nodes for number in numbers.get(node_id, ())]

    def _returning_nodes(self, entry: JobEntry) -> int:
        """The nodes, as a bitset, from which only reservations keep the job away, now or for a time when it could still run."""
        excluded = entry.job_class.excluded
        if not excluded or not self._reservation_ends_s:
            return 0
        job = self.trial.snapshot.jobs.get(self.trial.scheduler.job_id_by_seq[entry.seq])
        if job is None:
            return 0
        return excluded & bitset_of(self._reservation_ends_s) & ~self.trial.scheduler.fleet_index.left_out_by(job.spec)

    def jobs_ahead(self, entry: JobEntry) -> list[JobEntry]:
        """The jobs ahead of it in line."""
        mine = (-entry.job_class.rank, entry.submit_s, entry.seq)
        found = [
            other
            for other in self.trial.scheduler.board.waiting.values()
            if (-other.job_class.rank, other.submit_s, other.seq) < mine
        ]
        return sorted(found, key=lambda other: (-other.job_class.rank, other.submit_s, other.seq))

    def _place_ahead(self, times: Times, other: JobEntry) -> None:
        """Give a job ahead its place, for as long as it may run."""
        if not other.job_class.gpus or other.job_class.needs[0].mig_profile:
            return
        need = other.job_class.needs[0]
        start_s, nodes = self._place(times, need, other.job_class.excluded, self._returning_nodes(other))
        if start_s == NEVER:
            return
        end_s = start_s + self.remaining_time(other).high_s
        devices = [
            count
            for role in need.roles
            for count in [role.node_devices] * role.nodes + [role.last_node_devices] * (role.last_node_devices > 0)
        ]
        for number, count in zip(nodes, devices, strict=True):
            times[number, :count] = end_s
            times[number].sort()

    def _place(self, times: Times, need: Need, excluded: int, returning: int = 0) -> tuple[float, list[int]]:
        """When and where enough nodes have enough devices free. `returning`: of the excluded nodes, those that it may use after reservations."""
        board = self.trial.scheduler.board
        if need.others:
            return self._place_roles(times, need, excluded, returning)
        kind = np.array(board.pool_of_node)
        free_s = times[:, need.node_devices - 1] if need.node_devices else 0.0  # CPUs are not forecast
        ready = np.where(np.isin(kind, need.kinds), free_s, NEVER)
        closed = excluded & ~returning | need.excluded
        if closed:
            ready[[number for number in range(len(ready)) if closed >> number & 1]] = NEVER
        for number, until_s in self._reservation_ends_s.items() if returning else ():
            if returning >> number & 1:
                ready[number] = max(ready[number], until_s)
        parts = need.parts
        if not (need.required and need.within >= 0):
            return _soonest(ready, parts)
        domains = board.domains(need.within)
        best: tuple[float, list[int]] = (NEVER, [])
        for domain in np.unique(domains):
            inside = np.flatnonzero(domains == domain)
            start_s, chosen = _soonest(ready[inside], parts)
            best = min(best, (start_s, [int(inside[at]) for at in chosen]))
        return best

    def _place_roles(self, times: Times, need: Need, excluded: int, returning: int) -> tuple[float, list[int]]:
        """The same for a gang with several roles: it starts when the last of them has its nodes."""
        latest_s, found = 0.0, list[int]()
        for role in need.roles:
            taken = self.trial.scheduler.board.nodes_of((number, 0) for number in found)
            start_s, nodes = self._place(times, role, excluded | taken, returning & ~taken)
            if start_s == NEVER:
                return NEVER, []
            latest_s, found = max(latest_s, start_s), found + nodes
        return latest_s, found

    def _unknown_end(self, needs: Sequence[Need], excluded: int, *, reserved: int) -> str:
        """The first job with an unknown end, on nodes that it could use. `reserved`: nodes that only reservations exclude."""
        scheduler = self.trial.scheduler
        kinds = {kind for need in needs for role in need.roles for kind in role.kinds}
        for seq in sorted(scheduler.board.running):
            entry = scheduler.board.running[seq]
            left = self.remaining_time(entry)
            usable = any(
                scheduler.board.pool_of_node[number] in kinds and not excluded >> number & 1
                for number, _ in entry.places
            )
            if usable and left.high_s == NEVER:
                return f"job {scheduler.job_id_by_seq[seq]} has no time limit, and too few similar jobs have finished"
        if any(scheduler.board.pool_of_node[number] in kinds for number in scheduler.board.foreign_devices):
            return "it waits for devices in use outside Phalanx, whose end is unknown"
        if any(number in kinds and reserved >> at & 1 for at, number in enumerate(scheduler.board.pool_of_node)):
            return "nodes that it needs are reserved, now or for a time when it could still run"
        return _UNKNOWN_TEXT[WaitReasonCode.NODES_DOWN]


def _soonest(ready: Times, parts: int) -> tuple[float, list[int]]:
    """When the first `parts` nodes are ready, and which; never for too few."""
    if len(ready) < parts:
        return NEVER, []
    chosen = np.argpartition(ready, parts - 1)[:parts] if parts < len(ready) else np.arange(len(ready))
    return float(ready[chosen].max()), [int(number) for number in chosen]


def _room_at_s(holders: Sequence[JobEntry], run_s: Mapping[int, float], need: Need) -> float:
    """When the device that these jobs share has room for the need: for a share of their group once enough of them have ended."""
    shares = [(run_s[other.seq], other.need.share_milli if other.need is not None else 0) for other in holders]
    group = holders[0].need.share_group if holders[0].need is not None else ""
    if not need.share_milli or need.share_group != group:
        return max(end_s for end_s, _ in shares)
    room = MILLI_PER_DEVICE - sum(milli for _, milli in shares)
    return 0.0 if room >= need.share_milli else _freed_at_s(shares, need.share_milli - room)


def _freed_at_s(ends: Iterable[tuple[float, float]], wanted: float) -> float:
    """When this much has been freed."""
    freed = 0.0
    for end_s, weight in sorted(ends):
        freed += weight
        if freed >= wanted - 1e-9:
            return end_s
    return NEVER
