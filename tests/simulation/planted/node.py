"""Bugs of a supervisor: fences, commands, and what it says has stopped."""

from dataclasses import replace

from phalanx.node.logic import member as members
from phalanx.node.logic.events import GenerationId
from phalanx.node.logic.member import MemberPhase
from phalanx.node.logic.supervisor import Supervisor
from tests.simulation.planted.bug import planted


@planted(4, seed=1)
def ranks_run_on_without_a_lease(patch):
    """A supervisor whose lease is over freezes nothing: the fence is down."""
    lapse = members.on_lease_expired
    patch.setattr(members, "on_lease_expired", lambda member, end_ns, now: (lapse(member, end_ns, now)[0], []))


@planted(10, seed=1)
def any_answer_thaws(patch):
    """Frozen ranks go on with the first answer of the head, though it says that another epoch counts."""
    renew = members.on_lease_renewed

    def trusting(member, end_ns, now, *, confirmed):
        return renew(member, end_ns, now, confirmed=True)

    def deaf(self, slot, now):
        self._apply(slot, renew(slot.member, self._lease.deadline_ns, now, confirmed=True))

    patch.setattr(members, "on_lease_renewed", trusting)
    patch.setattr(Supervisor, "_supersede", deaf)


@planted(10, seed=0)
def stopped_is_said_before_it_is_true(patch):
    """A supervisor answers StopTasks at once, while the ranks still have their grace."""
    stop = Supervisor._stop

    def hasty(self, command, now):
        stop(self, command, now)
        self._report_stopped(command.job_id, GenerationId(command.epoch, command.generation), now)

    patch.setattr(Supervisor, "_stop", hasty)


@planted(10, seed=51)
def what_tasks_leave_behind_is_not_swept(patch):
    """When its last task has ended a member counts as gone: nobody waits for what is left, and nobody kills it."""
    task_ended = members.on_task_ended

    def careless(member, end, now):
        member, actions = task_ended(member, end, now)
        if member.phase in {MemberPhase.LINGERING, MemberPhase.STOPPING} and member.ended:
            member, more = members._wind_up(member)
            actions += more
        return member, actions

    patch.setattr(members, "on_task_ended", careless)


@planted(23, seed=0)
def a_refusal_quotes_what_was_asked(patch):
    """A supervisor that cannot prepare a job says of which command, word by word."""
    refuse = Supervisor._refuse
    patch.setattr(
        Supervisor,
        "_refuse",
        lambda self, command, found: refuse(self, command, replace(found, why=f"{found.why}: {command}")),
    )


@planted(17, seed=0)
def nothing_is_ever_forgotten(patch):
    """A supervisor carries on what the head has asked it to forget."""
    patch.setattr(Supervisor, "_remove", lambda self, slot, now: None)
