"""The calls of a head to its providers: in order, each once at a time, each outcome reported."""

import queue
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from phalanx.controller.provider_calls import ProviderCalls
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine
from phalanx.core.ids import NodeId, PoolId
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.reports import MachinesListed, ProviderOutcome
from phalanx.ports.provider import CallUnanswered, DelayedNode, EndedOrder, LeavingNode, LostNode, OfferRefused
from tests.contract.records import node_pool, pool_node

WAIT_S = 60.0  # a guard against hangs


class SlowProvider:
    """Holds the first start until it may go on; refuses nodes whose name begins with bad."""

    def __init__(self):
        self.calls, self.begun, self.go_on = [], threading.Event(), threading.Event()

    def offer(self, terms):
        raise NotImplementedError(terms)

    def open(self, orders):
        pass

    def start(self, order):
        self.calls.append(("start", order.node_id))
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        if order.node_id.startswith("bad"):
            raise OSError("no room")

    def stop(self, order):
        self.calls.append(("stop", order.node_id))
        return ()

    def observe(self):
        return ()

    def machines(self, settings):
        self.calls.append(("list", settings["account"]))
        if settings["account"] == "closed":
            raise OSError("no rights")
        return [ListedMachine(machine="i-1", node_id=NodeId("p-0"), token="p-0-k")]

    def check(self, settings):
        raise NotImplementedError(settings)

    def close(self, *, keep_nodes):
        pass


def call(action, name):
    return ProviderCall(provider="slow", action=action, node_id=NodeId(name), token=f"{name}-k", template="1", zone="")


def test_a_call_that_is_repeated_while_the_provider_is_slow_is_made_once():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    calls = ProviderCalls(create=lambda _: provider)
    calls.open({}, {}, lambda reports: told.put(reports[0]))
    first = [call(ProviderAction.START, "p-0"), call(ProviderAction.START, "bad-1")]
    calls.send(first)
    assert provider.begun.wait(WAIT_S)
    calls.send(first)  # as the controller does after a while
    calls.send([call(ProviderAction.STOP, "p-0")])
    provider.go_on.set()
    outcomes = [told.get(timeout=WAIT_S) for _ in range(3)]
    calls.send(first[:1])  # once it was answered, the same call is made again
    again = told.get(timeout=WAIT_S)
    calls.close(keep_nodes=True)
    assert provider.calls == [("start", "p-0"), ("start", "bad-1"), ("stop", "p-0"), ("start", "p-0")]
    assert [(one.node_id, one.outcome) for one in [*outcomes, again]] == [
        ("p-0", ProviderOutcome.STARTED),
        ("bad-1", ProviderOutcome.FAILED),
        ("p-0", ProviderOutcome.STOPPED),
        ("p-0", ProviderOutcome.STARTED),
    ]


def test_an_order_that_is_given_up_before_its_start_was_sent_costs_no_call():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    calls = ProviderCalls(create=lambda _: provider)
    calls.open({}, {}, lambda reports: told.put(reports[0]))
    calls.send([call(ProviderAction.START, "p-0"), call(ProviderAction.START, "p-1")])
    assert provider.begun.wait(WAIT_S)
    calls.send([call(ProviderAction.STOP, "p-1"), call(ProviderAction.STOP, "p-0")])
    provider.go_on.set()
    outcomes = [told.get(timeout=WAIT_S) for _ in range(3)]
    calls.close(keep_nodes=True)
    assert provider.calls == [("start", "p-0"), ("stop", "p-0")]
    assert [(one.node_id, one.outcome) for one in outcomes] == [
        ("p-0", ProviderOutcome.STARTED),
        ("p-1", ProviderOutcome.STOPPED),
        ("p-0", ProviderOutcome.STOPPED),
    ]


def test_an_order_of_an_earlier_head_is_stopped_by_a_call():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    pool, member = replace(node_pool(), provider="slow"), replace(pool_node("p-0"), token="p-0-k")
    calls = ProviderCalls(create=lambda _: provider)
    calls.open({pool.id: pool}, {member.id: member}, lambda reports: told.put(reports[0]))
    calls.send([call(ProviderAction.STOP, "p-0")])
    assert told.get(timeout=WAIT_S).outcome is ProviderOutcome.STOPPED
    calls.close(keep_nodes=True)
    assert provider.calls == [("stop", "p-0")]


def test_lists_and_the_ways_in_which_a_start_can_fail_are_told_apart():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    calls = ProviderCalls(create=lambda _: provider)
    calls.open({}, {}, lambda reports: told.put(reports[0]))
    fields: dict[str, Any] = {"provider": "slow", "template": "1", "zone": "", "pool": "p"}
    for account in ("open", "closed"):
        settings = (("account", account),)
        calls.send(
            [ProviderCall(action=ProviderAction.LIST, node_id=NodeId(""), token=account, settings=settings, **fields)]
        )
    good, bad = (told.get(timeout=WAIT_S) for _ in range(2))
    assert isinstance(good, MachinesListed)
    assert (good.pool, [one.machine for one in good.machines], good.why) == (PoolId("p"), ["i-1"], "")
    assert (bad.machines, bad.why) == ((), "no rights")
    outcomes = []
    wrong = BadRequest("wrong keys", hint="set others")
    for error in (OfferRefused("full"), CallUnanswered("late"), OSError("broken"), wrong):
        provider.start = provider.stop = Mock(side_effect=error)  # type: ignore[method-assign]
        calls.send([call(ProviderAction.START, "p-0")])
        report = told.get(timeout=WAIT_S)
        outcomes.append((report.outcome, report.why))
    calls.send([call(ProviderAction.STOP, "p-0")])
    outcomes.append((told.get(timeout=WAIT_S).outcome, "stop"))
    calls.close(keep_nodes=True)
    assert outcomes == [
        (ProviderOutcome.REFUSED, "full"),
        (ProviderOutcome.UNANSWERED, "late"),
        (ProviderOutcome.FAILED, "broken"),
        (ProviderOutcome.FAILED, "wrong keys (set others)"),
        (ProviderOutcome.UNANSWERED, "stop"),
    ]


def test_what_a_provider_observes_is_reported_by_its_kind():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    seen = [kind(node_id=NodeId("p-0"), token="p-0-k", why="a reason") for kind in (DelayedNode, LeavingNode, LostNode)]
    provider.observe = lambda: [seen.pop(0)] if seen else []  # type: ignore[method-assign]
    pool, member = replace(node_pool(), provider="slow"), replace(pool_node("p-0"), token="p-0-k")
    calls = ProviderCalls(create=lambda _: provider)
    calls.open({pool.id: pool}, {member.id: member}, told.put)
    found = [told.get(timeout=WAIT_S) for _ in range(3)]
    calls.close(keep_nodes=True)
    assert [[type(one).__name__ for one in reports] for reports in found] == [
        ["ProviderReported"],
        ["ProviderReported"],
        ["NodeDied", "ProviderReported"],
    ]
    outcomes = [reports[-1].outcome for reports in found]
    assert outcomes == [ProviderOutcome.DELAYED, ProviderOutcome.LEAVING, ProviderOutcome.LOST]


class MeetingProvider(SlowProvider):
    """Each start waits until another one is under way; `together` counts the calls of each order at a time."""

    def __init__(self):
        super().__init__()
        self.meeting = threading.Barrier(2, timeout=WAIT_S)
        self.guard, self.under_way, self.overlaps = threading.Lock(), set(), 0

    def start(self, order):
        with self.guard:
            self.overlaps += order.token in self.under_way
            self.under_way.add(order.token)
        self.meeting.wait()
        with self.guard:
            self.under_way.discard(order.token)
            self.calls.append(("start", order.node_id))

    def stop(self, order):
        with self.guard:
            self.overlaps += order.token in self.under_way
            self.calls.append(("stop", order.node_id))
        return ()


def test_calls_of_different_orders_are_carried_out_together_and_those_of_one_in_turn():
    provider, told = MeetingProvider(), queue.SimpleQueue[Any]()
    calls = ProviderCalls(create=lambda _: provider, parallel_calls=lambda _: 3)
    calls.open({}, {}, lambda reports: told.put(reports[0]))
    calls.send([call(ProviderAction.START, "p-0")])
    calls.send([replace(call(ProviderAction.STOP, "p-0"), machine="i-0")])  # the third thread must leave it
    calls.send([call(ProviderAction.START, "p-1")])  # one thread alone would wait for ever
    outcomes = {told.get(timeout=WAIT_S).node_id for _ in range(3)}
    calls.close(keep_nodes=True)
    assert outcomes == {"p-0", "p-1"}
    assert provider.overlaps == 0
    assert provider.calls.index(("start", "p-0")) < provider.calls.index(("stop", "p-0"))


def test_what_is_stopped_with_the_head_is_recorded_before_the_head_ends():
    provider, told = SlowProvider(), []
    charged = ChargedMachine(machine="i-9", since_s=1.0, until_s=9.0)
    orders = [
        EndedOrder(node_id=NodeId("p-9"), token="x", stopped=(charged,), stray=True),
        EndedOrder(node_id=NodeId("p-1"), token="y"),
    ]
    provider.close = Mock(return_value=orders)  # type: ignore[method-assign]
    pool = replace(node_pool(), provider="slow")
    written = Future[Any]()
    threading.Timer(0.05, written.set_result, ([],)).start()

    def report(reports):
        told.extend(reports)
        return written

    calls = ProviderCalls(create=lambda _: provider)
    calls.open({pool.id: pool}, {}, report)
    calls.send([call(ProviderAction.STOP, "p-0")])
    calls.send([replace(call(ProviderAction.LIST, ""), token="p", settings=(("account", "open"),))])
    while len(told) < 2:
        threading.Event().wait(0.01)
    calls.close(keep_nodes=False)
    assert written.done()
    assert [(one.node_id, one.outcome, one.machine, one.stopped) for one in told[2:]] == [
        ("p-9", ProviderOutcome.STOPPED, "i-9", (charged,)),
        ("p-1", ProviderOutcome.ENDED, "", ()),
        ("p-1", ProviderOutcome.STOPPED, "", ()),
    ]


def test_pools_with_the_same_settings_share_one_list():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    calls = ProviderCalls(create=lambda _: provider)

    def report(reports):
        for one in reports:
            told.put(one)

    calls.open({}, {}, report)
    calls.send([call(ProviderAction.START, "p-0")])
    assert provider.begun.wait(WAIT_S)
    for pool, account in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "one")):
        asked = replace(call(ProviderAction.LIST, ""), token=pool, pool=pool, settings=(("account", account),))
        calls.send([asked])
    provider.go_on.set()
    listed = [told.get(timeout=WAIT_S) for _ in range(5)][1:]
    calls.close(keep_nodes=True)
    assert provider.calls == [("start", "p-0"), ("list", "one"), ("list", "two")]
    assert sorted(one.pool for one in listed) == ["a", "b", "c", "d"]
    assert {one.machines[0].machine for one in listed} == {"i-1"}


def test_a_machine_is_stopped_although_its_console_cannot_be_read():
    provider, told = SlowProvider(), queue.SimpleQueue[Any]()
    provider.console = Mock(side_effect=KeyError("contents"))  # type: ignore[attr-defined]
    calls = ProviderCalls(create=lambda _: provider)

    def report(reports):
        for one in reports:
            told.put(one)

    calls.open({}, {}, report)
    provider.go_on.set()
    calls.send([call(ProviderAction.START, "p-0")])
    told.get(timeout=WAIT_S)
    calls.send([replace(call(ProviderAction.STOP, "p-0"), known_machine="i-0", console=True)])
    read, stopped = told.get(timeout=WAIT_S), told.get(timeout=WAIT_S)
    calls.close(keep_nodes=True)
    assert (read.outcome, read.console, read.why) == (ProviderOutcome.CONSOLE, "", "KeyError: 'contents'")
    assert stopped.outcome is ProviderOutcome.STOPPED
    assert provider.calls == [("start", "p-0"), ("stop", "p-0")]
