"""The talk with the head: hello, renewals, commands, events; one thread and one connection each, so that none waits for another.

The renewer has its own timer: a busy loop or a slow disk at the head must not cost the lease. Nothing here decides: what arrives goes to
the loop's inbox, what the loop reports is sent until it is acknowledged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlencode

import msgspec

from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.state.commands import Command
from phalanx.core.state.events import Report
from phalanx.node.logic.happenings import Renewed
from phalanx.node.logic.outgoing import Outgoing
from phalanx.node.shell.link import Connection, HeadAccess, HeadAway, HelloWanted, Rejected
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import boottime_ns

POLL_S: Final = 20.0  # how long the head holds a poll for commands that has nothing to say
_POLL_SLACK_S: Final = 10.0
_ASK_S: Final = 10.0  # for a durable answer: a commit and an fsync, on a busy disk
_RENEW_S: Final = 3.0  # a renewal is answered from memory; waiting longer would cost the next one
_QUICK_S: Final = 1.0  # a round trip longer than this leaves too much open about the head's clock
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 0.5  # how late a head that came back is found, at most
_OTHER_MACHINE: Final = "other_machine"  # controller.lives: another machine speaks for this node
_ELSEWHERE_S: Final = 2.0  # a whole site that was started anew asks so often
_log = logging.getLogger(__name__)


class Backoff:
    """Growing pauses between tries, ended early by an event."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._pause_s = _PAUSE_FIRST_S

    def pause(self) -> None:
        """Wait a little longer than the last time."""
        self._ended.wait(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _PAUSE_MAX_S)

    def reset(self) -> None:
        """The last try went well."""
        self._pause_s = _PAUSE_FIRST_S


class Greeter:
    """Says hello once for all threads whenever the head asks; `count` grows with each, `after` is where commands start then."""

    def __init__(
        self,
        access: HeadAccess,
        hello: Callable[[str], wire.HelloRequest],
        ended: threading.Event,
        *,
        on_refused: Callable[[Rejected], None] = lambda _: None,
    ) -> None:
        self._on_refused = on_refused
        self._access = access
        self._connection = Connection(access)
        self._hello = hello
        self._ended = ended
        self._lock = threading.Lock()
        self.count = 0
        self.reply: wire.HelloReply | None = None
        self.greeted = threading.Event()

    def greet(self, seen: int) -> None:
        """Say hello unless somebody did since `seen`; returns when the head knows us, or the supervisor ends."""
        backoff = Backoff(self._ended)
        challenge = ""
        with self._lock:
            while self.count == seen and not self._ended.is_set():
                try:
                    said, challenge = wire.encode(self._hello(challenge)), ""  # asks the head where its folders lie
                    body = self._connection.call("POST", "/v1/node/hello", said, timeout_s=_ASK_S)
                    reply = wire.decode(body, wire.HelloReply)
                    if reply.challenge:
                        challenge = reply.challenge
                        continue
                    self.reply = reply
                    self._access.address.learn(self.reply.heads)
                    self.count += 1
                    self.greeted.set()
                    _log.info("said hello to head %s, commands after %d", self.reply.head_id, self.reply.after)
                except (HeadAway, HelloWanted) as error:
                    _log.debug("hello: %s", error)
                    backoff.pause()
                except (Rejected, msgspec.MsgspecError) as error:
                    _log.warning("the head refuses this supervisor: %s", error)
                    if isinstance(error, Rejected):
                        self._on_refused(error)
                        if error.code == _OTHER_MACHINE:  # until that one has been silent for a lease
                            self._ended.wait(_ELSEWHERE_S)
                    backoff.pause()


class Renewer:
    """Renews the lease in its own time, at once after a hello or when asked."""

    def __init__(
        self,
        access: HeadAccess,
        greeter: Greeter,
        *,
        node_id: NodeId,
        supervisor_id: SupervisorId,
        epochs: Callable[[], list[tuple[JobId, Epoch]]],
        heard: Callable[[Renewed], None],
        ended: threading.Event,
    ) -> None:
        self._access = access
        self._connection = Connection(access)
        self._greeter = greeter
        self._node_id = node_id
        self._supervisor_id = supervisor_id
        self._epochs = epochs
        self._heard = heard
        self._ended = ended
        self._now = threading.Event()
        self._held_until_ns = 0
        self.renew_in_s = 0.0  # as the head said last
        self.clock_off_s = (
            0.0  # how far our wall clock is ahead of the head's, as of the last renewal that was quick enough to tell
        )

    def renew_now(self) -> None:
        """Do not wait for the next one to be due."""
        self._now.set()

    def run(self) -> None:
        """Until the supervisor ends."""
        backoff = Backoff(self._ended)
        while not self._ended.is_set():
            seen = self._greeter.count
            if seen == 0:
                self._greeter.greet(0)
                continue
            self._now.clear()
            try:
                renew_in_s = self._renew()
            except HelloWanted:
                self._greeter.greet(seen)
            except (HeadAway, Rejected, msgspec.MsgspecError) as error:
                _log.debug("renewal: %s", error)
                backoff.pause()
            else:
                backoff.reset()
                self._now.wait(renew_in_s)

    def _renew(self) -> float:
        epochs = self._epochs()
        sent_ns = boottime_ns()
        request = wire.LeaseRequest(
            supervisor_id=self._supervisor_id,
            node_id=self._node_id,
            epochs=epochs,
            held_s=max(0, self._held_until_ns - sent_ns) / 1e9,
        )
        sent_s = time.time()
        body = self._connection.call("POST", "/v1/node/lease", wire.encode(request), timeout_s=_RENEW_S)
        heard_s = time.time()
        reply = wire.decode(body, wire.LeaseReply)
        if reply.at_s and 0.0 <= heard_s - sent_s < _QUICK_S:  # the answer was made somewhere between the two
            self.clock_off_s = (sent_s + heard_s) / 2 - reply.at_s
        self._access.address.learn(reply.heads)
        self._held_until_ns = sent_ns + int(reply.lease_s * 1e9)
        self._heard(
            Renewed(
                sent_ns=sent_ns,
                lease_s=reply.lease_s,
                asked=frozenset(epochs),
                superseded=frozenset((job, epoch) for job, epoch in reply.superseded),
            )
        )
        self.renew_in_s = reply.renew_in_s
        return reply.renew_in_s


class Commands:
    """Polls for commands and hands them on, each at most once in a life of the head."""

    def __init__(
        self,
        access: HeadAccess,
        greeter: Greeter,
        *,
        supervisor_id: SupervisorId,
        obey: Callable[[list[Command | wire.OpenExec]], None],
        ended: threading.Event,
    ) -> None:
        self._connection = Connection(access)
        self._greeter = greeter
        self._supervisor_id = supervisor_id
        self._obey = obey
        self._ended = ended

    def run(self) -> None:
        """Until the supervisor ends."""
        backoff = Backoff(self._ended)
        greeting = after = 0
        who = ""
        while not self._ended.is_set():
            seen = self._greeter.count
            if seen != greeting or seen == 0:
                self._greeter.greeted.wait(_PAUSE_MAX_S)
                greeted = self._greeter.reply  # once: another hello may be answered meanwhile
                if greeted is None:
                    continue
                greeting, after = seen, greeted.after
                who = urlencode({"head": greeted.head_id, "supervisor": self._supervisor_id})
            try:
                path = f"/v1/node/commands?after={after}&wait_s={POLL_S:g}&{who}"
                reply = wire.decode(
                    self._connection.call("GET", path, timeout_s=POLL_S + _POLL_SLACK_S), wire.CommandsReply
                )
            except HelloWanted:
                self._greeter.greet(seen)
            except (HeadAway, Rejected, msgspec.MsgspecError) as error:
                _log.debug("commands: %s", error)
                backoff.pause()
            else:
                backoff.reset()
                after = max(after, reply.last)
                if reply.commands:
                    self._obey([command for framed in reply.commands if (command := _opened(framed)) is not None])


class Events:
    """Sends events in order until each is durable at the head."""

    def __init__(
        self, access: HeadAccess, greeter: Greeter, *, supervisor_id: SupervisorId, ended: threading.Event
    ) -> None:
        self._connection = Connection(access)
        self._greeter = greeter
        self._supervisor_id = supervisor_id
        self._ended = ended
        self._outgoing = Outgoing()
        self._some = threading.Condition()

    def put(self, events: list[Report]) -> None:
        """Send these, after all before."""
        with self._some:
            for event in events:
                self._outgoing.put(event)
            self._some.notify_all()

    def flushed(self, timeout_s: float) -> bool:
        """Wait until all is acknowledged."""
        with self._some:
            return self._some.wait_for(lambda: len(self._outgoing) == 0, timeout_s)

    def run(self) -> None:
        """Until the supervisor ends."""
        backoff = Backoff(self._ended)
        alone = False  # one at a time, to find the one the head refuses
        while not self._ended.is_set():
            with self._some:
                if not self._outgoing:
                    self._some.wait(_PAUSE_MAX_S)
                batch = self._outgoing.batch(1) if alone else self._outgoing.batch()
            if not batch:
                continue
            seen = self._greeter.count
            framed = self._framed(batch)
            if not framed:
                continue
            try:
                acked = self._send(framed)
            except HelloWanted:
                self._greeter.greet(seen)
            except Rejected as error:
                if alone or len(batch) == 1:
                    _log.error("the head refuses event %d (%s): %s", batch[0][0], type(batch[0][1]).__name__, error)
                    with self._some:
                        self._outgoing.discard(batch[0][0])
                alone = not alone
            except (HeadAway, msgspec.MsgspecError) as error:
                _log.debug("events: %s", error)
                backoff.pause()
            else:
                backoff.reset()
                alone = False
                with self._some:
                    self._outgoing.acknowledge(acked)
                    self._some.notify_all()

    def _framed(self, batch: list[tuple[int, Report]]) -> list[wire.Framed]:
        """Ready to travel; what cannot be written down is given up, for it would hold up all behind it."""
        framed = []
        for seq, event in batch:
            try:
                framed.append(wire.frame(seq, event))
            except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
                _log.error("event %d (%s) cannot be written down and is lost: %s", seq, type(event).__name__, error)
                with self._some:
                    self._outgoing.discard(seq)
                    self._some.notify_all()
        return framed

    def _send(self, framed: list[wire.Framed]) -> int:
        request = wire.EventsRequest(supervisor_id=self._supervisor_id, events=framed)
        body = self._connection.call("POST", "/v1/node/events", wire.encode(request), timeout_s=_ASK_S)
        return wire.decode(body, wire.EventsReply).acked


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A daemon thread that never dies silently: an error in it ends the supervisor, and with it all it carries."""

    def guarded() -> None:
        try:
            run()
        except BaseException:  # noqa: BLE001  whatever it was, this thread is gone
            _log.critical("thread %s failed; the supervisor ends, and its ranks with it", name, exc_info=True)
            os._exit(70)  # EX_SOFTWARE: half a supervisor would be worse than none

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _opened(framed: wire.Framed) -> Command | wire.OpenExec | None:
    """The command, or None for one that only a later release knows."""
    try:
        return wire.command_of(framed)
    except (wire.UnknownKind, msgspec.MsgspecError) as error:
        _log.warning("command %d (%s) is not understood and passed over: %s", framed.seq, framed.kind, error)
        return None
