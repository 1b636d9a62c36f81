"""One step of the controller: apply events, run transitions, schedule, verify; return what to commit and to send.

`Controller.step` is synchronous and uses no clock, thread, disk or network. The live head and the simulator run the same steps.
The controller owns the world between steps. If the store refuses a step's change, `Change.undo` reverts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from phalanx.controller import reports
from phalanx.controller.data_staging import StagingKeeper
from phalanx.controller.end_jobs import submit_end_jobs
from phalanx.controller.idle_jobs import IdlePolicyKeeper
from phalanx.controller.leases import (
    MARGIN_S,
    PRESUMED_HOLDER,
    UNCLAIMED,
    LeaseBook,
)
from phalanx.controller.maintenance_notices import NewAttemptNotices
from phalanx.controller.read_snapshot import ReadSnapshot, hypothetical_jobs, take_read_snapshot
from phalanx.controller.requests import registry
from phalanx.controller.requests.pools import PoolKeeper
from phalanx.controller.reservation_windows import ReservationWindows
from phalanx.controller.rulebook import Rulebook
from phalanx.controller.runtime_history import RuntimeHistory
from phalanx.controller.services.canary_judge import CanaryJudge
from phalanx.controller.services.load_scaler import LoadScaler
from phalanx.controller.services.service_reconciler import ServiceReconciler
from phalanx.controller.speed_facts import DeviceFacts, SpeedFactsKeeper
from phalanx.controller.step_context import ControllerSettings, FleetFailureRate, StepContext
from phalanx.controller.step_result import (
    IDLE_WAKE_S,
    Answer,
    ControllerTime,
    StepResult,
)
from phalanx.controller.supervisor_incarnations import SupervisorIncarnations
from phalanx.controller.timers import Deadline, DeadlineKind, Timers
from phalanx.controller.waits import GuardedWaits
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, Generation, JobId, SupervisorId
from phalanx.core.lifecycle.events import ReminderDue, StartOverdue, StopRequested
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.feasibility.cache import FeasibilityCache
from phalanx.core.scheduling.outlook.bursting import BurstRules
from phalanx.core.scheduling.outlook.explanations import WaitReasons
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import Event, PreparePlannedStop, Request, SubmitJob
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.records import IDEMPOTENCY, PROJECTS
from phalanx.core.state.reports import IdleJobsObserved, LoadObserved, SupervisorRegistered
from phalanx.core.state.world import World, WorldChange
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import FIRST_GENERATION, Attempt, EndCause, MemberState
from phalanx.core.work.job import Job
from phalanx.core.work.seats import parse_seat, supervisor_name_of
from phalanx.core.work.states import AttemptState

ENDED_JOBS_KEPT: Final = 1000  # in memory, for fast reads; the store has all
KEYS_KEPT: Final = 100_000  # idempotency keys in memory
START_LIMIT_S: Final = 60.0  # from Prepare to the barrier; a node that needs longer is unhealthy
SEAT_WAIT_S: Final = 30.0 + START_LIMIT_S  # until a seat's supervisor registers; engines report failed starts earlier
STAGING_LIMIT_S: Final = 86400.0  # for nodes that must copy the job's data first: 10 TB at 1 Gbit/s
SETUP_LIMIT_S: Final = 3600.0  # START_LIMIT_S for nodes that must set up the job's environment or download it first
SCHEDULER: Final = "scheduler"  # `by` of stops that the scheduler decides
REMIND_EVERY_S: Final = 5.0
HEAD_AWAY_S: Final = 2.0 * IDLE_WAKE_S  # a longer gap between two steps means that the head itself was suspended


@dataclass(slots=True)
class Controller:
    """The state machine of the head.

    Attributes:
        head_id: identifies this incarnation of the head.
        guard: held while the scheduler changes; readers of `waits` on other threads hold it too.
        waits: why each pending job waits, computed on access; read by the API, never stored.
        stats: counters since the start, for metrics.
        feasibility: judges whether a job can ever start, for submits, the scheduler, and readers on other threads.
        load_scaler: follows the load of services; its figures are read by the API.
        canaries: compares revisions in rollouts; its figures are read by the API.
        device_facts: reads what is known of the speed of device models; None: nothing.
    """

    world: World
    leases: LeaseBook
    settings: ControllerSettings
    policy: PolicySettings = field(default_factory=PolicySettings)
    head_id: str = ""
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    waits: Mapping[JobId, WaitReason] = field(init=False)
    scheduler: Scheduler = field(init=False)
    stats: dict[str, float] = field(default_factory=dict)
    run_times: RuntimeHistory = field(default_factory=RuntimeHistory)
    _own_run_times: RuntimeHistory = field(default_factory=RuntimeHistory)  # read by this thread, the other by readers
    device_facts: DeviceFacts | None = None
    feasibility: FeasibilityCache = field(default_factory=FeasibilityCache)
    _placed_boot_s: dict[JobId, float] = field(default_factory=dict)
    # Requested generation of each live attempt, and when it was requested (CLOCK_BOOTTIME).
    _generations: dict[JobId, tuple[Epoch, Generation, float]] = field(default_factory=dict)
    _timers: Timers = field(default_factory=Timers)
    _windows: ReservationWindows = field(default_factory=ReservationWindows)
    _notices: NewAttemptNotices = field(default_factory=NewAttemptNotices)
    _incarnations: SupervisorIncarnations = field(init=False)
    _services: ServiceReconciler = field(init=False)
    _staging: StagingKeeper = field(init=False)
    load_scaler: LoadScaler = field(init=False)
    canaries: CanaryJudge = field(init=False)
    _limits_s: dict[JobId, float] = field(default_factory=dict)  # armed time limit of each live attempt
    # State in which each gang was last sent a command, and when: the start of its reminder interval.
    _commanded: dict[JobId, tuple[AttemptState, float]] = field(default_factory=dict)
    _queued: set[JobId] = field(default_factory=set)  # that a queue of their engine's cluster keeps waiting
    _stepped_boot_s: float = 0.0
    _ended: deque[JobId] = field(default_factory=deque)
    _losses: FleetFailureRate = field(init=False)
    _rulebook: Rulebook = field(init=False)
    _steady_offset_s: float | None = None
    _pools: PoolKeeper = field(default_factory=PoolKeeper)
    _idle: IdlePolicyKeeper = field(default_factory=IdlePolicyKeeper)
    _idle_limits: IdlePolicyKeeper = field(default_factory=partial(IdlePolicyKeeper, own=True))
    _speed_facts: SpeedFactsKeeper | None = None

    def __post_init__(self) -> None:
        self._incarnations = SupervisorIncarnations(self.head_id)
        self._services = ServiceReconciler(self.world)
        self.canaries = self._services.canaries
        self._staging = StagingKeeper(self.world)
        self.load_scaler = LoadScaler(self.world)
        self._losses = FleetFailureRate(self.world)
        self._rulebook = Rulebook(self.world, self.settings.rules)
        self.scheduler = Scheduler(self.policy, feasibility=self.feasibility)
        self.scheduler.order_rules = BurstRules(self._own_run_times.predictor, lambda: self.world.table(PROJECTS))
        if self.device_facts is not None:
            self._speed_facts = SpeedFactsKeeper(self.world, self.device_facts)
        self.waits = GuardedWaits(WaitReasons(self.scheduler, self.world.jobs), self.guard)

    def start(self, now: ControllerTime, *, leases_until_s: float = 0.0) -> None:
        """Take over a loaded world. Time limits continue, and every lease counts as live for one full lease.

        Start limits begin again: supervisors could not reach a head that was down.

        Args:
            now: when this incarnation of the head starts.
            leases_until_s: CLOCK_BOOTTIME up to which a planned stop has granted leases; 0 for none.
        """
        # The previous head granted leases by the size of the whole fleet: the larger the fleet, the longer its leases.
        full_s = now.boot_s + self.leases.terms_for(len(self.world.nodes))[0] + MARGIN_S
        self.leases.long_until_s = leases_until_s
        for node in self.world.nodes.values():
            self._incarnations.record(node)
            if node.state is NodeState.UP and node.supervisor_id is not None:
                self.leases.grant(node.id, node.supervisor_id, now.boot_s, until_s=max(full_s, leases_until_s))
        for attempt in self.world.attempts.values():
            holder, until_s = PRESUMED_HOLDER, max(full_s, leases_until_s)
            if attempt.queued_why:
                holder, until_s = UNCLAIMED, now.boot_s + SEAT_WAIT_S
                self._queued.add(attempt.job_id)
            self._expect_seats(attempt, holder, now.boot_s, until_s=until_s)
            self._placed_boot_s[attempt.job_id] = now.boot_s - max(0.0, now.wall_s - attempt.placed_s)
            self._generations[attempt.job_id] = (attempt.epoch, attempt.generation, now.boot_s)
            self._publish_epochs(attempt)
            self._arm(attempt, now.boot_s, fresh=True)
        self._services.touch_all()
        self._staging.start(now.boot_s)
        ended = [job for job in sorted(self.world.jobs.values(), key=lambda job: job.seq) if job.state.terminal]
        self._ended.extend(job.id for job in ended)
        by_end = sorted(ended, key=lambda job: job.ended_s or 0.0)
        for run_times in (self.run_times, self._own_run_times):
            run_times.load(by_end)

    def step(self, now: ControllerTime, inbox: Sequence[Event]) -> StepResult:
        """Run one step. A refused request is answered with its error and changes nothing. An exception undoes the whole step."""
        if now.boot_s - self._stepped_boot_s > HEAD_AWAY_S:
            self.leases.presume_live(now.boot_s)
        self._stepped_boot_s = now.boot_s
        ages_s = _AttemptAges(self._placed_boot_s, now.boot_s)
        context = StepContext(
            world=self.world,
            settings=self.settings,
            now=now,
            change=WorldChange(world=self.world),
            ages_s=ages_s,
            failure_rate=self._losses,
            rulebook=self._rulebook,
            feasibility_cache=self.feasibility,
        )
        try:
            answers = [self._apply_event(context, event) for event in inbox]
            self._expire_leases(context)
            self._windows.update(context)
            self._fire_deadlines(context)
            self._idle.update(context)
            self._idle_limits.update(context)
            context.update_bad_nodes()
            self.load_scaler.update(context)
            self._services.update(context)
            self._staging.update(context)
            submit_end_jobs(context)
            context.settle_dependents()  # before the cycle, so that released jobs and new replicas can start in this step
            reconciled = len(context.change.records)
            wake_in_s = self._cycle(context)
            self._services.record(context.change.records[reconciled:])
            if context.ended or context.ended_with_command:  # by the cycle itself
                submit_end_jobs(context)
                context.settle_dependents()
                self.scheduler.stale, wake_in_s = True, 0.0
        except BaseException:
            context.change.undo()
            self._undone()
            raise
        self._count("steps", 1)
        self._count("events", len(inbox))
        return StepResult(
            change=context.change,
            answers=answers,
            commands=context.commands,
            lost=list(context.lost),
            provider_calls=context.provider_calls,
            audit_calls=context.audit_calls,
            due_in_s=self._due_in_s(now, wake_in_s),
        )

    def committed(self, outbox: StepResult, now: ControllerTime) -> None:
        """Update leases, timers and history after the outbox's change became durable.

        Raises:
            ExceptionGroup: internal errors, after everything else was published.
        """
        self._idle.settle()
        self._idle_limits.settle()
        if outbox.lost:
            self.leases.drop(outbox.lost)
        for deadline in self._timers.settle():
            if deadline.kind is DeadlineKind.REMIND and self._still_applies(deadline):
                self._arm_reminder(self.world.attempts[deadline.job_id], now.boot_s)
        newest: dict[tuple[JobId, Epoch], Attempt] = {}
        over: list[Job] = []
        for record in outbox.change.records:
            if isinstance(record, Attempt):
                newest[record.job_id, record.epoch] = record
            elif isinstance(record, Node):
                self._losses.invalidate()
                self._incarnations.record(record)
            elif isinstance(record, Job):
                if record.state.terminal:
                    self._ended.append(record.id)
                    over.append(record)
                elif record.spec.time_limit_s is not None and record.id in self._placed_boot_s:
                    # The limit may have been set or shortened.
                    self._arm_limit(record.id, record.spec.time_limit_s, record.epoch, FIRST_GENERATION)
        for run_times in (self.run_times, self._own_run_times):
            run_times.record(over, newest)
        faults: list[Exception] = []
        for attempt in newest.values():
            try:
                self._track_attempt(attempt, now.boot_s)
            except Exception as error:  # noqa: BLE001  # an internal error in one must not cost the others their leases
                faults.append(error)
        self._timers.sweep(self._still_applies)
        if outbox.change.removed:
            self._losses.invalidate()
        self._drop_old()
        if faults:
            raise ExceptionGroup("internal errors while tracking attempts", faults)

    def refused(self, outbox: StepResult) -> None:
        """Undo a change that the store refused. The next step evaluates everything again."""
        outbox.change.undo()
        self._undone()
        self._count("refused_commits", 1)

    def _undone(self) -> None:
        """A step's change was undone: judge everything again."""
        self._timers.undo()
        self._pools.undo()
        self._idle.undo()
        self._idle_limits.undo()
        self._losses.invalidate()
        self._services.touch_all()
        self.scheduler.stale = True

    def read_snapshot(
        self, now: ControllerTime, *, job_id: JobId | None = None, submission: SubmitJob | None = None
    ) -> ReadSnapshot:
        """Take a snapshot for questions answered on other threads; with `submission`, also the jobs that this submit would create.

        Raises:
            PhalanxError: the submit would be refused.
        """
        found = take_read_snapshot(self.world, self.scheduler, self.run_times, self.waits, now, job_id=job_id)
        if submission is None:
            return found
        context = StepContext(
            world=self.world,
            settings=self.settings,
            now=now,
            change=WorldChange(world=self.world),
            failure_rate=FleetFailureRate(self.world),
            feasibility_cache=self.feasibility,
        )
        return replace(found, hypothetical_jobs=hypothetical_jobs(context, submission))

    # ---- events -------------------------------------------------------------------------------------------------------

    def _apply_event(self, context: StepContext, event: Event) -> Answer | PhalanxError:
        answer: Answer = None
        try:
            if isinstance(event, Request):
                answer = registry.handle_request(context, event)
            else:
                if isinstance(event, SupervisorRegistered) and event.seat is None:
                    self._check_incarnation(event, context.now.boot_s)
                reports.handle_report(context, event)
                if isinstance(event, LoadObserved):
                    self.load_scaler.observe(event, context.now.boot_s)
                    self._services.observe(event, context.now.boot_s)
                if isinstance(event, SupervisorRegistered):
                    name = event.node.id if event.seat is None else event.seat.name
                    self.leases.grant(name, event.supervisor_id, context.now.boot_s)
                    self._republish(context, event)
        except PhalanxError as error:
            return error
        if isinstance(event, IdleJobsObserved):
            self._idle.observe(event, context.now.boot_s)
            self._idle_limits.observe(event, context.now.boot_s)
        if isinstance(event, PreparePlannedStop):
            self.leases.grant_long(event.lease_s, event.grants_until_s)
        return answer

    def _check_incarnation(self, hello: SupervisorRegistered, boot_s: float) -> None:
        known = self.world.nodes.get(hello.node.id)
        current = None if known is None else known.supervisor_id
        self._incarnations.check(
            hello,
            known,
            renewed_recently=current is not None and self.leases.renewed_recently(hello.node.id, current, boot_s),
        )

    def _republish(self, context: StepContext, event: SupervisorRegistered) -> None:
        for attempt in context.world.attempts_on(event.node.id):
            self._publish_epochs(attempt)

    def _publish_epochs(self, attempt: Attempt) -> None:
        for member in attempt.members:
            counts = attempt.holds_allocation and member.state is not MemberState.LOST
            name = supervisor_name_of(self.world.nodes, member.node_id, attempt.job_id, attempt.epoch)
            self.leases.set_current(name, attempt.job_id, attempt.epoch if counts else None)

    def _expect_seats(self, attempt: Attempt, who: SupervisorId, boot_s: float, *, until_s: float) -> None:
        """Grant leases to seats whose supervisors the engine is starting; a seat without a supervisor at `until_s` is lost."""
        for member in attempt.members:
            name = supervisor_name_of(self.world.nodes, member.node_id, attempt.job_id, attempt.epoch)
            if name != member.node_id and not self.leases.belongs_to_other(name, who):
                self.leases.grant(name, who, boot_s, until_s=until_s)

    # ---- time ---------------------------------------------------------------------------------------------------------

    def _expire_leases(self, context: StepContext) -> None:
        for node_id in self.leases.expire(context.now.boot_s):
            why = f"no heartbeat for {format_duration(self.leases.terms[0])}: its lease expired"
            seat = parse_seat(node_id)
            if seat is None:
                reports.lose_node(context, node_id, why)
            else:
                reports.lose_seat(context, seat, why)
            context.lost[node_id] = None

    def _fire_deadlines(self, context: StepContext) -> None:
        for deadline in self._timers.take(context.now.boot_s):
            attempt = self.world.attempts.get(deadline.job_id)
            if attempt is None or not self._still_applies(deadline):
                continue
            match deadline.kind:
                case DeadlineKind.LIMIT:
                    limit_s = self.world.jobs[attempt.job_id].spec.time_limit_s
                    assert limit_s is not None, deadline
                    why = f"time limit of {format_duration(limit_s)} reached"
                    context.apply_event(attempt.job_id, StopRequested(cause=EndCause.TIMEOUT, why=why))
                case DeadlineKind.START:
                    silent = tuple(
                        member.node_id for member in attempt.members if member.state is MemberState.REQUESTED
                    )
                    waited_s = context.now.boot_s - self._generations[attempt.job_id][2]
                    context.apply_event(attempt.job_id, StartOverdue(silent=silent, waited_s=waited_s))
                case DeadlineKind.REMIND:
                    self._remind(context, attempt)

    def _remind(self, context: StepContext, attempt: Attempt) -> None:
        """Resend unanswered commands: one may have been lost, and nothing else repeats it."""
        if attempt.queued_why:  # its supervisors come when the engine's cluster admits it
            self._expect_seats(attempt, UNCLAIMED, context.now.boot_s, until_s=context.now.boot_s + SEAT_WAIT_S)
            return
        for member in attempt.members:
            if member.state not in (MemberState.STOPPED, MemberState.LOST):
                context.apply_event(attempt.job_id, ReminderDue(node_id=member.node_id))

    def _still_applies(self, deadline: Deadline) -> bool:
        """Whether the deadline still applies to the newest state."""
        attempt = self.world.attempts.get(deadline.job_id)
        current = attempt is not None and (attempt.epoch, attempt.generation) == (deadline.epoch, deadline.generation)
        if attempt is not None and attempt.queued_why and deadline.kind is not DeadlineKind.REMIND:
            return False
        match deadline.kind:
            case DeadlineKind.LIMIT:
                return attempt is not None and self._limits_s.get(deadline.job_id) == deadline.at_s
            case DeadlineKind.START:
                return current and attempt is not None and attempt.state is AttemptState.PLACED
            case DeadlineKind.REMIND:
                commanded = self._commanded.get(deadline.job_id)
                return current and commanded is not None and commanded[1] + REMIND_EVERY_S == deadline.at_s

    def _track_attempt(self, attempt: Attempt, boot_s: float) -> None:
        """Publish the epoch of an attempt whose newest record became durable, and arm its deadlines."""
        job_id = attempt.job_id
        if not attempt.holds_allocation:
            self._publish_epochs(attempt)
            self._queued.discard(job_id)
            for table in (self._placed_boot_s, self._generations, self._limits_s, self._commanded):
                table.pop(job_id, None)
            return
        known = self._generations.get(job_id)
        fresh = known is None or known[:2] != (attempt.epoch, attempt.generation)
        changed = (job_id in self._queued) != bool(attempt.queued_why)
        admitted = changed and not attempt.queued_why
        (self._queued.add if attempt.queued_why else self._queued.discard)(job_id)
        if admitted:  # the engine's cluster starts it only now
            fresh, self._placed_boot_s[job_id] = True, boot_s
        if fresh:
            self._placed_boot_s.setdefault(job_id, boot_s)
            self._generations[job_id] = (attempt.epoch, attempt.generation, boot_s)
        if known is None or known[0] != attempt.epoch or changed:
            self._expect_seats(attempt, UNCLAIMED, boot_s, until_s=boot_s + SEAT_WAIT_S)
        if fresh or attempt.state is AttemptState.STOPPING:  # members are lost only while the gang stops
            self._publish_epochs(attempt)
        self._arm(attempt, boot_s, fresh=fresh)

    def _arm(self, attempt: Attempt, boot_s: float, *, fresh: bool) -> None:
        job_id, epoch, generation = attempt.job_id, attempt.epoch, attempt.generation
        spec = self.world.jobs[job_id].spec
        if fresh:
            downloads = attempt.head_stores_copies and (epoch, generation) > (
                Epoch(1),
                FIRST_GENERATION,
            )  # checkpoints from the head
            start_s = SETUP_LIMIT_S if spec.has_long_preparation or downloads else START_LIMIT_S
            start_s = STAGING_LIMIT_S if spec.stages_data else start_s
            self._timers.arm(boot_s + start_s, DeadlineKind.START, job_id, epoch, generation)
        if attempt.state is AttemptState.RUNNING and not attempt.runs_hook:
            self._commanded.pop(job_id, None)
        elif fresh or job_id not in self._commanded or self._commanded[job_id][0] is not attempt.state:
            self._arm_reminder(attempt, boot_s)
        if spec.time_limit_s is not None:
            self._arm_limit(job_id, spec.time_limit_s, epoch, generation)

    def _arm_reminder(self, attempt: Attempt, boot_s: float) -> None:
        """Start the gang's reminder interval: it was sent a command now."""
        self._commanded[attempt.job_id] = (attempt.state, boot_s)
        self._timers.arm(
            boot_s + REMIND_EVERY_S, DeadlineKind.REMIND, attempt.job_id, attempt.epoch, attempt.generation
        )

    def _arm_limit(self, job_id: JobId, limit_s: float, epoch: Epoch, generation: Generation) -> None:
        at_s = self._placed_boot_s[job_id] + limit_s
        if self._limits_s.get(job_id) != at_s:
            self._limits_s[job_id] = at_s
            self._timers.arm(at_s, DeadlineKind.LIMIT, job_id, epoch, generation)

    def _due_in_s(self, now: ControllerTime, cycle_due_s: float) -> float:
        at_s = min(self._timers.next_s(self._still_applies), self.leases.next_check_s())
        opens_s = self._windows.due_in_s(self.world.reservations, now.wall_s)
        kept_s = min(
            self._services.due_in_s(now.boot_s),
            self._idle.due_in_s(self.world, now.boot_s),
            self._idle_limits.due_in_s(self.world, now.boot_s),
        )
        return max(0.0, min(cycle_due_s, at_s - now.boot_s, opens_s, kept_s))

    # ---- scheduling ---------------------------------------------------------------------------------------------------

    def _cycle(self, context: StepContext) -> float:
        """Schedule; return in how many seconds to schedule again if nothing happens."""
        scheduler, wall_s = self.scheduler, context.now.wall_s
        now_s = context.now.boot_s + self._steady_offset(context.now)
        records = context.change.records
        scheduler.stale = scheduler.stale or bool(context.change.removed)
        with self.guard:
            if self._speed_facts is not None:
                scheduler.set_speed_facts(self._speed_facts.facts(records))
            scheduler.update(self.world, records, now_s, wall_s)
            targets = scheduler.staging_targets(self.world, now_s)
            if targets:
                known = len(records)
                self._staging.stage(context, targets)
                scheduler.update(self.world, records[known:], now_s, wall_s)
            plan = scheduler.plan(self.world, now_s, wall_s)
        reported = len(records)
        for stop in plan.stops:
            context.apply_event(stop.job_id, StopRequested(cause=stop.cause, why=stop.why, by=SCHEDULER))
        for placement in plan.placements:
            why_not = rejection_reason(self.world, placement)
            if why_not:
                self._count("rejected_placements", 1)
                with self.guard:
                    scheduler.record_rejection(placement.job_id, now_s)
            else:
                job = self.world.jobs[placement.job_id]
                context.apply(place(job, placement.allocation, context.facts, placement.speed))
                self._notices.announce(context, self.world.attempts[job.id])
        self._pools.update(context, plan)
        if len(records) > reported:
            with self.guard:
                scheduler.update(self.world, records[reported:], now_s, wall_s)
        if plan.decided:
            self._count("cycles", 1)
            self._count("placements", len(plan.placements))
            self._count("stops", len(plan.stops))
        return max(0.0, plan.wake_s - now_s)

    def _steady_offset(self, now: ControllerTime) -> float:
        """Offset from CLOCK_BOOTTIME to Unix time at the head's start: durations then ignore later changes of the wall clock."""
        if self._steady_offset_s is None:
            self._steady_offset_s = now.wall_s - now.boot_s
        return self._steady_offset_s

    # ---- bounds -------------------------------------------------------------------------------------------------------

    def _drop_old(self) -> None:
        while len(self._ended) > ENDED_JOBS_KEPT:
            self.world.jobs.pop(self._ended.popleft(), None)
        keys = self.world.table(IDEMPOTENCY)
        while len(keys) > KEYS_KEPT:
            keys.pop(next(iter(keys)))

    def _count(self, name: str, by: float) -> None:
        self.stats[name] = self.stats.get(name, 0) + by


class _AttemptAges(Mapping[JobId, float]):
    """Age of each live attempt in seconds, computed on access."""

    def __init__(self, placed_boot_s: Mapping[JobId, float], boot_s: float) -> None:
        self._placed_boot_s, self._boot_s = placed_boot_s, boot_s

    def __getitem__(self, job_id: JobId) -> float:
        return self._boot_s - self._placed_boot_s[job_id]

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._placed_boot_s)

    def __len__(self) -> int:
        return len(self._placed_boot_s)
