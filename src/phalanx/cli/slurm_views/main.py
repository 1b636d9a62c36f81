"""Runs one of Slurm's commands as a view: `python -I -m phalanx.cli.slurm_views.main squeue ...`.

Each command says once in a job, or once in a shell, on standard error that it is a view. What it prints on standard output is Slurm's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from phalanx.cli.slurm_views.own_job import use_head_of_job
from phalanx.cli.slurm_views.verbs import VERBS
from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.node.gang.job_link import BATCH_VARIABLE
from phalanx.node.slurm_compat.script_tools import VIEWS
from phalanx.web.command_hints import error_line

SHELL_VARIABLE: Final = "PHALANX_SLURM_SHELL"
"""The number of the shell that asked for the views, so that each speaks once in it."""
_FAILED: Final = 1


def main(words: Sequence[str]) -> int:
    """Run one view; returns its exit code."""
    name, rest = os.path.basename(words[0]), list(words[1:])
    try:
        use_head_of_job()
        if name != "scontrol" or rest[:2] not in (["show", "hostnames"], ["show", "hostname"]):
            _say_once(name)
        return _view(name)(rest)
    except PhalanxError as error:
        sys.stderr.write(f"{name}: error: {error_line(str(error), error.hint)}\n")
        return _FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _view(name: str) -> Callable[[list[str]], int]:
    """Import what the view needs, and no more: scripts call `scontrol show hostnames` at each start."""
    if name in {"squeue", "sacct", "sinfo"}:
        from phalanx.cli.slurm_views import lists

        return {"squeue": lists.squeue, "sacct": lists.sacct, "sinfo": lists.sinfo}[name]
    if name == "sbatch":
        from phalanx.cli.slurm_views.submit import sbatch

        return sbatch
    if name in {"scancel", "scontrol"}:
        from phalanx.cli.slurm_views import control

        return control.scancel if name == "scancel" else control.scontrol
    raise BadRequest(f"no view of {name}", hint=f"there are {', '.join(VIEWS)}")


def _say_once(name: str) -> None:
    folder, mark = os.path.dirname(os.environ.get(BATCH_VARIABLE, "")), f"said-{name}"
    if not folder and os.environ.get(SHELL_VARIABLE):
        from phalanx.client.connection.discovery import state_folder

        folder, mark = os.path.join(state_folder(), "slurm-views"), f"said-{name}-{os.environ[SHELL_VARIABLE]}"
    if folder:
        try:
            os.close(os.open(os.path.join(folder, mark), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        except OSError:
            pass  # said again: better than never
    sys.stderr.write(f"{name}: this is a view of Phalanx; its own command is `{VERBS[name]}`\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
