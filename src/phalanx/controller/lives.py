"""Which life of a supervisor speaks for its node: none that has been replaced, and none that cannot say that it lives now.

A hello may lie in a socket's buffer while its supervisor dies and the next one presents itself. Heard after that, it would look like yet
another life, and take from the living one what it carries: two epochs of a job would run. So a supervisor that was replaced is refused,
and one that would replace another is told a word to say again: the hello of a dead one is answered to nobody. Where the two are on
different machines (by their boots), the one that renews stays: only on its own machine does a newcomer know that the one before is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from phalanx.core.errors import Conflict
from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.events import Hello

GONE_MAX: Final = 50_000  # four lives of each node of a large fleet; a hello is late by seconds, not by so many others


class SupervisorReplaced(Conflict):
    """Another supervisor speaks for this node since."""

    code = "supervisor_replaced"


class Challenged(Conflict):
    """Another supervisor speaks for this node: the newcomer repeats its hello with this `challenge`, and is heard then."""

    code = "challenged"

    def __init__(self, message: str, challenge: str) -> None:
        super().__init__(message, hint="say hello again with the challenge")
        self.challenge = challenge


class OtherMachine(Conflict):
    """A machine speaks for this node that was heard just now, and the newcomer is on another. It may come once that one is silent."""

    code = "other_machine"
    retry_helps = True


class Lives:
    """Kept by the controller from committed records. `head_id`: the life of the head, so that no challenge of another is taken for ours."""

    def __init__(self, head_id: str = "") -> None:
        self._head_id = head_id
        self._present: dict[NodeId, SupervisorId] = {}
        self._gone: OrderedDict[SupervisorId, None] = OrderedDict()
        self._asked: dict[NodeId, tuple[SupervisorId, str]] = {}  # the last newcomer, and what it was told
        self._challenges = 0

    def note(self, node: Node) -> None:
        """A node's record is durable."""
        if node.supervisor_id is None:
            return
        before = self._present.get(node.id)
        self._present[node.id] = node.supervisor_id
        if before is not None and before != node.supervisor_id:
            self._gone[before] = None
            while len(self._gone) > GONE_MAX:
                self._gone.popitem(last=False)

    def check(self, hello: Hello, known: Node | None, *, heard: bool = False) -> None:
        """Let none speak that has been replaced, nor replace that may be dead or another machine.

        Args:
            hello: what it says.
            known: the node as of this step, whose records are not durable yet.
            heard: the supervisor that speaks for it was heard less than a lease ago.

        Raises:
            SupervisorReplaced: it has been.
            OtherMachine: it would replace one that lives elsewhere.
            Challenged: it would replace another, and has not said the challenge yet.
        """
        speaks = None if known is None else known.supervisor_id
        node_id, supervisor_id = hello.node.id, hello.supervisor_id
        within = speaks not in (None, supervisor_id) and self._present.get(node_id) == supervisor_id
        if within or supervisor_id in self._gone:
            raise SupervisorReplaced(
                f"node {node_id}: supervisor {supervisor_id} was replaced by {speaks or self._present[node_id]}",
                hint="if it still runs, stop it: one supervisor speaks for a node",
            )
        if known is None or speaks in (None, supervisor_id):
            return
        if heard and "" not in (known.boot_id, hello.node.boot_id) and known.boot_id != hello.node.boot_id:
            raise OtherMachine(
                f"node {node_id}: {known.hostname or 'another machine'} speaks for it and was heard just now; this is {hello.node.hostname}",
                hint="a machine that was started anew is heard once its lease is over; of two machines with one name, let one join under another",
            )
        if hello.challenge is not None:
            self._challenge(node_id, supervisor_id, hello.challenge)

    def _challenge(self, node_id: NodeId, supervisor_id: SupervisorId, said: str) -> None:
        asked = self._asked.get(node_id)
        if asked is None or asked[0] != supervisor_id:  # a newer one than the last: what that was told counts no more
            self._challenges += 1
            asked = self._asked[node_id] = supervisor_id, f"{self._head_id}:{self._challenges}"
        if said != asked[1]:
            raise Challenged(f"node {node_id}: another supervisor than {supervisor_id} speaks for it", asked[1])
        del self._asked[node_id]
