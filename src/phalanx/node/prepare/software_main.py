"""Looks for a job's environment on this node, and finds out what it changes: `python -I -m phalanx.node.prepare.software_main ORDER`.

Started by `software_environment` inside the member's containment, because modules and activation scripts are programs of the user. Their output
goes to the job's log, the result into the answer file: {"changes": {variable: value or null}, "found": text} or {"why": text}.
ORDER is JSON: conda, modules, venv, workdir, answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.durable_files import replace_file
from phalanx.node.logic.requirements import error_summary
from phalanx.node.logic.software import (
    LOAD_MODULES,
    MODULE_FAILED,
    NO_MODULE_COMMAND,
    RUN_ACTIVATION,
    absent_environment,
    absent_module,
    changes_between,
    conda_variables,
    modules_listed,
    read_variables,
    venv_setting,
    venv_variables,
)
from phalanx.node.prepare.conda_search import activation_scripts, ask_program, find_conda, is_environment, own_variables

_ASK_LIMIT_S: Final = 60.0  # an interpreter starts in 20 ms, from a cold network file system a few seconds
_SAID_BYTES_MAX: Final = 4 << 20  # Linux allows 2 MiB of variables and arguments for a program
_ASK: Final = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


class _Absent(Exception):
    """The environment is not on this node, or does not work here."""


def main(arguments: Sequence[str]) -> int:
    """Write the answer; returns 0 if the environment is there."""
    with open(arguments[0], encoding="utf-8") as file:
        order: dict[str, Any] = json.load(file)
    before = dict(os.environ)
    answer: dict[str, object]
    try:
        variables, found = _activate(order, before)
        answer = {"changes": changes_between(before, variables), "found": found}
    except _Absent as error:
        answer = {"why": str(error)}
    except OSError as error:
        answer = {"why": f"looking for the job's software failed on this node: {error}"}
    replace_file("", order["answer"], json.dumps(answer).encode())
    return 1 if "why" in answer else 0


def _activate(order: dict[str, Any], variables: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The variables with everything active, and what was found. Modules come first: an environment may need what they load."""
    after, found = dict(variables), []
    shell = _Shell(order["answer"], order["workdir"])
    if order["modules"]:
        after = shell.load_modules(order["modules"], after)
        found.append(f"modules {' '.join(order['modules'])}")
    if order["conda"]:
        after, text = _activate_conda(order["conda"], order["workdir"], shell, after)
        found.append(text)
    if order["venv"]:
        after, text = _activate_venv(order["venv"], order["workdir"], after)
        found.append(text)
    return after, ", ".join(found)


# ---- conda ----------------------------------------------------------------------------------------------------------


def _activate_conda(word: str, workdir: str, shell: _Shell, variables: Mapping[str, str]) -> tuple[dict[str, str], str]:
    places = find_conda(variables)
    name = word
    if "/" in word:
        prefix = _path(word, workdir)
        name = prefix
        if not is_environment(prefix):
            beside = _siblings(prefix, is_environment)
            why = "it has no folder conda-meta" if os.path.isdir(prefix) else "no such folder"
            raise _Absent(absent_environment(f"no conda environment {prefix}", os.path.basename(prefix), beside, why))
    else:
        found = places.folder_of(word) or ask_program(places, variables).get(word)
        if found is None:
            known = {**places.environments, **ask_program(places, variables)}
            nothing = (
                f"{places.program} knows no environment"
                if places.program
                else "neither conda, mamba nor micromamba is here: not in CONDA_EXE, PATH, the home folder or /opt"
            )
            raise _Absent(absent_environment(f"no conda environment {word}", word, known, nothing))
        prefix = found
    after = conda_variables(variables, prefix, name, own_variables(prefix), places.program)
    scripts = activation_scripts(prefix)
    if scripts:
        after = shell.run_activation(scripts, after)
    python = os.path.join(prefix, "bin", "python")
    version = f", Python {_version_of(python, after)}" if os.path.lexists(python) else ", without Python"
    return after, f"conda environment {prefix}{version}"


# ---- virtual environments -------------------------------------------------------------------------------------------


def _activate_venv(word: str, workdir: str, variables: Mapping[str, str]) -> tuple[dict[str, str], str]:
    venv = _path(word, workdir)
    settings = os.path.join(venv, "pyvenv.cfg")
    if not os.path.isfile(settings):
        beside = _siblings(venv, lambda one: os.path.isfile(os.path.join(one, "pyvenv.cfg")))
        why = "it has no pyvenv.cfg" if os.path.isdir(venv) else "no such folder"
        raise _Absent(absent_environment(f"no virtual environment {venv}", os.path.basename(venv), beside, why))
    python = os.path.join(venv, "bin", "python")
    version = _version_of(python, variables)
    with open(settings, encoding="utf-8", errors="replace") as file:
        text = file.read(_SAID_BYTES_MAX)
    made_for = venv_setting(text, "version_info") or venv_setting(text, "version")
    minor = ".".join(made_for.split(".")[:2])
    if made_for and minor != ".".join(version.split(".")[:2]):
        raise _Absent(f"{venv} was made for Python {minor}, but its Python is {version} on this node; make it again")
    return venv_variables(variables, venv), f"virtual environment {venv}, Python {version}"


# ---- what both need -------------------------------------------------------------------------------------------------


def _path(word: str, workdir: str) -> str:
    return os.path.normpath(os.path.join(workdir, os.path.expanduser(word)))


def _siblings(path: str, is_one: Any) -> list[str]:
    """The names of the environments beside a folder that is no environment."""
    parent = os.path.dirname(path)
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    return [name for name in names if is_one(os.path.join(parent, name))]


def _version_of(python: str, variables: Mapping[str, str]) -> str:
    """The version of an environment's Python, as it says itself.

    Raises:
        _Absent: it does not start here.
    """
    target = os.path.realpath(python)
    if not os.path.exists(target):
        raise _Absent(f"{python} does not exist on this node{'' if target == python else ': it leads to ' + target}")
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], env=dict(variables), capture_output=True, text=True, errors="replace", timeout=_ASK_LIMIT_S, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Absent(f"{python} does not start on this node: {error}") from None
    if asked.returncode != 0:
        said = error_summary(asked.stderr.splitlines()) or f"it ends with code {asked.returncode}"
        raise _Absent(f"{python} does not start on this node: {said}")
    return asked.stdout.strip()


class _Shell:
    """Runs bash in a variables' environment and reads the variables that it ends with."""

    def __init__(self, answer: str, workdir: str) -> None:
        self._dump, self._workdir = f"{answer}.dump", workdir

    def load_modules(self, modules: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
        """The variables with the modules loaded.

        Raises:
            _Absent: there is no `module` command, or it could not load one.
        """
        code, said = self._run(LOAD_MODULES, modules, variables)
        if code == NO_MODULE_COMMAND:
            raise _Absent(
                f"no `module` command on this node for {' '.join(modules)}: neither Environment Modules nor Lmod is installed"
            )
        if code == MODULE_FAILED:
            failed = self._read(".failed").decode(errors="replace")
            listed = modules_listed(self._read(".avail").decode(errors="replace"))
            raise _Absent(absent_module(failed, listed, self._read(".load").decode(errors="replace")))
        return self._variables(code, f"modules {' '.join(modules)}", said)

    def run_activation(self, scripts: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
        """The variables after an environment's own activation scripts.

        Raises:
            _Absent: one of them ended the shell.
        """
        code, said = self._run(RUN_ACTIVATION, scripts, variables)
        return self._variables(code, self._read(".at").decode(errors="replace"), said)

    def _run(self, script: str, words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, list[str]]:
        # A file, not a pipe: a process that a script leaves behind would keep a pipe open.
        with open(f"{self._dump}.said", "wb+") as said:
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-c", script, "phalanx", self._dump, *words],
                env=dict(variables),
                cwd=self._workdir,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                check=False,
            )
            said.seek(0)
            text = said.read(_SAID_BYTES_MAX).decode(errors="replace")
        sys.stdout.write(text)
        sys.stdout.flush()
        return done.returncode, text.splitlines()

    def _variables(self, code: int, what: str, said: Sequence[str]) -> dict[str, str]:
        dump = self._read("")
        if not dump:
            last = error_summary(said)
            raise _Absent(f"{what} ended the shell with code {code} on this node{': ' + last if last else ''}")
        return read_variables(dump)

    def _read(self, ending: str) -> bytes:
        try:
            with open(self._dump + ending, "rb") as file:
                found = file.read(_SAID_BYTES_MAX)
            os.unlink(self._dump + ending)
        except FileNotFoundError:
            return b""
        return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
