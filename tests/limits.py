"""Invariants 6 and 13 of DESIGN 3: what queues and users hold, and how often a job was stopped for others. Part of `tests.invariants`."""

from __future__ import annotations

from collections import Counter

from phalanx.controller.outbox import Outbox
from phalanx.core.ids import JobId, QueueId
from phalanx.core.state.world import World
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas import Holdings

TAKEN_BACK = "takes back what was borrowed"  # what `core.scheduling.waits` tells the borrower; a loan may be called in at any time


class Limits:
    """Remembers what was over its limit when the limits themselves changed: that is not undone, but may only get less."""

    def __init__(self, *, stops_max: int) -> None:
        self._stops_max = stops_max
        self._stops: Counter[JobId] = Counter()
        self._limits: object = None
        self._over: dict[str, int] = {}

    def look(self, world: World, outbox: Outbox) -> None:
        """After every event."""
        over, limits = over_limit(world), (tuple(world.queues.values()), fleet_gpus(world))
        if limits == self._limits:
            for what, by in over.items():
                assert by <= self._over.get(what, 0), f"6: {what} by {by}"
        self._over, self._limits = over, limits
        for line in outbox.change.story:
            if line.kind == "stopping" and line.text.startswith("preempted: ") and TAKEN_BACK not in line.text:
                self._stops[line.job_id] += 1
                stops = self._stops[line.job_id]
                assert stops <= self._stops_max, f"13: job {line.job_id} was preempted {stops} times: {line.text}"


def over_limit(world: World) -> dict[str, int]:
    """GPUs or jobs that something holds past its limit, counted anew from the live attempts."""
    held = [(world.jobs[attempt.job_id], attempt.allocation.gpus) for attempt in world.attempts.values()]
    over: dict[str, int] = {}
    tree = Holdings(world.queues.values(), fleet_gpus(world))
    for job, gpus in held:
        tree.take(tree.number(job.queue), job.user, gpus)
    for node, used in enumerate(tree.used):
        over[f"quota tree: {tree.ids[node] or 'the fleet'}, node {node}, holds more than it may"] = (
            used - tree.limit[node]
        )
    assert world.holdings().used == tree.used, "6: the books of the queue tree are wrong"
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
    below = sum(right(queues, one) for one in queues.values() if one.parent == queue.id)
    return max(below, queue.quota_gpus or 0)
