"""The calls of a head to its providers: in order, each once at a time, each outcome reported."""

import queue
import threading
from typing import Any

from phalanx.controller.provider_calls import ProviderCalls
from phalanx.core.ids import NodeId
from phalanx.core.state.commands import ProviderAction, ProviderCall
from phalanx.core.state.reports import ProviderOutcome

WAIT_S = 60.0  # a guard against hangs


class SlowProvider:
    """Holds the first start until it may go on; refuses nodes whose name begins with bad."""

    def __init__(self):
        self.calls, self.begun, self.go_on = [], threading.Event(), threading.Event()

    def offer(self, template):
        raise NotImplementedError(template)

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

    def observe(self):
        return ()

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
