"""Bugs of a supervisor: fences, commands, and what it says has stopped."""

from dataclasses import replace

from phalanx.node.logic import member as members
from phalanx.node.logic.events import GenerationId
from phalanx.node.logic.local_member import MemberPhase
from phalanx.node.logic.supervisor import Supervisor
from tests.simulation.planted.bug import planted


@planted(4, seed=17)
def ranks_run_without_a_lease(patch):
    """A supervisor whose lease has expired freezes no rank: the fence does not work."""
    lapse = members.on_lease_expired
    patch.setattr(members, "on_lease_expired", lambda member, end_ns, now: (lapse(member, end_ns, now)[0], []))


@planted(10, seed=57)
def any_reply_thaws(patch):
    """Frozen ranks continue at the first reply of the head, even if it names another epoch."""
    renew = members.on_lease_renewed

    def trusting(member, end_ns, now, *, confirmed):
        return renew(member, end_ns, now, confirmed=True)

    def deaf(self, slot, now):
        self._apply(slot, renew(slot.member, self._lease.deadline_ns, now, confirmed=True))

    patch.setattr(members, "on_lease_renewed", trusting)
    patch.setattr(Supervisor, "_supersede", deaf)


@planted(10, seed=0)
def stop_is_confirmed_too_early(patch):
    """A supervisor confirms StopTasks at once, while the ranks still use their grace period."""
    stop = Supervisor._stop

    def hasty(self, command, now):
        stop(self, command, now)
        self._report_stopped(command.job_id, GenerationId(command.epoch, command.generation), now)

    patch.setattr(Supervisor, "_stop", hasty)


@planted(10, seed=81)
def leftover_processes_are_not_killed(patch):
    """A member counts as gone when its last task has ended: its remaining processes are neither awaited nor killed."""
    task_ended = members.on_task_ended

    def careless(member, end, now):
        member, actions = task_ended(member, end, now)
        if member.phase in {MemberPhase.LINGERING, MemberPhase.STOPPING} and member.ended:
            member, more = members._wind_up(member)
            actions += more
        return member, actions

    patch.setattr(members, "on_task_ended", careless)


@planted(23, seed=0)
def refusal_quotes_the_command(patch):
    """A supervisor that cannot prepare a job reports the complete command."""
    refuse = Supervisor._refuse
    patch.setattr(
        Supervisor,
        "_refuse",
        lambda self, command, found: refuse(self, command, replace(found, why=f"{found.why}: {command}")),
    )


@planted(17, seed=0)
def removed_attempts_stay_at_the_supervisor(patch):
    """A supervisor keeps the attempts that the head has told it to remove."""
    patch.setattr(Supervisor, "_remove", lambda self, slot, now: None)
