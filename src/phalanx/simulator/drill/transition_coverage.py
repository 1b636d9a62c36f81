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
    MemberRefused ended, MemberRefused stopping, Progressed placed, Remind placed, StartOverdue stopping,
    StopRequested stopping, Withdrawn ended
running: CheckpointFailed running, CheckpointSaved running, MemberFrozen running, MemberFrozen stopping,
    MemberLost ended, MemberLost stopping, MemberStopped ended, MemberStopped running, Progressed running,
    Remind running, StopRequested stopping, TaskExited running, TaskExited stopping
starting: MemberLost ended, MemberLost stopping, MemberRefused ended, MemberRefused stopping, MemberStarted running,
    MemberStarted starting, MemberStopped ended, Progressed starting, Remind starting, StopRequested stopping,
    TaskExited starting, TaskExited stopping
stopping: CheckpointFailed stopping, CheckpointSaved stopping, MemberLost ended, MemberLost stopping,
    MemberStopped ended, MemberStopped placed, MemberStopped stopping, Progressed stopping, Remind stopping,
    StopRequested stopping, TaskExited stopping
""")
"""Attempt machine: state, event, state."""
RARE_ATTEMPT_TRANSITIONS: Final = _parse("""
placed: CheckpointFailed placed, CheckpointSaved placed, MemberStopped ended, MemberStopped stopping
running: MemberHung stopping, MemberLost running
starting: CheckpointFailed starting, CheckpointSaved starting, MemberFrozen starting, MemberFrozen stopping,
    MemberLost starting, MemberStopped starting, MemberStopped stopping
stopping: Withdrawn ended
""")
"""Rare ones."""
JOB_TRANSITIONS: Final = _parse("""
none: none pending
pending: none cancelled, none running
running: cancelled cancelled, crash failed, drained pending, failed failed, node_fail failed, node_fail pending,
    none pending, port_taken_generations failed, preempted pending, requeued pending, start_fail failed, start_fail pending,
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
killing: Killed closing, Prepare killing, TaskEnded killing
killing*: Killed closing*, TaskEnded killing*
lingering: Emptied closing, StopTasks killing, time killing
none: Prepare preparing, Prepare preparing*
preparing: Forget killing, Prepared ready, StopTasks killing, Terminated killing, Unfit killing, time preparing*
preparing*: Prepared ready*, Renewed preparing, StopTasks killing*
ready: StartTasks starting, StopTasks killing, Terminated killing, time ready*
ready*: Renewed killing*, Renewed ready, Renewed starting, StartTasks ready*, StopTasks killing*
running: StopTasks stopping, TaskEnded lingering, TaskEnded running, Terminated stopping, time running*,
    time stopping
running*: Renewed killing*, Renewed running, StopTasks stopping*
starting: Spawned running, StopTasks killing, Unfit killing
stopped: Forget none, Prepare next:preparing, Prepare next:preparing*, Renewed none
stopping: Emptied closing, TaskEnded stopping, time killing
stopping*: Renewed killing*, Renewed stopping
""")
"""A supervisor's members: phase, event, phase; "next:" marks a later generation."""
RARE_MEMBER_TRANSITIONS: Final = _parse("""
closing*: Renewed closing*, OutputDrained next:preparing*
killing: Forget killing
killing*: Prepare killing*, Renewed killing*
lingering: Terminated killing, time killing*, time lingering*
lingering*: Emptied closing*, Renewed lingering, time killing*
preparing*: Forget killing*, Prepare killing*, Renewed killing*, Terminated killing*, Unfit killing*
ready: Forget killing, Prepare killing
ready*: Prepare killing*, Terminated killing*
running: time killing*
running*: FreezeFinished killing*, Prepare killing*, TaskEnded lingering*, TaskEnded running*, Terminated stopping*,
    time killing*
starting: Spawned stopping, Terminated killing, time killing*
stopping: Terminated killing, time killing*, time stopping*
stopping*: Emptied closing*, time killing*
""")
"""Rare ones."""
