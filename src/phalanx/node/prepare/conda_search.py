"""Finds a conda environment of this node by its name or folder, without starting conda where its folders tell enough."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_PROGRAMS: Final = ("conda", "mamba", "micromamba")
_PROGRAM_VARIABLES: Final = ("CONDA_EXE", "MAMBA_EXE")
_NAMES: Final = ("miniforge3", "miniconda3", "anaconda3", "mambaforge", "micromamba", ".micromamba", "conda")
_SYSTEM_FOLDERS: Final = ("/opt", "/usr/local")
_UNSET: Final = "***unset***"  # how conda writes that a variable was removed
_BASE: Final = "base"
_ASK_LIMIT_S: Final = 60.0  # conda is written in Python: a second, from a cold network file system many


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaPlaces:
    """What of conda is on this node.

    Attributes:
        program: conda, mamba or micromamba; "" if none was found.
        roots: folders of installations, which are the environments called base.
        environments: folder of each other environment, by name; of two with one name the first that conda would take.
    """

    program: str
    roots: tuple[str, ...]
    environments: Mapping[str, str]

    def folder_of(self, name: str) -> str | None:
        """The folder of the environment with this name; None without one."""
        if name == _BASE and self.roots:
            return self.roots[0]
        return self.environments.get(name)


def find_conda(variables: Mapping[str, str]) -> CondaPlaces:
    """Look for conda where its variables, PATH, its usual folders and its own list of environments lead."""
    home = variables.get("HOME", "/")
    named = (variables.get(key, "") for key in _PROGRAM_VARIABLES)
    found = (shutil.which(name, path=variables.get("PATH", os.defpath)) for name in _PROGRAMS)
    programs = [path for path in (*named, *found) if path and os.access(path, os.X_OK)]
    candidates = [
        variables.get("MAMBA_ROOT_PREFIX", ""),
        *(os.path.dirname(os.path.dirname(os.path.realpath(path))) for path in programs),
        *(os.path.join(parent, name) for parent in (home, *_SYSTEM_FOLDERS) for name in _NAMES),
    ]
    roots = tuple(dict.fromkeys(one for one in candidates if one and os.path.isdir(os.path.join(one, "conda-meta"))))
    if not programs:
        inside = (os.path.join(root, "bin", name) for root in roots for name in _PROGRAMS)
        programs = [path for path in inside if os.access(path, os.X_OK)]
    environments: dict[str, str] = {}
    for folder in _folders(variables, home, candidates):
        environments.setdefault(os.path.basename(folder), folder)
    return CondaPlaces(program=programs[0] if programs else "", roots=roots, environments=environments)


def ask_program(places: CondaPlaces, variables: Mapping[str, str]) -> Mapping[str, str]:
    """The environments that conda itself knows, by name: a .condarc can name folders that are found in no other way."""
    if not places.program:
        return {}
    try:
        answer = subprocess.run(
            [places.program, "env", "list", "--json"],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_LIMIT_S,
            check=True,
        )
        folders = [str(one) for one in json.loads(answer.stdout)["envs"]]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return {}
    return {os.path.basename(one): one for one in reversed(folders) if is_environment(one) and one not in places.roots}


def is_environment(folder: str) -> bool:
    """Whether a folder is a conda environment: conda keeps its list of packages there."""
    return os.path.isdir(os.path.join(folder, "conda-meta"))


def own_variables(prefix: str) -> dict[str, str]:
    """The variables that an environment keeps for its activation (`conda env config vars set`, packages); a broken file has none."""
    found: dict[str, str] = {}
    folder = os.path.join(prefix, "etc", "conda", "env_vars.d")
    packaged = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for path, key in [(os.path.join(folder, name), "") for name in packaged] + [
        (f"{prefix}/conda-meta/state", "env_vars")
    ]:
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            table = content[key] if key else content
            found |= {name: value for name, value in table.items() if isinstance(value, str) and value != _UNSET}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def activation_scripts(prefix: str) -> list[str]:
    """The scripts that packages of the environment run at its activation, in order."""
    folder = os.path.join(prefix, "etc", "conda", "activate.d")
    return (
        [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".sh")]
        if os.path.isdir(folder)
        else []
    )


def _folders(variables: Mapping[str, str], home: str, roots: list[str]) -> Iterator[str]:
    """The folders of all environments that can be found without conda, in conda's order."""
    listed = variables.get("CONDA_ENVS_PATH") or variables.get("CONDA_ENVS_DIRS") or ""
    parents = [part for part in listed.split(os.pathsep) if part]
    parents += [os.path.join(root, "envs") for root in roots if root] + [os.path.join(home, ".conda", "envs")]
    for parent in dict.fromkeys(map(os.path.expanduser, parents)):
        for name in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
            if is_environment(os.path.join(parent, name)):
                yield os.path.join(parent, name)
    try:
        with open(os.path.join(home, ".conda", "environments.txt"), encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file]
    except OSError:
        return
    yield from (line for line in lines if line and line not in roots and is_environment(line))
