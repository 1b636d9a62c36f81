"""Records drawn in a line each: fleets as text, jobs by what matters of them. Values only; who needs time and faults takes `tests.harness`.

fleet = make_fleet("rack0: n0=8 n1=4 | rack1: n2=8")          # nodes and their devices
fleet = make_fleet("r: n0=h200:8 n1=a100-80gb:4", cpus=64)    # with models
fleet = make_fleet("leaf0/rack0: n0=8 | leaf1/rack0: n1=8")   # with leaves
fleet = fleet.runs(job("b", gpus=8), "n0:0-7", for_s=7200)    # and a job on it
plan = plan_of(fleet.with_jobs(job("a", gpus=16)))
assert lined(plan) == "b stops for a | a claimed"
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import (
    Epoch,
    Generation,
    JobId,
    NodeId,
    ProjectId,
    QueueId,
    ReservationId,
    SupervisorId,
    UserId,
)
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionContext
from phalanx.core.resources import Extras, extras_of
from phalanx.core.scheduling.outlook.what_if import plan_snapshot
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.state.plan import Plan
from phalanx.core.state.snapshot import Snapshot, Usage
from phalanx.core.units import GIB
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause, MemberState, TaskExit
from phalanx.core.work.extras import Licence, parse_extras
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.core.work.job import Job, PublishedCheckpoint
from phalanx.core.work.queue import Queue, QueueUsage, period_start_s
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.core.work.states import AttemptState

T = 1_700_000_000.0  # Unix seconds at which every history starts
PLAIN = Queue(id=QueueId("default"))


@dataclass(frozen=True)
class Fleet:
    """Nodes, what is held on them, and queues. Every method gives another fleet."""

    nodes: dict[NodeId, Node]
    usage: dict[NodeId, Usage] = field(default_factory=dict)
    queues: dict[QueueId, Queue] = field(default_factory=lambda: {PLAIN.id: PLAIN})
    now_s: float = T
    running: dict[JobId, tuple[Job, Attempt]] = field(default_factory=dict)
    reservations: dict[ReservationId, Reservation] = field(default_factory=dict)
    spent: dict[QueueId, QueueUsage] = field(default_factory=dict)
    licences: dict[str, Licence] = field(default_factory=dict)

    def with_jobs(self, *jobs: Job) -> Snapshot:
        """The snapshot in which these jobs wait, submitted after those that run, in the order given unless they say otherwise."""
        first = 1 + len(self.running)
        waiting = tuple(one if one.seq else replace(one, seq=seq) for seq, one in enumerate(jobs, start=first))
        attempts = {job_id: attempt for job_id, (_, attempt) in self.running.items()}
        return Snapshot(
            version=1,
            now_s=self.now_s,
            nodes=self.nodes,
            usage=self.usage,
            pending=waiting,
            queues=self.queues,
            jobs={one.id: one for one in (*(one for one, _ in self.running.values()), *waiting)} if attempts else {},
            attempts=attempts,
            reservations=self.reservations,
            queue_usage=self.spent,
            licences=self.licences,
            licence_usage=dict(extras_of(pair for one in attempts.values() for pair in one.allocation.licences)),
        )

    def runs(self, one: Job, on: str, *, for_s: float = 7200.0) -> Fleet:
        """The job has run for so long on `n0:0,1 n1:0-3`. Two hours are past every guaranteed run."""
        one = one if one.seq else replace(one, seq=1 + len(self.running))
        role = one.spec.role
        lies = allocation(
            on, cpus=role.cpus, memory_bytes=role.memory_bytes, extras=role.extras, licences=role.licences
        )
        case = place(one, lies, facts(self.now_s - T - for_s)).case
        usage = dict(self.usage)
        for grant in lies.grants:
            held = usage.get(grant.node_id, Usage())
            assert not held.devices & set(grant.devices), f"{grant.node_id} is drawn with a device twice"
            usage[grant.node_id] = Usage(
                devices=held.devices | set(grant.devices),
                host=held.host + grant.host,
            )
        attempt = at(case, AttemptState.RUNNING).attempt
        return replace(self, usage=usage, running={**self.running, one.id: (case.job, attempt)})

    def held(self, **devices: Iterable[int]) -> Fleet:
        """These devices are taken: `held(n0=[0, 1])`."""
        usage = {NodeId(name): Usage(devices=frozenset(taken)) for name, taken in devices.items()}
        return replace(self, usage={**self.usage, **usage})

    def down(self, *names: str) -> Fleet:
        return self._each(names, state=NodeState.DOWN)

    def drained(self, *names: str) -> Fleet:
        return self._each(names, cordon=Cordon(by="op", why="disk", since_s=T, drain=True))

    def cordoned(self, *names: str) -> Fleet:
        return self._each(names, cordon=Cordon(by="op", why="disk", since_s=T))

    def sick(self, name: str, *indices: int) -> Fleet:
        """These devices are not healthy."""
        node = self.nodes[NodeId(name)]
        devices = tuple(replace(device, healthy=device.index not in indices) for device in node.devices)
        return self._each((name,), devices=devices)

    def with_queues(self, *queues: Queue) -> Fleet:
        return replace(self, queues={queue.id: queue for queue in queues})

    def with_licences(self, **seats: int) -> Fleet:
        """Licences with so many seats."""
        return replace(self, licences={name: Licence(id=name, total=total) for name, total in seats.items()})

    def set_aside(self, *reservations: Reservation) -> Fleet:
        return replace(self, reservations={one.id: one for one in reservations})

    def having_spent(self, by_user: dict[str, float] | None = None, **gpu_h: float) -> Fleet:
        """GPU-hours that queues have used up to now, all in this budget period: `having_spent(nlp=100)`. `by_user`: of each of them."""
        spent = {
            QueueId(name): QueueUsage(
                queue=QueueId(name),
                at_s=self.now_s,
                period_s=period_start_s(self.queues[QueueId(name)], self.now_s),
                gpu_s=hours * 3600.0,
                decayed_gpu_s=hours * 3600.0,
                users=tuple((UserId(user), used * 3600.0) for user, used in (by_user or {}).items()),
            )
            for name, hours in gpu_h.items()
        }
        return replace(self, spent=spent)

    def _each(self, names: Iterable[str], **changes: Any) -> Fleet:
        changed = {NodeId(name): replace(self.nodes[NodeId(name)], **changes) for name in names}
        return replace(self, nodes={**self.nodes, **changed})


def make_fleet(text: str, *, cpus: int = 32, memory_gib: int = 256, offers: str = "") -> Fleet:
    """Nodes of `[LEAF/]RACK: NAME_PATTERN=[MODEL[-MEMgb]:]COUNT ...`, racks parted by `|`; each offers the same extras."""
    nodes: dict[NodeId, Node] = {}
    for rack in text.split("|"):
        name, _, inside = rack.rpartition(":") if "=" not in rack.partition(":")[0] and ":" in rack else ("", "", rack)
        if "=" in name:  # the last colon was a model's
            name, _, inside = rack.partition(":")
        for word in inside.split():
            node_name, _, devices = word.partition("=")
            nodes[NodeId(node_name)] = make_node(
                node_name,
                devices,
                cpus=cpus,
                memory_gib=memory_gib,
                rack=name.strip(),
                extras=parse_extras(offers),
            )
    return Fleet(nodes=nodes)


def make_node(
    name: str, devices: str | int = 4, *, cpus: int = 32, memory_gib: int = 256, rack: str = "", **fields: Any
) -> Node:
    """A node that is up, with devices as in the grammar of GPUs."""
    has = parse_gpus(devices)
    return Node(
        id=NodeId(name),
        engine="local",
        cpus=cpus,
        memory_bytes=memory_gib * GIB,
        state=NodeState.UP,
        devices=tuple(
            Device(
                index=index,
                uuid=f"{name}-{index}",
                model=has.model or "virtual",
                memory_bytes=(has.memory_gib or 16) * GIB,
            )
            for index in range(has.total)
        ),
        labels=_place_of(rack),
        joined_s=T,
        supervisor_id=SupervisorId(f"{name}-life1"),
        **{"shares_head_files": True, **fields},
    )


def _place_of(rack: str) -> dict[str, str]:
    """`rack` or `leaf/rack` as labels."""
    leaf, _, last = rack.rpartition("/")
    return {level: name for level, name in (("leaf", leaf), ("rack", last)) if name}


def queue(name: str, **fields: Any) -> Queue:
    """A queue by its name; `parent` too by name."""
    return Queue(id=QueueId(name), **fields)


def spec(
    name: str = "train",
    *,
    gpus: int | str | GpuRequest = 1,
    cpus: int = 0,
    memory_gib: int = 0,
    launch: LaunchMode = LaunchMode.PER_DEVICE,
    tasks_per_node: int | None = None,
    extras: str = "",
    licences: str = "",
    **fields: Any,
) -> JobSpec:
    """A job as submitted; extras and licences as in `--resources`."""
    role = Role(
        argv=("python", "train.py"),
        gpus=gpus if isinstance(gpus, GpuRequest) else parse_gpus(gpus),
        cpus=cpus,
        memory_bytes=memory_gib * GIB,
        launch=launch,
        tasks_per_node=tasks_per_node,
        extras=parse_extras(extras),
        licences=parse_extras(licences),
    )
    return JobSpec(name=name, role=role, workdir="/work", **fields)


def job(
    name: str = "1", *, seq: int = 0, queue: str = "default", priority: int = 0, user: str = "ada", **fields: Any
) -> Job:
    """A pending job whose id is its name. What a `JobSpec` or `Role` has goes there, the rest is the job's own."""
    own = {"submit_s": T, **{key: fields.pop(key) for key in tuple(fields) if key in _JOB_FIELDS}}
    return Job(
        id=JobId(name),
        folder=f"{name}-k",
        seq=seq,
        spec=spec(name, priority=priority, **fields),
        user=UserId(user),
        project=ProjectId("gpt"),
        queue=QueueId(queue),
        **own,
    )


_JOB_FIELDS = set(Job.__dataclass_fields__) - {"id", "seq", "spec", "queue", "user"}


def plan_of(snapshot: Snapshot, **policy: Any) -> Any:
    """What the scheduler makes of it: a `Plan`, asked by plain names."""
    return plan_snapshot(snapshot, PolicySettings(**policy))


def drawn(plan: Plan, name: str) -> str:
    """A placement as text: `n0:0,1 n1:0,1`; empty for none."""
    placed = plan.placement(JobId(name))
    if placed is None:
        return ""
    return " ".join(f"{grant.node_id}:{','.join(map(str, grant.devices))}" for grant in placed.allocation.grants)


def lined(plan: Plan, *names: str) -> str:
    """A plan in a line: stops as `b stops for a` (or `moves`), placements as `a n0:0,1`, waits as `c quota`; with names these jobs only."""
    verbs = {EndCause.PREEMPTED: "stops", EndCause.MOVED: "moves"}
    said = [
        (one.job_id, f"{one.job_id} {verbs[one.cause]}" + (f" for {one.preempted_by}" if one.preempted_by else ""))
        for one in plan.stops
    ]
    said += [(one.job_id, f"{one.job_id} {drawn(plan, one.job_id)}") for one in plan.placements]
    said += [(job_id, f"{job_id} {wait.reason}") for job_id, wait in sorted(plan.waits.items())]
    return " | ".join(text for job_id, text in said if not names or job_id in names)


def allocation(
    text: str,
    *,
    tasks: int | None = None,
    cpus: int = 0,
    memory_bytes: int = 0,
    extras: Extras = (),
    licences: Extras = (),
) -> Allocation:
    """`n0:0,1 n1:0-3` as an allocation; CPUs, memory and extras of each part."""
    grants: list[NodeGrant] = []
    for rank, word in enumerate(text.split()):
        node, _, devices = word.partition(":")
        spans = [span.partition("-") for span in devices.split(",") if span]
        indices = tuple(index for first, _, last in spans for index in range(int(first), int(last or first) + 1))
        count = tasks if tasks is not None else max(1, len(indices))
        grants.append(
            NodeGrant(
                node_id=NodeId(node),
                node_rank=rank,
                devices=indices,
                cpus=cpus,
                memory_bytes=memory_bytes,
                extras=extras,
                tasks=count,
                first_rank=rank * count,
            )
        )
    return Allocation(grants=tuple(grants), licences=licences)


def facts(now_s: float = 0.0, **fields: Any) -> TransitionContext:
    """The surroundings `now_s` seconds after the beginning."""
    return TransitionContext(now_s=T + now_s, checkpoint_root="/ckpt", output_root="/out", storage_key="k", **fields)


def placed(one: Job | None = None, on: str = "n0:0,1 n1:0,1", now_s: float = 0.0) -> Any:
    """A job with an attempt just placed: a `Case`, of which drawings look at what they know is there."""
    return place(one or job("1", gpus="2x2"), allocation(on), facts(now_s)).case


def at(case: AttemptCase, state: AttemptState, **members: str) -> Any:
    """The same case with its attempt in this state; members as `n0="stopped"`, the others as the state has them."""
    attempt = case.attempt
    assert attempt is not None
    usual = {AttemptState.PLACED: MemberState.REQUESTED, AttemptState.STARTING: MemberState.READY}.get(
        state, MemberState.STARTED
    )
    changed = tuple(
        replace(member, state=MemberState(members.get(member.node_id, usual)), port=29501) for member in attempt.members
    )
    return replace(case, attempt=replace(attempt, state=state, members=changed))


def exited(
    rank: int, node: str, code: int | None = 0, *, signal: int | None = None, by_us: bool = False, at_s: float = 0.0
) -> TaskExit:
    """How a task ended."""
    return TaskExit(
        rank=rank,
        node_id=NodeId(node),
        code=None if signal is not None else code,
        signal=signal,
        requested_by_phalanx=by_us,
        ended_s=T + at_s,
    )


def checkpoint(step: int, epoch: int = 1) -> PublishedCheckpoint:
    """A published checkpoint."""
    path = f"/ckpt/1-k/epoch-{epoch}-k/step-{step:08d}"
    return PublishedCheckpoint(epoch=Epoch(epoch), step=step, path=path, digest=f"sha-{epoch}-{step}")


def keyed(attempt: Attempt | None) -> dict[str, Any]:
    """The three names that every report carries."""
    assert attempt is not None
    return {"job_id": attempt.job_id, "epoch": attempt.epoch, "generation": Generation(attempt.generation)}


def gpu(total: int = 0, **fields: Any) -> GpuRequest:
    return GpuRequest(total=total, **fields)
