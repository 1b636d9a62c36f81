"""Keeps a board in step with the records: the nodes, and the jobs that may run, wait or run.

Jobs are synchronised one by one from their current records, not from events: a late or duplicate report has no effect. A change of
hardware, queues or reservations marks the board stale; the next plan rebuilds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from phalanx.core.fleet.node import ForeignUsage, Node
from phalanx.core.fleet.node_pool import NodePool, NodeTemplate, PoolNode
from phalanx.core.ids import JobId, NodeId, PoolId, QueueId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_builder import ClusterSnapshot, apply_foreign_usage, build_board
from phalanx.core.scheduling.board_records import NEVER_S, JobClass, JobEntry
from phalanx.core.scheduling.estimates.device_speeds import SpeedFacts
from phalanx.core.scheduling.estimates.job_speeds import JobSpeeds
from phalanx.core.scheduling.feasibility.cache import CLOCK_STEP_S, FeasibilityCache
from phalanx.core.scheduling.fleet_index import FleetIndex, ShapeCache, index_fleet
from phalanx.core.scheduling.job_classes import JobClassRegistry, WaitingChanges
from phalanx.core.scheduling.needs import Need, need_of_attempt, need_of_places
from phalanx.core.scheduling.node_bitsets import bitset_of
from phalanx.core.scheduling.order_rules import OrderRules
from phalanx.core.scheduling.outlook.explanations import ELIGIBLE, ineligibility
from phalanx.core.scheduling.pending_placements import PendingPlacements
from phalanx.core.scheduling.policy import Policy
from phalanx.core.scheduling.quota import QuotaCharges
from phalanx.core.scheduling.rented_nodes import RentedNodes
from phalanx.core.scheduling.reservation_calendar import ReservationCalendar, reservation_query_of
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.scheduling.staging_targets import StagingTargets
from phalanx.core.state.plan import WaitReason
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.extras import Licence
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.data_sources import staged_keys
from phalanx.core.work.queue import Queue, min_stay_s
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState, WaitReasonCode

LEARNED_STATES: Final = (
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.TIMEOUT,
)  # final states that count towards run time statistics
INFINITE: Final = float("inf")
DURATION_UNKNOWN: Final = -1.0
LOST_NODE_REASONS: Final = (
    WaitReasonCode.NODE_FAIL,
    WaitReasonCode.DRAINED,
)  # not the job's fault: it gets its place back
SHAPE_REASONS: Final = (
    WaitReasonCode.NO_NODES,
    WaitReasonCode.NODES_DOWN,
    WaitReasonCode.TOPOLOGY,
    WaitReasonCode.NEVER,
)  # the job has no shape on the nodes that are up


class BoardSynchronizer:
    """The board of one fleet, and what is known of its nodes and jobs.

    Attributes:
        entries: the board's entry of each job that may run or runs.
        ineligible: jobs that may not start regardless of free capacity, with the reason.
        pending_placements: started by the policy, not yet placed: running jobs on their nodes must stop first.
        policy: decides; it survives a rebuild of the board.
        job_id_by_seq: job ids by seq.
        stale: the board must be rebuilt.
        feasibility: judges whether a job can ever start.
        order_rules: the rules on nodes that cost money, `OrderRules[Scheduler]`; None in a trial.
    """

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        policy: Policy | None = None,
        feasibility: FeasibilityCache | None = None,
    ) -> None:
        self.feasibility = feasibility or FeasibilityCache()
        self.settings = settings or PolicySettings()
        self.policy = policy or self.settings.create_policy()
        self.board = Board(())
        self.fleet_index = FleetIndex()
        self.calendar = ReservationCalendar()
        self.entries: dict[JobId, JobEntry] = {}
        self.job_id_by_seq: dict[int, JobId] = {}
        self.ineligible: dict[JobId, WaitReason] = {}
        self.pending_placements = PendingPlacements()
        self._staging = StagingTargets()
        self.stale = True
        self._seen_nodes: dict[NodeId, Node] = {}
        self._shaping = ShapeCache(self._seen_nodes, self.fleet_index, self.feasibility.node_kinds)
        self._classes = JobClassRegistry()
        self.speeds = JobSpeeds(self.policy)
        self._charges = QuotaCharges()
        self._known_starts_s: dict[JobId, float] = {}  # start times of known runs, kept during a rebuild of the board
        self._wake_times: list[tuple[float, JobId]] = []  # when a parked job may become eligible by time alone
        self._wake_s = -INFINITE
        self._calendar_s = INFINITE
        self._now_s = self._wall_s = self._wall_offset_s = 0.0
        self._clock_jumped = False
        self._line_changes = WaitingChanges()
        self._history_learned = False
        self._asleep: set[JobId] = set()  # running jobs whose devices the board counts as free
        self._awaited_nodes = ""
        self._judged_until_s = INFINITE
        self._queues: Mapping[QueueId, Queue] = {}
        self._known_pools: dict[PoolId, tuple[int, NodeTemplate]] = {}
        self.order_rules: OrderRules[Any] | None = None
        self._rented = RentedNodes()

    # ---------------------------------------------------------------- updates

    def update(
        self, snapshot: ClusterSnapshot, changed: Iterable[object], now_s: float, wall_s: float | None = None
    ) -> None:
        """Process changed records; `snapshot` has their newest versions. Times as in `Scheduler.plan`."""
        jobs: dict[JobId, None] = {}
        nodes: dict[NodeId, None] = {}
        rented = False
        for record in changed:
            match record:
                case Job():
                    jobs[record.id] = None
                case Node():
                    nodes[record.id] = None
                case Queue() | Reservation() | Licence():
                    self.stale = True
                case NodePool():
                    self.stale = self.stale or self._known_pools.get(record.id) != _nodes_of_pool(record)
                    rented = True
                case PoolNode():
                    rented = True
                case Attempt() if record.holds_allocation:
                    # A replica fell asleep or regained its devices. Rare, so that its entry is not changed in place.
                    self.stale = self.stale or record.gave_devices_back != (record.job_id in self._asleep)
                case _:
                    pass  # an attempt's job changes with it whenever that matters here
        self._set_time(now_s, wall_s)
        self.stale = self.stale or snapshot.awaited_nodes != self._awaited_nodes
        if rented:
            self._update_rented(snapshot)
        if self._update_nodes(snapshot, nodes):
            return
        board_changed = bool(nodes)
        for job_id in jobs:
            board_changed |= self._sync(snapshot, job_id, now_s)
        self._line_changes.apply(self.board)
        if board_changed:
            self._wake_s = -INFINITE

    def rebuild(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Rebuild the board from the records."""
        self.stale = False
        self._rejudge(snapshot)
        self._awaited_nodes = snapshot.awaited_nodes
        self._asleep = {job_id for job_id, attempt in snapshot.attempts.items() if attempt.gave_devices_back}
        self._queues = snapshot.queues
        self._known_pools = {pool.id: _nodes_of_pool(pool) for pool in snapshot.node_pools.values()}
        self.fleet_index = index_fleet(snapshot.nodes)
        self.speeds.set_models(self.fleet_index.device_models)
        self._seen_nodes = dict(snapshot.nodes)
        self.calendar = ReservationCalendar(snapshot.reservations.values())
        self._calendar_s = self.calendar.next_change_s(self._wall_s) if self.calendar else INFINITE
        self.board = build_board(self.fleet_index, snapshot, self.settings.restart_cost_s, self._wall_s)
        self.policy.attach(self.board)
        # By the monotonic clock: the records' times are by a clock that may have been set since.
        self._known_starts_s = {
            job_id: entry.started_s
            for job_id, entry in self.entries.items()
            if entry.started_s >= 0.0 and job_id not in self.pending_placements
        }
        for known in (
            self.entries,
            self.job_id_by_seq,
            self.ineligible,
            self._charges,
            self.pending_placements,
            self._wake_times,
            self._line_changes,
            self._staging,
        ):
            known.clear()
        self._classes.clear_throttles()
        self._shaping = ShapeCache(
            self._seen_nodes, self.fleet_index, self.feasibility.node_kinds, snapshot.reservations
        )
        self._update_rented(snapshot)
        jobs = sorted(snapshot.jobs.values(), key=lambda job: job.seq)
        if not self._history_learned:
            self._learn_history(jobs)
        for job in jobs:
            if not job.state.terminal:
                self._sync(snapshot, job.id, now_s)
        self._known_starts_s = {}
        for number in range(len(self.fleet_index.nodes)):
            if not self.fleet_index.nodes[number].schedulable:
                self.board.remove_node(number)
        self._update_data_nodes()
        self._wake_s = -INFINITE

    def set_speed_facts(self, facts: SpeedFacts) -> None:
        """Set what is known of the speed of devices; the classes of all jobs are rebuilt if it changed."""
        self.stale = self.speeds.set_facts(facts) or self.stale

    def _set_time(self, now_s: float, wall_s: float | None) -> None:
        self._now_s = now_s
        self._wall_s = now_s if wall_s is None else wall_s
        skew_s = self._wall_s - now_s
        self._clock_jumped = self._clock_jumped or abs(skew_s - self._wall_offset_s) > CLOCK_STEP_S
        self._wall_offset_s = skew_s

    def _check_calendar(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """React if a reservation begins or ends, or a time limit now reaches into one: then some nodes open or close to other jobs."""
        if self._wall_s < self._calendar_s:
            return
        self._calendar_s = self.calendar.next_change_s(self._wall_s)
        for job_id, entry in list(self.entries.items()):
            if entry.started_s < 0.0:
                self._sync(snapshot, job_id, now_s)
        self._line_changes.apply(self.board)
        self._wake_s = -INFINITE

    def _release_parked(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Release parked jobs whose time has come."""
        while self._wake_times and self._wake_times[0][0] <= self._wall_s:
            _, job_id = heapq.heappop(self._wake_times)
            if job_id in self.ineligible:
                self._sync(snapshot, job_id, now_s)
                self._wake_s = -INFINITE

    def _refresh_speeds(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Give jobs of which something was learned their new speeds. Cost: one look at each job, at most once a minute."""
        names = self.speeds.take_changed(now_s)
        if not names:
            return
        for job_id, entry in list(self.entries.items()):
            job = snapshot.jobs[job_id]
            if (job.user, job.spec.name) not in names:
                continue
            klass = self._class_of(job, self._shaping.needs_of(job) or entry.job_class.needs)
            if entry.started_s < 0.0:
                self._reclass(entry, klass)
            elif (klass.speeds, klass.guessed_kinds) != (entry.job_class.speeds, entry.job_class.guessed_kinds):
                self.board.change_speeds(entry, klass)
        self._line_changes.apply(self.board)
        self._wake_s = -INFINITE

    def _refresh_kept_off(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Let waiting jobs use rented nodes, or not, by what is known of run times by now. Cost: one prediction for each, now and then."""
        if self.order_rules is None or not self._rented.check_is_due(now_s):
            return
        for job_id, entry in list(self.entries.items()):
            if entry.started_s < 0.0:
                job = snapshot.jobs[job_id]
                rented = self._rented.bits & ~self.fleet_index.left_out_by(job.spec)
                if self.kept_off(job) & rented != entry.job_class.excluded & rented:
                    self._sync(snapshot, job_id, now_s)
                    self._wake_s = -INFINITE
        self._line_changes.apply(self.board)

    # ---------------------------------------------------------------- queries

    @property
    def now_s(self) -> float:
        """The time of the last plan, in its seconds."""
        return self._now_s

    def needs_of(self, job: Job) -> tuple[Need, ...]:
        """The job's needs on the nodes that accept work now, in order of preference; empty if they can never hold it."""
        return self._shaping.needs_of(job)

    def kept_off(self, job: Job) -> int:
        """The nodes that cost money and on which the rule of its queue or project lets it not run, as a bitset."""
        rules = self.order_rules
        if rules is None:
            return 0
        return self._rented.kept_off(job, rules, self._queues, self.fleet_index)

    def explain_reservation(self, job: Job) -> str:
        """The reservation that keeps the job off its nodes, for users."""
        asker = reservation_query_of(job)
        return self.calendar.explain(self.calendar.closed_nodes(asker, self._wall_s), asker, self._wall_s)

    # ---------------------------------------------------------------- nodes

    def _update_nodes(self, snapshot: ClusterSnapshot, nodes: Iterable[NodeId]) -> bool:
        others = {node_id: self._seen_nodes[node_id].foreign_usage for node_id in nodes if node_id in self._seen_nodes}
        for node_id in nodes:
            if not self.stale:
                self._update_node(snapshot, node_id)
        if not self.stale:
            self._update_foreign_usage(
                snapshot, {name: held for name, held in others.items() if snapshot.nodes[name].foreign_usage != held}
            )
        return self.stale

    def _update_foreign_usage(self, snapshot: ClusterSnapshot, before: Mapping[NodeId, ForeignUsage]) -> None:
        """Usage outside Phalanx changed on these nodes: starts planned there are decided again."""
        if before:
            self._cancel_starts(apply_foreign_usage(self.board, self.fleet_index, snapshot, before))
            self._wake_s = -INFINITE

    def _cancel_starts(self, numbers: Collection[int]) -> None:
        """Jobs that are due on these nodes wait again."""
        for entry in self.pending_placements.remove_on_nodes(numbers):
            self.board.undo_start(entry, self._now_s)

    def _update_node(self, snapshot: ClusterSnapshot, node_id: NodeId) -> None:
        """A node joined, left or changed. A change of its hardware or labels needs a new board; state and foreign usage do not."""
        node, before = snapshot.nodes.get(node_id), self._seen_nodes.get(node_id)
        if (
            node is None
            or before is None
            or (node.devices, node.labels, node.host) != (before.devices, before.labels, before.host)
            or node.mounts_error != before.mounts_error
        ):
            self.stale = True
            return
        self._seen_nodes[node_id] = node
        for number in self.fleet_index.numbers_of_node[node_id]:
            self.fleet_index.nodes[number] = node
            if node.schedulable == (number in self.board.closed_nodes):
                if node.schedulable:
                    self.board.restore_node(number)
                else:
                    self.board.remove_node(number)
        if node.last_choice is not before.last_choice:
            self._update_slow_nodes()
        if node.datasets != before.datasets:
            self._move_datasets(before, node)
        if node.schedulable != before.schedulable:
            self._rejudge(snapshot)
            self._shaping.invalidate(node)
            self._update_shapes(snapshot)

    def _rejudge(self, snapshot: ClusterSnapshot) -> None:
        """Nodes, queues, reservations or the clock have changed, or a node has been down for so long that it does not count any more."""
        self.feasibility.drop()
        self._judged_until_s = self.feasibility.checker(snapshot, self._wall_s).valid_until_s

    def _update_slow_nodes(self) -> None:
        self.board.last_choice_nodes = bitset_of(
            number
            for number, node in enumerate(self.fleet_index.nodes)
            if node.last_choice or node.id in self._rented.used_last
        )

    def _update_rented(self, snapshot: ClusterSnapshot) -> None:
        self._rented.update(snapshot, self.fleet_index, self._seen_nodes)
        self._update_slow_nodes()

    def _update_data_nodes(self) -> None:
        holders: dict[str, list[int]] = {}
        for number, node in enumerate(self.fleet_index.nodes):
            for one in node.datasets:
                holders.setdefault(one.key, []).append(number)
        self.board.data_nodes = {key: bitset_of(numbers) for key, numbers in holders.items()}

    def _move_datasets(self, before: Node, node: Node) -> None:
        """Update the index of datasets for one node: nodes report each copy, and a fleet may have 100,000 of them."""
        bits = bitset_of(self.fleet_index.numbers_of_node[node.id])
        found = dict(self.board.data_nodes)  # copies of the board share it
        for one in before.datasets:
            found[one.key] = found.get(one.key, 0) & ~bits
        for one in node.datasets:
            found[one.key] = found.get(one.key, 0) | bits
        self.board.data_nodes = {key: holders for key, holders in found.items() if holders}

    def _update_shapes(self, snapshot: ClusterSnapshot) -> None:
        """Other nodes are up: a request without a fixed shape may have a different one, or have one for the first time."""
        self._cancel_starts(self.board.closed_nodes)
        for job_id, wait in list(self.ineligible.items()):
            if wait.reason in SHAPE_REASONS:
                self._sync(snapshot, job_id, self._now_s)
        for job_id, entry in list(self.entries.items()):
            if entry.started_s < 0.0:
                job = snapshot.jobs[job_id]
                if self._shaping.needs_of(job) != entry.job_class.needs:
                    self._sync(snapshot, job_id, self._now_s)
        self._line_changes.apply(self.board)
        self._wake_s = -INFINITE

    # ---------------------------------------------------------------- jobs

    def _learn_history(self, jobs: Iterable[Job]) -> None:
        """Learn from the available records of jobs that ended before this head began."""
        self._history_learned = True
        for job in jobs:
            self.speeds.learn(job)
            if job.state in LEARNED_STATES and job.started_s is not None and job.ended_s is not None:
                run_time_s = max(0.0, job.ended_s - job.started_s)
                gpus = max(1, job.spec.role.gpus.total)
                self.policy.learn(self._classes.label(job), gpus, job.submit_s, run_time_s)
                self._ended(job)

    def _ended(self, job: Job) -> None:
        dropped_label = self._classes.record_end(job)
        if dropped_label is not None:
            self.policy.drop_label(dropped_label)

    def _sync(self, snapshot: ClusterSnapshot, job_id: JobId, now_s: float) -> bool:
        """Synchronise the board with one job's records; returns whether the policy may decide differently now."""
        job, attempt = snapshot.jobs.get(job_id), snapshot.attempts.get(job_id)
        entry = self.entries.get(job_id)
        if job is not None:
            self.speeds.learn(job)
        if job is None or job.state.terminal:
            self._remove(job_id, entry, job, now_s)
            return entry is not None
        if attempt is not None:
            self._sync_running(job, attempt, entry)
            return entry is None
        return self._sync_pending(snapshot, job, entry, now_s)

    def _remove(self, job_id: JobId, entry: JobEntry | None, job: Job | None, now_s: float) -> None:
        self.ineligible.pop(job_id, None)
        self.pending_placements.drop(job_id)
        self.pending_placements.clear_rejections(job_id)
        self._charges.stop(self.board.quotas, job_id, self._wall_s)
        self._staging.drop(job_id)
        if entry is None:
            return
        del self.entries[job_id]
        del self.job_id_by_seq[entry.seq]
        if entry.started_s < 0.0:
            self._line_changes.remove(entry)
            return
        learn = job is not None and job.state in LEARNED_STATES
        self.board.finish(entry, now_s, learn=learn)
        if learn and job is not None:
            self._ended(job)

    def _sync_running(self, job: Job, attempt: Attempt, entry: JobEntry | None) -> None:
        self.ineligible.pop(job.id, None)
        self.pending_placements.clear_rejections(job.id)
        self._staging.drop(job.id)
        if entry is None:
            entry = self._adopt(job, attempt)
        if job.checkpoints:
            entry.saved_s = NEVER_S if job.spec.saves_on_stop else job.checkpoints[-1].saved_s - self._wall_offset_s
        entry.stated_end = job.stated_end  # takes effect in the next pass, which it does not cause
        self._charges.start(self.board.quotas, job, entry.job_class.queue, attempt, self._wall_s)

    def _adopt(self, job: Job, attempt: Attempt) -> JobEntry:
        """The job runs but is not on the board: after a start of the head or a rebuild of the board."""
        places, indices = self.fleet_index.places(attempt.allocation)
        kinds = {self.fleet_index.model_of_node[number] for number, _ in places}
        as_it_runs = need_of_attempt(attempt, kinds, self.fleet_index.numbers_of_node)
        entry = self._new_entry(job, self._shaping.needs_of(job) or (as_it_runs,))
        entry.never_stopped |= attempt.gave_devices_back  # its end frees no device
        share = attempt.allocation.grants[0].share
        milli = 0 if share is None else share.milli
        need = need_of_places(entry.job_class.needs, places, self.fleet_index.model_of_node, milli) or as_it_runs
        # A placement in the future means that the clock was set back while the head was down.
        placed_s = self._known_starts_s.get(job.id, min(attempt.placed_s - self._wall_offset_s, self._now_s))
        self.board.add_running(entry, need, places, placed_s, indices)
        return entry

    def _sync_pending(self, snapshot: ClusterSnapshot, job: Job, entry: JobEntry | None, now_s: float) -> bool:
        self._charges.stop(self.board.quotas, job.id, self._wall_s)
        self._staging.update(job)
        outlook = self.feasibility.checker(snapshot, self._wall_s).check_job(job)
        if outlook.never:  # off the board, where it would hold back others
            wait: WaitReason | None = WaitReason(reason=WaitReasonCode.NEVER, detail=outlook.detail)
        else:
            wait = ineligibility(job, snapshot.queues.get(job.queue), self._wall_s)
        if wait is ELIGIBLE:
            shapes = self._shaping.shapes_of_job(job)
            wait = shapes if isinstance(shapes, WaitReason) else ELIGIBLE
            if wait is not ELIGIBLE and wait.reason is WaitReasonCode.NODES_DOWN and outlook.detail:
                wait = replace(wait, detail=outlook.detail)
        needs = self._shaping.needs_of(job) if wait is ELIGIBLE else ()
        if wait is ELIGIBLE and not needs:
            level = job.spec.topology.within if job.spec.topology.required else job.spec.topology.slice_within
            wait = WaitReason(
                reason=WaitReasonCode.TOPOLOGY,
                detail=f"needs one {level}, but no node is labelled with its {level} any more",
            )
        if wait is not ELIGIBLE:
            self._park(job, entry, wait, now_s)
            return entry is not None
        self.ineligible.pop(job.id, None)
        if entry is not None:  # created while a stop was in progress, so it does not count that one
            entry.stops, entry.moves = job.preemptions, job.moves
        if entry is None:
            entry = self._new_entry(job, needs)
            self.board.add_waiting(entry)
            return True
        if job.id in self.pending_placements:
            return False
        avoid = self.fleet_index.bitset_of(job.avoided_nodes)
        if entry.started_s >= 0.0:
            entry.lost_nodes = job.reason in LOST_NODE_REASONS
            entry.avoided_nodes = avoid
            self.board.requeue_lost(entry, now_s, self._attained_s(job))
            self._reclass(entry, self._class_of(job, needs))  # a running job keeps the class that it started with
            return True
        entry.attained_s = self._attained_s(job)
        changed = avoid != entry.avoided_nodes
        entry.avoided_nodes = avoid
        return self._reclass(entry, self._class_of(job, needs)) or changed

    def _reclass(self, entry: JobEntry, job_class: JobClass) -> bool:
        """Move the waiting job to this class; returns whether it differs from the current one."""
        if job_class is entry.job_class:
            return False
        self._line_changes.change_class(entry, job_class)
        return True

    def _park(self, job: Job, entry: JobEntry | None, wait: WaitReason, now_s: float) -> None:
        self.ineligible[job.id] = wait
        if entry is not None:
            if self.pending_placements.drop(job.id):
                self.board.undo_start(entry, now_s)
            elif entry.started_s >= 0.0:
                self.board.requeue_lost(entry, now_s, self._attained_s(job))
            self._line_changes.remove(entry)
            del self.entries[job.id]
            del self.job_id_by_seq[entry.seq]
        if wait.reason in (WaitReasonCode.BACKOFF, WaitReasonCode.ENGINE_LIMIT):
            heapq.heappush(self._wake_times, (job.not_before_s, job.id))
        elif wait.reason is WaitReasonCode.BEGIN_TIME and job.spec.begin_s is not None:
            heapq.heappush(self._wake_times, (job.spec.begin_s, job.id))

    def _new_entry(self, job: Job, needs: tuple[Need, ...]) -> JobEntry:
        self._line_changes.apply_class_changes(self.board)
        entry = JobEntry(
            seq=job.seq,
            job_class=self._class_of(job, needs),
            submit_s=min(job.submit_s - self._wall_offset_s, self._now_s),
            size_s=self._size_s(job),
            attained_s=self._attained_s(job),
            stops=job.preemptions,
            moves=job.moves,
            avoided_nodes=self.fleet_index.bitset_of(job.avoided_nodes),
            data=staged_keys(job.spec.data, job.spec.data_mode),
            never_stopped=not job.spec.preemptible,
            saved_s=NEVER_S if job.spec.saves_on_stop else 0.0,
            lost_nodes=job.reason in LOST_NODE_REASONS,
            stated_end=job.stated_end,
        )
        self.entries[job.id] = entry
        self.job_id_by_seq[job.seq] = job.id
        return entry

    def _attained_s(self, job: Job) -> float:
        """Work saved over its earlier attempts, less the work that each restart repeated."""
        return job.attained_s - self.settings.restart_cost_s * (job.preemptions + job.moves)

    def _size_s(self, job: Job) -> float:
        if self.settings.run_time_of is not None:
            return self.settings.run_time_of(job)
        return DURATION_UNKNOWN if job.spec.time_limit_s is None else job.spec.time_limit_s

    def _class_of(self, job: Job, needs: tuple[Need, ...]) -> JobClass:
        queue = self._queues.get(job.queue)
        klass, until_s = self._classes.class_of(
            job,
            needs,
            self.board,
            self.fleet_index,
            self.calendar,
            queue,
            self._wall_s,
            self.speeds.estimate(job),
            self.kept_off(job),
            min_stay_s(self._queues, job.queue),
        )
        self._calendar_s = min(self._calendar_s, until_s)
        return klass


def _nodes_of_pool(pool: NodePool) -> tuple[int, NodeTemplate]:
    """How many nodes a pool can have, and which: if that changes, waiting jobs are judged again."""
    return 0 if pool.removing else pool.most_nodes, pool.template
