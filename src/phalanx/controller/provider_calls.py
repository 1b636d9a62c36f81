"""Carries out the calls of the providers of node pools, on threads of each provider, and reports their outcomes.

The calls of an order are carried out one after the other, in the order in which they were sent; those of different orders at the same time, on
as many threads as the provider allows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node_console import console_text
from phalanx.core.fleet.node_pool import ListedMachine, NodePool, PoolNode
from phalanx.core.ids import NodeId, PoolId
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.reports import MachinesListed, NodeDied, ProviderOutcome, ProviderReported, Report
from phalanx.ports.provider import (
    CallUnanswered,
    ConsoleReader,
    DelayedNode,
    EndedOrder,
    LeavingNode,
    LostNode,
    NodeOrder,
    NodeProvider,
    OfferRefused,
)

OBSERVE_EVERY_S: Final = 0.2
CLOSE_WAIT_S: Final = 30.0
_OUTCOMES: Final = {
    LostNode: ProviderOutcome.LOST,
    LeavingNode: ProviderOutcome.LEAVING,
    DelayedNode: ProviderOutcome.DELAYED,
}
_log = logging.getLogger("phalanx.providers")


@dataclass(slots=True, kw_only=True)
class ProviderCalls:
    """The providers of a head. Thread-safe.

    Attributes:
        create: returns a provider by its name; raises PhalanxError if it is not installed.
        parallel_calls: returns how many calls a provider of this name takes at the same time.
    """

    create: Callable[[str], NodeProvider]
    parallel_calls: Callable[[str], int] = lambda _: 1
    _report: Callable[[Sequence[Report]], object] = lambda _: None
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _providers: dict[str, NodeProvider] = field(default_factory=dict)
    _orders: dict[str, list[NodeOrder]] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def provider(self, name: str) -> NodeProvider:
        """Return the provider of this name.

        Raises:
            BadRequest: it is not installed.
        """
        with self._guard:
            if name not in self._providers:
                self._providers[name] = self.create(name)
            return self._providers[name]

    def open(
        self,
        pools: Mapping[PoolId, NodePool],
        members: Mapping[NodeId, PoolNode],
        report: Callable[[Sequence[Report]], object],
    ) -> None:
        """Start with the orders of the loaded records. `report` takes outcomes; it is called on the threads of the providers."""
        self._report = report
        for member in members.values():
            pool = pools[member.pool]
            order = NodeOrder(
                node_id=member.id,
                token=member.token,
                template=pool.template.text,
                zone=pool.zone,
                pool=pool.id,
                offer=member.offer,
                settings=dict(pool.settings),
                known_machine=member.machine,
            )
            self._orders.setdefault(pool.provider, []).append(order)
        for name in dict.fromkeys(pool.provider for pool in pools.values()):
            self._worker(name)

    def send(self, calls: Iterable[ProviderCall]) -> None:
        """Queue calls in order, except those that are queued or under way already: a slow provider must not fall behind. Never blocks."""
        for call in calls:
            self._worker(call.provider).add(call)

    def close(self, *, keep_nodes: bool) -> None:
        """Finish the calls under way and close the providers; unless `keep_nodes`, their nodes end."""
        for worker in self._workers.values():
            worker.end()
        until_s = time.monotonic() + CLOSE_WAIT_S
        for worker in self._workers.values():
            for thread in worker.threads:
                thread.join(timeout=max(0.0, until_s - time.monotonic()))
            if worker.provider is not None:
                self._record(worker.provider.close(keep_nodes=keep_nodes) or ())

    def _record(self, ended: Sequence[EndedOrder]) -> None:
        """Wait until it is recorded that these orders are over, and what they are charged for: the head ends."""
        reports: list[Report] = []
        for one in ended:
            report = partial(ProviderReported, node_id=one.node_id, token=one.token)
            if one.stray:
                reports += [
                    report(outcome=ProviderOutcome.STOPPED, machine=charged.machine, stopped=(charged,))
                    for charged in one.stopped
                ]
            else:
                reports.append(report(outcome=ProviderOutcome.ENDED, why="it was stopped with the head"))
                reports.append(report(outcome=ProviderOutcome.STOPPED, stopped=tuple(one.stopped)))
        if reports:
            _await_record(self._report(reports))

    def _worker(self, name: str) -> _Worker:
        if name not in self._workers:
            worker = _Worker(name=name, find=self.provider, orders=self._orders.get(name, []), report=self._report)
            self._workers[name] = worker
            worker.begin(self.parallel_calls(name))
        return self._workers[name]


@dataclass(slots=True, kw_only=True)
class _Worker:
    """The threads of one provider.

    Attributes:
        calls: those that wait, in the order in which they were sent; `busy`: the tokens of those under way. Both under `guard`.
        called: tokens of orders for which a start was or may have been sent, by this head or an earlier one.
        consoles: tokens of orders whose console was read.
        given_up: tokens of orders that are to be stopped: starts that are still queued are dropped.
    """

    name: str
    find: Callable[[str], NodeProvider]
    orders: Sequence[NodeOrder]
    report: Callable[[Sequence[Report]], object]
    provider: NodeProvider | None = None
    boottime_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    calls: deque[ProviderCall] = field(default_factory=deque)
    busy: set[str] = field(default_factory=set)
    guard: threading.Condition = field(default_factory=threading.Condition)
    opening: threading.Lock = field(default_factory=threading.Lock)
    unanswered: set[tuple[str, ProviderAction, str, str]] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    consoles: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, count: int) -> None:
        """Start `count` threads. The first one also opens and observes the provider."""
        self.called.update(order.token for order in self.orders)
        for number in range(count):
            name = f"provider-{self.name}-{number}"
            self.threads.append(threading.Thread(target=self.run, args=(number == 0,), name=name, daemon=True))
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Let the threads end after the calls under way."""
        self.ended.set()
        with self.guard:
            self.guard.notify_all()

    def add(self, call: ProviderCall) -> None:
        """Queue the call unless the same is queued or under way."""
        with self.guard:
            if call.action is ProviderAction.STOP and not call.machine:
                self.given_up.add(call.token)
            if _key(call) not in self.unanswered:
                self.unanswered.add(_key(call))
                self.calls.append(call)
                self.guard.notify()

    def run(self, first: bool) -> None:
        """Carry out calls until the head closes."""
        while not self.ended.is_set():
            try:
                self._step(first=first)
            except Exception:  # noqa: BLE001  # one failed call must not end the thread
                _log.exception("Error in provider %s; trying again", self.name)
                self.ended.wait(1.0)

    def _step(self, *, first: bool) -> None:
        provider = self._opened() if first and (self.orders or self.provider or self.calls) else None
        calls = self._take(OBSERVE_EVERY_S)
        if calls:
            try:
                reports = self._list(calls) if calls[0].action is ProviderAction.LIST else self._carry_out(calls[0])
                if reports:
                    self.report(reports)
            finally:
                self._done(calls)
        if provider is not None:
            for seen in provider.observe():
                outcome = _OUTCOMES[type(seen)]
                observed: list[Report] = (
                    [NodeDied(node_id=seen.node_id, supervisor_id=None, why=seen.why, confirmed=True)]
                    if isinstance(seen, LostNode)
                    else []
                )
                observed.append(ProviderReported(node_id=seen.node_id, token=seen.token, outcome=outcome, why=seen.why))
                self.report(observed)

    def _take(self, timeout_s: float) -> Sequence[ProviderCall]:
        """Return the first call whose order has none under way; none if no such call comes in time.

        With a list come all others that wait for a list by the same settings: pools of one account share it.
        """
        with self.guard:
            self.guard.wait_for(lambda: self.ended.is_set() or self._free() is not None, timeout_s)
            index = None if self.ended.is_set() else self._free()
            if index is None:
                return ()
            first = self.calls[index]
            found = [first]
            if first.action is ProviderAction.LIST:
                found += [one for one in self.calls if one is not first and self._shares_list(one, first)]
            taken = set(map(id, found))
            self.calls = deque(one for one in self.calls if id(one) not in taken)
            self.busy.update(one.token for one in found)
            return found

    def _shares_list(self, call: ProviderCall, other: ProviderCall) -> bool:
        same = call.action is ProviderAction.LIST and call.settings == other.settings
        return same and call.token not in self.busy

    def _free(self) -> int | None:
        return next((index for index, call in enumerate(self.calls) if call.token not in self.busy), None)

    def _done(self, calls: Sequence[ProviderCall]) -> None:
        with self.guard:
            self.unanswered.difference_update(map(_key, calls))
            self.busy.difference_update(call.token for call in calls)
            self.guard.notify()  # another call of the order may wait

    def _opened(self) -> NodeProvider:
        with self.opening:
            if self.provider is None:
                provider = self.find(self.name)
                provider.open(self.orders)
                self.provider = provider
            return self.provider

    def _carry_out(self, call: ProviderCall) -> Sequence[Report]:
        if call.action is ProviderAction.START:
            if call.token in self.given_up:
                return ()
            self.called.add(call.token)
        elif not call.machine and call.token not in self.called:  # nothing was ever asked for
            self.given_up.discard(call.token)
            outcome = ProviderOutcome.STOPPED
            return [ProviderReported(node_id=call.node_id, token=call.token, offer=call.offer, outcome=outcome)]
        order = NodeOrder(
            node_id=call.node_id,
            token=call.token,
            template=call.template,
            zone=call.zone,
            pool=call.pool,
            offer=call.offer,
            settings=dict(call.settings),
            machine=call.machine,
            known_machine=call.known_machine,
        )
        report = partial(ProviderReported, node_id=call.node_id, token=call.token, offer=call.offer)
        try:
            provider = self._opened()
            if call.action is ProviderAction.STOP:
                if call.console and isinstance(provider, ConsoleReader):
                    self._keep_console(provider, order)
                stopped = tuple(provider.stop(order))
                if not call.machine:
                    self.called.discard(call.token)
                    self.given_up.discard(call.token)
                    self.consoles.discard(call.token)
                return [report(outcome=ProviderOutcome.STOPPED, machine=call.machine, stopped=stopped)]
            started = provider.start(order)
        except (OSError, PhalanxError) as error:
            _log.warning("Provider %s could not %s %s: %s", self.name, call.action, call.node_id, error)
            outcome = ProviderOutcome.FAILED
            if call.action is ProviderAction.STOP or isinstance(error, CallUnanswered):
                outcome = ProviderOutcome.UNANSWERED  # the controller repeats the call
            elif isinstance(error, OfferRefused):
                outcome = ProviderOutcome.REFUSED
            return [report(outcome=outcome, why=_reason(error), machine=call.machine)]
        if started is None:
            return [report(outcome=ProviderOutcome.STARTED)]
        return [report(outcome=ProviderOutcome.STARTED, machine=started.machine, since_s=started.since_s)]

    def _keep_console(self, provider: ConsoleReader, order: NodeOrder) -> None:
        """Report what the machine printed, once, and wait until that is recorded: the machine is stopped next."""
        if order.token in self.consoles:
            return
        self.consoles.add(order.token)
        text = why = ""
        try:
            text = console_text(provider.console(order))
        except (OSError, PhalanxError) as error:
            _log.warning("Provider %s could not read the console of %s: %s", self.name, order.node_id, error)
            why = _reason(error)
        except Exception as error:  # noqa: BLE001  # the machine is paid for until it is stopped
            _log.exception("Error in provider %s while it read the console of %s", self.name, order.node_id)
            why = f"{type(error).__name__}: {error}"
        outcome = ProviderOutcome.CONSOLE
        report = ProviderReported(node_id=order.node_id, token=order.token, outcome=outcome, console=text, why=why)
        _await_record(self.report([report]))

    def _list(self, calls: Sequence[ProviderCall]) -> Sequence[Report]:
        """Ask once for the machines of these pools, which have the same settings."""
        asked_s, pools, why = self.boottime_s(), [PoolId(call.pool) for call in calls], ""
        machines: tuple[ListedMachine, ...] = ()
        try:
            machines = tuple(self._opened().machines(dict(calls[0].settings)))
        except (OSError, PhalanxError) as error:
            _log.warning("Provider %s could not list the machines of pool %s: %s", self.name, pools[0], error)
            why = _reason(error)
        return [MachinesListed(pool=pool, asked_boot_s=asked_s, machines=machines, why=why) for pool in pools]


def _await_record(recorded: object) -> None:
    """Wait until a report is recorded, if the driver promises that."""
    if isinstance(recorded, Future):
        try:
            recorded.result(timeout=CLOSE_WAIT_S)
        except (PhalanxError, TimeoutError) as error:
            _log.error("what a provider reported was not recorded: %s", error)


def _key(call: ProviderCall) -> tuple[str, ProviderAction, str, str]:
    return call.token, call.action, call.offer, call.machine


def _reason(error: OSError | PhalanxError) -> str:
    """The error in words, without its number, and with what to do next."""
    if isinstance(error, PhalanxError):
        return f"{error} ({error.hint})" if error.hint else str(error)
    if error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
