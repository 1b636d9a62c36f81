"""The thin shell around the controller: one thread that collects, steps, commits, and only then answers and commands.

Everything that queued up while the last commit was being fsynced goes into the next one: that is the group commit.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.outbox import Answer, Now, Outbox
from phalanx.controller.peek import Peek
from phalanx.controller.telemetry import Telemetry
from phalanx.core.access.audit import AuditLine, Call, Tip, line_of
from phalanx.core.access.audit_words import words_of
from phalanx.core.errors import PhalanxError, TryLater
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.state.commands import DeleteCheckpoints
from phalanx.core.state.events import Event, Report, Request, Submit
from phalanx.core.state.plan import Waiting
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import NO_EPOCH, Job
from phalanx.core.work.seat import supervisor_of
from phalanx.ports.clock import Clock
from phalanx.ports.engine import Engine
from phalanx.ports.store import Store, StoreDiverged, StoreRefused

INBOX_MAX: Final = 50_000  # letters waiting; past that requests are told to come back
STEP_EVENTS_MAX: Final = 4096  # in one step, so that answers do not wait for the whole queue
PEEKS_MAX: Final = 64  # questions waiting for the world to stand still; each is a person's
REFUSED_WAIT_S: Final = 0.5  # before what nobody repeats is tried again on a disk that took nothing
BROKEN_WAIT_S: Final = 1.0  # after a turn that broke off: a fault that lasts must not fill the log
COLLECT_EVERY: Final = 50_000  # objects more than before; a step of the largest kind makes about as many
OBSERVE_EVERY_S: Final = 0.1  # how late an engine's word of a death may be heard
_log = logging.getLogger("phalanx.controller")


@dataclass(slots=True)
class _Letter:
    """Events and where their answers go. `again`: heard anew after a refused commit, since nobody else would repeat it.
    `calls`: what the audit trail says of each event; of none (a call that the controller has no part in) it is told by itself.

    The future is marked as running at once: a caller who leaves must not be able to cancel what the loop will answer.
    """

    events: Sequence[Event]
    future: Future[list[Answer | PhalanxError]]
    again: bool = False
    calls: Sequence[Call] = ()

    def parts(self) -> list[_Letter]:
        """What can be heard on its own without the rest: each event that nobody waits for an answer to."""
        if not self.again:
            return [self]
        return [_Letter(events=[event], future=Future(), again=True) for event in self.events]


@dataclass(slots=True, kw_only=True)
class Driver:
    """Runs a controller. Thread-safe: `request` and `report` may be called from anywhere.

    Attributes:
        head_id: this life of the head; supervisors say hello again when it changes.
        audit_key: of the audit trail (core.access.audit).
        audit_tip: the newest line of it that is durable.
        on_superseded: called, on the thread, when the store refuses a commit because it holds what this head does not know: another one leads.
    """

    controller: Controller
    store: Store
    mailboxes: Mailboxes
    telemetry: Telemetry
    clock: Clock
    head_id: str
    engines: Sequence[Engine] = ()
    audit_key: bytes = b""
    audit_tip: Tip = field(default_factory=Tip)
    on_superseded: Callable[[str], None] = lambda _: None
    _listeners: list[Callable[[frozenset[JobId]], None]] = field(default_factory=list)
    _inbox: deque[_Letter] = field(default_factory=deque)
    _unheard: list[_Letter] = field(default_factory=list)  # whose commit was refused; first in the next turn
    _peeks: deque[tuple[Future[Peek], JobId | None, Submit | None]] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _stopping: bool = False
    _thread: threading.Thread | None = None

    @property
    def leases(self) -> LeaseBook:
        """The leases, renewed from the API's thread."""
        return self.controller.leases

    @property
    def waits(self) -> Mapping[JobId, Waiting]:
        """Why each pending job waits, as of the newest cycle."""
        return self.controller.waits

    def waiting(self) -> list[Job]:
        """All jobs that wait, in submit order. For figures alone: may be ahead of the store by the commit under way."""
        return list(
            self.controller.world.pending.values()
        )  # one step of the interpreter, so that no other thread comes between

    def holding(self) -> list[tuple[Job, Attempt]]:
        """All live attempts with their jobs. For figures alone, as `waiting`."""
        world = self.controller.world
        attempts = list(world.attempts.values())
        return [(job, attempt) for attempt in attempts if (job := world.jobs.get(attempt.job_id)) is not None]

    def fleet_gpus(self) -> int:
        """Devices of all known nodes, up or down: what quotas are counted against. As `waiting`."""
        return sum(len(node.devices) for node in list(self.controller.world.nodes.values()))

    @property
    def stats(self) -> dict[str, float]:
        """Counters of the loop."""
        return self.controller.stats

    def supervisor_of(self, node_id: NodeId, job_id: JobId, epoch: Epoch) -> NodeId:
        """By which name the supervisor goes that carries a node's part of an attempt: the node's own, or its seat's."""
        return supervisor_of(self.controller.world.nodes, node_id, job_id, epoch)

    def start(self, *, leases_until_s: float = 0.0) -> None:
        """Take over the loaded world and begin to turn. `leases_until_s` as in `Controller.begin`."""
        calm_collector()
        newest = self.store.audit_tip()
        self.audit_tip = Tip() if newest is None else Tip(seq=newest.seq, mac=newest.mac)
        self.controller.begin(self._now(), leases_until_s=leases_until_s)
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way and end; what waits is told to try later."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def request(self, event: Request, call: Call | None = None) -> Future[Answer]:
        """Ask for something; the future holds the answer once it is durable, or the refusal. `call` goes into the audit trail with it."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()

        def hand_over(done: Future[list[Answer | PhalanxError]]) -> None:
            error = done.exception()
            result = error if error is not None else done.result()[0]
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self._post([event], [] if call is None else [call]).add_done_callback(hand_over)
        return answer

    def report(self, reports: Sequence[Report]) -> Future[list[Answer | PhalanxError]]:
        """Hand over what supervisors said; the future ends once all of it is durable."""
        return self._post(reports)

    def request_all(self, events: Sequence[Request], calls: Sequence[Call] = ()) -> Future[list[Answer | PhalanxError]]:
        """The same for several requests in one step, with nothing scheduled in between; refusals are among the answers."""
        return self._post(events, calls)

    def note(self, call: Call) -> Future[list[Answer | PhalanxError]]:
        """Write a line of the audit trail for a call that asks the controller for nothing; the future ends once it is durable."""
        return self._post([], [call])

    def listen(self, listener: Callable[[frozenset[JobId]], None]) -> None:
        """Call `listener` with the jobs that each commit touched, on the controller's thread: it must return at once."""
        self._listeners.append(listener)

    def peek(self, *, job_id: JobId | None = None, wish: Submit | None = None) -> Future[Peek]:
        """The state between two steps, as `Controller.peek`. May be ahead of the store by nothing: the last step is committed or undone."""
        future: Future[Peek] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if self._stopping or len(self._peeks) >= PEEKS_MAX:
                why = "the head is stopping" if self._stopping else f"{PEEKS_MAX} such questions wait already"
                future.set_exception(TryLater(why, hint="try again in a moment"))
                return future
            self._peeks.append((future, job_id, wish))
            self._wake.notify()
        return future

    def _post(self, events: Sequence[Event], calls: Sequence[Call] = ()) -> Future[list[Answer | PhalanxError]]:
        future: Future[list[Answer | PhalanxError]] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if self._stopping or len(self._inbox) >= INBOX_MAX:
                why = "the head is stopping" if self._stopping else f"{INBOX_MAX} requests wait already"
                future.set_exception(TryLater(why, hint="try again in a moment"))
                return future
            self._inbox.append(_Letter(events=events, future=future, calls=calls))
            self._wake.notify()
        return future

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake_in_s = 0.0
        while True:
            letters = self._collect(wake_in_s)
            if letters is None:
                break
            wake_in_s = self._turn(letters)
            self._let_peek()
        for letter in self._inbox:
            letter.future.set_exception(TryLater("the head stopped", hint="try again once it is back"))
        for future, _, _ in self._peeks:
            future.set_exception(TryLater("the head stopped", hint="try again once it is back"))

    def _collect(self, wake_in_s: float) -> list[_Letter] | None:
        with self._wake:
            if not self._inbox and not self._peeks and not self._stopping:
                self._wake.wait(min(wake_in_s, OBSERVE_EVERY_S) if self.engines else wake_in_s)
            if self._stopping:
                return None
            letters, self._unheard = self._unheard, []
            # What engines saw goes first: the hello of a node's next life must not be heard before the end of the one before.
            seen = [report for engine in self.engines for report in engine.observe()]
            if seen:
                letters.append(_Letter(events=seen, future=Future(), again=True))
            events = 0
            while self._inbox and events < STEP_EVENTS_MAX:
                letters.append(self._inbox.popleft())
                events += len(letters[-1].events)
        return letters

    def _turn(self, letters: list[_Letter]) -> float:
        now = self._now()
        try:
            outbox = self.controller.step(now, [event for letter in letters for event in letter.events])
        except Exception as error:  # noqa: BLE001  # a fault of ours, undone by the step; a dead thread would be a dead head
            return self._one_by_one(letters, error)
        audit = self._audited(letters, outbox, now)
        try:
            if audit or not outbox.change.empty:
                self.store.commit(outbox.batch(audit))
        except StoreRefused as error:
            return self._refused(letters, outbox, error)
        except Exception:  # noqa: BLE001  # as above
            _log.exception("the store failed in a way it does not promise")
            return self._refused(
                letters,
                outbox,
                StoreRefused("the store failed in a way it does not promise", hint="the head's log has the details"),
            )
        if audit:
            self.audit_tip = Tip(seq=audit[-1].seq, mac=audit[-1].mac)
        self._publish(outbox, now)
        answers = iter(outbox.answers)
        for letter in letters:
            letter.future.set_result([next(answers) for _ in letter.events])
        return outbox.wake_in_s

    def _audited(self, letters: list[_Letter], outbox: Outbox, now: Now) -> list[AuditLine]:
        """What the trail says of this step's calls, in the order in which they were heard; refused ones too."""
        lines: list[AuditLine] = []
        tip, answered = self.audit_tip, 0
        for letter in letters:
            for number, call in enumerate(letter.calls):
                result, words = "", call.detail
                if letter.events:
                    answer, event = outbox.answers[answered + number], letter.events[number]
                    result = answer.code if isinstance(answer, PhalanxError) else ""
                    words = words_of(event, answer) if isinstance(event, Request) else ""
                lines.append(line_of(call, tip, now.wall_s, self.audit_key, detail=words, result=result))
                tip = Tip(seq=lines[-1].seq, mac=lines[-1].mac)
            answered += len(letter.events)
        return lines

    def _epoch_now(self, job_id: JobId) -> Epoch:
        attempt = self.controller.world.attempts.get(job_id)
        return NO_EPOCH if attempt is None else attempt.epoch

    def _publish(self, outbox: Outbox, now: Now) -> None:
        """All that follows from what is durable now. A fault of ours in one part costs neither the others nor the thread."""
        parts: tuple[Callable[[], None], ...] = (
            partial(self.controller.committed, outbox, now),
            partial(self._command, outbox),
            partial(self._tell_engines, outbox),
            partial(self._ring, outbox),
        )
        for part in parts:
            try:
                part()
            except Exception:  # noqa: BLE001  # as above
                _log.exception("what follows a commit broke off")

    def _command(self, outbox: Outbox) -> None:
        for command in outbox.commands:
            epoch = self._epoch_now(command.job_id) if isinstance(command, DeleteCheckpoints) else command.epoch
            self.mailboxes.post(self.supervisor_of(command.node_id, command.job_id, epoch), command)
        for name in outbox.lost:
            self.mailboxes.forget(name)

    def _tell_engines(self, outbox: Outbox) -> None:
        """Engines that bring a supervisor for each attempt follow them, from the first record to the last."""
        carriers = [engine for engine in self.engines if engine.capabilities.per_attempt]
        if not carriers:
            return
        records = outbox.change.records
        newest = {(one.job_id, one.epoch): one for one in records if isinstance(one, Attempt)}
        # One that ended may have left the world by now.
        changed = {one.id: one for one in records if isinstance(one, Job)}
        for attempt in newest.values():
            job = changed.get(attempt.job_id) or self.controller.world.jobs[attempt.job_id]
            for engine in carriers:
                engine.follow(job, attempt)

    def _ring(self, outbox: Outbox) -> None:
        if self._listeners:
            touched = frozenset(line.job_id for line in outbox.change.story if line.job_id is not None)
            for listener in self._listeners:
                listener(touched)

    def _let_peek(self) -> None:
        """Between two steps, when the world stands still."""
        while self._peeks:
            future, job_id, wish = self._peeks.popleft()
            try:
                future.set_result(self.controller.peek(self._now(), job_id=job_id, wish=wish))
            except Exception as error:  # noqa: BLE001  # a refusal, or a fault of ours: the asker's to hear, not the loop's to die of
                future.set_exception(error)

    def _refused(self, letters: list[_Letter], outbox: Outbox, error: StoreRefused) -> float:
        """Nothing of the step happened. What nobody else would repeat is heard again; requests are the caller's to repeat."""
        self.controller.refused(outbox)
        _log.error("commit refused: %s", error)
        if isinstance(error, StoreDiverged):
            self.on_superseded(error.message)
        for letter in letters:
            if letter.again:
                self._unheard.append(letter)
            else:
                letter.future.set_exception(error)
        return REFUSED_WAIT_S

    def _one_by_one(self, letters: list[_Letter], error: Exception) -> float:
        """The step broke off: hear each letter on its own, so that the one at fault is answered and the others are heard.

        What engines saw comes in one letter and is told once: of it, nothing but the event at fault is lost.
        """
        _log.error("a step with %d letters broke off", len(letters), exc_info=error)
        alone = [part for letter in letters for part in letter.parts()]
        if len(alone) > 1:
            return min([self._turn([part]) for part in alone])
        for letter in letters:
            letter.future.set_exception(PhalanxError("the head failed at this", hint="its log has the details"))
        return BROKEN_WAIT_S

    def _now(self) -> Now:
        return Now(wall_s=self.clock.now_s(), boot_s=self.clock.boottime_s())


def calm_collector() -> None:
    """Keep the garbage collector off what is loaded, and from looking at every few hundred records that a step makes.

    Records form no cycles: almost nothing is ever found. With Python's own thresholds a pass over 50,000 jobs took up to twice its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 50)
