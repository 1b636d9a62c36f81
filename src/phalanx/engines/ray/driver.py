"""The driver: `python -m phalanx.engines.ray.driver --address HOST:PORT --namespace NAME`, a child process of the head.

Translates between Ray and `protocol`. It is a separate process because Ray aborts a driver whose Ray head is lost; the Phalanx head then
starts another. It ends when its stdin does; the actors are detached and continue.
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
from phalanx.engines.ray.parse import error_line, parse_nodes
from phalanx.engines.ray.private_api import free_gpus
from phalanx.engines.ray.protocol import (
    DriverCommand,
    DriverConnected,
    DriverEvent,
    DriverProblem,
    NodeReleased,
    NodesListed,
    RayNode,
    ReleaseNode,
    StartSupervisor,
    SupervisorDied,
    decode_command,
    encode_line,
)
from phalanx.engines.ray.render import actor_options

NODES_POLL_S: Final = 0.5  # poll interval of Ray's list of nodes: one call to its head for any size
ACTOR_POLL_S: Final = 0.5  # poll interval of each actor: one call that it answers from memory
ACTOR_ANSWER_S: Final = 20.0  # after that an actor is asked again
FREED_POLL_S: Final = (
    5.0  # interval at which GPUs that others have released are looked for: one call for each node that lacks some
)
ACTOR_RETRY_S: Final = 2.0  # before an actor that Ray gave up is replaced
ACTOR_START_S: Final = 60.0  # an actor's process imports Ray and Phalanx: 1 to 3 s on an idle machine
_ORDER_WAIT_S: Final = 0.1


class _ActorState:
    """One node's actor. `start_call`, `pulse` and `growth_call` are references of pending calls; at most one of them is not None.

    `growth_gpus`: how many GPUs it will hold if it can be replaced; `looked_s`: when it was last compared with what is free; `lost`: Ray
    does not restart it.
    """

    def __init__(self, order: StartSupervisor, actor: Any, now_s: float) -> None:
        self.order, self.actor = order, actor
        self.reported = False
        self.asked_s = now_s
        self.pulse: Any = None
        self.start_call: Any = None
        self.growth_call: Any = None
        self.growth_gpus = 0
        self.lost = False
        self.looked_s = now_s


class _PendingRelease:
    """One node that is being released. `then`: an order to start its supervisor again that came since."""

    def __init__(self, actor: Any, now_s: float) -> None:
        self.actor, self.reference = actor, actor.release.remote()
        self.since_s = now_s
        self.then: StartSupervisor | None = None


class RayDriver:
    """One connection to Ray. Runs on the main thread; a second thread only reads orders."""

    def __init__(self, ray: Any, out: Any, orders: queue.SimpleQueue[DriverCommand]) -> None:
        self._ray, self._out, self._orders = ray, out, orders
        self._actors: dict[NodeId, _ActorState] = {}
        self._releases: dict[NodeId, _PendingRelease] = {}
        self._nodes: list[RayNode] = []
        self._polled_s = -NODES_POLL_S

    def run(self) -> None:
        """Run until `_read_orders` ends the process."""
        self._send(DriverConnected(version=self._ray.__version__))
        while True:
            now_s = time.monotonic()
            if now_s - self._polled_s >= NODES_POLL_S:
                self._polled_s = now_s
                self._poll_nodes()
            for node_id, state in list(self._actors.items()):
                self._poll_actor(node_id, state, now_s)
            self._finish_releases(now_s)
            try:
                self._on_command(self._orders.get(timeout=_ORDER_WAIT_S))
                for _ in range(self._orders.qsize()):  # the releases of a whole cluster come together
                    self._on_command(self._orders.get_nowait())
            except queue.Empty:
                continue

    def _send(self, tiding: DriverEvent) -> None:
        self._out.write(encode_line(tiding))
        self._out.flush()

    def _poll_nodes(self) -> None:
        nodes = parse_nodes(self._ray.nodes())
        if nodes != self._nodes:
            self._nodes = nodes
            self._send(NodesListed(nodes=nodes))
        alive = {node.ray_id for node in nodes if node.alive}
        for node_id, state in list(self._actors.items()):
            if state.order.node.ray_id not in alive:
                del self._actors[node_id]  # its actor is pinned to a dead Ray node

    # ------------------------------------------------------------------------------------------------------------- orders

    def _on_command(self, order: DriverCommand) -> None:
        match order:
            case StartSupervisor(node=node):
                release = self._releases.get(node.node_id)
                if release is not None:
                    release.then = order
                    return
                try:
                    self._start_supervisor(order)
                except Exception as error:  # noqa: BLE001  # an error of one node must not affect the others
                    self._send(DriverProblem(text=_error_line(error), node_id=node.node_id))
            case ReleaseNode(node_id=node_id):
                self._begin_release(node_id)

    def _start_supervisor(self, order: StartSupervisor, gpus: int | None = None) -> None:
        """Start the node's supervisor. `gpus`: of a new actor; None for all that are free, because others use the same Ray cluster."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from phalanx.engines.ray.node_actor import NodeActor

        node = order.node
        state = self._actors.get(node.node_id)
        if state is None:
            if gpus is None:
                gpus = int(min(node.gpus, free_gpus(node.ray_id)))
            options = actor_options(node.node_id, node.ray_id, float(gpus))
            pin = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
            actor = self._ray.remote(NodeActor).options(**options, scheduling_strategy=pin).remote()
            state = self._actors[node.node_id] = _ActorState(order, actor, time.monotonic())
        state.order = order
        self._call_start(state)

    def _call_start(self, state: _ActorState) -> None:
        state.start_call = state.actor.start_supervisor.remote(msgspec.to_builtins(state.order.spec))
        state.asked_s = time.monotonic()

    def _begin_release(self, node_id: NodeId) -> None:
        """Begin a release; `_finish_releases` completes it. Releases run in parallel, because each waits for its ranks to end."""
        state = self._actors.pop(node_id, None)
        if state is not None:
            self._releases[node_id] = _PendingRelease(state.actor, time.monotonic())
        elif node_id in self._releases:
            self._releases[node_id].then = None
        else:
            self._send(NodeReleased(node_id=node_id))

    def _finish_releases(self, now_s: float) -> None:
        """Kill the actors of released nodes, which frees their GPUs. Never blocks."""
        if not self._releases:
            return
        references = [release.reference for release in self._releases.values()]
        done = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
        for node_id, release in list(self._releases.items()):
            if release.reference not in done and now_s - release.since_s < ACTOR_ANSWER_S:
                continue
            try:
                self._ray.get(release.reference, timeout=0)
            except Exception as error:  # noqa: BLE001  # its node may be dead, which is as good
                self._send(
                    DriverProblem(
                        text=f"released without an answer of its actor: {_error_line(error)}", node_id=node_id
                    )
                )
            self._ray.kill(release.actor)
            del self._releases[node_id]
            self._send(NodeReleased(node_id=node_id))
            if release.then is not None:
                self._on_command(release.then)

    # ------------------------------------------------------------------------------------------------------------- pulses

    def _poll_actor(self, node_id: NodeId, state: _ActorState, now_s: float) -> None:
        """Handle the actor's answer to the last call, or call it again. Never blocks."""
        reference = next((one for one in (state.start_call, state.growth_call, state.pulse) if one is not None), None)
        if reference is None:
            if state.lost:
                if now_s - state.asked_s >= ACTOR_RETRY_S:
                    self._replace_actor(node_id, state, None)
            elif now_s - state.asked_s >= ACTOR_POLL_S:
                state.asked_s, state.pulse = now_s, state.actor.poll.remote()
            return
        done, _ = self._ray.wait([reference], timeout=0)
        if not done:
            limit_s = ACTOR_START_S if state.start_call is not None else ACTOR_ANSWER_S
            if now_s - state.asked_s >= limit_s:
                self._on_late_answer(node_id, state, limit_s)
            return
        start_call, growth_call = state.start_call, state.growth_call
        state.start_call = state.growth_call = state.pulse = None
        state.asked_s = now_s
        try:
            answer = self._ray.get(done[0])
        except Exception as error:  # noqa: BLE001  # Ray restarts the actor, or gave it up, or its node is dead
            state.lost = is_final(error)
            if start_call is not None and not state.reported:
                state.reported = True
                self._send(DriverProblem(text=_error_line(error), node_id=node_id))
            return
        if start_call is not None:
            state.reported = False
            if answer:
                self._send(DriverProblem(text=answer, node_id=node_id))
            return
        if growth_call is not None:
            if answer:
                self._replace_actor(node_id, state, state.growth_gpus)
            return
        for death in answer["deaths"]:
            self._send(_died(node_id, death))
        if not answer["carrying"]:
            self._call_start(state)  # Ray restarted the actor after its process died
        elif now_s - state.looked_s >= FREED_POLL_S:
            state.looked_s = now_s
            self._take_freed_gpus(state, answer.get("gpus"))

    def _take_freed_gpus(self, state: _ActorState, held: int | None) -> None:
        """If others have released GPUs of this node since its actor started, ask the actor to stop, which it does while it is idle."""
        node = state.order.node
        if held is None or held >= int(node.gpus):
            return
        freed = int(min(node.gpus - held, free_gpus(node.ray_id)))
        if freed > 0:
            state.growth_gpus = held + freed
            state.growth_call = state.actor.release_if_idle.remote()

    def _replace_actor(self, node_id: NodeId, state: _ActorState, gpus: int | None) -> None:
        """Start an actor in place of one that is lost, or that has stopped its supervisor so that the next one holds more GPUs."""
        self._ray.kill(state.actor)
        del self._actors[node_id]
        try:
            self._start_supervisor(state.order, gpus)
            if node_id in self._actors:
                self._actors[node_id].reported = state.reported
        except Exception as error:  # noqa: BLE001  # an error of one node must not affect the others
            self._send(DriverProblem(text=_error_line(error), node_id=node_id))

    def _on_late_answer(self, node_id: NodeId, state: _ActorState, limit_s: float) -> None:
        state.start_call = state.growth_call = state.pulse = None
        state.asked_s = time.monotonic()
        if not state.reported:
            state.reported = True
            self._send(DriverProblem(text=f"its actor did not answer within {limit_s:.0f} s", node_id=node_id))


def _read_orders(orders: queue.SimpleQueue[DriverCommand]) -> None:
    """Queue orders as they come, and exit the process at the end of stdin, even while a call to Ray is pending.

    Queued orders may be lost then: the head has waited for those that matter to it.
    """
    for line in sys.stdin.buffer:
        try:
            orders.put(decode_command(line))
        except msgspec.MsgspecError as error:
            sys.stderr.write(f"ignored an invalid order: {error}\n")
    os._exit(0)


def _died(node_id: NodeId, death: Any) -> SupervisorDied:
    if isinstance(death, str):  # from an actor of an earlier release
        return SupervisorDied(node_id=node_id, why=death)
    return SupervisorDied(node_id=node_id, why=death["why"], supervisor_id=death["supervisor_id"])


def is_final(error: BaseException) -> bool:
    """Whether Ray will not restart the actor: it died for good, or the scheduler did not yet know its new node, or not its GPUs."""
    from ray.exceptions import ActorDiedError, ActorUnschedulableError

    return isinstance(error, ActorDiedError | ActorUnschedulableError)


def _error_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_line(str(error))}"


def main() -> int:
    """Connect, and serve until stdin ends; with --check only test the connection."""
    parser = argparse.ArgumentParser(prog="phalanx-ray-driver")
    parser.add_argument("--address", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--check", action="store_true", help="test the connection to Ray, and exit")
    given = parser.parse_args()
    # Ray prints to stdout, so the protocol uses a duplicate, and stdout becomes stderr.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    orders: queue.SimpleQueue[DriverCommand] = queue.SimpleQueue()
    if not given.check:
        threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    try:
        import ray

        ray.init(address=given.address, namespace=given.namespace, log_to_driver=False, configure_logging=False)
        if given.check:
            out.write(encode_line(DriverConnected(version=ray.__version__)))
            out.flush()
            return 0
    except Exception as error:  # noqa: BLE001  # reported to the head in one line
        out.write(encode_line(DriverProblem(text=_error_line(error), fatal=True)))
        out.flush()
        return 1
    RayDriver(ray, out, orders).run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Ray's own shutdown may wait for a lost head
