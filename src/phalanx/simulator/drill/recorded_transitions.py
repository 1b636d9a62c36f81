"""State transitions recorded from drills; `edges` compares a campaign with them. Format: "before event after"; a star marks frozen.

From seeds of 2,000 events. Fewer than one seed in five covered the rare ones; a short campaign may miss them.
"""

from __future__ import annotations

import re
from typing import Final


def _parse(table: str) -> frozenset[str]:
    """Parse lines of "before: event after, event after"; a line without colon continues the previous one."""
    rows = (row.split(": ") for row in re.sub(r"\n +", " ", table.strip()).split("\n"))
    return frozenset(f"{before} {edge}" for before, edges in rows for edge in edges.split(", "))


ATTEMPT_TRANSITIONS: Final = _parse("""
placed: MemberLost ended, MemberLost stopping, MemberReady placed, MemberReady starting, MemberReady stopping,
    MemberRefused ended, MemberRefused stopping, ProgressReported placed, ReminderDue placed, StartOverdue stopping,
    StopRequested stopping, AttemptWithdrawn ended
running: CheckpointFailed running, CheckpointSaved running, MemberFrozen running, MemberFrozen stopping,
    MemberLost ended, MemberLost stopping, MemberStopped ended, MemberStopped running, ProgressReported running,
    ReminderDue running, StopRequested stopping, TaskExited running, TaskExited stopping
starting: MemberLost ended, MemberLost stopping, MemberRefused ended, MemberRefused stopping, MemberStarted running,
    MemberStarted starting, MemberStopped ended, ProgressReported starting, ReminderDue starting,
    StopRequested stopping, TaskExited starting, TaskExited stopping
stopping: CheckpointFailed stopping, CheckpointSaved stopping, MemberLost ended, MemberLost stopping,
    MemberStopped ended, MemberStopped placed, MemberStopped stopping, ProgressReported stopping, ReminderDue stopping,
    StopRequested stopping, TaskExited stopping
""")
"""Attempt machine: state, event, state."""
RARE_ATTEMPT_TRANSITIONS: Final = _parse("""
placed: CheckpointFailed placed, CheckpointSaved placed, MemberStopped ended, MemberStopped stopping
running: MemberHung stopping, MemberLost running
starting: CheckpointFailed starting, CheckpointSaved starting, MemberFrozen starting, MemberFrozen stopping,
    MemberLost starting, MemberStopped starting, MemberStopped stopping
stopping: AttemptWithdrawn ended
""")
"""Rare ones."""
JOB_TRANSITIONS: Final = _parse("""
none: none pending
pending: none cancelled, none running
running: cancelled cancelled, crash failed, drained pending, failed failed, node_fail failed, node_fail pending,
    none pending, port_taken failed, preempted pending, requeued pending, start_fail failed, start_fail pending,
    succeeded succeeded, timeout timeout, unfit pending
""")
"""Jobs: state, cause of the attempt that ended in the same commit, state."""
RARE_JOB_TRANSITIONS: Final = _parse("""
running: contended pending, hang failed, moved pending, unfit failed
""")
"""Rare ones."""
MEMBER_TRANSITIONS: Final = _parse("""
closing: OutputDrained next:preparing, OutputDrained none, OutputDrained stopped
closing*: OutputDrained next:preparing, OutputDrained none, OutputDrained stopped
killing: MemberKilled closing, PrepareTasks killing, TaskEnded killing
killing*: MemberKilled closing*, TaskEnded killing*
lingering: MemberEmptied closing, StopTasks killing, time killing
none: PrepareTasks preparing, PrepareTasks preparing*
preparing: CleanUpAttempt killing, MemberPrepared ready, StopTasks killing, TerminationRequested killing,
    MemberStartFailed killing, time preparing*
preparing*: MemberPrepared ready*, LeaseRenewed preparing, StopTasks killing*
ready: StartTasks starting, StopTasks killing, TerminationRequested killing, time ready*
ready*: LeaseRenewed killing*, LeaseRenewed ready, LeaseRenewed starting, StartTasks ready*, StopTasks killing*
running: StopTasks stopping, TaskEnded lingering, TaskEnded running, TerminationRequested stopping, time running*,
    time stopping
running*: LeaseRenewed killing*, LeaseRenewed running, StopTasks stopping*
starting: TasksSpawned running, StopTasks killing, MemberStartFailed killing
stopped: CleanUpAttempt none, PrepareTasks next:preparing, PrepareTasks next:preparing*, LeaseRenewed none
stopping: MemberEmptied closing, TaskEnded stopping, time killing
stopping*: LeaseRenewed killing*, LeaseRenewed stopping
""")
"""A supervisor's members: phase, event, phase; "next:" marks a later generation."""
RARE_MEMBER_TRANSITIONS: Final = _parse("""
closing*: LeaseRenewed closing*, OutputDrained next:preparing*
killing: CleanUpAttempt killing
killing*: PrepareTasks killing*, LeaseRenewed killing*
lingering: TerminationRequested killing, time killing*, time lingering*
lingering*: MemberEmptied closing*, LeaseRenewed lingering, time killing*
preparing*: CleanUpAttempt killing*, PrepareTasks killing*, LeaseRenewed killing*, TerminationRequested killing*,
    MemberStartFailed killing*
ready: CleanUpAttempt killing, PrepareTasks killing
ready*: PrepareTasks killing*, TerminationRequested killing*
running: time killing*
running*: FreezeFinished killing*, PrepareTasks killing*, TaskEnded lingering*, TaskEnded running*,
    TerminationRequested stopping*, time killing*
starting: TasksSpawned stopping, TerminationRequested killing, time killing*
stopping: TerminationRequested killing, time killing*, time stopping*
stopping*: MemberEmptied closing*, time killing*
""")
"""Rare ones."""
