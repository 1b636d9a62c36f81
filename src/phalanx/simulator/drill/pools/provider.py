"""The provider of a drill's node pool: machines that boot, cost money and die, behind calls that fail, are late, or lose or repeat answers.

It keeps the contract of `ports.provider`: at most one machine for each token, and none once its order was stopped, even if a call of an
earlier head arrives later. Calls are sent one after the other, none twice at once, as `controller.provider_calls` does; a head that dies takes
the unsent ones along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Protocol

from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import ChargedMachine, PoolNode
from phalanx.core.ids import NodeId
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.events import Event
from phalanx.core.state.reports import NodeDied, ProviderOutcome, ProviderReported
from phalanx.simulator.drill.clock import BEGIN_BOOT_S, BEGIN_UNIX_S
from phalanx.simulator.drill.head import DrillHead
from phalanx.simulator.drill.node import DrillNode
from phalanx.simulator.drill.protocols import NodeEnvironment

CALL_S: Final = 0.05
QUEUED_S: Final = 0.001  # from the commit to the call; the head may die in between
LATE_CALL_S: Final = (5.0, 20.0, 40.0)  # below and above the 15 s after which the controller repeats a call
BOOT_S: Final = (0.2, 1.0, 3.0)
INCARNATIONS_MAX: Final = 1000  # of the supervisors of one machine
SEEN_S: Final = 0.2  # until the provider notices that a machine ended
POOL_FAULT_KINDS: Final = (
    "provider_fails",
    "provider_late",
    "provider_silent",
    "provider_twice",
    "provider_keeps",
    "machine_never_up",
    "machine_lost",
    "head_crash_before_call",
    "head_crash_before_answer",
    "head_crash_at_record",
)


class MachineHost(NodeEnvironment, Protocol):
    """The cluster as used by the provider.

    Attributes:
        nodes: the current incarnation of each node; the provider adds and removes its own.
        original_nodes: the original record of each node.
    """

    nodes: dict[NodeId, DrillNode]
    original_nodes: dict[NodeId, Node]

    @property
    def boot_s(self) -> float:
        """CLOCK_BOOTTIME."""
        ...

    def count_event(self, what: str) -> None:
        """Count a state change."""
        ...

    def try_turn(self, events: Sequence[Event]) -> bool:
        """Report events to the head; return whether they are durable."""
        ...


@dataclass(slots=True)
class PoolMachine:
    """A machine; it costs money until it has ended. Times are by the provider's clock, which is never set: Unix seconds."""

    node_id: NodeId
    token: str
    name: str
    since_s: float
    until_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.until_s > 0.0


class DrillProvider:
    """See the module.

    Attributes:
        machines: every machine that was ever started, by token.
        on_start: called with each machine that starts; `on_stop`: with each that the head has stopped, while it still runs.
        failing, silent, doubled, kept, stuck, late: how many of the following starts fail, answers are lost or come twice, stops fail, machines
            never boot, and calls take `late_s`.
    """

    def __init__(self, cluster: MachineHost, dice: Random, make_node: Callable[[str], Node]) -> None:
        self._cluster, self._dice, self._make_node = cluster, dice, make_node
        self.machines: dict[str, PoolMachine] = {}
        self.on_start: Callable[[PoolMachine], None] = lambda _: None
        self.on_stop: Callable[[PoolMachine], None] = lambda _: None
        self.failing = self.silent = self.doubled = self.kept = self.stuck = self.late = 0
        self.late_s = CALL_S
        self._stopped: set[str] = set()  # tokens
        self._head: DrillHead | None = None  # that calls
        self._queued: set[tuple[str, ProviderAction]] = set()  # calls of this head without an answer
        self._busy_until_s = 0.0

    @property
    def running(self) -> list[PoolMachine]:
        """The machines that cost money now."""
        return [machine for machine in self.machines.values() if not machine.ended]

    def machine_of(self, node_id: NodeId) -> PoolMachine | None:
        """The running machine of a node."""
        return next((machine for machine in self.running if machine.node_id == node_id), None)

    @property
    def busy(self) -> bool:
        """Whether calls are queued or under way."""
        return bool(self._queued) and self._cluster.head is self._head

    def heal(self) -> None:
        """End all faults."""
        self.failing = self.silent = self.doubled = self.kept = self.stuck = self.late = 0

    # ---- calls ----------------------------------------------------------------------------------------------------------

    def open(self, head: DrillHead, orders: Iterable[PoolNode]) -> None:
        """Find the machines of the loaded orders, and stop all others, as the provider of a starting head does."""
        known = {member.token: member for member in orders}
        for machine in self.running:
            if machine.token not in known:
                self._stop(machine.token)
        for token in known:
            if token in self.machines and self.machines[token].ended:
                self._cluster.call_after(CALL_S, lambda token=token: self._report_lost(self.machines[token], head))  # type: ignore[misc]  # a default binds the loop variable

    def send(self, head: DrillHead, calls: Sequence[ProviderCall]) -> None:
        """Queue the calls of a head's step."""
        if self._head is not head:
            self._head, self._queued, self._busy_until_s = head, set(), 0.0
        for call in calls:
            if (call.token, call.action) in self._queued:
                continue
            self._queued.add((call.token, call.action))
            now_s = self._cluster.boot_s
            begin_s, took_s = max(now_s + QUEUED_S, self._busy_until_s), self.late_s if self.late > 0 else CALL_S
            self.late -= self.late > 0
            self._busy_until_s = begin_s + took_s
            self._cluster.call_after(begin_s - now_s, lambda call=call, took_s=took_s: self._begin(head, call, took_s))  # type: ignore[misc]  # as above

    def _begin(self, head: DrillHead, call: ProviderCall, took_s: float) -> None:
        """Send a call unless its head has died. From here on it arrives."""
        if self._cluster.head is head:
            self._cluster.call_after(took_s / 2.0, lambda: self._carry_out(head, call, took_s / 2.0))
            self._cluster.call_after(took_s, lambda: self._return(head, call))

    def _return(self, head: DrillHead, call: ProviderCall) -> None:
        if self._head is head:
            self._queued.discard((call.token, call.action))

    def _carry_out(self, head: DrillHead, call: ProviderCall, back_s: float) -> None:
        answer = self._start(call) if call.action is ProviderAction.START else self._stop_unless_kept(call)
        self._cluster.count_event(f"provider {call.action} {call.token}: {answer}")
        if answer is None:
            return
        if self.silent > 0:
            self.silent -= 1
            return
        times_s = [back_s]
        if self.doubled > 0:
            self.doubled -= 1
            times_s.append(back_s + self._dice.choice((0.1, 3.0, 30.0)))
        for after_s in times_s:
            self._cluster.call_after(after_s, lambda: self._answer(head, answer))

    def _answer(self, head: DrillHead, answer: ProviderReported) -> None:
        if self._cluster.head is head:
            self._cluster.try_turn(
                [answer]
            )  # an answer that is not recorded is not repeated; the controller calls again

    def _start(self, call: ProviderCall) -> ProviderReported:
        fails = self.failing > 0
        self.failing -= fails
        if not fails or self._dice.random() < 0.5:  # of a failed start, something may run
            self._create(call)
        report = ProviderReported(
            node_id=call.node_id,
            token=call.token,
            outcome=ProviderOutcome.FAILED if fails else ProviderOutcome.STARTED,
            why="no capacity" if fails else "",
        )
        machine = self.machines.get(call.token)
        if fails or machine is None:
            return report
        return replace(report, machine=machine.name, since_s=machine.since_s)

    def _create(self, call: ProviderCall) -> None:
        if call.token in self.machines or call.token in self._stopped:
            return
        name = f"m-{len(self.machines)}"
        machine = PoolMachine(node_id=call.node_id, token=call.token, name=name, since_s=self._now_s())
        self.machines[call.token] = machine
        self.on_start(machine)
        if self.stuck > 0:
            self.stuck -= 1
        else:
            self._cluster.call_after(self._dice.choice(BOOT_S), lambda: self._boot(machine))

    def _boot(self, machine: PoolMachine) -> None:
        if not machine.ended:
            record = self._make_node(machine.node_id)
            self._cluster.original_nodes[record.id] = record
            # A pool that was removed and added again uses the names again; a supervisor's incarnation never returns.
            incarnation = 1 + INCARNATIONS_MAX * len(self.machines)
            self._cluster.nodes[record.id] = DrillNode(self._cluster, record, incarnation=incarnation)
            self._cluster.nodes[record.id].boot()

    def _stop_unless_kept(self, call: ProviderCall) -> ProviderReported | None:
        if self.kept > 0:
            self.kept -= 1
            return None
        machine = self.machines.get(call.token)
        if machine is not None and not machine.ended:
            self.on_stop(machine)
        self._stop(call.token)
        stopped = (
            ()
            if machine is None
            else (ChargedMachine(machine=machine.name, since_s=machine.since_s, until_s=machine.until_s),)
        )
        return ProviderReported(
            node_id=call.node_id, token=call.token, outcome=ProviderOutcome.STOPPED, stopped=stopped
        )

    def _stop(self, token: str) -> None:
        self._stopped.add(token)
        if token in self.machines:
            self._end(self.machines[token])

    def _now_s(self) -> float:
        """The provider's clock."""
        return BEGIN_UNIX_S - BEGIN_BOOT_S + self._cluster.boot_s

    # ---- machines --------------------------------------------------------------------------------------------------------

    def _end(self, machine: PoolMachine) -> None:
        """The machine is gone with all its processes."""
        if machine.ended:
            return
        machine.until_s = self._now_s()
        node = self._cluster.nodes.pop(machine.node_id, None)
        self._cluster.original_nodes.pop(machine.node_id, None)
        if node is not None:
            node.power_off()
            self._cluster.processes_changed = True

    def machine_ended(self, node_id: NodeId) -> None:
        """The node died: its machine is gone, and the provider reports it."""
        machine = self.machine_of(node_id)
        if machine is not None:
            self._end(machine)
            self._cluster.call_after(
                SEEN_S, lambda: None if self._cluster.head is None else self._report_lost(machine, self._cluster.head)
            )

    def _report_lost(self, machine: PoolMachine, head: DrillHead) -> None:
        if self._cluster.head is head:
            why = "its machine has ended"
            self._cluster.try_turn(
                [
                    NodeDied(node_id=machine.node_id, supervisor_id=None, why=why, confirmed=True),
                    ProviderReported(
                        node_id=machine.node_id, token=machine.token, outcome=ProviderOutcome.LOST, why=why
                    ),
                ]
            )
