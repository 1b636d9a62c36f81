"""Run what a member needs before its ranks (its setup text, an installer, a pull of its image) in its own containment, and wait for it.

So it is frozen, stopped and killed with the member, and whoever waits here is let go when that happens. One at a time for a member.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.node.shell.present import Present
from phalanx.node.shell.processes import TaskNotStarted, TaskSpec
from phalanx.node.shell.refusal import Refusal

SETUP_TASK: Final = "setup"
REQUIREMENTS_TASK: Final = "requirements"
IMAGE_TASK: Final = "image"
ASIDE_TASKS: Final = frozenset({SETUP_TASK, REQUIREMENTS_TASK, IMAGE_TASK})


def run_aside(
    member: Present,
    task_id: str,
    command: tuple[str, ...] | str,
    variables: Mapping[str, str],
    open_output: Callable[[], int],
    *,
    cwd: str = "",
) -> int:
    """The exit code as a shell says it.

    Args:
        present: with its processes open.
        task_id: one of ASIDE_TASKS; its end comes by `Present.setup_done`.
        command: words, or a text for bash.
        variables: its whole environment.
        open_output: a new descriptor that what it prints is written to.
        cwd: where it runs; the working directory otherwise.

    Raises:
        Refusal: it could not be started, or the member was stopped meanwhile.
    """
    assert member.processes is not None
    member.setup_done.clear()
    if member.cancelled.is_set():  # asked after the clear: `cancel` sets both, this one first
        member.setup_done.set()
    output = open_output()
    member.running.wait()
    try:
        task = TaskSpec(
            task_id=task_id,
            command=command,
            cwd=cwd or member.workdir,
            env=variables,
            account=member.account,
            bound=not member.prepare.spec.image,
        )
        with member.containing:  # a freeze comes before or after, never while it is being started
            member.processes.spawn(task, output)
    except TaskNotStarted as error:
        raise Refusal(f"{task_id}: {error}", charge=error.user_error, exit_code=error.exit_code) from error
    finally:
        os.close(output)
    member.setup_done.wait()
    if member.cancelled.is_set():
        raise Refusal("stopped while it was being prepared", charge=False)
    return member.setup_code
