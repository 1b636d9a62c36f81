"""One step of the controller: apply events, run transitions, schedule, verify; return what to commit and to send.

`Controller.step` is synchronous and uses no clock, thread, disk or network. The live head and the simulator run the same steps.
The controller owns the world between steps. If the store refuses a step's change, `Change.undo` reverts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.controller import reports, requests
from phalanx.controller.history import History
from phalanx.controller.leases import MARGIN_S, NOBODY, SOMEBODY, LeaseBook
from phalanx.controller.lives import Lives
from phalanx.controller.outbox import IDLE_WAKE_S, Answer, Now, Outbox
from phalanx.controller.peek import Peek, peek, would_be
from phalanx.controller.rulebook import Rulebook
from phalanx.controller.timers import Deadline, Due, Timers
from phalanx.controller.turn import Losses, Settings, Turn
from phalanx.controller.waits import GuardedWaits
from phalanx.controller.windows import Windows
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, Generation, JobId, SupervisorId
from phalanx.core.lifecycle.happenings import Remind, StartOverdue, StopWanted
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.verify import rejection
from phalanx.core.scheduling.explanations import Waits
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import Policy
from phalanx.core.state.events import Event, Hello, PlanStop, Request, Submit
from phalanx.core.state.plan import Waiting
from phalanx.core.state.world import Change, World
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import FIRST_GENERATION, Attempt, AttemptState, Cause, MemberState
from phalanx.core.work.job import Job
from phalanx.core.work.seat import read_seat, supervisor_of

ENDED_JOBS_KEPT: Final = 1000  # in memory, for fast reads; the store has all
KEYS_KEPT: Final = 100_000  # idempotency keys in memory
START_LIMIT_S: Final = 60.0  # from Prepare to the barrier; a node that needs longer is unhealthy
SEAT_WAIT_S: Final = 30.0 + START_LIMIT_S  # until a seat's supervisor registers; engines report failed starts earlier
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
    """

    world: World
    leases: LeaseBook
    settings: Settings
    policy: Policy = field(default_factory=Policy)
    head_id: str = ""
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    waits: Mapping[JobId, Waiting] = field(init=False)
    scheduler: Scheduler = field(init=False)
    stats: dict[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    _placed_boot_s: dict[JobId, float] = field(default_factory=dict)
    # Requested generation of each live attempt, and when it was requested (CLOCK_BOOTTIME).
    _generations: dict[JobId, tuple[Epoch, Generation, float]] = field(default_factory=dict)
    _timers: Timers = field(default_factory=Timers)
    _windows: Windows = field(default_factory=Windows)
    _incarnations: Lives = field(init=False)
    _limits_s: dict[JobId, float] = field(default_factory=dict)  # armed time limit of each live attempt
    # State in which each gang was last sent a command, and when: the start of its reminder interval.
    _commanded: dict[JobId, tuple[AttemptState, float]] = field(default_factory=dict)
    _stepped_boot_s: float = 0.0
    _ended: deque[JobId] = field(default_factory=deque)
    _losses: Losses = field(init=False)
    _rulebook: Rulebook = field(init=False)
    _steady_offset_s: float | None = None

    def __post_init__(self) -> None:
        self._incarnations = Lives(self.head_id)
        self._losses = Losses(self.world)
        self._rulebook = Rulebook(self.world, self.settings.rules)
        self.scheduler = Scheduler(self.policy)
        self.waits = GuardedWaits(Waits(self.scheduler, self.world.jobs), self.guard)

    def begin(self, now: Now, *, leases_until_s: float = 0.0) -> None:
        """Take over a loaded world. Time limits continue, and every lease counts as live for one full lease.

        Start limits begin again: supervisors could not reach a head that was down.

        Args:
            now: when this incarnation of the head starts.
            leases_until_s: CLOCK_BOOTTIME up to which a planned stop has granted leases; 0 for none.
        """
        # The previous head granted leases by the size of the whole fleet: the larger the fleet, the longer its leases.
        full_s = now.boot_s + self.leases.terms_for(len(self.world.nodes))[0] + MARGIN_S
        for node in self.world.nodes.values():
            self._incarnations.note(node)
            if node.state is NodeState.UP and node.supervisor_id is not None:
                self.leases.grant(node.id, node.supervisor_id, now.boot_s, until_s=max(full_s, leases_until_s))
        for attempt in self.world.attempts.values():
            self._expect_seats(attempt, SOMEBODY, now.boot_s, until_s=max(full_s, leases_until_s))
            self._placed_boot_s[attempt.job_id] = now.boot_s - max(0.0, now.wall_s - attempt.placed_s)
            self._generations[attempt.job_id] = (attempt.epoch, attempt.generation, now.boot_s)
            self._publish_epochs(attempt)
            self._arm(attempt, now.boot_s, fresh=True)
        ended = [job for job in sorted(self.world.jobs.values(), key=lambda job: job.seq) if job.state.terminal]
        self._ended.extend(job.id for job in ended)
        self.history.remember(sorted(ended, key=lambda job: job.ended_s or 0.0))

    def step(self, now: Now, inbox: Sequence[Event]) -> Outbox:
        """Run one step. A refused request is answered with its error and changes nothing. An exception undoes the whole step."""
        if now.boot_s - self._stepped_boot_s > HEAD_AWAY_S:
            self.leases.presume_live(now.boot_s)
        self._stepped_boot_s = now.boot_s
        ages_s = _AttemptAges(self._placed_boot_s, now.boot_s)
        turn = Turn(
            world=self.world,
            settings=self.settings,
            now=now,
            change=Change(world=self.world),
            ages_s=ages_s,
            losses=self._losses,
            rulebook=self._rulebook,
        )
        try:
            answers = [self._apply_event(turn, event) for event in inbox]
            self._expire_leases(turn)
            self._windows.open(turn)
            self._fire_deadlines(turn)
            turn.judge_lemons()
            turn.settle_dependents()  # before the cycle, so that released jobs can start in this step
            wake_in_s = self._cycle(turn)
            if turn.ended:  # by the cycle itself
                turn.settle_dependents()
                self.scheduler.stale, wake_in_s = True, 0.0
        except BaseException:
            turn.change.undo()
            self._timers.undo()
            self._losses.forget()
            self.scheduler.stale = True
            raise
        self._count("steps", 1)
        self._count("events", len(inbox))
        return Outbox(
            change=turn.change,
            answers=answers,
            commands=turn.commands,
            lost=list(turn.lost),
            due_in_s=self._due_in_s(now, wake_in_s),
        )

    def committed(self, outbox: Outbox, now: Now) -> None:
        """Update leases, timers and history after the outbox's change became durable.

        Raises:
            ExceptionGroup: internal errors, after everything else was published.
        """
        if outbox.lost:
            self.leases.drop(outbox.lost)
        for deadline in self._timers.settle():
            if deadline.due is Due.REMIND and self._still_applies(deadline):
                self._arm_reminder(self.world.attempts[deadline.job_id], now.boot_s)
        newest: dict[tuple[JobId, Epoch], Attempt] = {}
        over: list[Job] = []
        for record in outbox.change.records:
            if isinstance(record, Attempt):
                newest[record.job_id, record.epoch] = record
            elif isinstance(record, Node):
                self._losses.forget()
                self._incarnations.note(record)
            elif isinstance(record, Job):
                if record.state.terminal:
                    self._ended.append(record.id)
                    over.append(record)
                elif record.spec.time_limit_s is not None and record.id in self._placed_boot_s:
                    # The limit may have been set or shortened.
                    self._arm_limit(record.id, record.spec.time_limit_s, record.epoch, FIRST_GENERATION)
        self.history.note(over, newest)
        faults: list[Exception] = []
        for attempt in newest.values():
            try:
                self._track_attempt(attempt, now.boot_s)
            except Exception as error:  # noqa: BLE001  # an internal error in one must not cost the others their leases
                faults.append(error)
        self._timers.sweep(self._still_applies)
        if outbox.change.removed:
            self._losses.forget()
        self._drop_old()
        if faults:
            raise ExceptionGroup("internal errors while tracking attempts", faults)

    def refused(self, outbox: Outbox) -> None:
        """Undo a change that the store refused. The next step evaluates everything again."""
        outbox.change.undo()
        self._timers.undo()
        self._losses.forget()
        self.scheduler.stale = True
        self._count("refused_commits", 1)

    def peek(self, now: Now, *, job_id: JobId | None = None, wish: Submit | None = None) -> Peek:
        """Take a snapshot for questions answered on other threads; with `wish`, also the jobs that this submit would create.

        Raises:
            PhalanxError: the submit would be refused.
        """
        found = peek(self.world, self.scheduler, self.history, self.waits, now, job_id=job_id)
        if wish is None:
            return found
        turn = Turn(
            world=self.world,
            settings=self.settings,
            now=now,
            change=Change(world=self.world),
            losses=Losses(self.world),
        )
        return replace(found, would_be=would_be(turn, wish))

    # ---- events -------------------------------------------------------------------------------------------------------

    def _apply_event(self, turn: Turn, event: Event) -> Answer | PhalanxError:
        answer: Answer = None
        try:
            if isinstance(event, Request):
                answer = requests.hear(turn, event)
            else:
                if isinstance(event, Hello) and event.seat is None:
                    self._check_incarnation(event, turn.now.boot_s)
                reports.hear(turn, event)
                if isinstance(event, Hello):
                    name = event.node.id if event.seat is None else event.seat.name
                    self.leases.grant(name, event.supervisor_id, turn.now.boot_s)
                    self._republish(turn, event)
        except PhalanxError as error:
            return error
        if isinstance(event, PlanStop):
            self.leases.lengthen(event.lease_s)
        return answer

    def _check_incarnation(self, hello: Hello, boot_s: float) -> None:
        known = self.world.nodes.get(hello.node.id)
        current = None if known is None else known.supervisor_id
        self._incarnations.check(
            hello, known, heard=current is not None and self.leases.heard(hello.node.id, current, boot_s)
        )

    def _republish(self, turn: Turn, event: Hello) -> None:
        for attempt in turn.world.attempts_on(event.node.id):
            self._publish_epochs(attempt)

    def _publish_epochs(self, attempt: Attempt) -> None:
        for member in attempt.members:
            counts = attempt.live and member.state is not MemberState.LOST
            name = supervisor_of(self.world.nodes, member.node_id, attempt.job_id, attempt.epoch)
            self.leases.set_current(name, attempt.job_id, attempt.epoch if counts else None)

    def _expect_seats(self, attempt: Attempt, who: SupervisorId, boot_s: float, *, until_s: float) -> None:
        """Grant leases to seats whose supervisors the engine is starting; a seat without a supervisor at `until_s` is lost."""
        for member in attempt.members:
            name = supervisor_of(self.world.nodes, member.node_id, attempt.job_id, attempt.epoch)
            if name != member.node_id:
                self.leases.grant(name, who, boot_s, until_s=until_s)

    # ---- time ---------------------------------------------------------------------------------------------------------

    def _expire_leases(self, turn: Turn) -> None:
        for node_id in self.leases.close_ended(turn.now.boot_s):
            why = f"no heartbeat for {format_duration(self.leases.terms[0])}: its lease expired"
            seat = read_seat(node_id)
            if seat is None:
                reports.lose_node(turn, node_id, why)
            else:
                reports.lose_seat(turn, seat, why)
            turn.lost[node_id] = None

    def _fire_deadlines(self, turn: Turn) -> None:
        for deadline in self._timers.take(turn.now.boot_s):
            attempt = self.world.attempts.get(deadline.job_id)
            if attempt is None or not self._still_applies(deadline):
                continue
            match deadline.due:
                case Due.LIMIT:
                    limit_s = self.world.jobs[attempt.job_id].spec.time_limit_s
                    assert limit_s is not None, deadline
                    why = f"time limit of {format_duration(limit_s)} reached"
                    turn.happen(attempt.job_id, StopWanted(cause=Cause.TIMEOUT, why=why))
                case Due.START:
                    silent = tuple(member.node_id for member in attempt.members if member.state is MemberState.ASKED)
                    waited_s = turn.now.boot_s - self._generations[attempt.job_id][2]
                    turn.happen(attempt.job_id, StartOverdue(silent=silent, waited_s=waited_s))
                case Due.REMIND:
                    self._remind(turn, attempt)

    def _remind(self, turn: Turn, attempt: Attempt) -> None:
        """Resend unanswered commands: one may have been lost, and nothing else repeats it."""
        for member in attempt.members:
            if member.state not in (MemberState.STOPPED, MemberState.LOST):
                turn.happen(attempt.job_id, Remind(node_id=member.node_id))

    def _still_applies(self, deadline: Deadline) -> bool:
        """Whether the deadline still applies to the newest state."""
        attempt = self.world.attempts.get(deadline.job_id)
        current = attempt is not None and (attempt.epoch, attempt.generation) == (deadline.epoch, deadline.generation)
        match deadline.due:
            case Due.LIMIT:
                return attempt is not None and self._limits_s.get(deadline.job_id) == deadline.at_s
            case Due.START:
                return current and attempt is not None and attempt.state is AttemptState.PLACED
            case Due.REMIND:
                commanded = self._commanded.get(deadline.job_id)
                return current and commanded is not None and commanded[1] + REMIND_EVERY_S == deadline.at_s

    def _track_attempt(self, attempt: Attempt, boot_s: float) -> None:
        """Publish the epoch of an attempt whose newest record became durable, and arm its deadlines."""
        job_id = attempt.job_id
        if not attempt.live:
            self._publish_epochs(attempt)
            for table in (self._placed_boot_s, self._generations, self._limits_s, self._commanded):
                table.pop(job_id, None)
            return
        known = self._generations.get(job_id)
        fresh = known is None or known[:2] != (attempt.epoch, attempt.generation)
        if fresh:
            self._placed_boot_s.setdefault(job_id, boot_s)
            self._generations[job_id] = (attempt.epoch, attempt.generation, boot_s)
        if known is None or known[0] != attempt.epoch:
            self._expect_seats(attempt, NOBODY, boot_s, until_s=boot_s + SEAT_WAIT_S)
        if fresh or attempt.state is AttemptState.STOPPING:  # members are lost only while the gang stops
            self._publish_epochs(attempt)
        self._arm(attempt, boot_s, fresh=fresh)

    def _arm(self, attempt: Attempt, boot_s: float, *, fresh: bool) -> None:
        job_id, epoch, generation = attempt.job_id, attempt.epoch, attempt.generation
        spec = self.world.jobs[job_id].spec
        if fresh:
            downloads = attempt.kept and (epoch, generation) > (Epoch(1), FIRST_GENERATION)  # checkpoints from the head
            start_s = SETUP_LIMIT_S if spec.prepares_long or downloads else START_LIMIT_S
            self._timers.arm(boot_s + start_s, Due.START, job_id, epoch, generation)
        if attempt.state is AttemptState.RUNNING:
            self._commanded.pop(job_id, None)
        elif fresh or job_id not in self._commanded or self._commanded[job_id][0] is not attempt.state:
            self._arm_reminder(attempt, boot_s)
        if spec.time_limit_s is not None:
            self._arm_limit(job_id, spec.time_limit_s, epoch, generation)

    def _arm_reminder(self, attempt: Attempt, boot_s: float) -> None:
        """Start the gang's reminder interval: it was sent a command now."""
        self._commanded[attempt.job_id] = (attempt.state, boot_s)
        self._timers.arm(boot_s + REMIND_EVERY_S, Due.REMIND, attempt.job_id, attempt.epoch, attempt.generation)

    def _arm_limit(self, job_id: JobId, limit_s: float, epoch: Epoch, generation: Generation) -> None:
        at_s = self._placed_boot_s[job_id] + limit_s
        if self._limits_s.get(job_id) != at_s:
            self._limits_s[job_id] = at_s
            self._timers.arm(at_s, Due.LIMIT, job_id, epoch, generation)

    def _due_in_s(self, now: Now, cycle_due_s: float) -> float:
        at_s = min(self._timers.next_s(self._still_applies), self.leases.look_again_s())
        opens_s = self._windows.due_in_s(self.world.reservations, now.wall_s)
        return max(0.0, min(cycle_due_s, at_s - now.boot_s, opens_s))

    # ---- scheduling ---------------------------------------------------------------------------------------------------

    def _cycle(self, turn: Turn) -> float:
        """Schedule; return in how many seconds to schedule again if nothing happens."""
        scheduler, wall_s = self.scheduler, turn.now.wall_s
        now_s = turn.now.boot_s + self._steady_offset(turn.now)
        records = turn.change.records
        scheduler.stale = scheduler.stale or bool(turn.change.removed or turn.change.removed_queues)
        with self.guard:
            scheduler.tell(self.world, records, now_s, wall_s)
            plan = scheduler.plan(self.world, now_s, wall_s)
        reported = len(records)
        for stop in plan.stops:
            turn.happen(stop.job_id, StopWanted(cause=stop.cause, why=stop.why, by=SCHEDULER))
        for placement in plan.placements:
            why_not = rejection(self.world, placement)
            if why_not:
                self._count("rejected_placements", 1)
                with self.guard:
                    scheduler.rejected(placement.job_id, now_s)
            else:
                turn.apply(place(self.world.jobs[placement.job_id], placement.allocation, turn.facts))
        if len(records) > reported:
            with self.guard:
                scheduler.tell(self.world, records[reported:], now_s, wall_s)
        if plan.decided:
            self._count("cycles", 1)
            self._count("placements", len(plan.placements))
            self._count("stops", len(plan.stops))
        return max(0.0, plan.wake_s - now_s)

    def _steady_offset(self, now: Now) -> float:
        """Offset from CLOCK_BOOTTIME to Unix time at the head's start: durations then ignore later changes of the wall clock."""
        if self._steady_offset_s is None:
            self._steady_offset_s = now.wall_s - now.boot_s
        return self._steady_offset_s

    # ---- bounds -------------------------------------------------------------------------------------------------------

    def _drop_old(self) -> None:
        while len(self._ended) > ENDED_JOBS_KEPT:
            self.world.jobs.pop(self._ended.popleft(), None)
        while len(self.world.idempotency) > KEYS_KEPT:
            self.world.idempotency.pop(next(iter(self.world.idempotency)))

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
