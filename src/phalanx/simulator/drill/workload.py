"""Simulated users and operators: they submit jobs of every kind in a small queue tree, and use every operation on them.

Twelve GPUs on three nodes make jobs compete. A request may meet a full disk, a dying head, or no head.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, ReservationId, SupervisorId, UserId
from phalanx.core.lifecycle.job import is_parked
from phalanx.core.lifecycle.transitions import AttemptCase
from phalanx.core.scheduling.policies import PolicyParameters
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.events import (
    CancelJob,
    CordonNode,
    EndReservation,
    Event,
    HoldJob,
    LabelNodes,
    ParkJob,
    PutQueues,
    PutReservation,
    RequeueJob,
    SubmitJob,
    UncordonNode,
    UpdateJob,
)
from phalanx.core.units import GIB
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.spec import JobSpec, Role
from phalanx.node.logic.events import MemberKey
from phalanx.simulator.drill.behaviour import CANARY_VALUE, JobBehaviour
from phalanx.simulator.drill.clock import BEGIN_UNIX_S
from phalanx.simulator.drill.violations import require

if TYPE_CHECKING:
    from phalanx.simulator.drill.cluster import DrillCluster

DEVICES: Final = 4  # of each node
LIVE_MAX: Final = 12  # live jobs: about twice as many as can run at once
_ADA, _OP = UserId("ada"), UserId("op")
_GPT = ProjectId("gpt")


def crash_at(after_s: float, code: int | None, signal: int | None, *, rank: int = 0, epochs: int = 2) -> Any:
    """Let this rank end this way in the first generation of the first `epochs` attempts."""

    def ends(key: MemberKey, who: int) -> tuple[float, int | None, int | None] | None:
        return (after_s, code, signal) if who == rank and key.generation == 0 and key.epoch <= epochs else None

    return ends


BEHAVIOURS: Final = {
    "short": JobBehaviour(run_s=2.0),
    "long": JobBehaviour(run_s=25.0),
    "saving": JobBehaviour(run_s=30.0, save_every_s=2.0),
    "saving2": JobBehaviour(run_s=20.0, save_every_s=1.5, saves_on_stop=True),
    "badsave": JobBehaviour(run_s=12.0, save_every_s=2.0, failing_save=2),
    "stubborn": JobBehaviour(run_s=12.0, ignores_sigterm=True),
    "crashing": JobBehaviour(run_s=8.0, save_every_s=3.0, ends=crash_at(4.0, None, 11)),
    "looping": JobBehaviour(run_s=8.0, ends=lambda _key, who: (0.6, None, 6) if who == 0 else None),
    "failing": JobBehaviour(ends=crash_at(1.0, 3, None, rank=1)),
    "slow": JobBehaviour(run_s=3.0, prepare_s=4.0),
    "glacial": JobBehaviour(run_s=3.0, prepare_s=66.0),
    "refused": JobBehaviour(run_s=5.0, refuses={"n1": "device 2 is sick"}),
    "wrong": JobBehaviour(run_s=5.0, refuses={"n0": "!no such file: train.py", "n2": "!no such file: train.py"}),
    "bound": JobBehaviour(run_s=6.0, port_taken_generations=2),
    "portless": JobBehaviour(run_s=6.0, port_taken_generations=9),
    "leaving": JobBehaviour(run_s=2.0, children_live_s=1.0),
    "lasting": JobBehaviour(run_s=2.0, children_live_s=30.0),
    "unspawnable": JobBehaviour(run_s=4.0, unspawnable_generations=1),
}
JOB_KINDS: Final = ("saving", "saving", "long", *sorted(set(BEHAVIOURS) - {"glacial"}))
SHAPES: Final = ("2x4", "2x2", "2x4", "4", "3x4", "2", "1", "6", "0", "1..3x4", "1..2x2", "1/2", "1/4", "2x1/2", "0.7")
QUEUE_TREE: Final = (
    Queue(id=QueueId("default")),
    Queue(id=QueueId("research"), quota_gpus=6),
    Queue(id=QueueId("nlp"), parent=QueueId("research"), quota_gpus=4, lend_gpus=2, gpus_per_user=10),
    Queue(id=QueueId("prod"), quota_gpus=4, borrow_gpus=4, priority=1, jobs_per_user=3),
)
"""Queues that lend, borrow or reserve, with both kinds of limits per user."""
QUEUES: Final = ("default", "default", "research", "nlp", "prod", "prod")
QUOTAS: Final = (None, 0, 2, 4, 6)
DEPENDENCIES: Final = ("afterok:{}", "afterany:{}", "afternotok:{}", "afterany:{},singleton")
FAST_POLICY: Final = PolicySettings(
    parameters=PolicyParameters(
        round_s=5.0, run_min_s=6.0, run_min_by_right_s=1.0, move_min_s=2.0, grow_min_s=3.0, stops_max=2
    )
)
"""The default policy's times in the same proportions, scaled to these short jobs."""


def fleet(devices: int = DEVICES) -> list[Node]:
    """Return three nodes of one rack."""
    return [drill_node(name, devices) for name in ("n0", "n1", "n2")]


def drill_node(name: str, devices: int = DEVICES) -> Node:
    """Return a node of the rack."""
    return Node(
        id=NodeId(name),
        engine="local",
        cpus=32,
        memory_bytes=256 * GIB,
        state=NodeState.UP,
        devices=tuple(
            Device(index=at, uuid=f"{name}-{at}", model="virtual", memory_bytes=16 * GIB) for at in range(devices)
        ),
        labels={"rack": "r"},
        joined_s=BEGIN_UNIX_S,
        supervisor_id=SupervisorId(f"{name}-life1"),
        shares_head_files=True,
    )


class UserSimulator:
    """Sends random requests. Every method is one request, possibly repeated.

    Attributes:
        tree: its queues.
        fixed_nodes: the nodes that belong to no pool.
    """

    tree: tuple[Queue, ...] = QUEUE_TREE

    def __init__(self, cluster: DrillCluster, dice: Random) -> None:
        self._cluster, self._dice = cluster, dice
        self.fixed_nodes = tuple(cluster.nodes)
        self._keys = 0
        self._jobs: list[JobId] = []
        self._unanswered: list[tuple[JobSpec, str, str]] = []
        cluster.behaviours.update(BEHAVIOURS)

    def start(self) -> None:
        """Create the queue tree and two jobs."""
        self._cluster.request(PutQueues(queues=self.tree))
        for _ in range(2):
            self.submit()

    def send_random_request(self) -> None:
        """Send one random request."""
        dice, full = self._dice, self._live() >= LIVE_MAX
        if not full and dice.random() < 0.55:
            dice.choice((self.submit, self.submit, self.submit, self.submit_after, self.submit_array))()
        else:
            dice.choice(
                (
                    self.cancel,
                    self.requeue,
                    self.hold,
                    self.hold,
                    self.park,
                    self.park,
                    self.cordon,
                    self.uncordon,
                    self.uncordon,
                    self.reserve,
                    self.unreserve,
                    self.change_quota,
                    self.update,
                )
            )()

    def _live(self) -> int:
        if self._cluster.head is None:
            return 0
        world = self._cluster.world
        return len(world.pending) + len(world.attempts)

    def _ask(self, event: Event) -> Any:
        """Return the answer; None if the request was refused or not answered."""
        try:
            return self._cluster.request(event)
        except PhalanxError:  # any other exception is a bug and ends the drill
            return None

    def _spec(self, **fields: Any) -> JobSpec:
        dice = self._dice
        kind = "glacial" if dice.random() < 0.02 else dice.choice(JOB_KINDS)
        given = fields.pop("gpus", None)
        role = Role(argv=("python", "train.py"), gpus=parse_gpus(given) if given else self.draw_gpus())
        return JobSpec(
            name=kind,
            role=role,
            workdir="/work",
            retry=dice.randint(0, 1),
            priority=dice.randint(0, 2),
            grace_s=dice.choice((1.0, 30.0)),
            time_limit_s=dice.choice((None, None, None, 9.0)),
            collective_timeout_s=20.0,
            env=(("API_KEY", CANARY_VALUE),),
            allow_never=True,  # quotas change, and waiting jobs must be judged again
            **fields,
        )

    def draw_gpus(self) -> GpuRequest:
        """The request of a job."""
        return parse_gpus(self._dice.choice(SHAPES))

    def _job(self) -> JobId | None:
        """Return a recent job, which is probably live."""
        return self._dice.choice(self._jobs[-16:]) if self._jobs else None

    # ---- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit twice with an idempotency key; unanswered submits are retried later with the same key."""
        if self._unanswered and self._dice.random() < 0.5:
            wanted, key, queue = self._unanswered.pop()
        else:
            self._keys += 1
            wanted, key, queue = self._spec(), f"key-{self._keys}", self._dice.choice(QUEUES)
        first = self._submit_once(wanted, key, queue)
        if first is None:
            self._unanswered.append((wanted, key, queue))
            return
        again = self._submit_once(wanted, key, queue)
        require(again in (None, first), 11, f"one idempotency key created jobs {first} and {again}")
        self._jobs.append(first)

    def _submit_once(self, wanted: JobSpec, key: str, queue: str) -> JobId | None:
        made = self._ask(
            SubmitJob(spec=wanted, user=_ADA, project=_GPT, queue=QueueId(queue), key=key, body_sha256=repr(wanted))
        )
        if not isinstance(made, Job):
            return None
        self._cluster.invariants.record_submit(made.id)
        return made.id

    def submit_after(self) -> None:
        """Submit a job that depends on another."""
        parent = self._job()
        if parent is None:
            return
        wanted = self._spec(gpus="2", dependencies=parse_dependencies(self._dice.choice(DEPENDENCIES).format(parent)))
        made = self._submit_once(wanted, "", self._dice.choice(QUEUES))
        if made is not None:
            self._jobs.append(made)

    def submit_array(self) -> None:
        """Submit an array of up to four elements."""
        dice = self._dice
        wanted = self._spec(gpus="2", array=f"0-{dice.randint(0, 3)}", array_max=dice.choice((None, 1, 2)))
        made = self._ask(SubmitJob(spec=wanted, user=_ADA, project=_GPT, queue=QueueId(dice.choice(QUEUES))))
        for job in made or ():
            self._cluster.invariants.record_submit(job.id)
            self._jobs.append(job.id)

    def cancel(self) -> None:
        """Cancel twice: the second request must change nothing."""
        job_id = self._job()
        if job_id is None:
            return
        once = self._ask(CancelJob(job_id=job_id, by=_ADA))
        if not isinstance(once, Job):
            return
        self._cluster.invariants.record_cancel(once)
        # The same step may have ended the job after its answer: its node was lost.
        before = self._cluster.world.jobs.get(job_id, once)
        again = self._ask(CancelJob(job_id=job_id, by=_ADA))
        if isinstance(again, Job):
            require(again == before, 11, f"a second cancel changed {before} to {again}")

    def requeue(self) -> None:
        """Requeue a job."""
        job_id = self._job()
        if job_id is not None:
            self._ask(RequeueJob(job_id=job_id, by=_ADA))

    def hold(self) -> None:
        """Hold or release a job."""
        job_id = self._job()
        if job_id is not None:
            self._ask(HoldJob(job_id=job_id, held=self._dice.random() < 0.4, by=_ADA))

    def park(self) -> None:
        """Park or resume a job."""
        job_id = self._job()
        if job_id is not None:
            self._ask(ParkJob(job_id=job_id, parked=self._dice.random() < 0.4, by=_ADA))

    def update(self) -> None:
        """Change priority and time limit."""
        job_id, dice = self._job(), self._dice
        if job_id is not None:
            limit_s = dice.choice((None, 8.0))
            self._ask(UpdateJob(job_id=job_id, by=_ADA, priority=dice.randint(0, 3), time_limit_s=limit_s))

    # ---- the fleet -----------------------------------------------------------------------------------------------------

    def cordon(self) -> None:
        """Cordon or drain twice: the second request must change nothing and record no event."""
        node_id, drain = self._node(), self._dice.random() < 0.5
        excluded = CordonNode(node_id=node_id, by=_OP, why="disk", drain=drain)
        once = self._ask(excluded)
        last_seq = self._cluster.world.next_history_seq - 1 if isinstance(once, Node) else 0
        again = self._ask(excluded)
        if isinstance(once, Node) and isinstance(again, Node):
            repeated = [
                line.text for line in self._cluster.store.history(node_id=node_id, after=last_seq) if line.by == _OP
            ]
            gone = again.state is not once.state  # its lease ended in the same step, independently of the drain
            same = again.cordon == once.cordon if gone else again == once
            require(same and not repeated, 11, f"a second drain changed {once} to {again}, with events {repeated}")
            self._ask(LabelNodes(labels={node_id: {"ticket": str(last_seq)}}, by=_OP))
        if self._cluster.head is not None:
            self._cluster.call_after(self._dice.choice((2.0, 9.0)), lambda: self._uncordon(node_id))

    def uncordon(self) -> None:
        """Uncordon a node."""
        self._uncordon(self._node())

    def _uncordon(self, node_id: NodeId) -> None:
        self._ask(UncordonNode(node_id=node_id, by=_OP))

    def reserve(self) -> None:
        """Reserve a node from now on; a later window could be started by a clock jump, which must not end attempts."""
        self._keys += 1
        now_s, dice = self._cluster.now.wall_s, self._dice
        users = frozenset({_ADA}) if dice.random() < 0.3 else frozenset()
        name = ReservationId(f"window-{self._keys}")
        window = Reservation(
            id=name, nodes=(self._node(),), start_s=now_s, end_s=now_s + dice.choice((3.0, 9.0)), users=users
        )
        self._ask(PutReservation(reservation=window))
        self._cluster.call_after(10.0, lambda: self._ask(EndReservation(reservation_id=name, by=_OP)))

    def unreserve(self) -> None:
        """End a reservation."""
        if self._cluster.head is not None:
            for name in sorted(self._cluster.world.reservations)[:1]:
                self._ask(EndReservation(reservation_id=name, by=_OP))

    def change_quota(self) -> None:
        """Change a quota: running jobs continue above a lowered quota, new ones do not start (6)."""
        which = self._dice.choice(self.tree[1:])
        self._ask(PutQueues(queues=(replace(which, quota_gpus=self._dice.choice(QUOTAS)),)))

    def _node(self) -> NodeId:
        return self._dice.choice(sorted(self._cluster.nodes))

    # ---- the end -------------------------------------------------------------------------------------------------------

    def remove_restrictions(self) -> None:
        """Remove all reservations, cordons, holds and changed quotas."""
        cluster = self._cluster
        for node_id in self.fixed_nodes:
            cluster.request(UncordonNode(node_id=node_id, by=_OP))
        for name in list(cluster.world.reservations):
            cluster.request(EndReservation(reservation_id=name, by=_OP))
        for job in list(cluster.world.jobs.values()):
            if is_parked(AttemptCase(job=job, attempt=cluster.world.attempts.get(job.id))):
                self._ask(ParkJob(job_id=job.id, parked=False, by=_OP))
            elif job.held and not job.state.terminal:
                self._ask(HoldJob(job_id=job.id, held=False, by=_OP))
        cluster.request(PutQueues(queues=self.tree))
