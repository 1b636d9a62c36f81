"""Provides the environment of this node that a job names: conda, modules, a virtual environment. It is not changed, only looked for and entered.

`software_main` looks for it in the member's containment; this module starts it, and gives its variables to every process of the member.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final

from phalanx.node.files.job_accounts import acting_as, open_for_writing
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.requirements import activated
from phalanx.node.logic.software import with_changes
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.prepare.cached_folders import read_answer
from phalanx.node.prepare.setup_runner import SOFTWARE_TASK, run_setup_command

_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.prepare.software_main")


def bring(member: MemberRuntime, *, variables: Mapping[str, str], open_output: Callable[[], int]) -> str:
    """Make the member run in the environment that its job names; returns what was found. A restart in place uses the earlier answer.

    Args:
        member: its processes must be open.
        variables: those that the environment changes.
        open_output: as in `run_setup_command`.

    Raises:
        PreparationFailed: this node does not have it, or it does not work here.
        OSError: the disk failed.
    """
    answer, order = (os.path.join(member.scratch.path, name) for name in ("software.json", "software.order"))
    with acting_as(member.account):
        found = read_answer(answer)
        if "changes" not in found:
            with open(open_for_writing(order), "w", encoding="utf-8") as out:
                json.dump({**asdict(member.prepare.spec.software), "workdir": member.workdir, "answer": answer}, out)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(answer)  # of a failed try
    if "changes" not in found:
        run_setup_command(member, SOFTWARE_TASK, (*_PROGRAM, order), variables, open_output)
        with acting_as(member.account):
            found = read_answer(answer)
    changes = found.get("changes")
    if not isinstance(changes, dict):
        raise PreparationFailed(
            str(found.get("why") or "looking for the job's software was interrupted on this node"), charge=True
        )
    member.software = {str(name): value if isinstance(value, str) else None for name, value in changes.items()}
    return str(found.get("found", ""))


def dressed(member: MemberRuntime, variables: dict[str, str]) -> dict[str, str]:
    """The variables, with the environment of the member's job active if it has one."""
    found = with_changes(variables, member.software) if member.software else variables
    return activated(found, member.venv) if member.venv else found
