"""Bugs of placement: where, whether, and how much."""

from dataclasses import replace

from phalanx.controller import controller
from phalanx.controller.controller import Controller
from phalanx.core.lifecycle import verify
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.resources import Resources
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.node_bitsets import CapacityIndex
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.sharing.shared_devices import SharedDeviceIndex
from phalanx.core.state import world
from phalanx.core.state.events import PutQueues
from phalanx.core.state.snapshot import Usage
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.queue import Queue, add_usage
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.core.work.states import WaitReasonCode
from tests.simulation.planted.bug import planted


@planted(2, seed=1)
def cordoned_node_gets_jobs(patch):
    """The board ignores nodes that left or were drained, and the final check of a placement ignores it too."""

    def lax(world, placement):
        why = rejection_reason(world, placement)
        return "" if why.endswith("accepts no new jobs") else why

    patch.setattr(controller, "rejection_reason", lax)
    patch.setattr(Board, "remove_node", lambda self, node: None)
    patch.setattr(Board, "restore_node", lambda self, node: None)


@planted(5, seed=0)
def gang_is_placed_with_a_node_missing(patch):
    """The last node of a gang is missing from its allocation."""

    def short(job, allocation, facts, *speed):
        if len(allocation.grants) > 1:
            allocation = replace(allocation, grants=allocation.grants[:-1])
        return place(job, allocation, facts, *speed)

    patch.setattr(controller, "place", short)


@planted(5, seed=7)
def elastic_gang_exceeds_its_maximum(patch):
    """An elastic job gets one node more than requested if there is room."""
    needs = FleetIndex.needs
    patch.setattr(
        FleetIndex,
        "needs",
        lambda self, *asked: tuple(
            replace(need, nodes_max=need.nodes_max + 1) if need.nodes_max else need for need in needs(self, *asked)
        ),
    )


@planted(6, seed=0)
def borrowed_gpus_are_not_counted(patch):
    """A queue may use any number of GPUs: only the limits of users are checked."""
    admits = QuotaTree.check_admission

    def lax(self, queue, user, gpus):
        refusal = admits(self, queue, user, gpus)
        return refusal if refusal is not None and refusal.reason is WaitReasonCode.USER_LIMIT else None

    patch.setattr(QuotaTree, "check_admission", lax)


@planted(6, seed=2, events=2000)
def quotas_are_ignored_while_they_change(patch):
    """The step that receives new quotas applies none."""
    step, admits = Controller.step, QuotaTree.check_admission
    changing: list[PutQueues] = []

    def hear(self, now, inbox):
        changing[:] = [event for event in inbox if isinstance(event, PutQueues)]
        try:
            return step(self, now, inbox)
        finally:
            changing.clear()

    patch.setattr(Controller, "step", hear)
    patch.setattr(QuotaTree, "check_admission", lambda *args: None if changing else admits(*args))


@planted(6, seed=0, resources=True)
def quotas_of_cpus_are_ignored(patch):
    """A queue may use any number of CPUs: only quotas of GPUs and limits of users are checked."""
    admits = QuotaTree.check_admission

    def lax(self, queue, user, asked):
        refusal = admits(self, queue, user, asked)
        other = refusal is not None and refusal.resource == "cpus" and refusal.reason is WaitReasonCode.QUOTA
        return admits(self, queue, user, replace(asked, cpus=0)) if other else refusal

    patch.setattr(QuotaTree, "check_admission", lax)


@planted(1, seed=0, resources=True)
def extras_of_a_node_are_given_twice(patch):
    """Neither the board nor the final check of a placement counts what a node offers."""
    patch.setattr(NodeGrant, "host", property(lambda self: Resources(0, self.cpus, self.memory_bytes)))
    patch.setattr(
        CapacityIndex,
        "_has",
        lambda self, node, cpus, memory, extras: self.cpus[node] >= cpus and self.memory[node] >= memory,
    )


@planted(6, seed=1)
def array_elements_are_not_counted(patch):
    """More elements of an array run at once than its limit allows."""
    patch.setattr(verify, "_array_full", lambda world, job: False)
    may_run = Board.job_class
    patch.setattr(Board, "job_class", lambda *args, **kwargs: may_run(*args, **{**kwargs, "throttle": None}))


@planted(14, seed=1)
def job_in_backoff_is_never_retried(patch):
    """A job that waits after a failed start is not considered again."""
    patch.setattr(Scheduler, "_release_parked", lambda self, seen, now_s: None)


@planted(14, seed=20)
def impossible_job_is_never_judged_again(patch):
    """A waiting job that its queue could not admit stays impossible when the quotas change."""
    put_queue = world._INDEXED[Queue]

    def unnoticed(self, queue):
        version = self.world.capacity_version
        put_queue(self, queue)
        self.world.capacity_version = version

    patch.setitem(world._INDEXED, Queue, unnoticed)


@planted(13, seed=2)
def guaranteed_run_time_is_ignored(patch):
    """A job may be preempted right after its placement."""
    place_due = Scheduler._place_due

    def unshielded(self, seen, now_s):
        placements = place_due(self, seen, now_s)
        for placement in placements:
            self.entries[placement.job_id].protected_until_s = 0.0
            self.entries[placement.job_id].placed_s = 0.0
        return placements

    patch.setattr(Scheduler, "_place_due", unshielded)


@planted(1, seed=0)
def share_is_not_freed(patch):
    """A job with a part of a device ends, and the part stays in use."""
    minus = Usage.minus
    patch.setattr(Usage, "minus", lambda self, grant: self if grant.share is not None else minus(self, grant))


@planted(1, seed=0)
def device_is_shared_beyond_its_capacity(patch):
    """A share may go to a device without room for it, and the final check of a placement ignores it too."""
    patch.setattr(
        SharedDeviceIndex,
        "best_device",
        lambda self, node, group, milli: next((one for one in self.on_node.get(node, ()) if one.group == group), None),
    )
    patch.setattr(Usage, "conflict", lambda self, grant: "")


@planted(18, seed=0)
def share_is_billed_as_a_whole_device(patch):
    """The usage of the queues counts whole devices for jobs with a part of one."""
    used = add_usage

    def coarse(queues, usage_records, queue_id, held, from_s, to_s, *speed):
        whole = replace(held, milli=-(-held.milli // 1000) * 1000)
        return used(queues, usage_records, queue_id, whole, from_s, to_s, *speed)

    patch.setattr(world, "add_usage", coarse)


@planted(1, seed=0)
def shared_device_is_granted_as_a_whole_one(patch):
    """Partly used devices count as free for jobs that want a whole one."""
    patch.setattr(FleetIndex, "allocation", _on_shared_devices(FleetIndex.allocation))
    patch.setattr(Usage, "conflict", lambda self, grant: "")


def _on_shared_devices(allocation):
    def lax(self, need, places, role, taken, shared=()):
        if need.share_milli:
            return allocation(self, need, places, role, taken, shared)
        return allocation(self, need, places, role, _WholeOnly(taken))

    return lax


class _WholeOnly:
    def __init__(self, taken):
        self._taken = taken

    def usage_of(self, node_id):
        held = self._taken.usage_of(node_id)
        return replace(held, devices=held.devices - set(held.shares))
