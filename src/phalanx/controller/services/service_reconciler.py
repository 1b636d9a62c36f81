"""Keeps services at their wanted number of replicas: applies the pure step of `core.lifecycle.service` to those that may need it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.requests import submits
from phalanx.controller.requests.services import add_service_history
from phalanx.controller.services.canary_judge import CANARY, EXAMINE_S, CanaryJudge
from phalanx.controller.step_context import StepContext
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, ServiceId, UserId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.events import DevicesRegained, SleepRequested, WakeDelayed, WakeRequested
from phalanx.core.lifecycle.service import Replica, ReplicaCondition, reconcile
from phalanx.core.lifecycle.transitions import AVOID_MAX
from phalanx.core.lifecycle.verify import wake_rejection
from phalanx.core.state.events import SubmitJob
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.records import REVISIONS, SERVICES, Record
from phalanx.core.state.reports import LoadObserved
from phalanx.core.state.world import World
from phalanx.core.work.attempt import FIRST_GENERATION, Attempt, SleepPhase
from phalanx.core.work.job import Job
from phalanx.core.work.services.service import Revision, Service
from phalanx.core.work.services.service_terms import ReplicaPosition

RECONCILER: Final = UserId("services")  # `by` of cancels that a service decides
_FAILED_NODES: Final = 2  # newest nodes that failed a replica, which it avoids besides
WAKE_EVERY_S: Final = 5.0  # between two tries without any event: a reservation or a budget may have ended
_Condition = tuple[Epoch, Generation, ReplicaCondition]


@dataclass(slots=True)
class ServiceReconciler:
    """See the module. In memory only: a starting head examines every service, and counts all waits from then.

    Attributes:
        canaries: decides about rollouts that go by shares of the sessions.
        _touched: services to examine in the next step.
        _due_s: when each service is to be examined again without a change (CLOCK_BOOTTIME).
        _since_s: the condition of each replica, and since when it has it (CLOCK_BOOTTIME).
        _wakers: replicas that waited to wake when their service was last examined; each step tries their devices.
    """

    world: World
    canaries: CanaryJudge = field(init=False)
    _touched: set[ServiceId] = field(default_factory=set)
    _due_s: dict[ServiceId, float] = field(default_factory=dict)
    _since_s: dict[JobId, tuple[_Condition, float]] = field(default_factory=dict)
    _wakers: set[JobId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.canaries = CanaryJudge(self.world)

    def observe(self, report: LoadObserved, boot_s: float) -> None:
        """Take over the report of a gateway, as far as it compares revisions."""
        self._touched.update(self.canaries.observe(report, boot_s))

    def touch_all(self) -> None:
        """Examine every service in the next step: the head starts, or a step was undone."""
        self._touched.update(self.world.table(SERVICES))

    def record(self, records: Iterable[Record]) -> None:
        """Examine the services that these records change in the next step."""
        if not self.world.table(SERVICES):
            return
        for record in records:
            if isinstance(record, Service):
                self._touched.add(record.id)
            elif isinstance(record, (Job, Attempt)):
                job = record if isinstance(record, Job) else self.world.jobs.get(record.job_id)
                if job is not None and job.replica is not None:
                    self._touched.add(job.replica.service)

    def update(self, context: StepContext) -> None:
        """Reconcile the services that this step or the previous one changed, and those that are due."""
        self.record(context.change.records)
        now_s = context.now.boot_s
        due = {service_id for service_id, due_s in self._due_s.items() if due_s <= now_s}
        examined, self._touched = sorted(self._touched | due), set()
        for service_id in examined:
            self._reconcile(context, service_id)
        for job_id in sorted(self._wakers):
            self._wake(context, job_id)

    def due_in_s(self, boot_s: float) -> float:
        """Time until a service is to be examined without a change; infinite for none."""
        if self._touched:
            return 0.0
        due_s = min(self._due_s.values(), default=math.inf) - boot_s
        return min(due_s, WAKE_EVERY_S) if self._wakers else due_s

    def _wake(self, context: StepContext, job_id: JobId) -> None:
        """Grant a replica its devices again if they are free. Before the scheduler's cycle, so that it goes before jobs that wait."""
        attempt = self.world.attempts.get(job_id)
        sleep = None if attempt is None else attempt.sleep
        if attempt is None or sleep is None or sleep.phase is not SleepPhase.WAITING:
            self._wakers.discard(job_id)
            return
        why = wake_rejection(self.world, attempt)
        if why == sleep.why != "":
            return
        context.apply_event(job_id, WakeDelayed(why=why) if why else DevicesRegained())
        replica = self.world.jobs[job_id].replica
        assert replica is not None  # no other job sleeps
        self._touched.add(replica.service)

    def _reconcile(self, context: StepContext, service_id: ServiceId) -> None:
        self._due_s.pop(service_id, None)
        service = self.world.table(SERVICES).get(service_id)
        if service is None:
            return
        table, replicas = self.world.table(REVISIONS), self._replicas(service_id, context.now.boot_s)
        revisions = {
            number: found
            for number in (service.revision, service.served_revision)
            if (found := table.get((service_id, number))) is not None
        }
        now = context.now
        judged, line = self.canaries.advance(service, revisions[service.revision], replicas, now.boot_s, now.wall_s)
        if line:
            add_service_history(context, judged, line, by=CANARY)
        step = reconcile(judged, revisions, replicas, now.wall_s)
        if step.service is not service:
            context.change.put(step.service)
        for text in step.news:
            add_service_history(context, step.service, text)
        for job_id, why in step.stop:
            context.apply(jobs.cancel(context.case(job_id), RECONCILER, why, context.facts))
        for job_id in step.sleep:
            context.apply_event(job_id, SleepRequested())
        for job_id in step.wake:
            context.apply_event(job_id, WakeRequested())
            self._wakers.add(job_id)
        if step.sleep or step.wake:
            self._touched.add(service_id)  # what they wait for counts from now
        stopped = {job_id for job_id, _ in step.stop}
        # Those just stopped are left out from here on: writing their records from before would undo the stop.
        remaining = [one for one in replicas if one.job.id not in stopped]
        self._spread(context, remaining)
        if step.start or step.start_stable:
            # One in each step: the scheduler places it in this one, and the next avoids its node. It may also wait for devices.
            number = step.service.served_revision if step.start_stable else step.service.revision
            self._start(context, step.service, revisions[number], remaining)
            self._touched.add(service_id)
        due_in_s = step.due_in_s if step.service.canary is None else min(EXAMINE_S, step.due_in_s)
        if due_in_s < math.inf:
            self._due_s[service_id] = now.boot_s + due_in_s

    def _replicas(self, service_id: ServiceId, boot_s: float) -> list[Replica]:
        """The replicas that have not been stopped, in submit order."""
        found = []
        for job_id in self.world.relations.replicas.get(service_id, ()):
            job = self.world.jobs[job_id]
            if job.cancelled_by:
                self._since_s.pop(job_id, None)
                continue
            replica = Replica(job=job, attempt=self.world.attempts.get(job_id))
            generation = FIRST_GENERATION if replica.attempt is None else replica.attempt.generation
            condition = (job.epoch, generation, replica.condition)
            known = self._since_s.get(job_id)
            if known is None or known[0] != condition:
                known = self._since_s[job_id] = (condition, boot_s)
            if replica.condition is ReplicaCondition.WAITING:
                self._wakers.add(job_id)
            found.append(replace(replica, since_s=boot_s - known[1]))
        return sorted(found, key=lambda one: one.job.seq)

    def _start(self, context: StepContext, service: Service, revision: Revision, replicas: Sequence[Replica]) -> None:
        request = SubmitJob(spec=revision.spec, user=service.user, project=service.project, queue=service.queue)
        job = submits.put_replica(context, request, ReplicaPosition(service=service.id, revision=revision.number))
        self._spread(context, [*replicas, Replica(job=job, attempt=None)])

    def _spread(self, context: StepContext, replicas: Sequence[Replica]) -> None:
        """Let the replicas that wait avoid the nodes of the others, so that one node's death leaves some of them ready.

        A preference: they share a node if nothing else fits.
        """
        waiting = [one for one in replicas if one.attempt is None]
        if len(waiting) == len(replicas):
            return
        usable = sum(node.schedulable for node in self.world.nodes.values())
        for one in waiting:
            place = one.job.replica
            assert place is not None
            failed = [node for node in one.job.avoided_nodes if node not in place.crowded][-_FAILED_NODES:]
            crowded = tuple(_crowded_nodes(one.revision, replicas, usable))
            avoided = tuple(dict.fromkeys((*crowded, *failed)))
            if avoided != one.job.avoided_nodes or crowded != place.crowded:
                context.change.put(replace(one.job, avoided_nodes=avoided, replica=replace(place, crowded=crowded)))


def _crowded_nodes(revision: int, replicas: Sequence[Replica], usable: int) -> list[NodeId]:
    """The nodes with replicas, fullest last; those with the fewest are left out if no usable node is without any.

    Replicas of another revision count half: a rollout stops them.
    """
    loads = Counter[NodeId]()
    for one in replicas:
        for grant in () if one.attempt is None else one.attempt.allocation.grants:
            loads[grant.node_id] += 2 if one.revision == revision else 1
    least = 0 if len(loads) < usable else min(loads.values())
    crowded = sorted((node for node in loads if loads[node] > least), key=lambda node: (loads[node], node))
    return crowded[-(AVOID_MAX - _FAILED_NODES) :]
