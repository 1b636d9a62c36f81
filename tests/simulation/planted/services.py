"""Bugs of services: which replicas a rollout stops, what a stop means, and whose the devices of a sleeping replica are."""

from dataclasses import replace

from phalanx.controller.services import service_reconciler
from phalanx.core.lifecycle import attempt as machine
from phalanx.core.lifecycle import gang_commands, sleep
from phalanx.core.lifecycle import service as services
from phalanx.core.lifecycle.events import SleepRequested, WakeRequested
from phalanx.core.work.attempt import Attempt, SleepPhase
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.states import AttemptState
from tests.simulation.planted.bug import planted


@planted(26, seed=0, services=True)
def service_drops_its_last_ready_replica_in_a_rollout(patch):
    """A rollout counts new replicas whose ranks run as ready, and stops the old ones before a port answers."""
    replaced = services._replaced

    def hasty(service, desired, asleep, new, old):
        runs = sum(one.attempt is not None and one.attempt.state is AttemptState.RUNNING for one in new)
        settled = services._settled(new, asleep)
        return replaced(service, desired - runs + settled, asleep, new, old)

    patch.setattr(services, "_replaced", hasty)


@planted(12, seed=1, services=True)
def stopped_service_starts_replicas_again(patch):
    """A stopped service is reconciled like any other, and gets its replicas back."""
    reconcile = services.reconcile

    def forgetful(service, *known):
        return reconcile(replace(service, stopped_by="", state=ServiceState.READY), *known)

    patch.setattr(service_reconciler, "reconcile", forgetful)


@planted(1, seed=0, services=True)
def devices_are_free_before_the_sleep_hook_has_answered(patch):
    """A replica that is asked to sleep gives its devices back at once, while its program still uses them."""
    fall_asleep = sleep.fall_asleep

    def hasty(case, attempt, happening, facts):
        result = fall_asleep(case, attempt, happening, facts)
        after = result.attempt
        if after is None or after.sleep is None or after.sleep.phase is not SleepPhase.FALLING_ASLEEP:
            return result
        grants = after.allocation.grants
        early = replace(after.sleep, devices=tuple(grant.devices for grant in grants), since_s=facts.now_s)
        stripped = replace(after.allocation, grants=tuple(replace(grant, devices=()) for grant in grants))
        return replace(result, attempt=replace(after, sleep=early, allocation=stripped))

    patch.setitem(machine.TRANSITIONS, (AttemptState.RUNNING, SleepRequested), hasty)


@planted(1, seed=4, services=True)
def replica_wakes_without_a_grant(patch):
    """A replica that shall wake runs its wake hook at once, and its devices are granted to it when they are free."""
    wish, hook = sleep.wish_to_wake, gang_commands.sleep_hook

    def hasty(case, attempt, happening, facts):
        result = wish(case, attempt, happening, facts)
        after = result.attempt
        if after is None or after.sleep is None or after.sleep.phase is not SleepPhase.WAITING:
            return result
        turn = replace(after, sleep=replace(after.sleep, phase=SleepPhase.WAKING), sleep_turn=after.sleep_turn + 1)
        return replace(result, attempt=replace(after, sleep_turn=turn.sleep_turn), commands=hook(turn))

    patch.setitem(machine.TRANSITIONS, (AttemptState.RUNNING, WakeRequested), hasty)


@planted(1, seed=4, services=True)
def wake_does_not_look_whether_the_devices_are_free(patch):
    """A replica that shall wake is granted its devices again although another job uses them."""
    patch.setattr(service_reconciler, "wake_rejection", lambda _world, _attempt: "")


@planted(18, seed=0, services=True)
def sleep_is_billed_for_gpus(patch):
    """The time in which a replica slept is billed as if it had held its devices."""
    patch.setattr(Attempt, "sleep_s", lambda _self, _now_s: 0.0)
