"""The image that a member runs in: turns each of its tasks into one that the runtime starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.node.logic import images
from phalanx.node.logic.images import Contained, Runtime
from phalanx.node.shell.containment import AttemptKey
from phalanx.node.shell.processes import TaskSpec
from phalanx.node.shell.sweeps import NODE_KEY_VARIABLE, TASK_KEY_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The image that a member runs in. `base`: the environment of the runtime's own processes."""

    runtime: Runtime
    what: Contained
    base: Mapping[str, str]

    def task(self, key: AttemptKey, task: TaskSpec) -> TaskSpec:
        """The task that runs this one in the image; its variables are those that it shall find inside."""
        variables = {**task.env, NODE_KEY_VARIABLE: key.node_key, TASK_KEY_VARIABLE: key.marker}
        command = images.wrap(self.runtime, self.what, task.task_id, task.command, variables)
        return replace(task, command=command, env=images.around(self.runtime, self.base, variables), cwd="/", warm=None)

    def enter(self, task: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
        """The words for a command beside a task."""
        return images.enter(self.runtime, self.what, task, argv, terminal=terminal)
