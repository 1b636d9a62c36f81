"""A supervisor's requests to the head over an unreliable network: registration, lease renewals, events, and polls for commands.

It follows `node.shell.link`: one request of each kind at a time, retries after a delay, events stored until acknowledged, commands read
after the last seen number. Delayed and duplicated requests are processed late or twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from phalanx.controller.leases import UnknownSupervisor
from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.reports import Report
from phalanx.node.logic.events import CommandReceived, LeaseRenewed, MemberKey
from phalanx.node.logic.pending_events import PendingEvents
from phalanx.simulator.drill.protocols import NodeInterface
from phalanx.wire.supervisor import decode_command, decode_event, encode_envelope

RETRY_S: Final = 0.5
POLL_S: Final = 1.0


class SupervisorCalls:
    """The requests of one node's supervisor; see the module."""

    def __init__(self, node: NodeInterface) -> None:
        self._node, self._cluster = node, node.cluster
        self.members: tuple[MemberKey, ...] = ()
        self._outgoing = PendingEvents()
        self._sending = False
        self._after = 0
        self._greeted_by = 0
        self._greeting = False
        self._challenge = ""
        self._renewal = 0

    def enqueue_event(self, event: Report) -> None:
        """Store an event until the head has acknowledged it. Encodes and decodes it, so that encoding errors appear here."""
        self._outgoing.put(decode_event(encode_envelope(0, event)))
        self.send_events()

    # ---- requests ------------------------------------------------------------------------------------------------------

    def _call(self, ask: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """Send a request and pass the answer on, answer_once even for duplicates; None if request or answer is lost."""
        node, network, done = self._node, self._cluster.network, False

        def answer_once(answer: Any) -> None:
            nonlocal done
            if not done and node.alive:
                done = True
                answered(answer)

        def arrive() -> None:
            self._cluster.call_when_head_free(process)

        def process() -> None:
            answer = ask()
            self._cluster.call_after(
                self._cluster.answer_delay_s(),
                lambda: network.send(node.link.down, lambda: answer_once(answer), lambda: answer_once(None)),
            )

        network.send(node.link.up, arrive, lambda: answer_once(None))

    def register(self) -> None:
        """Register with the head; retry until it succeeds."""
        node = self._node
        if not node.alive or self._greeting:
            return
        if node.paused:
            self._cluster.call_after(RETRY_S, self.register)
            return
        self._greeting = True
        hello_event = replace(self._cluster.registration_of(node), challenge=self._challenge)
        self._challenge = ""
        head: list[int] = []

        def ask() -> int | str | None:
            after, number = self._cluster.handle_registration(node.id, hello_event)
            head.append(number)
            return after

        def answered(after: int | str | None) -> None:
            self._greeting = False
            if isinstance(after, str):
                self._challenge = after
                self.register()
                return
            if after is None:
                self._cluster.call_after(RETRY_S, self.register)
                return
            self._after, self._greeted_by = after, head[-1]
            self.renew()
            self.send_events()
            self.poll()

        self._call(ask, answered)

    def renew(self) -> None:
        """Renew the lease now, and again when due."""
        node, clock = self._node, self._cluster.clock
        self._renewal += 1
        number = self._renewal

        def again() -> None:
            if self._renewal == number and node.alive:
                self.renew()

        if node.paused:
            self._cluster.call_after(RETRY_S, again)
            return
        epochs: list[tuple[JobId, Epoch]] = [(key.job_id, key.epoch) for key in self.members]
        sent_ns = clock.ns
        held_s = max(0.0, (node.logic.lease.deadline_ns - sent_ns) / 1e9)

        def answered(answer: Any) -> None:
            if isinstance(answer, UnknownSupervisor):
                if self._renewal == number:
                    self.register()
                return
            if answer is not None:
                node.deliver(
                    LeaseRenewed(
                        sent_ns=sent_ns,
                        lease_s=answer.lease_s,
                        requested=frozenset(epochs),
                        superseded=frozenset(answer.superseded),
                    )
                )
            self._cluster.call_after(RETRY_S if answer is None else answer.renew_in_s, again)

        self._call(lambda: self._cluster.handle_renewal(node.id, node.supervisor_id, epochs, held_s), answered)

    def send_events(self) -> None:
        """Send the events that the head has not acknowledged."""
        node = self._node
        if self._sending or not self._outgoing or not node.alive:
            return
        if node.paused:
            return
        self._sending = True
        batch = self._outgoing.batch()

        def answered(acked: int | None) -> None:
            self._sending = False
            if acked is None or acked < 0:
                self._cluster.call_after(RETRY_S, self.send_events)
                return
            self._outgoing.acknowledge(acked)
            self.send_events()

        self._call(lambda: self._cluster.handle_events(node.id, node.supervisor_id, batch), answered)

    def send_step_report(self, report: Report) -> None:
        """Send a report from a step stream; retries can deliver it late and out of order with events."""
        node = self._node

        def again(process: bool | None) -> None:
            if not process:
                self._cluster.call_after(RETRY_S, lambda: self.send_step_report(report) if node.alive else None)

        self._call(lambda: self._cluster.handle_step_report(node.id, node.supervisor_id, report), again)

    # ---- commands ------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read the commands in the mailbox, as the answer to a waiting poll."""
        head, node = self._cluster.head, self._node
        if head is None or not node.reachable or head.registered.get(node.id) != node.supervisor_id:
            return
        if head.incarnation != self._greeted_by or node.link.up.cut:
            return
        framed, last = head.mailboxes.take(node.id, self._after)
        if not framed:
            self._after = last
            return
        commands = [decode_command(one) for one in framed]
        number = head.incarnation

        def arrive() -> None:
            if self._greeted_by == number:
                self._after = max(self._after, last)
            node.deliver(*(CommandReceived(command=command) for command in commands))  # type: ignore[arg-type]  # exec commands do not occur here

        if node.link.down.healthy:
            arrive()  # the latency was applied when the command was posted
        else:
            self._cluster.network.send(node.link.down, arrive)

    def poll_forever(self) -> None:
        """Poll until the supervisor ends."""
        if self._node.alive:
            self.poll()
            self._cluster.call_after(POLL_S, self.poll_forever)
