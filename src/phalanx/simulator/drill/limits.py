"""Invariants 6 and 13 of DESIGN 3: what queues and users hold, how often and how soon a job is stopped for others. Part of `invariants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from phalanx.controller.controller import SCHEDULER
from phalanx.controller.outbox import Outbox
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, QueueId
from phalanx.core.state.world import World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas import Holdings
from phalanx.simulator.drill.head import Head
from phalanx.simulator.drill.stage import Watched
from phalanx.simulator.drill.violation import Broken

TAKEN_BACK = "reclaims the GPUs it had lent"  # what `core.scheduling.explanations` sends the borrower; a loan may be called in at any time


class Limits:
    """Remembers what was over its limit when the limits themselves changed: that is not undone, but may only get less."""

    def __init__(self, cluster: Watched) -> None:
        self._cluster, self._knobs = cluster, cluster.policy.knobs
        self._stops: Counter[JobId] = Counter()
        self._placed: dict[tuple[JobId, Epoch | None], tuple[int, float]] = {}  # by which life of the head, and when
        self._limits: object = None
        self._over: dict[str, int] = {}
        self._holders: set[tuple[JobId, Epoch]] | None = None

    def look(self, world: World, outbox: Outbox, head: Head) -> None:
        """After every commit; who holds what is summed anew only when that, or a limit, has changed."""
        holders = {(one.job_id, one.epoch) for one in world.attempts.values()}
        limited = any(isinstance(record, (Queue, Node)) for record in outbox.change.records)
        if holders != self._holders or limited or outbox.change.removed or outbox.change.removed_queues:
            before, self._holders = self._holders or set(), holders
            self._sum(world, before)
        for line in outbox.change.story:
            if line.job_id is None:
                continue
            if line.kind == "placed":
                self._placed[line.job_id, line.epoch] = head.number, self._cluster.boot_s
            elif line.kind == "stopping" and line.by == SCHEDULER:
                self._stopped(line.job_id, line.epoch, line.text, head)

    def _sum(self, world: World, before: set[tuple[JobId, Epoch]]) -> None:
        """`before`: who held something then. By other limits those alone may be over, and not who came in the same commit."""
        over, limits = over_limit(world, world.attempts.values()), (tuple(world.queues.values()), fleet_gpus(world))
        if world.holdings().used != tree_of(world, world.attempts.values()).used:
            raise Broken(6, "the books of the queue tree are wrong")
        allowed = self._over
        if limits != self._limits:
            stayed = [one for one in world.attempts.values() if (one.job_id, one.epoch) in before]
            allowed = over_limit(world, stayed)
        for what, by in over.items():
            if by > allowed.get(what, 0):
                raise Broken(6, f"{what} by {by}")
        self._over, self._limits = over, limits

    def _stopped(self, job_id: JobId, epoch: Epoch | None, text: str, head: Head) -> None:
        if text.startswith("preempted: ") and TAKEN_BACK not in text:
            self._stops[job_id] += 1
            stops = self._stops[job_id]
            if stops > self._knobs.stops_max:
                raise Broken(13, f"job {job_id} was preempted {stops} times: {text}")
        number, placed_s = self._placed[job_id, epoch]
        if number == head.number:  # another head reckons by the clock on the wall, which may have been set
            least_s = min(self._knobs.right_min_s, self._knobs.move_min_s, self._knobs.run_min_s)
            age_s = self._cluster.boot_s - placed_s
            if age_s < least_s - 1e-6:
                raise Broken(13, f"job {job_id} ran {age_s:.3f} s of the {least_s} s it is guaranteed: {text}")


def tree_of(world: World, attempts: Iterable[Attempt]) -> Holdings:
    """The queue tree with what these hold."""
    tree = Holdings(world.queues.values(), fleet_gpus(world))
    for attempt in attempts:
        job = world.jobs[attempt.job_id]
        tree.take(tree.number(job.queue), job.user, attempt.allocation.gpus)
    return tree


def over_limit(world: World, attempts: Collection[Attempt]) -> dict[str, int]:
    """GPUs or jobs that something holds past its limit, counted anew from these live attempts."""
    held = [(world.jobs[attempt.job_id], attempt.allocation.gpus) for attempt in attempts]
    over: dict[str, int] = {}
    tree = tree_of(world, attempts)
    for node, used in enumerate(tree.used):
        over[f"quota tree: {tree.ids[node] or 'the fleet'}, node {node}, holds more than it may"] = (
            used - tree.limit[node]
        )
    for queue in world.queues.values():
        inside = [(job, gpus) for job, gpus in held if queue.id in above(world.queues, job.queue)]
        # Once more without the tree: nobody holds more than its right and what it may borrow.
        if queue.borrow_gpus is not None:
            most = right(world.queues, queue) + queue.borrow_gpus
            over[f"{queue.id} holds more than its right and what it may borrow"] = (
                sum(gpus for _, gpus in inside) - most
            )
        for user in {job.user for job, _ in inside}:
            mine = [gpus for job, gpus in inside if job.user == user]
            if queue.gpus_per_user is not None:
                over[f"{user} holds more GPUs of {queue.id} than one may"] = sum(mine) - queue.gpus_per_user
            if queue.jobs_per_user is not None:
                over[f"{user} runs more jobs in {queue.id} than one may"] = len(mine) - queue.jobs_per_user
    return {what: by for what, by in over.items() if by > 0}


def fleet_gpus(world: World) -> int:
    """All devices, whatever the state of their nodes."""
    return sum(len(node.devices) for node in world.nodes.values())


def above(queues: dict[QueueId, Queue], queue_id: QueueId) -> set[QueueId]:
    """The queue and all above it."""
    found: set[QueueId] = set()
    at: QueueId | None = queue_id
    while at is not None and at not in found:
        found.add(at)
        at = queues[at].parent
    return found


def right(queues: dict[QueueId, Queue], queue: Queue) -> int:
    """What it may hold of its own: its quota, or the sum of those below it where that is more."""
    below = sum(right(queues, one) for one in queues.values() if one.parent == queue.id)
    return max(below, queue.quota_gpus or 0)
