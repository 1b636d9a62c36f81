"""The driver: `python -m phalanx.engines.ray.driver --address HOST:PORT --namespace NAME`, a child process of the head.

Speaks Ray on one side and `protocol` on the other. It is a process of its own because Ray aborts a driver whose Ray head is gone: then the
Phalanx head starts another. It ends when its stdin does; the actors, which are detached, go on.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from typing import Any, Final

import msgspec

from phalanx.core.ids import NodeId
from phalanx.engines.ray.parse import nodes_of, reason_of
from phalanx.engines.ray.protocol import (
    Carry,
    Connected,
    Died,
    Order,
    RayNode,
    Release,
    Released,
    Seen,
    Tiding,
    Trouble,
    line_of,
    order_of,
)
from phalanx.engines.ray.render import actor_options

LOOK_EVERY_S: Final = 0.5  # at Ray's list of nodes: one call to its head, whatever the size
PULSE_EVERY_S: Final = 0.5  # of each actor; one call that is answered from memory
PULSE_LIMIT_S: Final = 20.0  # an actor that answers later is asked again
STARTING_LIMIT_S: Final = 60.0  # an actor's process imports Ray and us: 1 to 3 s where nothing else runs
_TURN_S: Final = 0.1


class _Held:
    """One carried node. `pulse` is the reference of the call that is under way."""

    def __init__(self, order: Carry, actor: Any, now_s: float) -> None:
        self.order, self.actor = order, actor
        self.carrying = False
        self.told = False
        self.asked_s = now_s
        self.pulse: Any = None
        self.begun: Any = None


class _Leaving:
    """One node that is being released. `then`: an order to carry it that came meanwhile."""

    def __init__(self, actor: Any, now_s: float) -> None:
        self.actor, self.reference = actor, actor.release.remote()
        self.since_s = now_s
        self.then: Carry | None = None


class Driver:
    """One life. All of it on the main thread; a second one only reads orders."""

    def __init__(self, ray: Any, out: Any, orders: queue.SimpleQueue[Order]) -> None:
        self._ray, self._out, self._orders = ray, out, orders
        self._held: dict[NodeId, _Held] = {}
        self._leaving: dict[NodeId, _Leaving] = {}
        self._nodes: list[RayNode] = []
        self._looked_s = -LOOK_EVERY_S

    def run(self) -> None:
        """Until `_read` ends the process."""
        self._tell(Connected(version=self._ray.__version__))
        while True:
            now_s = time.monotonic()
            if now_s - self._looked_s >= LOOK_EVERY_S:
                self._looked_s = now_s
                self._look()
            for node_id, held in list(self._held.items()):
                self._feel(node_id, held, now_s)
            self._let_go(now_s)
            try:
                self._obey(self._orders.get(timeout=_TURN_S))
                for _ in range(self._orders.qsize()):  # the releases of a whole cluster come at once
                    self._obey(self._orders.get_nowait())
            except queue.Empty:
                continue

    def _tell(self, tiding: Tiding) -> None:
        self._out.write(line_of(tiding))
        self._out.flush()

    def _look(self) -> None:
        nodes = nodes_of(self._ray.nodes())
        if nodes != self._nodes:
            self._nodes = nodes
            self._tell(Seen(nodes=nodes))
        alive = {node.ray_id for node in nodes if node.alive}
        for node_id, held in list(self._held.items()):
            if held.order.node.ray_id not in alive:
                del self._held[node_id]  # its actor is pinned to a Ray node that is no more

    # ------------------------------------------------------------------------------------------------------------- orders

    def _obey(self, order: Order) -> None:
        match order:
            case Carry(node=node):
                leaving = self._leaving.get(node.node_id)
                if leaving is not None:
                    leaving.then = order
                    return
                try:
                    self._carry(order)
                except Exception as error:  # noqa: BLE001  # whatever Ray says of one node must not end the others
                    self._tell(Trouble(text=_short(error), node_id=node.node_id))
            case Release(node_id=node_id):
                self._release(node_id)

    def _carry(self, order: Carry) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from phalanx.engines.ray.carrier import Carrier

        node = order.node
        held = self._held.get(node.node_id)
        if held is None:
            options = actor_options(node.node_id, node.ray_id, self._free_gpus(node))
            pin = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
            actor = self._ray.remote(Carrier).options(**options, scheduling_strategy=pin).remote()
            held = self._held[node.node_id] = _Held(order, actor, time.monotonic())
        held.order = order
        self._begin(held)

    def _begin(self, held: _Held) -> None:
        held.begun = held.actor.carry.remote(msgspec.to_builtins(held.order.what))
        held.asked_s = time.monotonic()

    def _free_gpus(self, node: RayNode) -> float:
        """What of the node's GPUs nobody holds: the rest are another user's of the same Ray cluster."""
        from ray._private import state

        inside: Any = state  # Ray's own, without types where it is installed
        free: dict[str, dict[str, float]] = inside.available_resources_per_node()
        return float(int(min(node.gpus, free.get(node.ray_id, {}).get("GPU", 0.0))))

    def _release(self, node_id: NodeId) -> None:
        """Begin it; `_let_go` hears its end. Side by side, since each may take as long as its ranks take to end."""
        held = self._held.pop(node_id, None)
        if held is not None:
            self._leaving[node_id] = _Leaving(held.actor, time.monotonic())
        elif node_id in self._leaving:
            self._leaving[node_id].then = None
        else:
            self._tell(Released(node_id=node_id))

    def _let_go(self, now_s: float) -> None:
        """Hear which nodes have been released, and give their GPUs back; never waits."""
        if not self._leaving:
            return
        references = [leaving.reference for leaving in self._leaving.values()]
        done = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
        for node_id, leaving in list(self._leaving.items()):
            if leaving.reference not in done and now_s - leaving.since_s < PULSE_LIMIT_S:
                continue
            try:
                self._ray.get(leaving.reference, timeout=0)
            except Exception as error:  # noqa: BLE001  # its node may be gone, which is what was wanted
                self._tell(Trouble(text=f"released without an answer: {_short(error)}", node_id=node_id))
            self._ray.kill(leaving.actor)
            del self._leaving[node_id]
            self._tell(Released(node_id=node_id))
            if leaving.then is not None:
                self._obey(leaving.then)

    # ------------------------------------------------------------------------------------------------------------- pulses

    def _feel(self, node_id: NodeId, held: _Held, now_s: float) -> None:
        """Ask the actor, and hear what it answered to the last question; never waits."""
        reference = held.begun if held.begun is not None else held.pulse
        if reference is None:
            if now_s - held.asked_s >= PULSE_EVERY_S:
                held.asked_s, held.pulse = now_s, held.actor.pulse.remote()
            return
        done, _ = self._ray.wait([reference], timeout=0)
        if not done:
            limit_s = STARTING_LIMIT_S if held.begun is not None else PULSE_LIMIT_S
            if now_s - held.asked_s >= limit_s:
                self._late(node_id, held, limit_s)
            return
        begun, held.begun, held.pulse, held.asked_s = held.begun, None, None, now_s
        try:
            answer = self._ray.get(done[0])
        except Exception as error:  # noqa: BLE001  # the actor is being started again by Ray, or is gone with its node
            if begun is not None and not held.told:
                held.told = True
                self._tell(Trouble(text=_short(error), node_id=node_id))
            return
        if begun is not None:
            held.carrying, held.told = not answer, False
            if answer:
                self._tell(Trouble(text=answer, node_id=node_id))
            return
        for death in answer["deaths"]:
            self._tell(_died(node_id, death))
        if not answer["carrying"]:
            self._begin(held)  # Ray started it again after its process had died

    def _late(self, node_id: NodeId, held: _Held, limit_s: float) -> None:
        held.begun = held.pulse = None
        held.asked_s = time.monotonic()
        if not held.told:
            held.told = True
            self._tell(Trouble(text=f"its actor has not answered for {limit_s:.0f} s", node_id=node_id))


def _read(orders: queue.SimpleQueue[Order]) -> None:
    """Orders as they come. Where they end, the head is gone or wants nothing more: the process ends, whatever Ray is waited for.

    The head has waited for what it wanted done, so nothing in the queue is missed.
    """
    for line in sys.stdin.buffer:
        try:
            orders.put(order_of(line))
        except msgspec.MsgspecError as error:
            sys.stderr.write(f"an order is not understood: {error}\n")
    os._exit(0)


def _died(node_id: NodeId, death: Any) -> Died:
    if isinstance(death, str):  # why, and no more, from an actor of a release before this one
        return Died(node_id=node_id, why=death)
    return Died(node_id=node_id, why=death["why"], supervisor_id=death["supervisor_id"])


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {reason_of(str(error))}"


def main() -> int:
    """Connect, and serve until stdin ends; with --check only say whether it works."""
    parser = argparse.ArgumentParser(prog="phalanx-ray-driver")
    parser.add_argument("--address", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--check", action="store_true", help="say whether Ray lets us in, and end")
    given = parser.parse_args()
    # Ray prints to stdout as it likes; the protocol keeps the real one.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    if not given.check:
        threading.Thread(target=_read, args=(orders,), name="orders", daemon=True).start()
    try:
        import ray

        ray.init(address=given.address, namespace=given.namespace, log_to_driver=False, configure_logging=False)
        if given.check:
            out.write(line_of(Connected(version=ray.__version__)))
            out.flush()
            return 0
    except Exception as error:  # noqa: BLE001  # whatever it is, the head is told in one line
        out.write(line_of(Trouble(text=_short(error), fatal=True)))
        out.flush()
        return 1
    Driver(ray, out, orders).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Ray's own end may wait for a head that is gone
