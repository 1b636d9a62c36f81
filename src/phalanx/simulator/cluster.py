"""A whole cluster in virtual time: the head's controller as it runs live, and every supervisor, without a network or a store between.

`turn` is one turn of the live driver (`controller.driver`): step, commit, hand over the commands. Here a commit cannot be refused, and
what the supervisors answer is heard in the next turn of the same instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.outbox import Answer, Now, Outbox
from phalanx.controller.turn import Settings
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.scheduling.settings import Policy
from phalanx.core.state.events import Event, Hello, PutProject, PutQueues, PutUser
from phalanx.core.state.world import World
from phalanx.core.units import GIB
from phalanx.core.work.people import User, UserRole
from phalanx.core.work.queue import Project, Queue
from phalanx.simulator.fleet import SimNode
from phalanx.simulator.supervisors import Course, Supervisors
from phalanx.simulator.trace import model_word

PROJECT: Final = ProjectId("trace")
QUEUE: Final = QueueId("default")
_LEASE_S: Final = float("inf")  # no node of a replay falls silent
_DEVICE_BYTES: Final = 80 * GIB  # jobs of a trace ask for no memory; a plausible device
_NODE_CPUS: Final = 1 << 20  # traces are about GPUs: CPUs and memory never bind
_NODE_BYTES: Final = _NODE_CPUS * GIB


@dataclass(slots=True)
class Turned:
    """What one instant brought.

    Attributes:
        answers: to the events it began with.
        courses: as `supervisors.Heard`, over all turns of the instant.
        due_in_s: how long nothing happens by itself; infinite when only an event can change anything.
    """

    answers: Sequence[Answer | PhalanxError] = ()
    courses: list[tuple[Course, JobId]] = field(default_factory=list)
    due_in_s: float = float("inf")


class Cluster:
    """The head and its nodes.

    Attributes:
        controller: as live, with its world.
    """

    def __init__(
        self,
        nodes: Sequence[SimNode],
        policy: Policy,
        *,
        users: Sequence[UserId],
        start_s: float,
        queues: Sequence[Queue] = (),
    ) -> None:
        self.controller = Controller(
            world=World(), leases=LeaseBook(lease_s=_LEASE_S), policy=policy,
            settings=Settings(checkpoint_root="/simulated/checkpoints", output_root="/simulated/output"),
        )  # fmt: skip
        self.supervisors = Supervisors()
        now = Now(wall_s=start_s, boot_s=start_s)
        self.controller.begin(now)
        self.instant(start_s, [
            PutProject(project=Project(id=PROJECT)), PutQueues(queues=(*(() if any(queue.id == QUEUE for queue in queues) else (Queue(id=QUEUE),)), *queues)),
            *(PutUser(user=User(id=user, role=UserRole.USER)) for user in users),
            *(Hello(node=_node(node), supervisor_id=SupervisorId(node.name)) for node in nodes),
        ])  # fmt: skip

    def instant(self, now_s: float, inbox: Sequence[Event]) -> Turned:
        """Turn until nobody has anything more to say at this instant."""
        now = Now(wall_s=now_s, boot_s=now_s)
        outbox = self._turn(now, inbox)
        turned = Turned(answers=outbox.answers, due_in_s=outbox.due_in_s)
        while outbox.commands:
            heard = self.supervisors.hear(outbox.commands, now_s)
            turned.courses += heard.courses
            if not heard.reports:
                break
            outbox = self._turn(now, heard.reports)
            turned.due_in_s = outbox.due_in_s
        return turned

    def _turn(self, now: Now, inbox: Sequence[Event]) -> Outbox:
        outbox = self.controller.step(now, inbox)
        self.controller.committed(outbox, now)
        return outbox


def _node(node: SimNode) -> Node:
    return Node(
        id=NodeId(node.name), engine="simulated", cpus=_NODE_CPUS, memory_bytes=_NODE_BYTES, state=NodeState.UP,
        devices=tuple(
            Device(index=index, uuid=f"{node.name}/{index}", model=model_word(node.model), memory_bytes=_DEVICE_BYTES)
            for index in range(node.gpus)
        ),
        sees_head_files=True,
    )  # fmt: skip
