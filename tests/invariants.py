"""The invariants of DESIGN 3, as far as one process can see them: checked by the harness after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.controller.outbox import Outbox
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.lifecycle.facts import NO_PROGRESS_BUDGET, PORT_TRIES
from phalanx.core.state.commands import Prepare, StartTasks
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.work.attempt import Attempt, AttemptState, Cause, MemberState
from phalanx.core.work.dependency import Dependency, DependencyKind, element_id
from phalanx.core.work.job import Job, JobState, Resume
from tests.limits import Limits
from tests.simulated_node import newest_whole

if TYPE_CHECKING:
    from tests.harness import Harness


class Watch:
    """Remembers what must stay true, and looks."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._acknowledged: set[JobId] = set()
        self._ended: dict[JobId, Job] = {}
        self._cancelled: dict[JobId, tuple[Epoch, Generation]] = {}
        self._epochs: dict[JobId, Epoch] = {}
        self._started: dict[tuple[JobId, Epoch, Generation], Resume | None] = {}
        self._last_line = 0
        self._limits = Limits(harness)

    def acknowledged(self, job_id: JobId) -> None:
        self._acknowledged.add(job_id)

    def cancelled(self, job: Job) -> None:
        attempt = self._harness.world.attempts.get(job.id)
        if not job.state.terminal or job.state is JobState.CANCELLED:
            self._cancelled.setdefault(job.id, (job.epoch, attempt.generation if attempt else Generation(0)))

    def committed(self, outbox: Outbox) -> None:
        """After a step's change is durable."""
        for record in outbox.change.records:
            if isinstance(record, Job):
                self._job(record)
            elif isinstance(record, Attempt):
                self._attempt(record)
        for line in outbox.change.story:
            assert line.seq == self._last_line + 1, "19: events have no gaps"
            self._last_line = line.seq
        self._commands(outbox)
        self._devices()
        self._limits.look(self._harness.world, outbox)
        for job_id in self._acknowledged:
            assert self._harness.store.job(job_id) is not None, "3: an acknowledged submit survives"

    def _job(self, job: Job) -> None:
        before = self._ended.get(job.id)
        if before is not None:
            assert (before.state, before.exit_code) == (job.state, job.exit_code), (
                f"8: {job.id} was {before.state} and is {job.state}"
            )
        if job.state.terminal:
            self._ended[job.id] = job
        assert job.stalls <= NO_PROGRESS_BUDGET + 1, f"13: job {job.id} restarted {job.stalls} times without progress"
        assert job.user_retries <= job.spec.retry, "13: user retries"
        for kept in job.checkpoints:
            assert kept.path not in self._harness.deleted, "21: a kept checkpoint was deleted"

    def _attempt(self, attempt: Attempt) -> None:
        assert len(attempt.members) == len(attempt.allocation.grants), "5: a gang holds all or nothing"
        before = self._epochs.get(attempt.job_id, Epoch(0))
        assert attempt.epoch >= before, "4: epochs go up"
        if attempt.epoch > before:
            assert attempt.epoch == before + 1
            self._epochs[attempt.job_id] = attempt.epoch
            for grant in attempt.allocation.grants:
                node = self._harness.world.nodes[grant.node_id]
                assert node.schedulable, f"2: something new on {grant.node_id}, which is {node.state} {node.cordon}"
                self._set_aside(attempt, grant.node_id)
            self._may_start(self._harness.job(attempt.job_id))
        if attempt.job_id in self._cancelled:
            assert (attempt.epoch, attempt.generation) <= self._cancelled[attempt.job_id], "12: runs after a cancel"
        tail = attempt.causes[-PORT_TRIES - 1 :]
        assert tail != (Cause.PORT_TAKEN,) * (PORT_TRIES + 1) or not attempt.live, "13: ports are tried for ever"

    def _may_start(self, job: Job) -> None:
        assert not job.unmet, f"7: job {job.id} starts before {job.unmet}"
        assert not job.held, f"job {job.id} starts while it is held"
        for condition in job.spec.dependencies:
            assert self._holds(condition, job), f"7: job {job.id} starts, and {condition} does not hold"

    def _holds(self, condition: Dependency, job: Job) -> bool:
        """Worked out anew from the jobs' states; the lifecycle strikes conditions out as jobs end."""
        world = self._harness.world
        if condition.kind is DependencyKind.SINGLETON:
            likes = [one for one in world.jobs.values() if (one.user, one.spec.name) == (job.user, job.spec.name)]
            return all(one.state.terminal or array_of(one) == array_of(job) for one in likes if one.seq < job.seq)
        names = [one.id for one in world.jobs.values() if array_of(one) == condition.job_id]
        if condition.kind is DependencyKind.AFTER_CORR and job.array is not None and names:
            names = [element_id(condition.job_id, job.array.index)]
        known = [self._harness.store.job(name) for name in names or [condition.job_id]]
        states = [
            one.state for one in known if one is not None
        ]  # of a job before the store's time the request alone knows
        if condition.kind in (DependencyKind.AFTER_OK, DependencyKind.AFTER_CORR):
            return all(state is JobState.SUCCEEDED for state in states)
        if condition.kind is DependencyKind.AFTER_NOT_OK and all(state is JobState.SUCCEEDED for state in states):
            return False
        return all(state.terminal for state in states)

    def _set_aside(self, attempt: Attempt, node_id: NodeId) -> None:
        job = self._harness.world.jobs[attempt.job_id]
        for one in self._harness.world.reservations.values():
            shut = node_id in one.nodes and one.holds(self._harness.now.wall_s) and not one.admits(job.user, job.queue)
            assert not shut, f"2: job {job.id} came to {node_id}, which is set aside for {one.holders} ({one.id})"

    def _commands(self, outbox: Outbox) -> None:
        world = self._harness.world
        for command in outbox.commands:
            if not isinstance(command, (Prepare, StartTasks)):
                continue
            attempt, job = world.attempts.get(command.job_id), world.jobs[command.job_id]
            # Within one step an attempt may be asked to prepare, and then be over: its node died. Never the other way round.
            assert command.epoch <= job.epoch
            if attempt is not None and attempt.epoch == command.epoch:
                assert command.generation <= attempt.generation
            if isinstance(command, StartTasks):
                place = (job.id, command.epoch, command.generation)
                if place not in self._started:
                    best = newest_whole(job.checkpoints, self._harness.corrupt)
                    assert command.resume == best, f"9: job {job.id} does not resume from its newest valid checkpoint"
                # Said again later, it names what it named at first, whatever was published since.
                assert self._started.setdefault(place, command.resume) == command.resume

    def _devices(self) -> None:
        world = self._harness.world
        held: dict[NodeId, set[int]] = {}
        cpus: dict[NodeId, int] = {}
        for attempt in world.attempts.values():
            assert attempt.live
            assert world.jobs[attempt.job_id].epoch == attempt.epoch, "4: one live attempt, of the newest epoch"
            assert world.jobs[attempt.job_id].state is JobState.RUNNING
            for grant in attempt.allocation.grants:
                taken = held.setdefault(grant.node_id, set())
                assert not taken & set(grant.devices), f"1: devices of {grant.node_id} twice"
                taken.update(grant.devices)
                cpus[grant.node_id] = cpus.get(grant.node_id, 0) + grant.cpus
                assert world.on_node[grant.node_id][attempt.job_id] == attempt
            if attempt.state is AttemptState.RUNNING:
                assert all(m.state in (MemberState.STARTED, MemberState.STOPPED) for m in attempt.members)
        for node_id in {*held, *world.usage}:
            usage = world.usage.get(node_id, EMPTY_USAGE)
            assert usage.devices == held.get(node_id, set()), f"1: {node_id} holds {usage.devices}"
            assert usage.cpus == cpus.get(node_id, 0)
        for condition in world.relations.dependents:
            parent = world.jobs.get(condition.job_id)
            alive = condition.job_id in world.relations.elements or (parent is not None and not parent.state.terminal)
            assert alive, f"7: {condition} is waited for, and can change no more"
        for job in world.jobs.values():
            assert (job.id in world.pending) == (job.state is JobState.PENDING)
            assert not job.unmet or job.state in (JobState.PENDING, JobState.CANCELLED), (
                f"7: job {job.id} runs before {job.unmet}"
            )
            if job.state is JobState.RUNNING:
                if job.array is not None and job.array.running_max is not None:
                    place = job.array
                    running = sum(
                        world.jobs[one].state is JobState.RUNNING for one in world.relations.elements[place.array_id]
                    )
                    assert running <= (place.running_max or 0), f"{running} elements of array {place.array_id} run"
                assert job.id in world.attempts, f"job {job.id} runs without an attempt"

    def truth(self) -> None:
        """What really executes, whatever anybody believes: never two epochs of a job, never two jobs on a device."""
        epochs: dict[JobId, set[tuple[Epoch, Generation]]] = {}
        for node in self._harness.nodes.values():
            on_device: dict[int, JobId] = {}
            for task in node.working():
                epochs.setdefault(task.key.job_id, set()).add((task.key.epoch, task.key.generation))
                for device in task.devices:
                    other = on_device.setdefault(device, task.key.job_id)
                    assert other == task.key.job_id, f"1: jobs {other} and {task.key.job_id} on {node.id}:{device}"
        for job_id, places in epochs.items():
            assert len(places) == 1, (
                f"4: job {job_id} executes as {sorted(places)} at once\n{self._harness.told(job_id)}"
            )

    def settled(self) -> None:
        """17, 10: after heal and quiet, head and nodes agree, and nothing of an ended attempt is left."""
        world = self._harness.world
        for node in self._harness.nodes.values():
            for task in node.tasks.values():
                attempt = world.attempts.get(task.key.job_id)
                assert attempt is not None, f"10: {task.key} lives on {node.id}"
                assert attempt.epoch == task.key.epoch, f"10: {task.key} lives on {node.id}"
        assert not world.attempts or any(node.tasks for node in self._harness.nodes.values())


def array_of(job: Job) -> JobId:
    """The array it is an element of, else itself."""
    return job.id if job.array is None else job.array.array_id
