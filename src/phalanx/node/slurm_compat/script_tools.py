"""Puts our `srun` and views of Slurm's commands in front of the machine's own, for a script and all that it starts. Pure.

PATH alone is not enough: a login shell (`#!/bin/bash -l`) reads a profile that sets it again. A machine that has Slurm would then run its real
`srun`, outside of the job. Exported functions of bash would come before any PATH, but `kill $!` would end the function, not the `srun` that it runs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Final

VIEWS: Final = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sinfo")
"""Commands of Slurm that are views of Phalanx: in a job, and at a prompt that asks for them."""
TOOLS: Final[Mapping[str, str]] = {
    "srun": "phalanx.node.slurm_compat.srun_main",
    **dict.fromkeys(VIEWS, "phalanx.cli.slurm_views.main"),
}
"""Command -> the module that runs it."""
_SHELLS: Final = ("sh", "bash", "dash", "ksh", "zsh")


def with_tools_after_profile(script: str, folder: str) -> str:
    """Return the script; if its first line starts a login shell, the tools come back into PATH after the profile, on the second line.

    Line numbers stay as they are.
    """
    first, newline, rest = script.partition("\n")
    if not newline or not _is_login_shell(first):
        return script
    return f'{first}\nexport PATH={shlex.quote(folder)}:"$PATH"; {rest}'


def _is_login_shell(line: str) -> bool:
    words = line.removeprefix("#!").split()
    if words and os.path.basename(words[0]) == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    if not words or os.path.basename(words[0]) not in _SHELLS:
        return False
    return any(
        word == "--login" or (word.startswith("-") and not word.startswith("--") and "l" in word) for word in words[1:]
    )
