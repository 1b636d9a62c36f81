"""The reports of a member to the head, built from its record. `member.py` decides when each is sent."""

from __future__ import annotations

from typing import Final

from phalanx.core.state.reports import (
    MemberFrozen,
    MemberHung,
    MemberReady,
    MemberStarted,
    ReadinessChanged,
    SleepHookEnded,
    TaskExited,
)
from phalanx.core.work.attempt import TaskExit
from phalanx.node.logic.actions import AppendNote, SendEvent
from phalanx.node.logic.events import HangDetected, ReadinessProbed, SleepHookAnswered, TaskEnded
from phalanx.node.logic.lease import NS_PER_S
from phalanx.node.logic.local_member import LocalMember, StepClock
from phalanx.node.logic.utf8 import replace_invalid_utf8

SIGKILL_NUMBER: Final = 9


def ready_report(member: LocalMember) -> SendEvent:
    """Report the result of preparation."""
    assert member.ready is not None
    key, node_id = member.key, member.grant.node_id
    return SendEvent(
        event=MemberReady(
            job_id=key.job_id,
            epoch=key.epoch,
            generation=key.generation,
            node_id=node_id,
            port=member.ready.port,
            resume=member.ready.resume,
            bad_links=member.ready.bad_links,
            clock_off_s=member.ready.clock_off_s,
            service_port=member.ready.service_port,
        )
    )


def started_report(member: LocalMember, now: StepClock) -> SendEvent:
    """Report that all tasks are exec'd."""
    key, node_id = member.key, member.grant.node_id
    return SendEvent(
        event=MemberStarted(
            job_id=key.job_id, epoch=key.epoch, generation=key.generation, node_id=node_id, at_s=now.unix_s
        )
    )


def hang_report(member: LocalMember, found: HangDetected) -> SendEvent:
    """Report that the ranks make no steps."""
    key, silence = member.key, found.hang
    event = MemberHung(
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        node_id=member.grant.node_id,
        silent_s=silence.silent_s,
        limit_s=silence.limit_s,
        step=silence.step,
    )
    return SendEvent(event=event)


def readiness_report(member: LocalMember, found: ReadinessProbed) -> SendEvent:
    """Report that a replica became ready or no longer answers."""
    key = member.key
    event = ReadinessChanged(
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        node_id=member.grant.node_id,
        ready=found.ready,
        why=replace_invalid_utf8(found.why),
    )
    return SendEvent(event=event)


def sleep_hook_answer(member: LocalMember, found: SleepHookAnswered) -> SleepHookEnded:
    """The answer of a hook, which is kept to be repeated."""
    key = member.key
    return SleepHookEnded(
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        node_id=member.grant.node_id,
        turn=found.turn,
        sleep=found.sleep,
        why=replace_invalid_utf8(found.why),
    )


def exit_report(member: LocalMember, end: TaskEnded, *, by_us: bool) -> SendEvent:
    """Report the end of a task. `by_us`: after we asked it to end."""
    key = member.key
    code, signal, note = end.code, end.signal, member.stop_why if by_us else ""
    if end.status_unknown:
        code, signal, note = (
            None,
            SIGKILL_NUMBER,
            "the process that waited for it was killed; its exit status is unknown",
        )
    exit = TaskExit(
        rank=end.rank,
        node_id=member.grant.node_id,
        code=code,
        signal=signal,
        requested_by_phalanx=by_us,
        ended_s=end.at_s,
        note=note,
        evidence=end.evidence,
    )
    event = TaskExited(job_id=key.job_id, epoch=key.epoch, generation=key.generation, exit=exit)
    return SendEvent(event=event)


def freeze_report(member: LocalMember, frozen_ns: int, *, thawed: bool) -> SendEvent:
    """Report for how long the member was frozen, and whether it goes on."""
    key = member.key
    event = MemberFrozen(
        job_id=key.job_id,
        epoch=key.epoch,
        generation=key.generation,
        node_id=member.grant.node_id,
        frozen_s=frozen_ns / NS_PER_S,
        thawed=thawed,
    )
    return SendEvent(event=event)


def note(member: LocalMember, text: str) -> AppendNote:
    """Append a line to the notes of the attempt on this node."""
    return AppendNote(job_id=member.key.job_id, epoch=member.key.epoch, text=text)
