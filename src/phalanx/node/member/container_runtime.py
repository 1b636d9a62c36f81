"""The container that a member's tasks run in: converts each task into one that the container runtime starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.node.files.job_accounts import acting_as
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic import images
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.logic.images import ContainerSettings, InstalledRuntime
from phalanx.node.processes.attempt_processes import TaskSpec
from phalanx.node.processes.containment import AttemptKey
from phalanx.node.processes.sweeps import NODE_KEY_VARIABLE, TASK_KEY_VARIABLE

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRuntime:
    """A member's container. `base`: environment of the runtime's own processes; `account`: the account they run under, None for ours."""

    runtime: InstalledRuntime
    container: ContainerSettings
    base: Mapping[str, str]
    account: NodeAccount | None = None

    def wrap_task(self, key: AttemptKey, task: TaskSpec) -> TaskSpec:
        """The task that runs this one in the image; its variables are those visible inside.

        Raises:
            PreparationFailed: a variable cannot be passed into the container.
            OSError: the disk failed.
        """
        variables = {**task.env, NODE_KEY_VARIABLE: key.node_key, TASK_KEY_VARIABLE: key.marker}
        self._write(task, variables)
        command = images.run_command(self.runtime, self.container, task.task_id, task.command, variables)
        return replace(
            task,
            command=command,
            env=images.runtime_environment(self.runtime, self.base, variables),
            cwd="/",
            warm=None,
        )

    def exec_command(self, task: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
        """The command that runs `argv` beside a task."""
        return images.exec_command(self.runtime, self.container, task, argv, terminal=terminal)

    def _write(self, task: TaskSpec, variables: Mapping[str, str]) -> None:
        """Create the variables file that this task needs, readable by its account alone."""
        try:
            file = images.variables_file(self.runtime, self.container, task.task_id, variables)
        except ValueError as error:
            raise PreparationFailed(str(error), charge=True) from error
        if file is None:
            return
        path, content = file
        with acting_as(self.account):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with open(os.open(path, _NEW, 0o600), "wb") as written:
                written.write(content)
