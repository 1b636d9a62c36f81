"""Bugs of placement: where, whether, and how much."""

from dataclasses import replace

from phalanx.controller import controller
from phalanx.controller.controller import Controller
from phalanx.core.lifecycle import verify
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.shared_devices import SharedDeviceIndex
from phalanx.core.state import world
from phalanx.core.state.events import PutQueues
from phalanx.core.state.snapshot import Usage
from phalanx.core.work.job import WaitReasonCode
from phalanx.core.work.queue import Queue, add_usage
from phalanx.core.work.quota_tree import QuotaTree
from tests.simulation.planted.bug import planted


@planted(2, seed=0)
def a_cordoned_node_takes_work(patch):
    """The board does not hear of nodes that left or were drained, and the last look at a placement does not ask."""

    def lax(world, placement):
        why = rejection_reason(world, placement)
        return "" if why.endswith("accepts no new jobs") else why

    patch.setattr(controller, "rejection_reason", lax)
    patch.setattr(Board, "remove_node", lambda self, node: None)
    patch.setattr(Board, "restore_node", lambda self, node: None)


@planted(5, seed=0)
def a_gang_is_placed_with_a_member_missing(patch):
    """The last node of a gang is left out of its allocation."""

    def short(job, allocation, facts):
        if len(allocation.grants) > 1:
            allocation = replace(allocation, grants=allocation.grants[:-1])
        return place(job, allocation, facts)

    patch.setattr(controller, "place", short)


@planted(5, seed=2)
def an_elastic_gang_grows_past_what_was_asked(patch):
    """An elastic job gets one node more than its owner wrote, where there is room."""
    needs = FleetIndex.needs
    patch.setattr(
        FleetIndex,
        "needs",
        lambda self, *asked: tuple(
            replace(need, nodes_max=need.nodes_max + 1) if need.nodes_max else need for need in needs(self, *asked)
        ),
    )


@planted(6, seed=0)
def what_was_borrowed_does_not_count(patch):
    """A queue may take what it likes: only the limits of users are asked."""
    admits = QuotaTree.check_admission

    def lax(self, queue, user, gpus):
        refusal = admits(self, queue, user, gpus)
        return refusal if refusal is not None and refusal.reason is WaitReasonCode.USER_LIMIT else None

    patch.setattr(QuotaTree, "check_admission", lax)


@planted(6, seed=0, events=2000)
def quotas_do_not_count_while_they_change(patch):
    """In the step that hears of other quotas nobody is held to any."""
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


@planted(6, seed=1)
def elements_of_an_array_are_not_counted(patch):
    """More elements of an array run at once than its owner asked for."""
    patch.setattr(verify, "_array_full", lambda world, job: False)
    may_run = Board.job_class
    patch.setattr(Board, "job_class", lambda *args, **kwargs: may_run(*args, **{**kwargs, "throttle": None}))


@planted(14, seed=0)
def a_job_that_backs_off_is_forgotten(patch):
    """Nobody looks again at a job that waits a moment after a failed start."""
    patch.setattr(Scheduler, "_release_parked", lambda self, seen, now_s: None)


@planted(14, seed=0)
def an_impossible_job_is_never_judged_again(patch):
    """A waiting job that its queue could not admit stays impossible when the quotas change."""
    put_queue = world._INDEXED[Queue]

    def unnoticed(self, queue):
        version = self.world.capacity_version
        put_queue(self, queue)
        self.world.capacity_version = version

    patch.setitem(world._INDEXED, Queue, unnoticed)


@planted(13, seed=2)
def nobody_has_a_guaranteed_run(patch):
    """A job may be stopped for another the moment it was placed."""
    place_due = Scheduler._place_due

    def unshielded(self, seen, now_s):
        placements = place_due(self, seen, now_s)
        for placement in placements:
            self.entries[placement.job_id].protected_until_s = 0.0
            self.entries[placement.job_id].placed_s = 0.0
        return placements

    patch.setattr(Scheduler, "_place_due", unshielded)


@planted(1, seed=0)
def a_share_is_not_given_back(patch):
    """A job that had a part of a device ends, and the part stays in use."""
    minus = Usage.minus
    patch.setattr(Usage, "minus", lambda self, grant: self if grant.share is not None else minus(self, grant))


@planted(1, seed=0)
def a_device_is_shared_past_what_it_has(patch):
    """Where a share goes, nobody asks what the device has left, nor does the last look at a placement."""
    patch.setattr(
        SharedDeviceIndex,
        "best_device",
        lambda self, node, group, milli: next((one for one in self.on_node.get(node, ()) if one.group == group), None),
    )
    patch.setattr(Usage, "conflict", lambda self, grant: "")


@planted(18, seed=0)
def a_share_is_billed_as_a_whole_device(patch):
    """The books of the queues count devices, whatever part of them a job has."""
    used = add_usage

    def coarse(queues, usage_records, queue_id, milli, from_s, to_s):
        return used(queues, usage_records, queue_id, -(-milli // 1000) * 1000, from_s, to_s)

    patch.setattr(world, "add_usage", coarse)


@planted(1, seed=0)
def a_whole_device_is_granted_though_it_is_shared(patch):
    """Devices in use in part do not count as in use for jobs that want a whole one."""
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
