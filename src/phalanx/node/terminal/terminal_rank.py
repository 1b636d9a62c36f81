"""Builds the task of a rank that runs on a terminal."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Final

from phalanx.node.logic.images import shell_argv
from phalanx.node.processes.attempt_processes import TaskSpec

_HOST: Final = (sys.executable, "-I", "-m", "phalanx.node.terminal.host_main")
_TERMINAL: Final = "terminal"  # the socket, in the scratch folder of the attempt
_KIND: Final = "xterm-256color"


def on_terminal(task: TaskSpec, scratch_path: str) -> TaskSpec:
    """Return the task with its command on a terminal of its own, to which clients attach by a socket in the scratch folder."""
    command = (*_HOST, os.path.join(scratch_path, _TERMINAL), *shell_argv(task.command))
    return replace(task, command=command, env={"TERM": _KIND, **task.env})
