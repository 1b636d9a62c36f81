"""One turn of the loop: hear, transition, schedule, verify, and say what to commit and command.

`Controller.step` is synchronous and knows no clock, thread, disk or network. The live head and the simulator drive the very same steps.
It owns the world between steps; a step whose change the store refuses is undone by `Change.undo` and never happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller import reports, requests
from phalanx.controller.leases import MARGIN_S, LeaseBook
from phalanx.controller.outbox import Answer, Now, Outbox
from phalanx.controller.turn import Settings, Turn
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.lifecycle.happenings import Remind, StartOverdue, StopWanted
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.verify import rejection
from phalanx.core.scheduling.schedule import Policy, schedule
from phalanx.core.state.events import Event, Hello, PlanStop, Request, Submit
from phalanx.core.state.plan import Waiting
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.state.world import Change, World
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt, AttemptState, Cause, MemberState
from phalanx.core.work.job import Job

ENDED_JOBS_KEPT: Final = 1000  # in memory, for quick answers; the store keeps all
KEYS_KEPT: Final = 100_000  # idempotency keys in memory
START_LIMIT_S: Final = 60.0  # from Prepare to the barrier; a node that needs longer is not well
SETUP_LIMIT_S: Final = 3600.0  # the same when the job has a setup script
REMIND_EVERY_S: Final = 5.0
IDLE_WAKE_S: Final = 1.0
HEAD_AWAY_S: Final = 2.0 * IDLE_WAKE_S  # a gap between two steps that only a head that did not run can have


@dataclass(slots=True)
class Controller:
    """The loop's inside.

    Attributes:
        waits: why each pending job waits, from the newest cycle; read by the API, never stored.
        stats: counters of the loop since the start, for metrics.
    """

    world: World
    leases: LeaseBook
    settings: Settings
    policy: Policy = field(default_factory=Policy)
    waits: dict[JobId, Waiting] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    _placed_boot_s: dict[JobId, float] = field(default_factory=dict)
    _generations: dict[JobId, tuple[Epoch, Generation, float]] = field(
        default_factory=dict
    )  # asked for on CLOCK_BOOTTIME
    _reminded_s: dict[JobId, float] = field(default_factory=dict)
    _unjudged: dict[JobId, None] = field(default_factory=dict)
    _stepped_boot_s: float = 0.0
    _judge_all: bool = True
    _ended: deque[JobId] = field(default_factory=deque)

    def begin(self, now: Now, *, leases_until_s: float = 0.0) -> None:
        """Take over a loaded world: time limits go on where they were, and every lease is presumed live for one full lease.

        The limit for getting ready starts anew: supervisors could not answer a head that was not there.

        Args:
            now: the first moment of this life of the head.
            leases_until_s: CLOCK_BOOTTIME up to which a planned stop has granted leases; 0 for none.
        """
        # Granted by a head that knew the whole fleet: the larger the fleet, the longer its leases.
        full_s = now.boot_s + self.leases.terms_for(len(self.world.nodes))[0] + MARGIN_S
        for node in self.world.nodes.values():
            if node.state is NodeState.UP and node.supervisor_id is not None:
                self.leases.grant(node.id, node.supervisor_id, now.boot_s, until_s=max(full_s, leases_until_s))
        for attempt in self.world.attempts.values():
            self._placed_boot_s[attempt.job_id] = now.boot_s - max(0.0, now.wall_s - attempt.placed_s)
            self._generations[attempt.job_id] = (attempt.epoch, attempt.generation, now.boot_s)
            self._publish_epochs(attempt)
        self._ended.extend(
            job.id for job in sorted(self.world.jobs.values(), key=lambda job: job.seq) if job.state.terminal
        )

    def step(self, now: Now, inbox: Sequence[Event]) -> Outbox:
        """One turn. Refused requests are answered with their error and change nothing; nor does a step that breaks off."""
        if now.boot_s - self._stepped_boot_s > HEAD_AWAY_S:
            self.leases.presume_live(now.boot_s)
        self._stepped_boot_s = now.boot_s
        ages_s = _Ages(self._placed_boot_s, now.boot_s)
        turn = Turn(world=self.world, settings=self.settings, now=now, change=Change(world=self.world), ages_s=ages_s)
        try:
            answers = [self._hear(turn, event) for event in inbox]
            self._let_leases_end(turn)
            self._timers(turn)
            wake_in_s = self._cycle(turn)
        except BaseException:
            turn.change.undo()
            self._judge_all = True
            raise
        self._count("steps", 1)
        self._count("events", len(inbox))
        return Outbox(
            change=turn.change, answers=answers, commands=turn.commands, lost=list(turn.lost),
            wake_in_s=self._wake_in_s(now, wake_in_s),
        )  # fmt: skip

    def committed(self, outbox: Outbox, now: Now) -> None:
        """The outbox's change is durable: publish what depends on it."""
        self.leases.drop(outbox.lost)
        for record in outbox.change.records:
            if isinstance(record, Attempt):
                self._publish_epochs(record)
                if record.live:
                    self._placed_boot_s.setdefault(record.job_id, now.boot_s)
                    if self._generations.get(record.job_id, (0, 0, 0.0))[:2] != (record.epoch, record.generation):
                        self._generations[record.job_id] = (record.epoch, record.generation, now.boot_s)
                        self._reminded_s.pop(record.job_id, None)
                else:
                    self._placed_boot_s.pop(record.job_id, None)
                    self._generations.pop(record.job_id, None)
                    self._reminded_s.pop(record.job_id, None)
        self._forget_old(outbox)

    def refused(self, outbox: Outbox) -> None:
        """The store did not take the change: the world is as before, and everything is judged again."""
        outbox.change.undo()
        self._judge_all = True
        self._count("refused_commits", 1)

    # ---- hearing ------------------------------------------------------------------------------------------------------

    def _hear(self, turn: Turn, event: Event) -> Answer | PhalanxError:
        answer: Answer = None
        try:
            if isinstance(event, Request):
                answer = requests.hear(turn, event)
            else:
                reports.hear(turn, event)
                if isinstance(event, Hello):
                    self.leases.grant(event.node.id, event.supervisor_id, turn.now.boot_s)
                    self._republish(turn, event)
        except PhalanxError as error:
            return error
        if isinstance(event, PlanStop):
            self.leases.lengthen(event.lease_s)
        if isinstance(event, Submit):
            self._unjudged.update(dict.fromkeys(turn.submitted))
            turn.submitted.clear()
        elif turn.freed:
            self._judge_all = True
        turn.freed = False
        return answer

    def _republish(self, turn: Turn, event: Hello) -> None:
        for attempt in turn.world.attempts_on(event.node.id):
            self._publish_epochs(attempt)

    def _publish_epochs(self, attempt: Attempt) -> None:
        for member in attempt.members:
            counts = attempt.live and member.state is not MemberState.LOST
            self.leases.set_current(member.node_id, attempt.job_id, attempt.epoch if counts else None)

    # ---- time ---------------------------------------------------------------------------------------------------------

    def _let_leases_end(self, turn: Turn) -> None:
        for node_id in self.leases.close_ended(turn.now.boot_s):
            why = f"no word for {format_duration(self.leases.terms[0])}: its lease is over"
            reports.lose_node(turn, node_id, why)
            turn.lost[node_id] = None
            self._judge_all = True

    def _timers(self, turn: Turn) -> None:
        for attempt in tuple(self.world.attempts.values()):
            age_s = turn.now.boot_s - self._placed_boot_s.get(attempt.job_id, turn.now.boot_s)
            limit_s = self.world.jobs[attempt.job_id].spec.time_limit_s
            if limit_s is not None and age_s >= limit_s and attempt.ending is not Cause.TIMEOUT:
                why = f"time limit of {format_duration(limit_s)} reached"
                turn.happen(attempt.job_id, StopWanted(cause=Cause.TIMEOUT, why=why))
            elif attempt.state is AttemptState.PLACED:
                self._start_limit(turn, attempt)
            now = self.world.attempts.get(attempt.job_id)
            if now is not None and now.state is not AttemptState.RUNNING:
                self._remind(turn, now)
        if turn.freed:
            self._judge_all = True
            turn.freed = False

    def _start_limit(self, turn: Turn, attempt: Attempt) -> None:
        limit_s = SETUP_LIMIT_S if self.world.jobs[attempt.job_id].spec.setup else START_LIMIT_S
        known = self._generations.get(attempt.job_id)
        if known is None or known[:2] != (attempt.epoch, attempt.generation):
            return  # asked for in this very step
        waited_s = turn.now.boot_s - known[2]
        if waited_s >= limit_s:
            silent = tuple(member.node_id for member in attempt.members if member.state is MemberState.ASKED)
            turn.happen(attempt.job_id, StartOverdue(silent=silent, waited_s=waited_s))

    def _remind(self, turn: Turn, attempt: Attempt) -> None:
        """Say again what has not been answered: a command may be lost, and nobody else would repeat it."""
        last_s = self._reminded_s.setdefault(attempt.job_id, turn.now.boot_s)
        if turn.now.boot_s - last_s < REMIND_EVERY_S:
            return
        self._reminded_s[attempt.job_id] = turn.now.boot_s
        for member in attempt.members:
            if member.state not in (MemberState.STOPPED, MemberState.LOST):
                turn.happen(attempt.job_id, Remind(node_id=member.node_id))

    def _wake_in_s(self, now: Now, cycle_wake_s: float) -> float:
        wake = min(IDLE_WAKE_S, cycle_wake_s)
        lease_end_s = self.leases.next_end_s()
        if lease_end_s is not None:
            wake = min(wake, max(0.0, lease_end_s - now.boot_s))
        for job_id, placed_s in self._placed_boot_s.items():
            job = self.world.jobs.get(job_id)
            if job is not None and job.spec.time_limit_s is not None:
                wake = min(wake, max(0.05, placed_s + job.spec.time_limit_s - now.boot_s))
        return wake

    # ---- scheduling ---------------------------------------------------------------------------------------------------

    def _cycle(self, turn: Turn) -> float:
        """Schedule what can have changed. Room only shrinks between full cycles, so that new jobs alone need judging until some is freed."""
        world = self.world
        if self._judge_all:
            snapshot = world.snapshot(turn.now.wall_s)
            self.waits.clear()
        elif self._unjudged:
            pending = tuple(world.pending[job_id] for job_id in self._unjudged if job_id in world.pending)
            whole = world.snapshot(turn.now.wall_s)
            snapshot = Snapshot(
                version=whole.version,
                now_s=whole.now_s,
                nodes=whole.nodes,
                usage=whole.usage,
                pending=pending,
                queues=whole.queues,
            )
        else:
            return IDLE_WAKE_S
        self._judge_all = False
        self._unjudged.clear()
        if not snapshot.pending:
            return IDLE_WAKE_S
        plan = schedule(snapshot, self.policy)
        self.waits.update(plan.waits)
        for placement in plan.placements:
            why_not = rejection(world, placement)
            if why_not:
                self._count("rejected_placements", 1)
                self._judge_all = True
                continue
            turn.apply(place(world.jobs[placement.job_id], placement.allocation, turn.facts))
        self._count("cycles", 1)
        self._count("placements", len(plan.placements))
        turn.freed = False
        return self._cycle_wake(snapshot, len(plan.placements))

    def _cycle_wake(self, snapshot: Snapshot, placed: int) -> float:
        if placed >= self.policy.placements_max:
            self._judge_all = True
            return 0.0
        soonest = min(
            (job.not_before_s - snapshot.now_s for job in snapshot.pending if job.not_before_s > snapshot.now_s),
            default=None,
        )
        if soonest is None:
            return IDLE_WAKE_S
        self._judge_all = True  # at the next step, whenever it is: backing-off jobs are few
        return max(0.05, soonest)

    # ---- bounds -------------------------------------------------------------------------------------------------------

    def _forget_old(self, outbox: Outbox) -> None:
        for record in outbox.change.records:
            if isinstance(record, Job) and record.state.terminal:
                self._ended.append(record.id)
        while len(self._ended) > ENDED_JOBS_KEPT:
            self.world.jobs.pop(self._ended.popleft(), None)
        while len(self.world.idempotency) > KEYS_KEPT:
            self.world.idempotency.pop(next(iter(self.world.idempotency)))

    def _count(self, name: str, by: float) -> None:
        self.stats[name] = self.stats.get(name, 0) + by


class _Ages(Mapping[JobId, float]):
    """How long each live attempt has lasted, reckoned when asked."""

    def __init__(self, placed_boot_s: Mapping[JobId, float], boot_s: float) -> None:
        self._placed_boot_s, self._boot_s = placed_boot_s, boot_s

    def __getitem__(self, job_id: JobId) -> float:
        return self._boot_s - self._placed_boot_s[job_id]

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._placed_boot_s)

    def __len__(self) -> int:
        return len(self._placed_boot_s)
