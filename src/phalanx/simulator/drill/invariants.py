"""Checks of the invariants of DESIGN 3 that one process can observe, after every state change.

Checks are incremental: records by the step's change, limits when allocations change, processes when some start, end, freeze or thaw.
Every `FULL_CHECK_EVERY` commits and at each start of a head everything is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.controller.step_result import ControllerTime, StepResult
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.lifecycle.transitions import HANGS_BEFORE_STOP, NO_PROGRESS_BUDGET, PORT_TRIES
from phalanx.core.resources import NO_RESOURCES, Resources
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.state.events import Event
from phalanx.core.state.reports import CheckpointSaved
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.state.world import World
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.dependency import Dependency, DependencyKind, array_element_id
from phalanx.core.work.job import NO_EPOCH, Job, PublishedCheckpoint
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.spec import Role
from phalanx.core.work.states import AttemptState, JobState
from phalanx.simulator.drill.behaviour import CANARY_VALUE
from phalanx.simulator.drill.billing_invariants import BillingChecker
from phalanx.simulator.drill.head import DrillHead
from phalanx.simulator.drill.limit_invariants import LimitChecker
from phalanx.simulator.drill.operator_invariants import OperatorChecker
from phalanx.simulator.drill.pools.invariants import PoolChecker
from phalanx.simulator.drill.processes import newest_valid
from phalanx.simulator.drill.protocols import ObservedCluster
from phalanx.simulator.drill.restart_invariants import RestartChecker
from phalanx.simulator.drill.service_invariants import check_services
from phalanx.simulator.drill.violations import InvariantBroken, require

FULL_CHECK_EVERY: Final = 64  # commits between two full checks


class InvariantChecker:
    """Records what must stay true, and checks it."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster = cluster
        self._acknowledged: set[JobId] = set()
        self._ended: dict[JobId, Job] = {}
        self._cancelled: dict[JobId, tuple[Epoch, Generation]] = {}
        self._epochs: dict[JobId, Epoch] = {}
        self._started: dict[tuple[JobId, Epoch, Generation], PublishedCheckpoint | None] = {}
        self._known: dict[JobId, Job] = {}
        self._restarts: dict[JobId, RestartChecker] = {}
        self._last_line = 0
        self._commits = 0
        self._limits = LimitChecker(cluster)
        self._books = BillingChecker(cluster)
        self.operators = OperatorChecker()
        self.pools: PoolChecker | None = None

    # ---- acknowledged requests -----------------------------------------------------------------------------------------

    def record_submit(self, job_id: JobId) -> None:
        """Record an acknowledged submit."""
        self._acknowledged.add(job_id)
        require(self._cluster.store.job(job_id), 3, f"job {job_id} is acknowledged but not stored")

    def record_cancel(self, job: Job) -> None:
        """Record an acknowledged cancel."""
        attempt = self._cluster.world.attempts.get(job.id)
        if not job.state.terminal or job.state is JobState.CANCELLED:
            self._cancelled.setdefault(job.id, (job.epoch, attempt.generation if attempt else Generation(0)))

    # ---- acknowledged events of nodes ----------------------------------------------------------------------------------

    def check_events(self, events: Sequence[Event], world: World) -> None:
        """Check events after their step is durable; their senders now drop them."""
        for event in events:
            if isinstance(event, CheckpointSaved):
                self._saved(event, world)
        self.operators.check_events(events, world)

    def _saved(self, event: CheckpointSaved, world: World) -> None:
        """Check that a checkpoint of the current epoch, or a newer one, is recorded."""
        attempt, saved = world.attempts.get(event.job_id), event.resume
        if attempt is None or attempt.epoch != saved.epoch:
            return
        known = [(kept.epoch, kept.step) for kept in world.jobs[event.job_id].checkpoints]
        if max(known, default=(NO_EPOCH, -1)) < (saved.epoch, saved.step):
            raise InvariantBroken(9, f"job {event.job_id} saved step {saved.step}, but only {known} are recorded")

    # ---- durable changes -----------------------------------------------------------------------------------------------

    def check_commit(self, outbox: StepResult, head: DrillHead, now: ControllerTime) -> None:
        """Check a committed change. `head` holds the change; it may have died in the commit, at `now`."""
        change, world = outbox.change, head.controller.world
        attempts = {}
        for record in change.records:
            if isinstance(record, Attempt):
                attempts[record.job_id] = record
        for record in change.records:
            if isinstance(record, Job):
                self._cluster.coverage.count_job_transition(record, attempts.get(record.id), self._known.get(record.id))
                self._known[record.id] = record
                self._job(record)
            elif isinstance(record, Attempt):
                self._attempt(record, world)
        for line in change.history:
            if line.seq != self._last_line + 1:
                raise InvariantBroken(19, f"line {line.seq} follows line {self._last_line}")
            self._last_line = line.seq
            if CANARY_VALUE in line.text or (line.facts and CANARY_VALUE in repr(line.facts)):
                raise InvariantBroken(23, f"line {line.seq} ({line.kind}) contains a secret of job {line.job_id}")
        self._commands(outbox, world)
        if change.empty:
            return
        self._commits += 1
        if self._commits % FULL_CHECK_EVERY == 0:
            self._whole(world)
        self._devices(world)
        for record in change.records:
            if isinstance(record, Job):
                self._indexed(record.id, world)
        for condition in world.relations.dependents:
            self._check_dependents(condition, world)
        self._limits.check(world, outbox, head)
        self._books.check(change.records, now)
        check_services(change.history, world)
        if self.pools is not None:
            self.pools.check_commit(change, world)

    def check_store(self) -> None:
        """Check the store when a head starts, and at the end."""
        self.operators.check_trail(self._cluster.store)
        for job_id in self._acknowledged:
            require(self._cluster.store.job(job_id), 3, f"job {job_id} was acknowledged but is lost")
        for job_id, job in self._ended.items():
            found = self._cluster.store.job(job_id)
            require(found is not None and found.state is job.state, 8, f"{job_id} was {job.state} before the crash")

    def _job(self, job: Job) -> None:
        before = self._ended.get(job.id)
        if before is not None and (before.state, before.exit_code) != (job.state, job.exit_code):
            raise InvariantBroken(8, f"{job.id} was {before.state} and is {job.state}")
        if job.state.terminal:
            self._ended[job.id] = job
        require(CANARY_VALUE not in job.detail, 23, f"the detail of job {job.id} contains its secret")
        if job.hang_restarts > HANGS_BEFORE_STOP:
            raise InvariantBroken(
                13, f"job {job.id} was restarted {job.hang_restarts} times after hangs without progress"
            )
        if job.charged_restarts > NO_PROGRESS_BUDGET + 1 and job.replica is None:
            raise InvariantBroken(13, f"job {job.id} restarted {job.charged_restarts} times without progress")
        if job.user_retries > job.spec.retry:
            raise InvariantBroken(13, f"job {job.id} was retried {job.user_retries} times of {job.spec.retry}")
        for kept in job.checkpoints:
            if kept.path in self._cluster.deleted_checkpoints:
                raise InvariantBroken(21, f"checkpoint {kept.path} of job {job.id} is recorded but was deleted")

    def _attempt(self, attempt: Attempt, world: World) -> None:
        self._restarts.setdefault(attempt.job_id, RestartChecker()).check(attempt, world.jobs[attempt.job_id])
        if len(attempt.members) != len(attempt.allocation.grants):
            raise InvariantBroken(5, f"job {attempt.job_id} has {len(attempt.members)} members")
        before = self._epochs.get(attempt.job_id, Epoch(0))
        if attempt.epoch < before:
            raise InvariantBroken(4, f"the epoch of job {attempt.job_id} decreases from {before} to {attempt.epoch}")
        if attempt.epoch > before:
            require(
                attempt.epoch == before + 1,
                4,
                f"the epoch of job {attempt.job_id} jumps from {before} to {attempt.epoch}",
            )
            self._epochs[attempt.job_id] = attempt.epoch
            self._placed(attempt, world)
        if attempt.job_id in self._cancelled:
            place = (attempt.epoch, attempt.generation)
            require(
                place <= self._cancelled[attempt.job_id], 12, f"job {attempt.job_id} runs after a cancel as {place}"
            )
        tail = attempt.causes[-PORT_TRIES - 1 :]
        if tail == (EndCause.PORT_TAKEN,) * (PORT_TRIES + 1) and attempt.holds_allocation:
            raise InvariantBroken(13, f"job {attempt.job_id} retries ports without limit")

    def _placed(self, attempt: Attempt, world: World) -> None:
        role = world.jobs[attempt.job_id].spec.role
        held = attempt.allocation.licences
        require(held == role.licences, 5, f"job {attempt.job_id} requested {role.licences} and holds {held}")
        for number, one in enumerate(role.each):
            grants = [grant for grant in attempt.allocation.grants if grant.role == number]
            _check_grants(f"job {attempt.job_id}", one, grants)
        for grant in attempt.allocation.grants:
            node = world.nodes[grant.node_id]
            if not node.schedulable:
                raise InvariantBroken(2, f"new allocation on {grant.node_id}, which is {node.state} {node.cordon}")
            have = {device.index for device in node.devices if device.healthy}
            if not set(grant.devices) <= have:
                raise InvariantBroken(
                    2, f"job {attempt.job_id} got {grant.devices} of {grant.node_id}, which has {have}"
                )
            self._check_reservations(attempt, grant.node_id, world)
        self._may_start(world.jobs[attempt.job_id], world)

    def _may_start(self, job: Job, world: World) -> None:
        require(not job.unmet_dependencies, 7, f"job {job.id} starts before {job.unmet_dependencies}")
        require(not job.held, 7, f"job {job.id} starts while it is held")
        for condition in job.spec.dependencies:
            require(self._holds(condition, job, world), 7, f"job {job.id} starts although {condition} does not hold")

    def _holds(self, condition: Dependency, job: Job, world: World) -> bool:
        """Evaluate a condition from the jobs' states, independently of the lifecycle, which removes conditions as jobs end."""
        if condition.kind is DependencyKind.SINGLETON:
            likes = [one for one in world.jobs.values() if (one.user, one.spec.name) == (job.user, job.spec.name)]
            return all(one.state.terminal or array_of(one) == array_of(job) for one in likes if one.seq < job.seq)
        names = [one.id for one in world.jobs.values() if array_of(one) == condition.job_id]
        if condition.kind is DependencyKind.AFTER_CORR and job.array is not None and names:
            names = [array_element_id(condition.job_id, job.array.index)]
        known = [self._cluster.store.job(name) for name in names or [condition.job_id]]
        states = [
            one.state for one in known if one is not None
        ]  # a job that predates the store is only named in the request
        if condition.kind in (DependencyKind.AFTER_OK, DependencyKind.AFTER_CORR):
            return all(state is JobState.SUCCEEDED for state in states)
        if condition.kind is DependencyKind.AFTER_NOT_OK and all(state is JobState.SUCCEEDED for state in states):
            return False
        return all(state.terminal for state in states)

    def _check_reservations(self, attempt: Attempt, node_id: NodeId, world: World) -> None:
        job = world.jobs[attempt.job_id]
        for one in world.reservations.values():
            excluded = (
                node_id in one.nodes and one.is_active(self._cluster.now.wall_s) and not one.admits(job.user, job.queue)
            )
            require(
                not excluded,
                2,
                f"job {job.id} was placed on {node_id}, which is reserved for {one.holders_text} ({one.id})",
            )

    def _commands(self, outbox: StepResult, world: World) -> None:
        for command in outbox.commands:
            if not isinstance(command, (PrepareTasks, StartTasks)):
                continue
            attempt, job = world.attempts.get(command.job_id), world.jobs[command.job_id]
            # Within one step an attempt may be prepared and then end because its node died, but never in the other order.
            require(
                command.epoch <= job.epoch,
                4,
                f"job {job.id} of epoch {job.epoch}: {type(command).__name__} of epoch {command.epoch}",
            )
            if attempt is not None and attempt.epoch == command.epoch:
                require(command.generation <= attempt.generation, 4, f"job {job.id}: a command of a later generation")
            if isinstance(command, StartTasks):
                self._resumes(command, job)

    def _resumes(self, command: StartTasks, job: Job) -> None:
        place = (job.id, command.epoch, command.generation)
        if place not in self._started:
            best = newest_valid(job.checkpoints, self._cluster.corrupt_checkpoints)
            if command.resume != best:
                raise InvariantBroken(
                    9, f"job {job.id} resumes from {command.resume} and not from its newest valid checkpoint, {best}"
                )
        # A repeated command names the same checkpoint, even if newer ones were published since.
        if self._started.setdefault(place, command.resume) != command.resume:
            raise InvariantBroken(9, f"job {job.id}: ranks of one generation resume from different checkpoints")

    # ---- allocations ---------------------------------------------------------------------------------------------------

    def _devices(self, world: World) -> None:
        held: dict[NodeId, dict[int, tuple[int, str]]] = {}
        hosts: dict[NodeId, Resources] = {}
        slices: dict[NodeId, dict[int, int]] = {}
        for attempt in world.attempts.values():
            job = world.jobs[attempt.job_id]
            if not attempt.holds_allocation or job.epoch != attempt.epoch or job.state is not JobState.RUNNING:
                raise InvariantBroken(
                    4,
                    f"job {job.id} is {job.state} in epoch {job.epoch}, its attempt {attempt.state} in {attempt.epoch}",
                )
            for grant in attempt.allocation.grants:
                taken = held.setdefault(grant.node_id, {})
                _check_mig_mode(world.nodes.get(grant.node_id), grant)
                for one in () if grant.share is None else grant.share.slices:
                    occupied = slices.setdefault(grant.node_id, {})
                    overlaps = occupied.get(one.device, 0) & one.bits
                    require(not overlaps, 1, f"two slices of {grant.node_id}:{one.device} overlap at {one.start}")
                    occupied[one.device] = occupied.get(one.device, 0) | one.bits
                for index in grant.devices:
                    milli, group = (
                        (MILLI_PER_DEVICE, "")
                        if grant.share is None
                        else (grant.share.milli_on(index), grant.share.group)
                    )
                    used, other = taken.get(index, (0, group))
                    if used + milli > MILLI_PER_DEVICE:
                        raise InvariantBroken(1, f"{used + milli} thousandths of {grant.node_id}:{index} are allocated")
                    if other != group:
                        raise InvariantBroken(1, f"{grant.node_id}:{index} is shared by {other} and {group}")
                    taken[index] = (used + milli, group)
                # Not `grant.host`, which is under test.
                own = Resources(0, grant.cpus, grant.memory_bytes, grant.extras)
                hosts[grant.node_id] = hosts.get(grant.node_id, NO_RESOURCES) + own
                if world.attempts_by_node[grant.node_id][attempt.job_id] != attempt:
                    raise InvariantBroken(1, f"the index of {grant.node_id} is wrong")
            if attempt.state is AttemptState.RUNNING:
                started = all(m.state in (MemberState.STARTED, MemberState.STOPPED) for m in attempt.members)
                require(started, 5, f"job {job.id} runs in part")
        for node_id in {*held, *world.usage}:
            usage = world.usage.get(node_id, EMPTY_USAGE)
            taken = held.get(node_id, {})
            shares = {index: part for index, part in taken.items() if part[1]}
            host = hosts.get(node_id, NO_RESOURCES)
            node = world.nodes.get(node_id)
            if node is not None and not host.fits(node.host):
                raise InvariantBroken(1, f"{node_id} has {node.host}, and its attempts hold {host}")
            counted = (set(usage.devices), dict(usage.shares), usage.host, dict(usage.slices))
            if counted != (set(taken), shares, host, slices.get(node_id, {})):
                raise InvariantBroken(
                    1, f"the usage of {node_id} says {usage.devices} and {usage.shares}, its attempts hold {taken}"
                )

    def _indexed(self, job_id: JobId, world: World) -> None:
        job = world.jobs.get(job_id)
        if job is None:
            return
        require(
            (job.id in world.pending) == (job.state is JobState.PENDING),
            4,
            f"job {job.id} is {job.state} but indexed otherwise",
        )
        if job.unmet_dependencies and job.state not in (JobState.PENDING, JobState.CANCELLED):
            raise InvariantBroken(7, f"job {job.id} runs before {job.unmet_dependencies}")
        if job.state is not JobState.RUNNING:
            return
        require(job.id in world.attempts, 4, f"job {job.id} runs without an attempt")
        place = job.array
        if place is not None and place.running_max is not None:
            elements = world.relations.elements[place.array_id]
            running = sum(world.jobs[one].state is JobState.RUNNING for one in elements)
            require(running <= place.running_max, 6, f"{running} elements of array {place.array_id} run")

    @staticmethod
    def _check_dependents(condition: Dependency, world: World) -> None:
        parent = world.jobs.get(condition.job_id)
        alive = condition.job_id in world.relations.elements or (parent is not None and not parent.state.terminal)
        require(alive, 7, f"{condition} is pending but can no longer change")

    def _whole(self, world: World) -> None:
        for job_id in world.jobs:
            self._indexed(job_id, world)
        self.check_store()

    # ---- executing processes -------------------------------------------------------------------------------------------

    def check_processes(self) -> None:
        """Check the executing processes: one epoch per job, one job per device, none of an ended attempt."""
        places: dict[JobId, tuple[Epoch, Generation]] = {}
        users: set[JobId] = set()  # of devices
        for node in self._cluster.nodes.values():
            on_device: dict[int, dict[JobId, int]] = {}
            for task in node.executing_tasks():
                key = task.key
                place = (key.epoch, key.generation)
                if places.setdefault(key.job_id, place) != place:
                    raise InvariantBroken(
                        4,
                        f"job {key.job_id} executes as {place} and {places[key.job_id]} at the same time\n{self._cluster.event_lines(key.job_id)}",
                    )
                if task.device_milli:
                    users.add(key.job_id)
                for device, milli in task.device_milli.items():
                    here = on_device.setdefault(device, {})
                    here[key.job_id] = milli
                    if sum(here.values()) > MILLI_PER_DEVICE:
                        raise InvariantBroken(1, f"jobs {', '.join(here)} execute on {node.id}:{device}")
        for job_id, (epoch, _) in places.items():
            job = self._cluster.store.job(job_id)
            if job is None or job.epoch != epoch or job.state is not JobState.RUNNING:
                raise InvariantBroken(
                    10,
                    f"epoch {epoch} of job {job_id} executes after its attempt ended\n{self._cluster.event_lines(job_id)}",
                )
            if job.replica is not None and job_id in users:
                attempt = self._cluster.store.newest_attempts([job_id])[job_id]
                require(not attempt.gave_devices_back, 1, f"job {job_id} gave its devices back and uses them")

    def check_settled(self) -> None:
        """Check after healing that head and nodes agree (17) and no process of an ended attempt is left (10)."""
        world = self._cluster.world
        for node in self._cluster.nodes.values():
            for task in node.tasks.values():
                attempt = world.attempts.get(task.key.job_id)
                agreed = attempt is not None and attempt.epoch == task.key.epoch
                require(agreed, 10, f"process {task.key} is left on {node.id}")
            for member in node.logic.members():
                known = world.attempts.get(member.key.job_id)
                agreed = known is not None and (known.epoch, known.generation) == (
                    member.key.epoch,
                    member.key.generation,
                )
                require(agreed, 17, f"{node.id} has member {member.key} ({member.phase}), which the head does not know")
            require(
                world.nodes[node.id].supervisor_id == node.supervisor_id,
                17,
                f"the head has another supervisor for {node.id}",
            )
        require(
            not world.attempts or any(node.tasks for node in self._cluster.nodes.values()),
            17,
            "the head has attempts without processes",
        )
        self._whole(world)


def array_of(job: Job) -> JobId:
    """Return the job's array, or the job itself."""
    return job.id if job.array is None else job.array.array_id


def _check_mig_mode(node: Node | None, grant: NodeGrant) -> None:
    """Check that slices lie on devices with MIG mode on, and nothing else does."""
    slices = () if grant.share is None else grant.share.slices
    divided = {} if node is None else {device.index: device.divided for device in node.devices}
    for index in grant.devices:
        what = "a slice" if slices else "a whole device or a share"
        agrees = divided.get(index, bool(slices)) == bool(slices)
        require(agrees, 1, f"{what} is granted of {grant.node_id}:{index}, whose MIG mode is {divided.get(index)}")


def _check_grants(name: str, role: Role, grants: Sequence[NodeGrant]) -> None:
    """Check that the grants of a role are what it requested."""
    choices = role.gpus.choices
    for grant in grants:
        require(
            grant.extras == role.extras and grant.cpus >= role.cpus,
            5,
            f"{name} requested {role.extras} and {role.cpus} CPUs of each node and has {grant.host} of {grant.node_id}",
        )
    got = sum(grant.visible_devices for grant in grants)
    shares = any(grant.share is not None for grant in grants)
    # One of the alternatives must hold: the one with this number of devices, else the first, which is then reported.
    asked = next((one for one in choices if one.total == got and (one.share is not None) == shares), choices[0])
    if asked.share is not None:
        given = [grant.share.milli if grant.share else 0 for grant in grants]
        # Of MIG, a part is the smallest profile that holds it.
        wanted = [each if asked.is_mig else asked.share.milli or each for each in given]
        require(
            len(given) == asked.nodes and given == wanted and all(given), 5, f"{name} requested {asked} and has {given}"
        )
    elif asked.nodes_max is None:
        require(got == asked.total, 5, f"{name} requested {asked.total} GPUs and has {got}")
    else:
        nodes, least, each = len(grants), asked.nodes or 1, asked.per_node or 0
        whole = least <= nodes <= asked.nodes_max and got == nodes * each
        require(whole, 5, f"{name} requested {asked} and has {got} GPUs on {nodes} nodes")
