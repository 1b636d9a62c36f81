"""Rejects registrations from stale supervisor incarnations.

A registration (`SupervisorRegistered`) may sit in a socket buffer while its supervisor dies and a successor registers. Processed later, it would replace
the live supervisor, and two epochs of a job could run. Therefore:

- A supervisor that was replaced is refused.
- A supervisor that would replace another must repeat its registration with a challenge; a dead one cannot.
- If the two are on different machines (by boot id), the one that renews its lease stays: only on the same machine can a newcomer know that
  its predecessor is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from phalanx.core.errors import Conflict
from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.reports import SupervisorRegistered

REPLACED_MAX: Final = (
    50_000  # four incarnations for each node of a large fleet; registrations are late by seconds at most
)


class SupervisorReplaced(Conflict):
    """Another supervisor has replaced this one."""

    code = "supervisor_replaced"


class RegistrationChallenged(Conflict):
    """The node has another supervisor. The newcomer must register again with this `challenge`."""

    code = "challenged"

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(message, hint="register again with the challenge")
        self.challenge = challenge


class HeldByOtherMachine(Conflict):
    """Another machine holds this node's lease and renewed it recently. The newcomer may register once that lease expires."""

    code = "other_machine"
    retry_helps = True


class SupervisorIncarnations:
    """Current and replaced supervisors, from committed records. Challenges contain `head_id`, so those of other heads are not accepted."""

    def __init__(self, head_id: str = "") -> None:
        self._head_id = head_id
        self._present: dict[NodeId, SupervisorId] = {}
        self._gone: OrderedDict[SupervisorId, None] = OrderedDict()
        self._pending: dict[NodeId, tuple[SupervisorId, str]] = {}  # the newest newcomer and its challenge
        self._challenges = 0

    def record(self, node: Node) -> None:
        """Record a committed node's supervisor."""
        if node.supervisor_id is None:
            return
        before = self._present.get(node.id)
        self._present[node.id] = node.supervisor_id
        if before is not None and before != node.supervisor_id:
            self._gone[before] = None
            while len(self._gone) > REPLACED_MAX:
                self._gone.popitem(last=False)

    def check(self, hello: SupervisorRegistered, known: Node | None, *, renewed_recently: bool = False) -> None:
        """Refuse a registration by a replaced supervisor, or one that would replace a live supervisor elsewhere.

        Args:
            hello: the registration.
            known: the node in this step, including changes that are not durable yet.
            renewed_recently: the node's current supervisor renewed its lease less than a lease ago.

        Raises:
            SupervisorReplaced: this supervisor was replaced.
            HeldByOtherMachine: the current supervisor runs on another machine.
            RegistrationChallenged: it would replace another supervisor and did not send the challenge.
        """
        current = None if known is None else known.supervisor_id
        node_id, supervisor_id = hello.node.id, hello.supervisor_id
        replaced_now = current not in (None, supervisor_id) and self._present.get(node_id) == supervisor_id
        if replaced_now or supervisor_id in self._gone:
            raise SupervisorReplaced(
                f"node {node_id}: supervisor {supervisor_id} was replaced by {current or self._present[node_id]}",
                hint="if it still runs, stop it: a node has one supervisor",
            )
        if known is None or current in (None, supervisor_id):
            return
        if renewed_recently and "" not in (known.boot_id, hello.node.boot_id) and known.boot_id != hello.node.boot_id:
            raise HeldByOtherMachine(
                f"node {node_id} is taken by {known.hostname or 'another machine'}, which renewed its lease just now;"
                f" this is {hello.node.hostname}",
                hint="after a reboot, wait until the old lease expires; if two machines share the name, join one under another name",
            )
        if hello.challenge is not None:
            self._challenge(node_id, supervisor_id, hello.challenge)

    def _challenge(self, node_id: NodeId, supervisor_id: SupervisorId, response: str) -> None:
        pending = self._pending.get(node_id)
        if pending is None or pending[0] != supervisor_id:  # a newer newcomer invalidates the older challenge
            self._challenges += 1
            pending = self._pending[node_id] = supervisor_id, f"{self._head_id}:{self._challenges}"
        if response != pending[1]:
            raise RegistrationChallenged(f"node {node_id} has another supervisor than {supervisor_id}", pending[1])
        del self._pending[node_id]
