"""`eval "$(phalanx slurm-env)"`: Slurm's commands as views in this shell, and in no other."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Final

import click

from phalanx.cli.slurm_views.main import SHELL_VARIABLE
from phalanx.client.connection.discovery import state_folder
from phalanx.node.slurm_compat.script_tools import VIEWS

_MODULE: Final = "phalanx.cli.slurm_views.main"


@click.command("slurm-env")
def slurm_env() -> int:
    """Print shell commands that make sbatch, squeue and their kin views of Phalanx.

    \b
    eval "$(phalanx slurm-env)"

    Only the shell that evaluates them is changed. Nothing is installed.
    """  # noqa: D301 - click reads the backspace character itself
    folder = os.path.join(state_folder(), "slurm-views")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for tool in VIEWS:
        path = os.path.join(folder, tool)
        words = shlex.join((sys.executable, "-I", "-m", _MODULE, tool))
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o700), "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
    print(f'export PATH={shlex.quote(folder)}:"$PATH"')
    print(f"export {SHELL_VARIABLE}=$$")
    print(f"{', '.join(VIEWS)} are views of Phalanx in this shell", file=sys.stderr)
    return 0
