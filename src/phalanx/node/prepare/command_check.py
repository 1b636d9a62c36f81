"""Checks the command of a member before it starts: its program exists, and its script can work here.

Also finds out what decides the environment of its ranks: whether the script imports JAX.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic import script_check
from phalanx.node.logic.script_imports import imported_modules, imports_package, module_file
from phalanx.node.logic.separate_worlds import independent_tasks, mpi_library, shell_world
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.attempt_processes import NOT_EXECUTABLE, NOT_FOUND, path_text
from phalanx.wire.manifest import open_regular

# One script check at a time on a node: each may take 60 MiB and block other threads.
_script_checks: Final = threading.Lock()


def check_program_and_script(
    command: tuple[str, ...] | str, member: MemberRuntime, variables: Mapping[str, str]
) -> None:
    """Look up the program of the command, and check the script that it would run.

    Raises:
        PreparationFailed: it cannot run here, or its tasks would be separate MPI worlds.
    """
    spec = member.prepare.spec
    words: Sequence[str] = ()
    if not isinstance(command, str):
        words = command
        # Otherwise the setup or the image may provide it; exec reports.
        known = not spec.setup and not spec.image
        if known:
            _check_one_world(_resolve(command[0], member.workdir, variables), member)
        judge_script(script_check.script_path(command), member, must_exist=known)
    elif "\n" not in command.strip():
        with contextlib.suppress(ValueError):
            words = shlex.split(command)
            judge_script(script_check.script_path(words), member, must_exist=False)
    script = script_check.script_path(words) or module_file(words)
    if script is not None and script.endswith(".py"):
        path = os.path.join(member.workdir, script)
        member.imports_jax = imports_package("jax", path, _read_source, modules_of=_parsed_imports)


def _parsed_imports(text: bytes) -> set[str]:
    with _script_checks:  # only while parsing: reading may hang with the user's file system
        return imported_modules(text)


def _read_source(path: str) -> bytes | None:
    try:
        with open_regular(path) as file:
            return file.read(script_check.SCRIPT_BYTES_MAX + 1)
    except (OSError, ValueError):
        return None


def _check_one_world(path: str, member: MemberRuntime) -> None:
    """Refuse a program that is linked with MPI, or a shell script that calls mpirun, if several tasks start it."""
    tasks = independent_tasks(member.prepare)
    if not tasks or not os.path.isfile(path):
        return
    with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
        # Not mapped: a file that its owner truncates meanwhile would end this process by SIGBUS.
        library = mpi_library(lambda at, length: os.pread(file.fileno(), length, at))
        if library is not None:
            _refuse_worlds(f"{os.path.basename(path)} uses MPI ({library})", tasks)


def _refuse_worlds(what: str, tasks: int) -> NoReturn:
    raise PreparationFailed(
        f"{what}, but no MPI launcher starts it: its {tasks} tasks would be {tasks} worlds of size 1. "
        "Start it by mpirun: phalanx run ... -- mpirun PROGRAM",
        charge=True,
    )


def _resolve(program: str, workdir: str, variables: Mapping[str, str]) -> str:
    """Return the path of a program.

    Raises:
        PreparationFailed: it is missing or not executable.
    """
    if "/" in program:
        path: str | None = os.path.join(workdir, program)
        if not os.path.exists(path or ""):
            raise PreparationFailed(f"{program}: no such file in {workdir}", charge=True, exit_code=NOT_FOUND)
        if os.path.isdir(path or "") or not os.access(path or "", os.X_OK):
            raise PreparationFailed(
                f"{program}: is not executable; use chmod +x, or name its interpreter",
                charge=True,
                exit_code=NOT_EXECUTABLE,
            )
        return path or ""
    folders = variables.get("PATH", os.defpath)
    path = shutil.which(
        program, path=os.pathsep.join(os.path.join(workdir, part) for part in folders.split(os.pathsep))
    )
    if path is None:
        raise PreparationFailed(
            f"{program}: command not found in the {path_text(folders)}",
            charge=True,
            exit_code=NOT_FOUND,
            note=f"{program}: command not found; searched PATH={folders}",
        )
    return path


def judge_script(script: str | None, member: MemberRuntime, *, must_exist: bool) -> None:
    """Check a script of the working directory; None is no script.

    Raises:
        PreparationFailed: it is missing although it `must_exist`, or cannot work here.
    """
    if script is None:
        return
    path = os.path.join(member.workdir, script)
    if not os.path.exists(path):
        if must_exist:
            raise PreparationFailed(f"{script}: no such file in {member.workdir}", charge=True)
        return
    if not os.path.isfile(path):
        return
    if not path.endswith(".py"):
        _check_shell_script(script, path, member)
        return
    with open_regular(path) as file:  # its owner may replace it at any time, even by a pipe
        text = file.read(script_check.SCRIPT_BYTES_MAX + 1)
    allocation = member.prepare.allocation
    context = script_check.ScriptContext(
        nodes=len(allocation.grants),
        world_size=max(allocation.world_size, allocation.gpus),
        cuda=bool(member.grant.devices) and member.environment["PHALANX_VIRTUAL"] != "1",
    )
    with _script_checks:
        why = script_check.find_script_error(script, text, context)
        line = script_check.line_of_mpi4py(text) if independent_tasks(member.prepare) else None
    if why is not None:
        raise PreparationFailed(why, charge=True)
    if line is not None:
        _refuse_worlds(
            f"{os.path.basename(script)}, line {line}: the script imports mpi4py", independent_tasks(member.prepare)
        )


def _check_shell_script(script: str, path: str, member: MemberRuntime) -> None:
    tasks, text = independent_tasks(member.prepare), _read_source(path) or b""
    launcher = shell_world(text.decode("utf-8", "replace")) if tasks and b"\0" not in text else None
    if launcher is not None:
        raise PreparationFailed(
            f"{os.path.basename(script)} calls {launcher}, but starts {tasks} times, which gives {tasks} separate worlds. "
            f'Start it once: phalanx run ... -- bash -c "$(cat {os.path.basename(script)})"',
            charge=True,
        )
