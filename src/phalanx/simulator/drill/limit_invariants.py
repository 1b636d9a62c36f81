"""Invariants 6 and 13 of DESIGN 3: limits of queues and users, number of preemptions, and guaranteed run times. Called by `invariants`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from phalanx.controller.controller import SCHEDULER
from phalanx.controller.step_result import StepResult
from phalanx.core.fleet.capacity import fleet_resources
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, QueueId
from phalanx.core.resources import Resources, extras_of
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.extras import Licence, seats_of
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.simulator.drill.head import DrillHead
from phalanx.simulator.drill.protocols import ObservedCluster
from phalanx.simulator.drill.violations import InvariantBroken

RECLAIM_TEXT = "reclaims the GPUs it had lent"  # what `core.scheduling.explanations` sends the borrower; a loan may be called in at any time


_Holder = tuple[JobId, Epoch, bool]  # a live attempt, and whether it sleeps without its devices


class LimitChecker:
    """Checks limits. Usage above a limit that was lowered is allowed, but may only decrease."""

    def __init__(self, cluster: ObservedCluster) -> None:
        self._cluster, self._knobs = cluster, cluster.policy.parameters
        self._stops: dict[
            JobId, set[Epoch | None]
        ] = {}  # attempts preempted; a head that died may have to stop one again
        self._placed: dict[tuple[JobId, Epoch | None], tuple[int, float]] = {}  # head incarnation and time
        self._limits: object = None
        self._over: dict[str, int] = {}
        self._holders: set[_Holder] | None = None

    def check(self, world: World, outbox: StepResult, head: DrillHead) -> None:
        """Check a commit; sum up the usage only if allocations or limits have changed."""
        holders = {_holder(one) for one in world.attempts.values()}
        limited = any(isinstance(record, (Queue, Node, Licence)) for record in outbox.change.records)
        if holders != self._holders or limited or outbox.change.removed:
            before, self._holders = self._holders or set(), holders
            self._sum(world, before)
        for line in outbox.change.history:
            if line.job_id is None:
                continue
            if line.kind == "placed":
                self._placed[line.job_id, line.epoch] = head.incarnation, self._cluster.boot_s
            elif line.kind == "stopping" and line.by == SCHEDULER:
                self._stopped(line.job_id, line.epoch, line.text, head)

    def _sum(self, world: World, before: set[_Holder]) -> None:
        """Check the sums. `before`: earlier allocations; after a change of limits only these may exceed them."""
        over, limits = over_limit(world, world.attempts.values()), (tuple(world.queues.values()), fleet_capacity(world))
        counted, known = usage_tree(world, world.attempts.values()), world.holdings()
        for own, other in zip((known.gpus, *known.others), (counted.gpus, *counted.others), strict=True):
            if own.used != other.used:
                raise InvariantBroken(6, f"the usage of {own.resource} in the queue tree is wrong")
        seats = extras_of(pair for one in world.attempts.values() for pair in one.allocation.licences)
        if extras_of(world.licence_usage.items()) != seats:
            raise InvariantBroken(6, f"licences in use are {dict(seats)}, but the head counts {world.licence_usage}")
        allowed = self._over
        if limits != self._limits:
            stayed = [one for one in world.attempts.values() if _holder(one) in before]
            allowed = over_limit(world, stayed)
        for what, by in over.items():
            if by > allowed.get(what, 0):
                raise InvariantBroken(6, f"{what} by {by}")
        self._over, self._limits = over, limits

    def _stopped(self, job_id: JobId, epoch: Epoch | None, text: str, head: DrillHead) -> None:
        if text.startswith("preempted: ") and RECLAIM_TEXT not in text:
            stopped = self._stops.setdefault(job_id, set())
            stopped.add(epoch)
            stops = len(stopped)
            if stops > self._knobs.stops_max:
                raise InvariantBroken(13, f"job {job_id} was preempted {stops} times: {text}")
        number, placed_s = self._placed[job_id, epoch]
        if number == head.incarnation:  # another head uses the wall clock, which may have been set
            knobs = self._knobs
            known = (knobs.run_min_by_right_s, knobs.move_min_s, knobs.run_min_s)
            least_s = min(seconds for seconds in known if seconds is not None)
            age_s = self._cluster.boot_s - placed_s
            if age_s < least_s - 1e-6:
                raise InvariantBroken(
                    13, f"job {job_id} was stopped after {age_s:.3f} s of its guaranteed {least_s} s: {text}"
                )


def _holder(attempt: Attempt) -> _Holder:
    return attempt.job_id, attempt.epoch, attempt.gave_devices_back


def usage_tree(world: World, attempts: Iterable[Attempt]) -> QuotaTree:
    """Build the queue tree with the usage of these attempts."""
    tree = QuotaTree(world.queues.values(), fleet_capacity(world))
    for attempt in attempts:
        job = world.jobs[attempt.job_id]
        tree.add_running(tree.job_node(job.queue), job.user, attempt.allocation.resources)
    return tree


def over_limit(world: World, attempts: Collection[Attempt]) -> dict[str, int]:
    """Return amounts (thousandths of GPUs, jobs, seats) above each limit, counted independently from these live attempts."""
    held = [(world.jobs[attempt.job_id], attempt.allocation.milli) for attempt in attempts]
    over: dict[str, int] = {}
    tree = usage_tree(world, attempts)
    for one in (tree.gpus, *tree.others):
        for node, used in enumerate(one.used):
            what = f"quota tree: {tree.ids[node] or 'the fleet'}, node {node}, exceeds its limit of {one.resource}"
            over[what] = used - one.limit[node]
        over |= _over_limits_of(one.resource, world, attempts)
    for licence in world.licences.values():
        used = sum(one.allocation.resources.amount_of(licence.id) for one in attempts)
        over[f"more seats of licence {licence.id} are in use than exist,"] = used - licence.total
    for queue in world.queues.values():
        inside = [(job, gpus) for job, gpus in held if queue.id in ancestors(world.queues, job.queue)]
        for user in {job.user for job, _ in inside}:
            mine = [gpus for job, gpus in inside if job.user == user]
            if queue.jobs_per_user is not None:
                over[f"{user} exceeds the jobs per user of {queue.id}"] = len(mine) - queue.jobs_per_user
    return {what: by for what, by in over.items() if by > 0}


def _over_limits_of(resource: str, world: World, attempts: Iterable[Attempt]) -> dict[str, int]:
    """Check again without the tree: usage is at most the right plus the borrow limit, and each user's at most the limit per user."""
    over: dict[str, int] = {}
    held = [(world.jobs[one.job_id], one.allocation.resources.amount_of(resource)) for one in attempts]
    for queue in world.queues.values():
        terms = queue.terms_of(resource)
        inside = [(job, amount) for job, amount in held if queue.id in ancestors(world.queues, job.queue)]
        if terms.borrow is not None:
            most = own_right(world.queues, queue, resource) + terms.borrow
            over[f"{queue.id} uses more {resource} than its right and borrow limit"] = (
                sum(each for _, each in inside) - most
            )
        for user in {job.user for job, _ in inside} if terms.per_user is not None else ():
            mine = sum(amount for job, amount in inside if job.user == user)
            over[f"{user} exceeds the {resource} per user of {queue.id}"] = mine - (terms.per_user or 0)
    return over


def fleet_capacity(world: World) -> Resources:
    """Return what all nodes in any state have, and the seats of all licences."""
    return fleet_resources(world.nodes, seats_of(world.licences))


def ancestors(queues: dict[QueueId, Queue], queue_id: QueueId) -> set[QueueId]:
    """Return the queue and its ancestors."""
    found: set[QueueId] = set()
    at: QueueId | None = queue_id
    while at is not None and at not in found:
        found.add(at)
        at = queues[at].parent
    return found


def own_right(queues: dict[QueueId, Queue], queue: Queue, resource: str) -> int:
    """Return the queue's own right: its quota, or the sum of its children's rights if larger."""
    below = sum(own_right(queues, one, resource) for one in queues.values() if one.parent == queue.id)
    return max(below, queue.terms_of(resource).quota or 0)
