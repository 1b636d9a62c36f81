"""The provider of pools in a replay: machines that boot after a fixed time, and the ledger of what they cost."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from phalanx.core.fleet.node_pool import HOUR_S, NodePool, template_node
from phalanx.core.ids import NodeId, PoolId, SupervisorId
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.events import Event
from phalanx.core.state.reports import ProviderOutcome, ProviderReported, SupervisorRegistered

_ENGINE = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedPool:
    """A pool of a replay. `boot_s`: from the request of a node until it is up."""

    pool: NodePool
    boot_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RentedNode:
    """A node that was started. Times in seconds of the trace; `until_s` is negative while it runs."""

    node: NodeId
    pool: NodePool
    since_s: float
    until_s: float = -1.0

    @property
    def gpus(self) -> int:
        """Its number of GPUs."""
        return len(self.pool.template.devices)

    @property
    def cost(self) -> float:
        """What it was charged, in US dollars; 0 while it runs."""
        return self.pool.price_per_h * self.pool.paid_s(max(0.0, self.until_s - self.since_s)) / HOUR_S


class ReplayProvider:
    """Starts and stops the nodes of all pools of a replay.

    Attributes:
        nodes: every node that was started, in order.
    """

    def __init__(self, pools: Iterable[RentedPool] = ()) -> None:
        self._boot_s: Mapping[PoolId, float] = {one.pool.id: one.boot_s for one in pools}
        self._pools = {one.pool.id: one.pool for one in pools}
        self._boots: list[tuple[float, str]] = []
        self._running: dict[str, RentedNode] = {}  # by token
        self.nodes: list[RentedNode] = []

    def next_boot_s(self) -> float:
        """When the next machine has booted; infinite for none."""
        return self._boots[0][0] if self._boots else float("inf")

    def carry_out(self, calls: Iterable[ProviderCall], now_s: float) -> list[Event]:
        """Carry out the calls of one step; return the answers."""
        answers: list[Event] = []
        for call in calls:
            if call.action is ProviderAction.START and call.token not in self._running:
                pool = self._pools[PoolId(call.pool)]
                node = self._running[call.token] = RentedNode(node=call.node_id, pool=pool, since_s=now_s)
                self.nodes.append(node)
                heapq.heappush(self._boots, (now_s + self._boot_s[pool.id], call.token))
            elif call.action is ProviderAction.STOP and call.token in self._running:
                self._running.pop(call.token).until_s = now_s
            done = ProviderOutcome.STARTED if call.action is ProviderAction.START else ProviderOutcome.STOPPED
            answers.append(
                ProviderReported(node_id=call.node_id, token=call.token, offer=call.offer, outcome=done, since_s=now_s)
            )
        return answers

    def booted(self, now_s: float) -> list[Event]:
        """Return the registrations of the machines that are up by now."""
        found: list[Event] = []
        while self._boots and self._boots[0][0] <= now_s:
            _, token = heapq.heappop(self._boots)
            if token in self._running:
                rented = self._running[token]
                record = replace(
                    template_node(rented.pool, rented.node), engine=_ENGINE, shares_head_files=True, labels={}
                )
                found.append(SupervisorRegistered(node=record, supervisor_id=SupervisorId(rented.node)))
        return found

    def close(self, now_s: float) -> None:
        """The replay is over: what still runs is charged until now."""
        for rented in self._running.values():
            rented.until_s = now_s
        self._running.clear()
