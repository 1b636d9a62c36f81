"""Run a preparation command of a member (setup text, package installer, image pull) in the member's containment, and wait for it.

The command is frozen, stopped and killed with the member; the wait ends then. A member runs one such command at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.attempt_processes import TaskNotStarted, TaskSpec

SETUP_TASK: Final = "setup"
REQUIREMENTS_TASK: Final = "requirements"
SOFTWARE_TASK: Final = "software"
IMAGE_TASK: Final = "image"
DATA_TASK: Final = "data"
SETUP_TASKS: Final = frozenset({SETUP_TASK, REQUIREMENTS_TASK, SOFTWARE_TASK, IMAGE_TASK, DATA_TASK})


def run_setup_command(
    member: MemberRuntime,
    task_id: str,
    command: tuple[str, ...] | str,
    variables: Mapping[str, str],
    open_output: Callable[[], int],
    *,
    cwd: str = "",
) -> int:
    """Run the command; returns its exit code as a shell gives it.

    Args:
        member: its processes must be open.
        task_id: one of ASIDE_TASKS; `MemberRuntime.setup_done` signals its end.
        command: argv, or a text for bash.
        variables: the complete environment.
        open_output: returns a new descriptor for the command's output.
        cwd: the folder it runs in; by default the working directory.

    Raises:
        PreparationFailed: it could not be started, or the member was stopped while it ran.
    """
    assert member.processes is not None
    member.setup_done.clear()
    if member.cancelled.is_set():  # checked after the clear: `cancel` sets `cancelled` before `setup_done`
        member.setup_done.set()
    output = open_output()
    member.not_frozen.wait()
    try:
        task = TaskSpec(
            task_id=task_id,
            command=command,
            cwd=cwd or member.workdir,
            env=variables,
            account=member.account,
            no_new_privileges=not member.prepare.spec.image,
        )
        with member.containment_lock:  # no freeze while the task is being started
            member.processes.spawn(task, output)
    except TaskNotStarted as error:
        raise PreparationFailed(f"{task_id}: {error}", charge=error.user_error, exit_code=error.exit_code) from error
    finally:
        os.close(output)
    member.setup_done.wait()
    if member.cancelled.is_set():
        raise PreparationFailed("the job was stopped during preparation", charge=False)
    return member.setup_code
