"""Finds out which server the ranks of a program need: PMI-1 (MPICH, Intel MPI, MVAPICH) or PMIx (Open MPI)."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from phalanx.core.work.launchers import SHELLS, shell_text, split_commands, unwrapped
from phalanx.node.logic.script_check import SCRIPT_BYTES_MAX, line_of_mpi4py, script_path
from phalanx.node.logic.separate_worlds import mpi_library
from phalanx.wire.manifest import open_regular

PMI, PMIX = "pmi", "pmix"
_OPEN_MPI: Final = (
    "libmpi.so.40"  # the library of Open MPI 4 and 5; that of MPICH, Intel MPI and MVAPICH is libmpi.so.12
)
_LIBRARY_OF_MPI4PY: Final = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
_IMPORT_S: Final = 30.0
_COMMANDS_MAX: Final = 100  # of a shell script


def wanted_server(option: str, command: Sequence[str], cwd: str, env: Mapping[str, str]) -> str:
    """Return the server that a step needs; "" for none.

    A program that is found to use MPI gets the server that it speaks, whatever `--mpi` says but `none`: with another one, each of its tasks
    would be a world of size 1, with exit code 0. MPICH refuses to start if it finds both.
    """
    if option == "none":
        return ""
    asked = PMIX if option.startswith(("pmix", "openmpi")) else PMI if option else ""
    return _of_command(command, cwd, env, shells=1) or asked


def _of_command(command: Sequence[str], cwd: str, env: Mapping[str, str], *, shells: int) -> str:
    words = unwrapped(command)
    name = words[0] if words else ""
    program = shutil.which(os.path.join(cwd, name) if "/" in name else name, path=env.get("PATH"))
    if program is None:
        return ""
    script = script_path(words)
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        if script is not None and script.endswith(".py"):
            imported = script != name and line_of_mpi4py(_read(os.path.join(cwd, script))) is not None
            return _of_mpi4py(program, cwd, env) if imported else ""
        text = _read(os.path.join(cwd, script)).decode("utf-8", "replace") if script is not None else ""
        if shells and (text or os.path.basename(name) in SHELLS):
            commands = split_commands(text or shell_text(words[1:]))[:_COMMANDS_MAX]
            found = (_of_command(_words(one), cwd, env, shells=shells - 1) for one in commands)
            return next((server for server in found if server), "")
        with open_regular(program) as file:
            library = mpi_library(lambda at, length: os.pread(file.fileno(), length, at))
        return "" if library is None else PMIX if library.startswith(_OPEN_MPI) else PMI
    return ""


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quotation that ends on another line
        return []


def _read(path: str) -> bytes:
    with open_regular(path) as file:
        return file.read(SCRIPT_BYTES_MAX + 1)


def _of_mpi4py(python: str, cwd: str, env: Mapping[str, str]) -> str:
    """Ask an interpreter for the library that its mpi4py loads, which is known only then."""
    ask = [python, "-c", _LIBRARY_OF_MPI4PY]
    said = subprocess.run(ask, cwd=cwd, env=dict(env), capture_output=True, timeout=_IMPORT_S, check=False).stdout
    return PMIX if b"Open MPI" in said else PMI if said.strip() else ""
