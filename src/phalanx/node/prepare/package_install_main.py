"""Installs a job's packages into a virtual environment of this node: `python -I -m phalanx.node.prepare.package_install_main ORDER`.

Started by `requirements` inside the member's containment, so it is frozen, stopped and killed with it. Its output goes to the job's log, its
result into the answer file: {"name": environment, "source": folder for PYTHONPATH or ""} or {"why": text, "charge": bool}. ORDER is JSON: file, workdir, cache, argv, answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.requirements import LOCK_FILE, PROJECT_FILE
from phalanx.durable_files import replace_file
from phalanx.node.files.folder_cache import FolderCache
from phalanx.node.logic.requirements import (
    InvalidRequirements,
    PythonInterpreter,
    RequirementsList,
    activated,
    environment_name,
    error_summary,
    locked_sources,
    python_candidates,
    read_requirements,
)
from phalanx.node.processes.zygote import find_interpreter

_TAIL_LINES: Final = 40  # of an installer's output, in which the error is searched
_SCRIPT_BYTES_MAX: Final = 1 << 20  # a command of a package is a few lines of Python
_SHEBANG_MAX: Final = 127  # every Linux reads this much of a script's first line
_ASK_LIMIT_S: Final = 60.0  # an interpreter starts in 20 ms, from a cold network file system a few seconds
# Created by builds, or not source.
_NOT_HASHED: Final = frozenset({".git", "__pycache__", "build", "dist", ".venv", "venv"})
_ASK: Final = """
import json, sys, sysconfig
inner = sys.prefix != sys.base_prefix
seen = [p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))]
print(json.dumps({
    "path": sys.executable, "version": sys.version.split()[0], "abi": str(sysconfig.get_config_var("SOABI")),
    "platform": sysconfig.get_platform(), "parents": seen if inner else [], "scripts": sysconfig.get_path("scripts"),
}))
"""

_PYTHON_OF_UV: Final = PythonInterpreter(path="", version="", abi="", platform="", parents=(), scripts="")


class _MissingPrerequisite(Exception):
    """This node lacks a prerequisite that the job may expect; another node may have it."""


def main(arguments: Sequence[str]) -> int:
    """Write the answer; returns 0 if the environment is ready."""
    with open(arguments[0], encoding="utf-8") as file:
        order: dict[str, Any] = json.load(file)
    answer: dict[str, object]
    try:
        locked = os.path.basename(order["file"]) == LOCK_FILE
        answer = _install_lock(order) if locked else {"name": _install(order)}
    except (InvalidRequirements, BadRequest) as error:
        answer = {"why": str(error), "charge": True}
    except _MissingPrerequisite as error:
        answer = {"why": str(error), "charge": False}
    except OSError as error:
        answer = {"why": f"installing {order['file']} failed on this node: {error}", "charge": False}
    replace_file("", order["answer"], json.dumps(answer).encode())
    if "why" in answer:
        _print(str(answer["why"]))
    return 1 if "why" in answer else 0


def _install(order: dict[str, Any]) -> str:
    """The name of the ready environment; "" if the file lists nothing."""
    file, workdir = order["file"], order["workdir"]
    wanted = read_requirements(file, workdir=workdir, read=lambda path: _read(os.path.join(workdir, path)))
    if not wanted.installer_lines:
        return ""
    python = _ask_python(python_candidates(order["argv"]), workdir)
    contents = [(path, _digest(os.path.join(workdir, path), path, file)) for path in wanted.local_paths]
    name = environment_name(python, wanted, contents)
    return _provide(order, name, lambda venvs: _make(venvs, name, python, wanted, order))


def _install_lock(order: dict[str, Any]) -> dict[str, object]:
    """The answer for the environment of a uv project. Its own code is not in it, since that lies in the working directory and changes with each job."""
    file, workdir = order["file"], order["workdir"]
    folder = os.path.join(workdir, os.path.dirname(file))
    texts = {name: _read(os.path.join(folder, name)) for name in (LOCK_FILE, PROJECT_FILE, ".python-version")}
    for name in (LOCK_FILE, PROJECT_FILE):
        if texts[name] is None:
            raise InvalidRequirements(f"{os.path.join(os.path.dirname(file), name)}: no such file in {workdir}")
    folders, is_package = locked_sources(texts[LOCK_FILE] or "")
    uv = shutil.which("uv") or shutil.which("uv", path=os.path.expanduser("~/.local/bin"))
    if uv is None:
        raise _MissingPrerequisite(f"{file}: uv is not on this node; searched PATH and ~/.local/bin")
    # Not the project's own .venv, which --system leaves out. Without an interpreter `uv sync` may fetch one, as its settings allow.
    asked = [uv, "python", "find", "--system", "--project", folder]
    found = subprocess.run(asked, capture_output=True, text=True, errors="replace", check=False, cwd=folder).stdout
    python = _ask_python([found.strip()], workdir) if found.strip() else _PYTHON_OF_UV
    wanted = RequirementsList(
        source_lines=(LOCK_FILE, *(text or "" for text in texts.values())), installer_lines=(), local_paths=folders
    )
    contents = [(path, _digest(os.path.join(folder, path), path, file)) for path in folders]
    name = environment_name(python, wanted, contents)

    def sync(venvs: FolderCache) -> None:
        began_s = time.monotonic()
        variables = {**os.environ, "UV_PROJECT_ENVIRONMENT": venvs.clear(name)}
        command = [uv, "sync", "--frozen", "--no-editable", "--no-install-project", "--project", folder]
        command += ["--python", python.path] if python.path else []
        _print(f"{file}: installing with uv, as {name[:12]}")
        error = f"{file} could not be installed"
        _call(command, error, InvalidRequirements, variables=variables, cwd=folder)
        _finish(venvs, name, file, began_s)

    source = os.path.join(folder, "src")
    on_path = source if is_package and os.path.isdir(source) else ""
    return {"name": _provide(order, name, sync), "source": on_path}


def _provide(order: dict[str, Any], name: str, make: Callable[[FolderCache], None]) -> str:
    """Make the environment unless it is there, or wait for another job that makes it; returns its name."""
    file, venvs = order["file"], FolderCache(order["cache"])
    in_use = venvs.acquire(name)  # from here on no sweep of another job removes it
    try:
        if venvs.complete(name):
            _print(f"{file}: already installed on this node, as {name[:12]}")
            return name
        with venvs.creation_lock(name, wait=False) as mine:
            if mine:
                make(venvs)
                return name
        _print(f"{file}: another job is installing the same packages; waiting for it")
        with venvs.creation_lock(name, wait=True):
            if not venvs.complete(name):  # the other job failed or was stopped
                make(venvs)
        return name
    finally:
        os.close(in_use)


def _make(
    venvs: FolderCache, name: str, python: PythonInterpreter, wanted: RequirementsList, order: dict[str, Any]
) -> None:
    began_s = time.monotonic()
    path = venvs.clear(name)
    inner = ["--without-pip", *([] if python.parents else ["--system-site-packages"])]
    _call([python.path, "-I", "-m", "venv", *inner, path], "cannot create a virtual environment", _MissingPrerequisite)
    _link_parents(path, python)
    variables = activated(os.environ, path)
    tool = _installer(path, variables)
    listing = os.path.join(os.path.dirname(order["answer"]), "requirements.installed.txt")
    with open(listing, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(line + "\n" for line in wanted.installer_lines)
    _print(f"{order['file']}: installing with {tool[0]} for Python {python.version}, as {name[:12]}")
    error = f"{order['file']} could not be installed"
    _call([*tool[1], "-r", listing], error, InvalidRequirements, variables=variables, cwd=order["workdir"])
    _copy_commands(path, python)
    _finish(venvs, name, order["file"], began_s)


def _finish(venvs: FolderCache, name: str, file: str, began_s: float) -> None:
    venvs.mark_complete(name)
    _print(f"{file}: installed in {time.monotonic() - began_s:.1f} s")
    for gone in venvs.sweep():
        _print(f"removed the packages {gone[:12]}: least recently used, or incomplete")


def _installer(path: str, variables: dict[str, str]) -> tuple[str, list[str]]:
    """The installer and the start of its command: uv if installed, else pip of the node or of this Python."""
    python = os.path.join(path, "bin", "python")
    uv = shutil.which("uv", path=variables["PATH"])
    if uv is not None:
        return "uv", [uv, "pip", "install", "--python", python]
    pip = [python, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False, env=variables).returncode != 0:
        _call(
            [python, "-m", "ensurepip"],
            "neither uv nor pip is installed on this node",
            _MissingPrerequisite,
            variables=variables,
        )
    return "pip", [*pip, "install", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]


def _link_parents(path: str, python: PythonInterpreter) -> None:
    """Make the packages of the node's own environment (its torch) importable, after those of this environment."""
    if not python.parents:
        return
    library = next(os.scandir(os.path.join(path, "lib"))).path
    with open(os.path.join(library, "site-packages", "phalanx-node.pth"), "w", encoding="utf-8") as file:
        # addsitedir instead of a plain path, so that .pth files there are read: editable installs need them.
        file.writelines(f"import site; site.addsitedir({parent!r})\n" for parent in python.parents)


def _copy_commands(path: str, python: PythonInterpreter) -> None:
    """Copy the node's commands that are written in this Python (torchrun, accelerate), so that they use the environment's packages."""
    own = os.path.join(path, "bin")
    real = os.path.realpath(python.path)
    for entry in os.scandir(python.scripts) if os.path.isdir(python.scripts) else ():
        target = os.path.join(own, entry.name)
        if os.path.lexists(target) or not entry.is_file() or entry.stat().st_size > _SCRIPT_BYTES_MAX:
            continue
        with open(entry.path, "rb") as file:
            first, rest = file.readline(_SHEBANG_MAX + 1), file.read()
        words = first[2:].split() if first.startswith(b"#!") else []
        if len(words) == 1 and os.path.realpath(os.fsdecode(words[0])) == real:
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "wb") as file:
                file.write(_shebang(os.path.join(own, "python")) + rest)


def _shebang(python: str) -> bytes:
    if len(python) + 3 <= _SHEBANG_MAX:
        return os.fsencode(f"#!{python}\n")
    # As pip writes it: sh runs the line, and Python reads it as a string.
    return os.fsencode(f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n")


def _ask_python(names: Sequence[str], workdir: str) -> PythonInterpreter:
    for name in names:
        found = find_interpreter(name, env=os.environ, cwd=workdir)
        if found is None:
            continue
        try:
            asked = subprocess.run(
                [found, "-I", "-c", _ASK], capture_output=True, check=True, timeout=_ASK_LIMIT_S, cwd="/"
            )
            return PythonInterpreter(
                **{**json.loads(asked.stdout), "parents": tuple(json.loads(asked.stdout)["parents"])}
            )
        except (subprocess.SubprocessError, ValueError) as error:
            raise _MissingPrerequisite(f"{found} did not report its Python version: {error}") from error
    raise _MissingPrerequisite(f"no Python for the requirements; searched PATH={os.environ.get('PATH', '')}")


def _call(
    command: Sequence[str],
    message: str,
    kind: type[Exception],
    *,
    variables: dict[str, str] | None = None,
    cwd: str | None = None,
) -> None:
    """Run a command and forward its output.

    Raises:
        kind: it failed; contains its last lines.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    environment = dict(os.environ) if variables is None else variables
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=cwd, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip("\n"))
            sys.stdout.write(line)
            sys.stdout.flush()
    if process.returncode != 0:
        last = error_summary(tail)
        raise kind(
            f"{message}: {os.path.basename(command[0])} ended with code {process.returncode}{': ' + last if last else ''}"
        )


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _digest(path: str, name: str, named_in: str) -> str:
    """SHA-256 of a file, or of a folder's names and contents."""
    if not os.path.exists(path):
        raise InvalidRequirements(f"{name}: no such file or folder ({named_in} names it)")
    digest = hashlib.sha256()
    for file in [path] if os.path.isfile(path) else _files_below(path):
        digest.update(os.fsencode(os.path.relpath(file, path)) + b"\0")
        with open(file, "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _files_below(path: str) -> list[str]:
    found: list[str] = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if name not in _NOT_HASHED and not name.endswith(".egg-info"))
        found += [os.path.join(folder, name) for name in sorted(names) if os.path.isfile(os.path.join(folder, name))]
    return found


def _print(text: str) -> None:
    sys.stdout.write(f"phalanx: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
