"""A whole cluster in virtual time: the production controller and simulated supervisors, without network and store.

`_turn` is one turn of `controller.driver`: step, commit, deliver the commands. A commit cannot fail here. The next turn at the same
instant processes the supervisors' reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.step_result import Answer, ControllerTime, StepResult
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, SupervisorId, UserId
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import Event, PutNodePool, PutProject, PutQueues, PutUser
from phalanx.core.state.reports import SupervisorRegistered
from phalanx.core.state.world import World
from phalanx.core.units import GIB
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.users import User, UserRole
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.rented_nodes import RentedPool, ReplayProvider
from phalanx.simulator.supervisors import GangEvent, ReplaySupervisors
from phalanx.simulator.trace import normalize_model

PROJECT: Final = ProjectId("trace")
QUEUE: Final = QueueId("default")
_LEASE_S: Final = float("inf")  # no node of a replay fails
_DEVICE_BYTES: Final = 80 * GIB  # jobs of a trace request no memory; a plausible device
_NODE_CPUS: Final = 1 << 20  # traces only contain GPUs: CPUs and memory never limit
_NODE_BYTES: Final = _NODE_CPUS * GIB


@dataclass(slots=True)
class InstantResult:
    """The results of one instant.

    Attributes:
        answers: answers to the inbox.
        gang_events: gang events as in `supervisors.SupervisorReplies`, over all turns of the instant.
        due_in_s: time until the controller's next timer; infinite without one.
    """

    answers: Sequence[Answer | PhalanxError] = ()
    gang_events: list[tuple[GangEvent, JobId]] = field(default_factory=list)
    due_in_s: float = float("inf")


class ReplayCluster:
    """The controller and its nodes.

    Attributes:
        controller: the production controller with its world.
        provider: of the pools.
    """

    def __init__(
        self,
        nodes: Sequence[TraceNode],
        policy: PolicySettings,
        *,
        users: Sequence[UserId],
        start_s: float,
        queues: Sequence[Queue] = (),
        pools: Sequence[RentedPool] = (),
    ) -> None:
        self.provider = ReplayProvider(pools)
        self.controller = Controller(
            world=World(),
            leases=LeaseBook(lease_s=_LEASE_S),
            policy=policy,
            settings=ControllerSettings(
                checkpoint_root="/simulated/checkpoints", output_root="/simulated/output", storage_key="0"
            ),
        )
        self.supervisors = ReplaySupervisors()
        now = ControllerTime(wall_s=start_s, boot_s=start_s)
        self.controller.start(now)
        self.run_instant(
            start_s,
            [
                PutProject(project=Project(id=PROJECT)),
                PutQueues(
                    queues=(*(() if any(queue.id == QUEUE for queue in queues) else (Queue(id=QUEUE),)), *queues)
                ),
                *(PutUser(user=User(id=user, role=UserRole.USER)) for user in users),
                *(SupervisorRegistered(node=node_of(node), supervisor_id=SupervisorId(node.name)) for node in nodes),
                *(PutNodePool(pool=one.pool) for one in pools),
            ],
        )

    def run_instant(self, now_s: float, inbox: Sequence[Event]) -> InstantResult:
        """Run turns until neither controller nor supervisors have anything left to process at this instant."""
        now = ControllerTime(wall_s=now_s, boot_s=now_s)
        booted = self.provider.booted(now_s)
        outbox = self._turn(now, [*inbox, *booted])
        turned = InstantResult(answers=outbox.answers[: len(inbox)], due_in_s=outbox.due_in_s)
        while outbox.commands or outbox.provider_calls:
            replies = self.supervisors.execute(outbox.commands, now_s)
            turned.gang_events += replies.gang_events
            reports = [*replies.reports, *self.provider.carry_out(outbox.provider_calls, now_s)]
            if not reports:
                break
            outbox = self._turn(now, reports)
            turned.due_in_s = outbox.due_in_s
        return turned

    def _turn(self, now: ControllerTime, inbox: Sequence[Event]) -> StepResult:
        outbox = self.controller.step(now, inbox)
        self.controller.committed(outbox, now)
        return outbox


def node_of(node: TraceNode) -> Node:
    """The record of a node of a fleet."""
    return Node(
        id=NodeId(node.name),
        engine="simulated",
        cpus=_NODE_CPUS,
        memory_bytes=_NODE_BYTES,
        state=NodeState.UP,
        devices=tuple(
            Device(
                index=index, uuid=f"{node.name}/{index}", model=normalize_model(node.model), memory_bytes=_DEVICE_BYTES
            )
            for index in range(node.gpus)
        ),
        shares_head_files=True,
    )
