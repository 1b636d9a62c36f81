"""Starts a program of Phalanx from a copied folder, by the Python of an image that knows nothing of Phalanx; see `supervisor_files`.

It runs on Python 3.6 and newer: one that is too old or too new must get as far as the line that says so. It imports nothing of Phalanx, and
runs the program in its own process: a second start of Python would cost each pod 60 ms.
"""

import json
import os
import runpy
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from typing import List  # noqa: UP035  # list[...] is new in 3.9

FACTS_FILE = "supervisor.json"
UNFIT_IMAGE = 78  # exit code: this image cannot run the supervisor; the line says why (sysexits' EX_CONFIG)


def find_problem(here: str) -> str:
    """Return why this image cannot run the copied program; empty if it can."""
    with open(os.path.join(here, FACTS_FILE), encoding="ascii") as file:
        facts = json.load(file)
    version = list(sys.version_info[:2])
    if version != facts["python"]:
        wanted = ".".join(map(str, facts["python"]))
        return f"this image has Python {version[0]}.{version[1]} as python3, and the supervisor needs {wanted}"
    if facts["suffix"] not in EXTENSION_SUFFIXES:
        return f"its Python loads {EXTENSION_SUFFIXES[0]}, not {facts['suffix']}: the supervisor needs glibc and the same processor"
    sys.path.insert(0, _site(here, version))
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        return f"this image cannot load the supervisor: {' '.join(str(error).split())}"
    return ""


def make_environment(here: str) -> str:
    """Make the folder a virtual environment of this Python; return its program. The variables of ranks stay as the image has them."""
    python = os.path.realpath(sys.executable)
    folder = os.path.join(here, "bin")
    program = os.path.join(folder, "python")
    os.makedirs(folder, exist_ok=True)
    if not os.path.islink(program):
        os.symlink(python, program)
    with open(os.path.join(here, "pyvenv.cfg"), "w", encoding="utf-8") as file:
        file.write(f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n")
    return program


def use_environment(here: str, program: str) -> None:
    """Let this process import what the environment's own program would, and start that one for further programs."""
    sys.executable = program
    site = _site(here, list(sys.version_info[:2]))
    foreign = ("site-packages", "dist-packages")
    sys.path[:] = [
        site,
        *(path for path in sys.path if path not in ("", here, site) and os.path.basename(path) not in foreign),
    ]


def _site(here: str, version: List[int]) -> str:  # noqa: UP006  # as above
    return os.path.join(here, "lib", f"python{version[0]}.{version[1]}", "site-packages")


def main() -> int:
    """Run the module of the command line, or say why not."""
    here, program = os.path.dirname(os.path.abspath(__file__)), ""
    try:
        problem = find_problem(here)
        if not problem:
            program = make_environment(here)
    except OSError as error:
        problem = f"cannot prepare {here}: {error}"
    if problem:
        sys.stderr.write(f"phalanx: {problem}\n")
        return UNFIT_IMAGE
    use_environment(here, program)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
