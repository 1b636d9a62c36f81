"""The live scheduler: keeps a board in step with the records, runs the policy on it, and turns its decisions into a plan.

The board is the planned state, the records are the actual state. Jobs are synchronised one by one from their current records, not from
events: a late or duplicate report has no effect. `due` bridges the two: jobs that the policy has started while others still save and
leave their nodes; they are placed as soon as the nodes are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from phalanx.core.fleet.node import Node, Others
from phalanx.core.ids import JobId, NodeId, QueueId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_builder import Seen, new_board, take_difference
from phalanx.core.scheduling.calendar import Calendar, asker_of
from phalanx.core.scheduling.classes import Classes, LineChanges
from phalanx.core.scheduling.due import Due
from phalanx.core.scheduling.entry import NEVER_S, Decision, Entry, Klass, Listener, Verb
from phalanx.core.scheduling.explanations import ELIGIBLE, Waits, not_eligible, stop_of, why_waiting
from phalanx.core.scheduling.fleet_index import Fit, Shaping, fit_of
from phalanx.core.scheduling.hazard import HazardTable
from phalanx.core.scheduling.needs import Need, held_as, need_of
from phalanx.core.scheduling.node_sets import bits_of
from phalanx.core.scheduling.policies import make_policy
from phalanx.core.scheduling.quota import Charges
from phalanx.core.scheduling.settings import Policy
from phalanx.core.state.plan import Placement, Plan, Stop, Waiting
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState, Reason
from phalanx.core.work.queue import Queue
from phalanx.core.work.reservation import Reservation

LEARNED_STATES: Final = (
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.TIMEOUT,
)  # final states that count towards run time statistics
INFINITE: Final = float("inf")
DURATION_UNKNOWN: Final = -1.0
CLOCK_STEP_S: Final = 1.0  # NTP corrects smaller steps
REPAIR_REASONS: Final = (Reason.NODE_FAIL, Reason.DRAINED)  # not the job's fault: it gets its place back
SHAPE_REASONS: Final = (
    Reason.NO_NODES,
    Reason.NODES_DOWN,
    Reason.TOPOLOGY,
)  # the job has no shape on the nodes that are up


class Scheduler:
    """One fleet's scheduler.

    Attributes:
        entries: the board's entry of each job that may run or runs.
        parked: jobs that may not start regardless of free capacity, with the reason.
        due: started by the policy, not yet placed: running jobs on their nodes must stop first.
        table: statistics of run times; survives a rebuild of the board.
        ids: job ids by seq.
        held_over: the last cycle reached its limit of placements, and more are due.
        stale: the board must be rebuilt.
        said: cached reasons why classes wait, cleared by each plan.
    """

    def __init__(self, policy: Policy | None = None, *, table: HazardTable | None = None) -> None:
        self.policy = policy or Policy()
        self.table = table or HazardTable()
        self.board = Board(())
        self.decider: Listener = Listener()
        self.fit = Fit()
        self.calendar = Calendar()
        self.entries: dict[JobId, Entry] = {}
        self.ids: dict[int, JobId] = {}
        self.parked: dict[JobId, Waiting] = {}
        self.due = Due()
        self.held_over = False
        self.stale = True
        self._seen_nodes: dict[NodeId, Node] = {}
        self._shaping = Shaping(self._seen_nodes, self.fit)
        self._classes = Classes()
        self._charges = Charges()
        self.said: dict[tuple[int, int], Waiting] = {}
        self._known_starts_s: dict[JobId, float] = {}  # start times of known runs, kept during a rebuild of the board
        self._wake_times: list[tuple[float, JobId]] = []  # when a parked job may become eligible by time alone
        self._wake_s = -INFINITE
        self._calendar_s = INFINITE
        self._now_s = self._wall_s = self._wall_offset_s = 0.0
        self._clock_jumped = False
        self._line_changes = LineChanges()
        self._history_learned = False
        self._queues: Mapping[QueueId, Queue] = {}

    # ---------------------------------------------------------------- updates

    def tell(self, seen: Seen, changed: Iterable[object], now_s: float, wall_s: float | None = None) -> None:
        """Process changed records; `seen` has their newest versions. Times as in `plan`."""
        jobs: dict[JobId, None] = {}
        nodes: dict[NodeId, None] = {}
        for record in changed:
            match record:
                case Job():
                    jobs[record.id] = None
                case Node():
                    nodes[record.id] = None
                case Queue() | Reservation():
                    self.stale = True
                case _:
                    pass  # an attempt's job changes with it whenever that matters here
        self._set_time(now_s, wall_s)
        if self._update_nodes(seen, nodes):
            return
        board_changed = bool(nodes)
        for job_id in jobs:
            board_changed |= self._sync(seen, job_id, now_s)
        self._line_changes.carry_out(self.board)
        if board_changed:
            self._wake_s = -INFINITE

    def load(self, seen: Seen, now_s: float) -> None:
        """Rebuild the board from the records."""
        self.stale = False
        self._queues = seen.queues
        self.fit = fit_of(seen.nodes)
        self._seen_nodes = dict(seen.nodes)
        self.calendar = Calendar(seen.reservations.values())
        self._calendar_s = self.calendar.next_change_s(self._wall_s) if self.calendar else INFINITE
        self.board = new_board(self.fit, seen, self.policy.restart_cost_s, self._wall_s)
        self.decider = make_policy(self.policy.name, self.board, self.policy.knobs, self.table)
        self.board.listen(self.decider)
        self.table.forget_active()
        # By the monotonic clock: the records' times are by a clock that may have been set since.
        self._known_starts_s = {
            job_id: entry.since_s
            for job_id, entry in self.entries.items()
            if entry.since_s >= 0.0 and job_id not in self.due
        }
        for known in (
            self.entries,
            self.ids,
            self.parked,
            self._charges,
            self.due,
            self._wake_times,
            self._line_changes,
        ):
            known.clear()
        self._classes.begin()
        self._shaping = Shaping(self._seen_nodes, self.fit)
        jobs = sorted(seen.jobs.values(), key=lambda job: job.seq)
        if not self._history_learned:
            self._learn_history(jobs)
        for job in jobs:
            if not job.state.terminal:
                self._sync(seen, job.id, now_s)
        self._known_starts_s = {}
        for number in range(len(self.fit.nodes)):
            if not self.fit.nodes[number].schedulable:
                self.board.node_left(number)
        self._update_slow_nodes()
        self._wake_s = -INFINITE

    def plan(self, seen: Seen, now_s: float, wall_s: float | None = None) -> Plan:
        """Decide. Cost: proportional to the changes since the last call, plus the waiting classes.

        Args:
            seen: the records.
            now_s: seconds of a monotonic clock, for waits and run times.
            wall_s: Unix seconds, as used in the records; equal to `now_s` if None.
        """
        self._set_time(now_s, wall_s)
        if self.stale:
            self.load(seen, now_s)
        if self._clock_jumped:  # the clock was set: recompute everything that depends on Unix time
            self._clock_jumped = False
            self._charges.begin_anew(self.board.quotas, seen.spent.values(), seen.attempts, self._wall_s)
            self._calendar_s = -INFINITE
            self._wake_times = [(-INFINITE, job_id) for job_id in self.parked]
        self._check_calendar(seen, now_s)
        self._release_parked(seen, now_s)
        quotas = self.board.quotas
        if quotas is not None and quotas.advance(self._wall_s):  # a budget was exhausted, or its next period has begun
            self._wake_s = -INFINITE
        stops: list[Stop] = []
        self.said = {}
        decided = now_s >= self._wake_s or bool(self.board.decisions)
        if decided:
            again_s = self.decider.decide(now_s)
            self._wake_s = INFINITE if again_s is None else again_s
            stops = self._apply_decisions(seen, self.board.drain())
        placements = self._place_due(seen, now_s)
        more = self.held_over = len(placements) >= self.policy.placements_max
        wake_s = (
            now_s
            if more
            else min(
                self._wake_s,
                min(self._wake_times[0][0] if self._wake_times else INFINITE, self._calendar_s) - self._wall_offset_s,
            )
        )
        if quotas is not None:
            wake_s = min(wake_s, quotas.next_change_s(self._wall_s) - self._wall_offset_s)
        return Plan(
            version=seen.version,
            placements=tuple(placements),
            stops=tuple(stops),
            waits=Waits(self, seen.jobs),
            wake_s=wake_s,
            decided=decided,
        )

    def why(self, job: Job) -> Waiting | None:
        """Why the pending job waits now; None if it does not."""
        parked = self.parked.get(job.id)
        if parked is not None:
            return parked
        entry = self.entries.get(job.id)
        return None if entry is None else why_waiting(self, job, entry)

    def blank(self) -> Scheduler:
        """A scheduler with the same policy and statistics and an empty board: for what-if trials."""
        other = Scheduler(self.policy, table=self.table.copy())
        other._classes, other._history_learned = self._classes.copy(), True
        return other

    def needs_of(self, job: Job) -> tuple[Need, ...]:
        """The job's needs on the nodes that accept work now, in order of preference; empty if they can never hold it."""
        return self._shaping.needs_of(job)

    def _set_time(self, now_s: float, wall_s: float | None) -> None:
        self._now_s = now_s
        self._wall_s = now_s if wall_s is None else wall_s
        skew_s = self._wall_s - now_s
        self._clock_jumped = self._clock_jumped or abs(skew_s - self._wall_offset_s) > CLOCK_STEP_S
        self._wall_offset_s = skew_s

    def _check_calendar(self, seen: Seen, now_s: float) -> None:
        """React if a reservation begins or ends, or a time limit now reaches into one: then some nodes open or close to other jobs."""
        if self._wall_s < self._calendar_s:
            return
        self._calendar_s = self.calendar.next_change_s(self._wall_s)
        for job_id, entry in list(self.entries.items()):
            if entry.since_s < 0.0:
                self._sync(seen, job_id, now_s)
        self._line_changes.carry_out(self.board)
        self._wake_s = -INFINITE

    def reserved_for(self, job: Job) -> str:
        """The reservation that keeps the job off its nodes, for users."""
        asker = asker_of(job)
        return self.calendar.said(self.calendar.closed_to(asker, self._wall_s), asker, self._wall_s)

    # ---------------------------------------------------------------- nodes

    def _update_nodes(self, seen: Seen, nodes: Iterable[NodeId]) -> bool:
        others = {node_id: self._seen_nodes[node_id].others for node_id in nodes if node_id in self._seen_nodes}
        for node_id in nodes:
            if not self.stale:
                self._update_node(seen, node_id)
        if not self.stale:
            self._update_foreign_usage(
                seen, {name: held for name, held in others.items() if seen.nodes[name].others != held}
            )
        return self.stale

    def _update_foreign_usage(self, seen: Seen, before: Mapping[NodeId, Others]) -> None:
        """Usage outside Phalanx changed on these nodes: starts planned there are decided again."""
        if before:
            self._cancel_starts(take_difference(self.board, self.fit, seen, before))
            self._wake_s = -INFINITE

    def _cancel_starts(self, numbers: Collection[int]) -> None:
        """Jobs that are due on these nodes wait again."""
        for entry in self.due.take_on(numbers):
            self.board.undo_start(entry, self._now_s)

    def _update_node(self, seen: Seen, node_id: NodeId) -> None:
        """A node joined, left or changed. A change of its hardware or labels needs a new board; state and foreign usage do not."""
        node, before = seen.nodes.get(node_id), self._seen_nodes.get(node_id)
        if (
            node is None
            or before is None
            or (node.devices, node.labels, node.cpus, node.memory_bytes)
            != (before.devices, before.labels, before.cpus, before.memory_bytes)
        ):
            self.stale = True
            return
        self._seen_nodes[node_id] = node
        for number in self.fit.numbers[node_id]:
            self.fit.nodes[number] = node
            if node.schedulable == (number in self.board.down):
                if node.schedulable:
                    self.board.node_back(number)
                else:
                    self.board.node_left(number)
        if node.last_choice is not before.last_choice:
            self._update_slow_nodes()
        if node.schedulable != before.schedulable:
            self._shaping.changed(node)
            self._update_shapes(seen)

    def _update_slow_nodes(self) -> None:
        self.board.slow = bits_of(number for number, node in enumerate(self.fit.nodes) if node.last_choice)

    def _update_shapes(self, seen: Seen) -> None:
        """Other nodes are up: a request without a fixed shape may have a different one, or have one for the first time."""
        self._cancel_starts(self.board.down)
        for job_id, wait in list(self.parked.items()):
            if wait.reason in SHAPE_REASONS:
                self._sync(seen, job_id, self._now_s)
        for job_id, entry in list(self.entries.items()):
            if entry.since_s < 0.0:
                job = seen.jobs[job_id]
                if self._shaping.needs_of(job) != entry.klass.needs:
                    self._sync(seen, job_id, self._now_s)
        self._line_changes.carry_out(self.board)
        self._wake_s = -INFINITE

    # ---------------------------------------------------------------- jobs

    def _learn_history(self, jobs: Iterable[Job]) -> None:
        """Learn from the available records of jobs that ended before this head began."""
        self._history_learned = True
        for job in jobs:
            if job.state in LEARNED_STATES and job.started_s is not None and job.ended_s is not None:
                label = self._classes.label(job)
                self.table.ended(
                    self.table.burst(label, max(1, job.spec.role.gpus.total), job.submit_s),
                    max(0.0, job.ended_s - job.started_s),
                )
                self._ended(job)

    def _ended(self, job: Job) -> None:
        dropped_label = self._classes.ended(job)
        if dropped_label is not None:
            self.table.forget(dropped_label)

    def _sync(self, seen: Seen, job_id: JobId, now_s: float) -> bool:
        """Synchronise the board with one job's records; returns whether the policy may decide differently now."""
        job, attempt = seen.jobs.get(job_id), seen.attempts.get(job_id)
        entry = self.entries.get(job_id)
        if job is None or job.state.terminal:
            self._remove(job_id, entry, job, now_s)
            return entry is not None
        if attempt is not None:
            self._sync_running(job, attempt, entry)
            return entry is None
        return self._sync_pending(seen, job, entry, now_s)

    def _remove(self, job_id: JobId, entry: Entry | None, job: Job | None, now_s: float) -> None:
        self.parked.pop(job_id, None)
        self.due.drop(job_id)
        self.due.settled(job_id)
        self._charges.end(self.board.quotas, job_id, self._wall_s)
        if entry is None:
            return
        del self.entries[job_id]
        del self.ids[entry.seq]
        if entry.since_s < 0.0:
            self._line_changes.goes(entry)
            return
        learn = job is not None and job.state in LEARNED_STATES
        self.board.end(entry, now_s, learn=learn)
        if learn and job is not None:
            self._ended(job)

    def _sync_running(self, job: Job, attempt: Attempt, entry: Entry | None) -> None:
        self.parked.pop(job.id, None)
        self.due.settled(job.id)
        if entry is None:
            entry = self._adopt(job, attempt)
        if job.checkpoints:
            entry.saved_s = NEVER_S if job.spec.saves_on_stop else job.checkpoints[-1].saved_s - self._wall_offset_s
        self._charges.begin(self.board.quotas, job.id, entry.klass.queue, attempt, self._wall_s)

    def _adopt(self, job: Job, attempt: Attempt) -> Entry:
        """The job runs but is not on the board: after a start of the head or a rebuild of the board."""
        entry = self._new_entry(job, self._shaping.needs_of(job) or (need_of(attempt),))
        places = self.fit.places(attempt.allocation)
        need = held_as(entry.klass.needs, places, self.fit.kind) or need_of(attempt)
        # A placement in the future means that the clock was set back while the head was down.
        placed_s = self._known_starts_s.get(job.id, min(attempt.placed_s - self._wall_offset_s, self._now_s))
        self.board.adopt(entry, need, places, placed_s)
        entry.shield_s = placed_s + self.policy.knobs.run_min_s
        return entry

    def _sync_pending(self, seen: Seen, job: Job, entry: Entry | None, now_s: float) -> bool:
        self._charges.end(self.board.quotas, job.id, self._wall_s)
        wait = not_eligible(job, seen.queues.get(job.queue), self._wall_s)
        if wait is ELIGIBLE:
            shapes = self._shaping.shapes_of_job(job)
            wait = shapes if isinstance(shapes, Waiting) else ELIGIBLE
        needs = self._shaping.needs_of(job) if wait is ELIGIBLE else ()
        if wait is ELIGIBLE and not needs:
            level = job.spec.spread.within if job.spec.spread.required else job.spec.spread.slice_within
            wait = Waiting(
                reason=Reason.TOPOLOGY, detail=f"needs one {level}, but no node is labelled with its {level} any more"
            )
        if wait is not ELIGIBLE:
            self._park(job, entry, wait, now_s)
            return entry is not None
        self.parked.pop(job.id, None)
        if entry is not None:  # created while a stop was in progress, so it does not count that one
            entry.stops, entry.moves = job.preemptions, job.moves
        if entry is None:
            entry = self._new_entry(job, needs)
            self.board.arrive(entry)
            return True
        if job.id in self.due:
            return False
        avoid = self.fit.bits(job.avoid)
        if entry.since_s >= 0.0:
            entry.repair = job.reason in REPAIR_REASONS
            entry.avoid = avoid
            self.board.fell(entry, now_s, self._attained_s(job))
            self._reclass(entry, self._class_of(job, needs))  # a running job keeps the class that it started with
            return True
        entry.attained_s = self._attained_s(job)
        changed = avoid != entry.avoid
        entry.avoid = avoid
        return self._reclass(entry, self._class_of(job, needs)) or changed

    def _reclass(self, entry: Entry, klass: Klass) -> bool:
        """Move the waiting job to this class; returns whether it differs from the current one."""
        if klass is entry.klass:
            return False
        self._line_changes.becomes(entry, klass)
        return True

    def _park(self, job: Job, entry: Entry | None, wait: Waiting, now_s: float) -> None:
        self.parked[job.id] = wait
        if entry is not None:
            if self.due.drop(job.id):
                self.board.undo_start(entry, now_s)
            elif entry.since_s >= 0.0:
                self.board.fell(entry, now_s, self._attained_s(job))
            self._line_changes.goes(entry)
            del self.entries[job.id]
            del self.ids[entry.seq]
        if wait.reason is Reason.BACKOFF:
            heapq.heappush(self._wake_times, (job.not_before_s, job.id))
        elif wait.reason is Reason.BEGIN_TIME and job.spec.begin_s is not None:
            heapq.heappush(self._wake_times, (job.spec.begin_s, job.id))

    def _release_parked(self, seen: Seen, now_s: float) -> None:
        """Release parked jobs whose time has come."""
        while self._wake_times and self._wake_times[0][0] <= self._wall_s:
            _, job_id = heapq.heappop(self._wake_times)
            if job_id in self.parked:
                self._sync(seen, job_id, now_s)
                self._wake_s = -INFINITE

    def _new_entry(self, job: Job, needs: tuple[Need, ...]) -> Entry:
        self._line_changes.reclass(self.board)
        entry = Entry(
            seq=job.seq,
            klass=self._class_of(job, needs),
            submit_s=min(job.submit_s - self._wall_offset_s, self._now_s),
            size_s=self._size_s(job),
            attained_s=self._attained_s(job),
            stops=job.preemptions,
            moves=job.moves,
            avoid=self.fit.bits(job.avoid),
            fixed=not job.spec.preemptible,
            saved_s=NEVER_S if job.spec.saves_on_stop else 0.0,
            repair=job.reason in REPAIR_REASONS,
        )
        self.entries[job.id] = entry
        self.ids[job.seq] = job.id
        return entry

    def _attained_s(self, job: Job) -> float:
        """Work saved over its earlier attempts, less the work that each restart repeated."""
        return job.attained_s - self.policy.restart_cost_s * (job.preemptions + job.moves)

    def _size_s(self, job: Job) -> float:
        if self.policy.size_of is not None:
            return self.policy.size_of(job)
        return DURATION_UNKNOWN if job.spec.time_limit_s is None else job.spec.time_limit_s

    def _class_of(self, job: Job, needs: tuple[Need, ...]) -> Klass:
        queue = self._queues.get(job.queue)
        klass, until_s = self._classes.klass_of(job, needs, self.board, self.fit, self.calendar, queue, self._wall_s)
        self._calendar_s = min(self._calendar_s, until_s)
        return klass

    # ---------------------------------------------------------------- plan

    def _apply_decisions(self, seen: Seen, decisions: Iterable[Decision]) -> list[Stop]:
        """The policy's decisions: stops for the plan, and jobs that become due."""
        stops: list[Stop] = []
        for decision in decisions:
            job_id = self.ids[decision.entry.seq]
            waiting = self.due.drop(job_id)  # decided but not yet placed: nothing of it runs
            if decision.verb is not Verb.START and not waiting and job_id in seen.attempts:
                stops.append(stop_of(self, job_id, decision))
            if decision.verb is not Verb.STOP and decision.entry.places:
                self.due.add(job_id, decision.entry)
        return stops

    def _place_due(self, seen: Seen, now_s: float) -> list[Placement]:
        """Place the due jobs whose nodes are free by now."""
        if not self.due:
            return []
        placed = self.due.place(seen, self.fit, self.policy.placements_max)
        for entry, placement in placed:
            entry.attained_s = self._attained_s(seen.jobs[placement.job_id])
            entry.since_s = entry.moved_s = now_s
            entry.shield_s = now_s + self.policy.knobs.run_min_s  # from the start, not from the decision
        return [placement for _, placement in placed]

    def rejected(self, job_id: JobId, now_s: float) -> None:
        """The newest state rejected the placement: retry after further changes, and give up after a while."""
        entry = self.entries.get(job_id)
        if entry is None or entry.since_s < 0.0:
            return
        if not self.due.refused(job_id, entry, now_s):
            self.board.undo_start(entry, now_s)
            self._wake_s = -INFINITE
