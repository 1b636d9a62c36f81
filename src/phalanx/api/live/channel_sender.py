"""Delivers lines of the history, and a digest of the past month, to notification channels. A thread reads, others send: no channel waits for another.

Each line is sent at least once: a head that crashes after sending and before it has recorded that sends again. Lines that come close together
are one message.
"""

from __future__ import annotations

import calendar
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.core.accounting.usage_digest import digest_message
from phalanx.core.errors import PhalanxError, TryLater
from phalanx.core.ids import JobId, ProjectId
from phalanx.core.state.events import MarkChannels
from phalanx.core.state.records import CHANNEL_MARKS, CHANNELS
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.channel import KINDS, Channel, ChannelMark, ChannelTopic, Message, message_of
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.notify import may_be_named
from phalanx.ports.notifier import Notifier
from phalanx.wire.api.channels import ChannelView

TICK_S: Final = 2.0
BETWEEN_S: Final = 10.0  # two messages to one channel
RETRY_S: Final = (10.0, 30.0, 120.0, 600.0)  # after failures in a row; then always the last
PENDING_MAX: Final = 1000  # lines that wait for one channel; past that the oldest are dropped
_MARK_EVERY_S: Final = 3600.0  # how much of the history a head reads again at most
_PAGE: Final = 1000
_SENDERS: Final = 16  # messages on their way at once
_TIMEOUT_S: Final = 60.0  # of a commit
_log: Final = logging.getLogger("phalanx.channels")


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that waits. `project`: that it is about; "" for none."""

    topic: ChannelTopic
    project: ProjectId
    text: str


@dataclass(slots=True)
class _Progress:
    """How far one channel is. `seq`: of the last line that it was compared with; `digest`: the last month that it received, as recorded."""

    channel: Channel
    seq: int
    digest: str
    pending: list[_Line] = field(default_factory=list)
    sending: Future[None] | None = None
    sending_lines: int = 0
    sending_digest: str = ""
    next_s: float = 0.0
    marked_s: float = 0.0
    failures: int = 0
    error: str = ""
    sent_s: float | None = None
    messages: int = 0


class ChannelSender:
    """See the module. `newest_seq`: the seq of the newest line of the history."""

    def __init__(self, services: HeadServices, newest_seq: Callable[[], int]) -> None:
        self._services, self._newest_seq = services, newest_seq
        self._lock = threading.Lock()
        self._progress: dict[str, _Progress] = {}
        self._closing = threading.Event()

    @property
    def notifier(self) -> Notifier:
        """What sends messages.

        Raises:
            TryLater: this head has none.
        """
        if self._services.notifier is None:
            raise TryLater("this head cannot send messages")
        return self._services.notifier

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="channels", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next tick; a message that is being sent is not waited for."""
        self._closing.set()

    def views(self) -> list[ChannelView]:
        """All channels, by name."""
        with self._lock:
            return [self._view(channel) for channel in self._services.store.records(CHANNELS)]

    def step(self) -> None:
        """Read new lines of the history, take the results of what was sent, and send what is due. Called by the thread."""
        with self._lock:
            channels = self._services.store.records(CHANNELS)
            names = {channel.id for channel in channels}
            for gone in self._progress.keys() - names:
                del self._progress[gone]
            for channel in channels:
                known = self._progress.get(channel.id)
                if known is None:
                    self._progress[channel.id] = self._begin(channel)
                elif known.channel != channel:
                    self._progress[channel.id] = _replaced(known, channel)
            if channels:
                self._read(channels)
                for channel in channels:
                    self._finish(channel, self._progress[channel.id])
                for channel in sorted(channels, key=lambda one: self._progress[one.id].next_s):  # the longest due first
                    self._send(channel, self._progress[channel.id])
                self._mark()

    def _run(self) -> None:
        while not self._closing.wait(until_tick_s(TICK_S, time.monotonic())):
            try:
                self.step()
            except PhalanxError as error:
                _log.warning("channels: %s", error)
            except Exception:  # noqa: BLE001  an internal error must not end the thread; the next tick tries again
                _log.exception("internal error in the sender of messages")

    def _begin(self, channel: Channel) -> _Progress:
        mark = self._services.store.record(CHANNEL_MARKS, channel.id)
        if mark is None:  # a new channel receives what happens from now on
            mark = ChannelMark(id=channel.id, seq=self._newest_seq(), digest=self._month(0))
            self._record([mark])
        return _Progress(channel=channel, seq=mark.seq, digest=mark.digest, marked_s=self._now_s())

    def _read(self, channels: list[Channel]) -> None:
        """Compare all channels with the lines that are new to one of them."""
        jobs: dict[JobId, Job | None] = {}
        after = min(self._progress[channel.id].seq for channel in channels)
        while lines := self._services.store.history(after=after, limit=_PAGE):
            for line in lines:
                topic = KINDS.get(line.kind)
                if topic is None:
                    continue
                job = self._job(line.job_id, jobs)
                if job is not None and job.copies_ahead:
                    continue  # if the data cannot be had, the jobs that want it fail by themselves
                project = ProjectId(str(line.facts.get("project", ""))) if job is None else job.project
                text = (
                    line.text if job is None else f"job {job.id} ({job.name}) of {job.user} in {project}: {line.text}"
                )
                for channel in channels:
                    progress = self._progress[channel.id]
                    if job is not None and _asks_for(job, line.kind, channel):
                        continue  # it gets the message that the job asks for
                    if line.seq > progress.seq and channel.takes(topic, project):
                        progress.pending.append(_Line(topic, project, text))
            after = lines[-1].seq
            for channel in channels:
                progress = self._progress[channel.id]
                progress.seq = max(progress.seq, after)
                _drop_oldest(progress)
            if len(lines) < _PAGE:
                return

    def _job(self, job_id: JobId | None, known: dict[JobId, Job | None]) -> Job | None:
        if job_id is None:
            return None
        if job_id not in known:
            known[job_id] = self._services.store.job(job_id)
        return known[job_id]

    def _send(self, channel: Channel, progress: _Progress) -> None:
        """Send what waits, if anything does and the channel is ready."""
        if progress.sending is not None or self._now_s() < progress.next_s:
            return
        if sum(one.sending is not None for one in self._progress.values()) >= _SENDERS:
            return
        month = self._month(-1)
        if progress.digest != self._month(0) and channel.takes(ChannelTopic.DIGEST, channel.project):
            message, progress.sending_digest = partial(self._digest, month, channel.project), self._month(0)
        elif progress.pending:
            lines = [(line.topic, line.text) for line in progress.pending]
            message, progress.sending_lines = partial(message_of, lines), len(lines)
        else:
            return
        progress.sending = Future()
        # A daemon, not one of a pool: a head that stops would wait for the threads of a pool, and a service may be slow.
        deliver = partial(self._deliver, progress.sending, channel.url, message)
        threading.Thread(target=deliver, name="channel", daemon=True).start()

    def _deliver(self, done: Future[None], url: str, message: Callable[[], Message]) -> None:
        try:
            self.notifier.send(url, message())
        except Exception as error:  # noqa: BLE001  reported as the error of the channel
            done.set_exception(error)
        else:
            done.set_result(None)

    def _finish(self, channel: Channel, progress: _Progress) -> None:
        """Take the result of a message that was sent."""
        if progress.sending is None or not progress.sending.done():
            return
        error, progress.sending = progress.sending.exception(), None
        if error is None:
            progress.failures, progress.error = 0, ""
            progress.sent_s, progress.messages = self._services.clock.now_s(), progress.messages + 1
            progress.next_s = self._now_s() + BETWEEN_S
            del progress.pending[: progress.sending_lines]
            progress.digest = progress.sending_digest or progress.digest
            progress.marked_s = -math.inf  # record it now
        else:
            progress.error = str(error) if isinstance(error, PhalanxError) else type(error).__name__
            progress.next_s = self._now_s() + RETRY_S[min(progress.failures, len(RETRY_S) - 1)]
            progress.failures += 1
            _log.warning("channel %s: %s", channel.id, progress.error)
        progress.sending_lines, progress.sending_digest = 0, ""

    def _mark(self) -> None:
        """Record how far those channels are for which nothing waits."""
        marks = []
        for name, progress in self._progress.items():
            due = self._now_s() - progress.marked_s >= _MARK_EVERY_S
            if due and not progress.pending and progress.sending is None:
                marks.append(ChannelMark(id=name, seq=progress.seq, digest=progress.digest))
        if marks:
            self._record(marks)
            for mark in marks:
                self._progress[mark.id].marked_s = self._now_s()

    def _record(self, marks: list[ChannelMark]) -> None:
        self._services.controller.request(MarkChannels(marks=marks)).result(timeout=_TIMEOUT_S)

    def _digest(self, month: str, project: ProjectId) -> Message:
        begin_s = _month_begin_s(month)
        end_s = _month_begin_s(self._month(0))
        hours = [hour for hour in self._services.usage_hours(begin_s, end_s) if begin_s <= int(hour.id) < end_s]
        return digest_message(hours, month, project)

    def _month(self, ahead: int) -> str:
        """The current month (0), or the one before (-1), in UTC."""
        now = time.gmtime(self._services.clock.now_s())
        number = now.tm_year * 12 + now.tm_mon - 1 + ahead
        return f"{number // 12}-{number % 12 + 1:02d}"

    def _now_s(self) -> float:
        return self._services.clock.boottime_s()

    def _view(self, channel: Channel) -> ChannelView:
        progress = self._progress.get(channel.id)
        return ChannelView(
            name=channel.id,
            shown=channel.shown,
            project=channel.project,
            topics=[topic.value for topic in channel.topics],
            by=channel.by,
            created_s=channel.created_s,
            pending=0 if progress is None else len(progress.pending),
            messages=0 if progress is None else progress.messages,
            sent_s=None if progress is None else progress.sent_s,
            error="" if progress is None else progress.error,
        )


def _asks_for(job: Job, kind: str, channel: Channel) -> bool:
    """Whether the job itself sends this to the channel."""
    terms = job.spec.notify
    return terms is not None and channel.id in terms.to and terms.wants(kind) and may_be_named(channel, job.project)


def _replaced(known: _Progress, channel: Channel) -> _Progress:
    """Go on with the new settings at once. Lines that wait and that the new settings take stay; the old address gets no more of them."""
    kept = [line for line in known.pending if channel.takes(line.topic, line.project)]
    return _Progress(channel=channel, seq=known.seq, digest=known.digest, pending=kept, marked_s=-math.inf)


def _drop_oldest(progress: _Progress) -> None:
    """Keep the newest PENDING_MAX lines that wait. Of those that are being sent, fewer are left to take off when they are sent."""
    dropped = max(0, len(progress.pending) - PENDING_MAX)
    del progress.pending[:dropped]
    progress.sending_lines = max(0, progress.sending_lines - dropped)


def _month_begin_s(month: str) -> float:
    return float(calendar.timegm(time.strptime(f"{month}-01 UTC", "%Y-%m-%d %Z")))
