"""Sends the messages that jobs ask for with `notify`. A thread reads the history, others send: no target waits for another.

Each message is sent at least once: how far each target is lies in the store, and a head that crashes between a delivery and its record sends
again. Messages of one user to one target that come close together are one, and their number in an hour is bounded. Of an array its start, its
first failure and its end are sent, with the number of elements in each state.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from phalanx.api.auth.secret_seal import SecretSeal
from phalanx.api.live.channel_sender import BETWEEN_S, RETRY_S, TICK_S
from phalanx.api.live.job_messages import JobNote, array_end_note, first_failure_note, job_note, joined_message
from phalanx.api.services import HeadServices
from phalanx.core.errors import NotFound, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, ProjectId, UserId
from phalanx.core.state.events import MarkChannels
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import CHANNEL_MARKS, CHANNELS, SECRETS, SIGN_IN
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.channel import JOB_MARKS, ChannelMark, Message
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.notify import (
    EVENTS_OF_KIND,
    NotifyEvent,
    NotifyTargetKind,
    NotifyTerms,
    mail_channel,
    may_be_named,
    secret_of,
    target_kind,
)
from phalanx.core.work.secret import find_secret
from phalanx.core.work.sign_in import PROVIDER
from phalanx.core.work.states import JobState
from phalanx.ports.store import JobFilter

QUICK_MAX: Final = 10  # messages to one target in an hour; further ones follow BETWEEN_LATER_S apart
BETWEEN_LATER_S: Final = 600.0
USER_MAX: Final = 60  # messages of one user in an hour, over all targets, with those that were not accepted
HOUR_S: Final = 3600.0
GIVE_UP_S: Final = 86400.0
PENDING_MAX: Final = 200  # notes that wait for one target; past that the oldest are dropped
_SENDERS: Final = 8  # messages on their way at once
_USER_SENDERS: Final = 2  # of one user, so that slow services of one do not delay the others
_ARRAYS_MAX: Final = 10_000  # of which it is remembered what was sent
_MARK_EVERY_S: Final = 3600.0  # how much of the history a head reads again at most
_PAGE: Final = 1000
_TIMEOUT_S: Final = 60.0  # of a commit
_FAILED: Final = frozenset({JobState.FAILED, JobState.TIMEOUT})
_READ_MARK: Final = JOB_MARKS
_log: Final = logging.getLogger("phalanx.notify")


@dataclass(slots=True)
class _Outbox:
    """What waits for one target of one user's jobs in one project. `seq`: of the last line that was delivered before this head started."""

    user: UserId
    project: ProjectId
    target: str
    seq: int
    pending: list[JobNote] = field(default_factory=list)
    dropped: int = 0
    sending: Future[None] | None = None
    sending_notes: int = 0
    sent_s: deque[float] = field(default_factory=deque)
    next_s: float = 0.0
    failures: int = 0

    @property
    def mark_id(self) -> str:
        """The id of its mark in the store."""
        return f"{JOB_MARKS}{self.user}:{self.project}:{self.target}"


class JobNotifier:
    """See the module."""

    def __init__(self, services: HeadServices, seal: SecretSeal) -> None:
        self._services, self._seal = services, seal
        self._lock = threading.Lock()
        self._outboxes: dict[tuple[UserId, ProjectId, str], _Outbox] = {}
        self._sent_by: dict[UserId, deque[float]] = {}
        self._arrays: OrderedDict[JobId, set[NotifyEvent]] = OrderedDict()
        self._stored: dict[str, int] = {}
        # All up to this line was delivered, except to targets with a mark of their own; -1 before the first step.
        self._began_at = -1
        self._seq = 0
        self._marked_s = -math.inf
        self._is_due = False
        self._lines: list[tuple[JobId, str]] = []
        self._closing = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="notify", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next tick; a message that is being sent is not waited for."""
        self._closing.set()

    def step(self) -> None:
        """Read new lines of the history, take the results of what was sent, and send what is due. Called by the thread."""
        with self._lock:
            if self._began_at < 0:
                self._load()
            self._read()
            for outbox in self._outboxes.values():
                self._finish(outbox)
            for outbox in sorted(self._outboxes.values(), key=lambda one: one.next_s):  # the longest due first
                self._send(outbox)
            self._mark()
            self._drop_idle()

    def _run(self) -> None:
        while not self._closing.wait(until_tick_s(TICK_S, time.monotonic())):
            try:
                self.step()
            except PhalanxError as error:
                _log.warning("notify: %s", error)
            except Exception:  # noqa: BLE001  an internal error must not end the thread; the next tick tries again
                _log.exception("internal error in the sender of jobs' messages")

    def _load(self) -> None:
        """Go on where the head before this one was. A cluster that has no mark yet has delivered nothing: it begins with the first line."""
        marks = [mark for mark in self._services.store.records(CHANNEL_MARKS) if mark.id.startswith(JOB_MARKS)]
        self._stored = {mark.id: mark.seq for mark in marks}
        self._began_at = self._stored.get(_READ_MARK, 0)
        self._seq = min([self._began_at, *self._stored.values()])
        self._marked_s = self._now_s()

    # ---- reading --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while lines := self._services.store.history(after=self._seq, limit=_PAGE):
            found: list[tuple[Job, JobNote]] = []
            ended: dict[JobId, tuple[Job, int]] = {}
            jobs = {
                job_id: self._services.store.job(job_id)
                for job_id in {line.job_id for line in lines if line.kind in EVENTS_OF_KIND}
                if job_id is not None
            }
            for line in lines:
                job = None if line.kind not in EVENTS_OF_KIND or line.job_id is None else jobs[line.job_id]
                if job is None or job.spec.notify is None:
                    continue
                found += [(job, note) for note in self._notes(job, job.spec.notify, line)]
                if job.array is not None and EVENTS_OF_KIND[line.kind] & {NotifyEvent.END}:
                    ended[job.array.array_id] = job, line.seq
            found += [(job, note) for job, seq in ended.values() for note in self._array_end(job, seq)]
            for job, note in sorted(found, key=lambda one: one[1].seq):
                self._add(job, note)
            self._seq = lines[-1].seq
            if len(lines) < _PAGE:
                return

    def _notes(self, job: Job, terms: NotifyTerms, line: HistoryLine) -> list[JobNote]:
        events = EVENTS_OF_KIND[line.kind]
        if line.kind == "cancelled" and job.epoch == 0 and not job.cancelled_by:  # a dependency can never be met
            events |= {NotifyEvent.FAILURE}
        wanted = events.intersection(terms.on)
        if not wanted:
            return []
        attempt = self._services.store.newest_attempts([job.id]).get(job.id)
        if job.array is None:
            return [job_note(job, line, attempt, self._page_url(job.id))]
        # An array's end is a message of the whole array. Of everything else the first element's is sent.
        event = next((event for event in NotifyEvent if event in wanted and event is not NotifyEvent.END), None)
        if event is None or not self._is_first(job, event):
            return []
        if event is NotifyEvent.FAILURE:
            return [first_failure_note(job, line, attempt, self._page_url(job.id))]
        return [job_note(job, line, attempt, self._page_url(job.id))]

    def _is_first(self, job: Job, event: NotifyEvent) -> bool:
        """Whether no element of the array had this event before. Asks the store, since this head may not have seen the first one."""
        assert job.array is not None
        sent = self._sent_of(job.array.array_id)
        if event in sent:
            return False
        sent.add(event)
        if event is NotifyEvent.START:
            return all(
                (one.started_s, one.seq) >= (job.started_s, job.seq)
                for one in self._elements(job)
                if one.started_s is not None
            )
        if event is NotifyEvent.FAILURE:
            failed = [one for one in self._elements(job) if one.state in _FAILED and one.ended_s is not None]
            ended_s = math.inf if job.ended_s is None else job.ended_s  # a waiting one can fail: it can never start
            return all((one.ended_s, one.seq) >= (ended_s, job.seq) for one in failed)
        return True

    def _elements(self, job: Job) -> list[Job]:
        """All elements of an array: half a second for ten thousand, once for each event."""
        assert job.array is not None
        first = int(job.array.array_id)
        wanted = JobFilter(before_seq=first + job.array.size, limit=job.array.size)
        return [
            one
            for one in self._services.store.jobs(wanted)
            if one.array is not None and one.array.array_id == job.array.array_id
        ]

    def _sent_of(self, array_id: JobId) -> set[NotifyEvent]:
        """The events of an array that were sent."""
        sent = self._arrays.setdefault(array_id, set())
        self._arrays.move_to_end(array_id)
        if len(self._arrays) > _ARRAYS_MAX:
            self._arrays.popitem(last=False)
        return sent

    def _array_end(self, job: Job, seq: int) -> list[JobNote]:
        """The note of an array that has ended. Called after its lines were read, so that the states are not older than they are."""
        assert job.array is not None
        assert job.spec.notify is not None
        sent = self._sent_of(job.array.array_id)
        if NotifyEvent.END in sent:
            return []
        states = self._services.store.states(int(job.array.array_id), job.array.size)
        if not all(state.terminal for _, state in states):
            return []
        sent.add(NotifyEvent.END)
        on = job.spec.notify.on
        if NotifyEvent.END not in on and not (
            NotifyEvent.FAILURE in on and any(state in _FAILED for _, state in states)
        ):
            return []
        return [array_end_note(job, dict(states), seq, self._page_url(job.array.array_id))]

    def _page_url(self, job_id: JobId) -> str:
        """The job's page: below the URL that people sign in at, else that of the head."""
        settings = self._services.store.record(SIGN_IN, PROVIDER)
        base = settings.urls[0] if settings is not None and settings.urls else self._services.url
        return f"{base.rstrip('/')}/jobs/{job_id}" if base else ""

    def _add(self, job: Job, note: JobNote) -> None:
        assert job.spec.notify is not None
        for target in job.spec.notify.to:
            key = job.user, job.project, target
            outbox = self._outboxes.get(key)
            if outbox is None:
                outbox = self._outboxes[key] = _Outbox(*key, seq=0)
                outbox.seq = self._stored.get(outbox.mark_id, self._began_at)
            if note.seq > outbox.seq:
                note = note.at(self._now_s())
                outbox.pending.append(note)
                if len(outbox.pending) > PENDING_MAX:
                    del outbox.pending[0]
                    outbox.dropped += 1
                    outbox.sending_notes = max(0, outbox.sending_notes - 1)

    # ---- sending --------------------------------------------------------------------------------------------------------

    def _send(self, outbox: _Outbox) -> None:
        """Send what waits, if anything does and the target is ready."""
        if (
            outbox.sending is not None
            or not outbox.pending
            or self._now_s() < max(outbox.next_s, self._allowed_s(outbox))
        ):
            return
        busy = [one for one in self._outboxes.values() if one.sending is not None]
        if len(busy) >= _SENDERS or sum(one.user == outbox.user for one in busy) >= _USER_SENDERS:
            return
        message = joined_message(outbox.pending, outbox.dropped)
        outbox.sending_notes, outbox.sending = len(outbox.pending), Future()
        self._sent_by[outbox.user].append(self._now_s())
        # A daemon, not one of a pool: a head that stops would wait for the threads of a pool, and a service may be slow.
        deliver = partial(self._deliver, outbox.sending, outbox.user, outbox.project, outbox.target, message)
        threading.Thread(target=deliver, name="notify-send", daemon=True).start()

    def _allowed_s(self, outbox: _Outbox) -> float:
        """When the bounds of the target and of the user allow the next message."""
        now_s = self._now_s()
        own, all_sent = outbox.sent_s, self._sent_by.setdefault(outbox.user, deque())
        for sent in (own, all_sent):
            while sent and sent[0] <= now_s - HOUR_S:
                sent.popleft()
        between_s = BETWEEN_S if len(own) < QUICK_MAX else BETWEEN_LATER_S
        next_s = own[-1] + between_s if own else 0.0
        return max(next_s, all_sent[-USER_MAX] + HOUR_S) if len(all_sent) >= USER_MAX else next_s

    def _deliver(self, done: Future[None], user: UserId, project: ProjectId, target: str, message: Message) -> None:
        try:
            self._notify(user, project, target, message)
        except Exception as error:  # noqa: BLE001  reported in the history of the job
            done.set_exception(error)
        else:
            done.set_result(None)

    def _notify(self, user: UserId, project: ProjectId, target: str, message: Message) -> None:
        """Send a message. Channels and secrets are looked up now: what a job may use can have changed since it was submitted.

        Raises:
            PhalanxError: it was not accepted, or the target is not there.
        """
        services = self._services
        assert services.notifier is not None  # the thread is not started without
        channels = services.store.records(CHANNELS)
        match target_kind(target):
            case NotifyTargetKind.SEALED_URL:
                known = {secret.id: secret for secret in services.store.records(SECRETS)}
                secret = find_secret(known, secret_of(target), user=user, project=project)
                if secret is None:
                    raise NotFound(f"secret {secret_of(target)} was removed", hint=Hint(HintCode.LIST_SECRETS))
                services.notifier.send(self._seal.open(secret).strip(), message, from_user=True)
            case NotifyTargetKind.MAIL:
                channel = mail_channel(channels, project)
                if channel is None:
                    raise NotFound("this head has no mail channel for jobs", hint=Hint(HintCode.ADD_MAIL_CHANNEL))
                services.notifier.send(channel.url, message, to=target)
            case NotifyTargetKind.CHANNEL:
                named = next((one for one in channels if one.id == target and may_be_named(one, project)), None)
                if named is None:
                    raise NotFound(
                        f"channel {target} is not there, or not for jobs",
                        hint=Hint(HintCode.ADD_JOB_CHANNEL, channel=target),
                    )
                services.notifier.send(named.url, message)

    def _finish(self, outbox: _Outbox) -> None:
        """Take the result of a message that was sent."""
        if outbox.sending is None or not outbox.sending.done():
            return
        error, outbox.sending = outbox.sending.exception(), None
        if error is None:
            del outbox.pending[: outbox.sending_notes]
            outbox.failures = outbox.dropped = 0
            outbox.sent_s.append(self._now_s())
            self._is_due = True
        else:
            why = str(error) if isinstance(error, PhalanxError) else type(error).__name__
            _log.warning("notify: %s of user %s: %s", outbox.target, outbox.user, why)
            self._retry_later(outbox, why)
        outbox.sending_notes = 0

    def _retry_later(self, outbox: _Outbox, why: str) -> None:
        """Try again after a while, and drop what has waited for GIVE_UP_S. The first failure, and what is dropped, are in the job's history."""
        now_s = self._now_s()
        if not outbox.failures:
            self._lines.append(
                (outbox.pending[-1].job_id, f"notify: {outbox.target} was not reached, trying again: {why}")
            )
        outbox.next_s = now_s + RETRY_S[min(outbox.failures, len(RETRY_S) - 1)]
        outbox.failures += 1
        late = [note for note in outbox.pending if note.at_s <= now_s - GIVE_UP_S]
        if late:
            del outbox.pending[: len(late)]
            text = (
                f"notify: {len(late)} messages to {outbox.target} were dropped, as it was not reached for 24 h: {why}"
            )
            self._lines.append((late[-1].job_id, text))
        self._is_due = True

    # ---- the position in the store --------------------------------------------------------------------------------------

    def _mark(self) -> None:
        """Record how far each target is; at once after a delivery, and now and then what was read."""
        is_late = self._now_s() - self._marked_s >= _MARK_EVERY_S
        if not self._is_due and not (is_late and self._seq != self._stored.get(_READ_MARK)):
            return
        marks = {_READ_MARK: self._seq} | {
            outbox.mark_id: outbox.pending[0].seq - 1 for outbox in self._outboxes.values() if outbox.pending
        }
        fresh = [ChannelMark(id=id_, seq=seq) for id_, seq in marks.items() if self._stored.get(id_) != seq]
        gone = [id_ for id_ in self._stored if id_ not in marks]
        if fresh or gone or self._lines:
            command = MarkChannels(marks=fresh, removed=gone, lines=tuple(self._lines))
            self._services.controller.request(command).result(timeout=_TIMEOUT_S)
        self._stored, self._lines, self._is_due, self._marked_s = marks, [], False, self._now_s()

    def _drop_idle(self) -> None:
        """Drop targets for which nothing waits, and users, that got no message in the last hour."""
        now_s = self._now_s()
        for key, outbox in list(self._outboxes.items()):
            if (
                not outbox.pending
                and outbox.sending is None
                and (not outbox.sent_s or outbox.sent_s[-1] <= now_s - HOUR_S)
            ):
                del self._outboxes[key]
        for user in [user for user, sent in self._sent_by.items() if not sent or sent[-1] <= now_s - HOUR_S]:
            del self._sent_by[user]

    def _now_s(self) -> float:
        return self._services.clock.boottime_s()
