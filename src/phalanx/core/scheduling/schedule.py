"""One cycle: snapshot -> plan. Called by the controller after every change and by the simulator in virtual time.

Jobs are judged by priority, then submit order. Each gang is placed whole or not at all, where it leaves the least room behind. A job
that does not fit is passed over and told why; later jobs that fit may start. Equal requests are judged once a cycle: after one of
them has not fitted, its likes are not tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import NeverFits
from phalanx.core.scheduling.place import FreeRooms, find, most_free
from phalanx.core.scheduling.shape import Shape, shape_of
from phalanx.core.state.plan import Placement, Plan, Waiting
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.work.job import BACKOFF_MAX_S, Job, Reason
from phalanx.core.work.spec import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a cycle decides. `placements_max` bounds one cycle's work; the rest follows in the next."""

    name: str = "priority"
    placements_max: int = 512


@dataclass(frozen=True, slots=True)
class _RequestClass:
    """What makes two requests equal to the placement."""

    role: Role


def schedule(snapshot: Snapshot, policy: Policy) -> Plan:
    """The plan for this snapshot: placements in the order they were granted, and a reason for every other pending job.

    Equal snapshots give equal plans. Cost: pending jobs x log for the order, plus classes x nodes for the placing.
    """
    free = FreeRooms.of(snapshot)
    placements: list[Placement] = []
    waits: dict[str, Waiting] = {}
    failed: dict[_RequestClass, Waiting] = {}
    shapes: dict[_RequestClass, Shape | Waiting] = {}
    for job in sorted(snapshot.pending, key=lambda job: (-_priority(job, snapshot), job.seq)):
        wait = _not_eligible(job, snapshot)
        kind = _RequestClass(_placement_part(job.spec.role))
        wait = wait or failed.get(kind)
        if wait is None:
            shape = shapes.get(kind)
            if shape is None:
                shape = shapes[kind] = _shape(job.spec.role, snapshot)
            wait = _try(job, shape, free, placements, policy)
            if wait is not None and wait.reason is not Reason.BACKOFF:
                failed[kind] = wait
        if wait is not None:
            waits[job.id] = wait
    return Plan(version=snapshot.version, placements=tuple(placements), waits=waits)  # type: ignore[arg-type]  # JobId is str


def _try(
    job: Job, shape: Shape | Waiting, free: FreeRooms, placements: list[Placement], policy: Policy
) -> Waiting | None:
    if isinstance(shape, Waiting):
        return shape
    if len(placements) >= policy.placements_max:
        return Waiting(reason=Reason.BACKOFF, detail="judged again in a moment: this cycle has placed its share")
    allocation = find(free, shape, job.avoid) if free.free_devices >= shape.nodes * shape.devices else None
    if allocation is None:
        return _explain(shape, free)
    free.take(allocation)
    placements.append(Placement(job_id=job.id, allocation=allocation))
    return None


def _priority(job: Job, snapshot: Snapshot) -> int:
    queue = snapshot.queues.get(job.queue)
    return job.spec.priority + (queue.priority if queue is not None else 0)


def _placement_part(role: Role) -> Role:
    """The role without what does not matter to its place, so that equal requests are equal values."""
    return Role(
        gpus=role.gpus,
        cpus=role.cpus,
        memory_bytes=role.memory_bytes,
        launch=role.launch,
        tasks_per_node=role.tasks_per_node,
    )


def _not_eligible(job: Job, snapshot: Snapshot) -> Waiting | None:
    if job.held:
        return Waiting(reason=Reason.HELD, detail=f"held; phalanx release {job.id} lets it start")
    queue = snapshot.queues.get(job.queue)
    if queue is not None and not queue.open:
        return Waiting(reason=Reason.QUEUE_CLOSED, detail=f"queue {queue.id} is closed")
    if (
        0 < job.not_before_s - snapshot.now_s <= BACKOFF_MAX_S
    ):  # further off means that the clock was set back meanwhile
        return Waiting(reason=Reason.BACKOFF, detail=f"waits a moment after a failed start: {job.detail}")
    return None


def _shape(role: Role, snapshot: Snapshot) -> Shape | Waiting:
    """The shape on the nodes that take work now; failing that, why."""
    up = tuple(snapshot.nodes[node_id] for node_id in sorted(snapshot.nodes) if snapshot.nodes[node_id].schedulable)
    if not up:
        some = "no node is up" if snapshot.nodes else "no node has joined"
        return Waiting(reason=Reason.NO_NODES, detail=f"{some}; phalanx nodes shows why")
    try:
        return shape_of(role, up)
    except NeverFits as error:
        away = sorted(node_id for node_id, node in snapshot.nodes.items() if not node.schedulable)
        names = ", ".join(away[:4]) + ("" if len(away) <= 4 else f" and {len(away) - 4} more")
        return Waiting(reason=Reason.NODES_DOWN, detail=f"{error.message}; down or drained: {names or 'none'}")


def _explain(shape: Shape, free: FreeRooms) -> Waiting:
    if not shape.devices:
        return Waiting(
            reason=Reason.RESOURCES,
            detail=f"needs {shape.cpus} CPUs on {shape.nodes} nodes; the free ones do not suffice",
        )
    return Waiting(
        reason=Reason.RESOURCES,
        detail=f"needs {shape.nodes} x {shape.devices} GPUs; {free.free_devices} free in all, at most {most_free(free, shape)} on one node",
    )
