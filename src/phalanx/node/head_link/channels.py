"""The connection to the head: registration, lease renewals, commands, events. Each has its own thread and connection, so that none blocks another.

The renewer has its own timer: a busy loop or a slow disk at the head must not cost the lease. Received messages go to the loop's inbox;
reports from the loop are sent until they are acknowledged.
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
from phalanx.core.state.reports import Report
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.events import LeaseRenewed
from phalanx.node.logic.pending_events import PendingEvents
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import boottime_ns

POLL_S: Final = 20.0  # how long the head holds a poll while there are no commands
_POLL_SLACK_S: Final = 10.0
_ASK_S: Final = 10.0  # for a durable answer: a commit and an fsync, on a busy disk
_RENEW_S: Final = 3.0  # the head answers from memory; a longer wait would delay the next renewal
_QUICK_S: Final = 1.0  # a longer round trip tells too little about the head's clock
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 0.5  # longest delay until a restarted head is found
_SPACING_S: Final = 0.005  # between two requests of a busy channel: what comes meanwhile travels together
_IDLE_S: Final = 5.0  # an event ends this wait; so the thread also ends with its supervisor
_OTHER_MACHINE: Final = "other_machine"  # controller.lives: another machine is registered for this node
_OTHER_MACHINE_RETRY_S: Final = 2.0  # also the retry interval of a whole site after a restart
_log = logging.getLogger(__name__)


class Backoff:
    """Growing pauses between retries; an event ends a pause early."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._pause_s = _PAUSE_FIRST_S

    def pause(self) -> None:
        """Wait, each time twice as long up to a limit."""
        self._ended.wait(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _PAUSE_MAX_S)

    def reset(self) -> None:
        """Start again with the shortest pause, after a success."""
        self._pause_s = _PAUSE_FIRST_S


class RequestSpacing:
    """Keeps the starts of a channel's requests apart: one request carries what would else be several. A request after a pause starts at once."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def wait(self) -> None:
        """Wait until another request may start, and count it as started."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            time.sleep(self._next_s - now_s)
            now_s = self._next_s
        self._next_s = now_s + _SPACING_S


class Registrar:
    """Registers the supervisor, once for all threads, when the head asks. `registrations`: registrations so far; the reply's `after`: where commands start."""

    def __init__(
        self,
        access: HeadAccess,
        make_request: Callable[[str], wire.HelloRequest],
        ended: threading.Event,
        *,
        on_refused: Callable[[RequestRejected], None] = lambda _: None,
    ) -> None:
        self._on_refused = on_refused
        self._access = access
        self._connection = HeadConnection(access)
        self._hello = make_request
        self._ended = ended
        self._lock = threading.Lock()
        self.registrations = 0
        self.reply: wire.HelloReply | None = None
        self.registered = threading.Event()

    def register(self, seen: int) -> None:
        """Register unless another thread did since `seen`; returns once the head knows us, or the supervisor leaves."""
        if self._ended.is_set():
            time.sleep(_PAUSE_MAX_S)  # callers ask again until they end too
            return
        backoff = Backoff(self._ended)
        challenge = ""
        with self._lock:
            while self.registrations == seen and not self._ended.is_set():
                try:
                    request, challenge = wire.encode(self._hello(challenge)), ""  # queries the head for its folders
                    body = self._connection.call("POST", "/v1/node/hello", request, timeout_s=_ASK_S)
                    reply = wire.decode(body, wire.HelloReply)
                    if reply.challenge:
                        challenge = reply.challenge
                        continue
                    self.reply = reply
                    self._access.address.add_heads(self.reply.heads)
                    self.registrations += 1
                    self.registered.set()
                    _log.info("registered with head %s, commands after %d", self.reply.head_id, self.reply.after)
                except (HeadUnavailable, RegistrationRequired) as error:
                    _log.debug("registration: %s", error)
                    backoff.pause()
                except (RequestRejected, msgspec.MsgspecError) as error:
                    _log.warning("the head refuses this supervisor: %s", error)
                    if isinstance(error, RequestRejected):
                        self._on_refused(error)
                        if error.code == _OTHER_MACHINE:  # until the other supervisor has been silent for a lease
                            self._ended.wait(_OTHER_MACHINE_RETRY_S)
                    backoff.pause()


class LeaseRenewer:
    """Renews the lease when it is due, and at once after a registration or `renew_now`."""

    def __init__(
        self,
        access: HeadAccess,
        registrar: Registrar,
        *,
        node_id: NodeId,
        supervisor_id: SupervisorId,
        epochs: Callable[[], list[tuple[JobId, Epoch]]],
        on_renewed: Callable[[LeaseRenewed], None],
        ended: threading.Event,
    ) -> None:
        self._access = access
        self._connection = HeadConnection(access, protocol=wire.RENEWAL_PROTOCOL)
        self._registrar = registrar
        self._node_id = node_id
        self._supervisor_id = supervisor_id
        self._epochs = epochs
        self._on_renewed = on_renewed
        self._ended = ended
        self._now = threading.Event()
        self._held_until_ns = 0
        self.renew_in_s = 0.0  # as the head requested last
        # How far our wall clock is ahead of the head's, measured at the last renewal with a short round trip.
        self.clock_offset_s = 0.0

    def renew_now(self) -> None:
        """Renew at once."""
        self._now.set()

    def run(self) -> None:
        """Run until the supervisor ends."""
        backoff = Backoff(self._ended)
        while not self._ended.is_set():
            seen = self._registrar.registrations
            if seen == 0:
                self._registrar.register(0)
                continue
            self._now.clear()
            try:
                renew_in_s = self._renew()
            except RegistrationRequired:
                if not self._ended.is_set():
                    self._registrar.register(seen)
            except (HeadUnavailable, RequestRejected, msgspec.MsgspecError) as error:
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
            reconnects=True,
        )
        sent_s = time.time()
        body = self._connection.call("POST", "/v1/node/lease", wire.encode(request), timeout_s=_RENEW_S)
        received_s = time.time()
        reply = wire.decode(body, wire.LeaseReply)
        if reply.at_s and 0.0 <= received_s - sent_s < _QUICK_S:  # the head answered between the two times
            self.clock_offset_s = (sent_s + received_s) / 2 - reply.at_s
        self._access.address.add_heads(reply.heads)
        self._held_until_ns = sent_ns + int(reply.lease_s * 1e9)
        self._on_renewed(
            LeaseRenewed(
                sent_ns=sent_ns,
                lease_s=reply.lease_s,
                requested=frozenset(epochs),
                superseded=frozenset((job, epoch) for job, epoch in reply.superseded),
            )
        )
        self.renew_in_s = reply.renew_in_s
        return reply.renew_in_s


class CommandPoller:
    """Polls for commands and passes them on, each at most once in one incarnation of the head."""

    def __init__(
        self,
        access: HeadAccess,
        registrar: Registrar,
        *,
        supervisor_id: SupervisorId,
        on_commands: Callable[[list[Command | wire.OpenExec]], None],
        ended: threading.Event,
    ) -> None:
        self._connection = HeadConnection(access)
        self._registrar = registrar
        self._supervisor_id = supervisor_id
        self._on_commands = on_commands
        self._ended = ended

    def run(self) -> None:
        """Run until the supervisor ends."""
        backoff, spacing = Backoff(self._ended), RequestSpacing()
        registration = after = 0
        ids = ""
        while not self._ended.is_set():
            seen = self._registrar.registrations
            if seen != registration or seen == 0:
                self._registrar.registered.wait(_PAUSE_MAX_S)
                registered = self._registrar.reply  # read once: another registration may complete meanwhile
                if registered is None:
                    continue
                registration, after = seen, registered.after
                ids = urlencode({"head": registered.head_id, "supervisor": self._supervisor_id})
            spacing.wait()
            try:
                path = f"/v1/node/commands?after={after}&wait_s={POLL_S:g}&{ids}"
                reply = wire.decode(
                    self._connection.call("GET", path, timeout_s=POLL_S + _POLL_SLACK_S), wire.CommandsReply
                )
            except RegistrationRequired:
                self._registrar.register(seen)
            except (HeadUnavailable, RequestRejected, msgspec.MsgspecError) as error:
                _log.debug("commands: %s", error)
                backoff.pause()
            else:
                backoff.reset()
                after = max(after, reply.last)
                if reply.commands:
                    self._on_commands(
                        [command for framed in reply.commands if (command := _decoded(framed)) is not None]
                    )


class EventSender:
    """Sends events in order until the head has stored each durably."""

    def __init__(
        self, access: HeadAccess, registrar: Registrar, *, supervisor_id: SupervisorId, ended: threading.Event
    ) -> None:
        self._connection = HeadConnection(access)
        self._registrar = registrar
        self._supervisor_id = supervisor_id
        self._ended = ended
        self._outgoing = PendingEvents()
        self._some = threading.Condition()

    def put(self, events: list[Report]) -> None:
        """Queue these events for sending."""
        with self._some:
            for event in events:
                self._outgoing.put(event)
            self._some.notify_all()

    def wait_flushed(self, timeout_s: float) -> bool:
        """Wait until all events are acknowledged; False on timeout."""
        with self._some:
            return self._some.wait_for(lambda: len(self._outgoing) == 0, timeout_s)

    def run(self) -> None:
        """Run until the supervisor ends."""
        backoff, spacing = Backoff(self._ended), RequestSpacing()
        alone = False  # one event in a request, to find the one that the head rejects
        while not self._ended.is_set():
            with self._some:
                if not self._outgoing:
                    self._some.wait(_IDLE_S)
            spacing.wait()
            with self._some:
                batch = self._outgoing.batch(1) if alone else self._outgoing.batch()
            if not batch:
                continue
            seen = self._registrar.registrations
            framed = self._framed(batch)
            if not framed:
                continue
            try:
                acked = self._send(framed)
            except RegistrationRequired:
                self._registrar.register(seen)
            except RequestRejected as error:
                if alone or len(batch) == 1:
                    _log.error("the head rejected event %d (%s): %s", batch[0][0], type(batch[0][1]).__name__, error)
                    with self._some:
                        self._outgoing.discard(batch[0][0])
                alone = not alone
            except (HeadUnavailable, msgspec.MsgspecError) as error:
                _log.debug("events: %s", error)
                backoff.pause()
            else:
                backoff.reset()
                alone = False
                with self._some:
                    self._outgoing.acknowledge(acked)
                    self._some.notify_all()

    def _framed(self, batch: list[tuple[int, Report]]) -> list[wire.Envelope]:
        """Encode events; drop one that cannot be encoded, since it would block all behind it."""
        framed = []
        for seq, event in batch:
            try:
                framed.append(wire.encode_envelope(seq, event))
            except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
                _log.error("event %d (%s) cannot be encoded and is lost: %s", seq, type(event).__name__, error)
                with self._some:
                    self._outgoing.discard(seq)
                    self._some.notify_all()
        return framed

    def _send(self, framed: list[wire.Envelope]) -> int:
        request = wire.EventsRequest(supervisor_id=self._supervisor_id, events=framed)
        body = self._connection.call("POST", "/v1/node/events", wire.encode(request), timeout_s=_ASK_S)
        return wire.decode(body, wire.EventsReply).acked


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread. An unhandled error in it ends the supervisor and with it its ranks, rather than go unnoticed."""

    def guarded() -> None:
        try:
            run()
        except BaseException:  # noqa: BLE001  any error: this thread is gone
            _log.critical("thread %s failed; the supervisor and its ranks end", name, exc_info=True)
            os._exit(70)  # EX_SOFTWARE: a supervisor without this thread would be worse than none

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _decoded(framed: wire.Envelope) -> Command | wire.OpenExec | None:
    """The command; None for one that only a later release knows."""
    try:
        return wire.decode_command(framed)
    except (wire.UnknownEnvelopeKind, msgspec.MsgspecError) as error:
        _log.warning("command %d (%s) is unknown to this release and skipped: %s", framed.seq, framed.kind, error)
        return None
