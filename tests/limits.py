"""Invariants 6 and 13 of DESIGN 3: what queues and users hold, how often and how soon a job is stopped for others. Part of `tests.invariants`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from phalanx.controller.controller import SCHEDULER
from phalanx.controller.outbox import Outbox
from phalanx.core.ids import Epoch, JobId, QueueId
from phalanx.core.state.world import World
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas import Holdings

if TYPE_CHECKING:
    from tests.harness import Harness

TAKEN_BACK = "takes back what was borrowed"  # what `core.scheduling.waits` tells the borrower; a loan may be called in at any time


class Limits:
    """Remembers what was over its limit when the limits themselves changed: that is not undone, but may only get less."""

    def __init__(self, harness: Harness) -> None:
        self._harness, self._knobs = harness, harness.policy.knobs
        self._stops: Counter[JobId] = Counter()
        self._placed: dict[tuple[JobId, Epoch | None], tuple[int, float]] = {}  # by which life of the head, and when
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
            if line.job_id is None:
                continue
            if line.kind == "placed":
                self._placed[line.job_id, line.epoch] = self._head(), self._harness.boot_s
            elif line.kind == "stopping" and line.by == SCHEDULER:
                self._stopped(line.job_id, line.epoch, line.text)

    def _stopped(self, job_id: JobId, epoch: Epoch | None, text: str) -> None:
        if text.startswith("preempted: ") and TAKEN_BACK not in text:
            self._stops[job_id] += 1
            stops = self._stops[job_id]
            assert stops <= self._knobs.stops_max, f"13: job {job_id} was preempted {stops} times: {text}"
        head, placed_s = self._placed[job_id, epoch]
        if head == self._head():  # another head reckons by the clock on the wall, which may have been set
            least_s = min(self._knobs.right_min_s, self._knobs.move_min_s, self._knobs.run_min_s)
            age_s = self._harness.boot_s - placed_s
            assert age_s >= least_s - 1e-6, (
                f"job {job_id} ran {age_s:.3f} s of the {least_s} s it is guaranteed: {text}"
            )

    def _head(self) -> int:
        assert self._harness.head is not None
        return self._harness.head.number


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
