"""What an environment of a job changes in the variables of its processes, and how a node says that it lacks one. Pure: callers read files and run shells."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from phalanx.core.work.nearest_match import suggestion
from phalanx.node.logic.requirements import activated
from phalanx.node.logic.variables.environment import is_set_by_phalanx

_OF_THE_SHELL: Final = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
_LISTED_MAX: Final = 8  # names in one line of `phalanx show`
_SAID_LINES: Final = 4  # of what a module prints that cannot be loaded
_SAID_CHARACTERS_MAX: Final = 400
_LISTED: Final = re.compile(r"(\S*?[^\s:/])(?:\([^)]*\))?(?: <[^>]*>)?")  # with the marks of `default` and `loaded`
NO_MODULE_COMMAND: Final = 93
MODULE_FAILED: Final = 94

# Arguments: the file for the variables, then the modules. A login shell's start files define `module`; /etc/profile itself is left out, since
# Debian's resets PATH. 93 and 94 are chosen so that no common program ends with them.
LOAD_MODULES: Final = f"""
dump=$1; shift
if ! type module >/dev/null 2>&1 && [ -r "${{MODULESHOME:-}}/init/bash" ]; then . "$MODULESHOME/init/bash"; fi
if ! type module >/dev/null 2>&1; then
  for start in /etc/profile.d/*.sh; do if [ -r "$start" ]; then . "$start"; fi; done
fi
for home in /usr/share/modules /usr/share/Modules /usr/local/Modules /usr/share/lmod/lmod /opt/apps/lmod/lmod; do
  if ! type module >/dev/null 2>&1 && [ -r "$home/init/bash" ]; then . "$home/init/bash"; fi
done
type module >/dev/null 2>&1 || exit {NO_MODULE_COMMAND}
for name; do
  module load "$name" >"$dump.load" 2>&1 && loaded=1 || loaded=0
  cat "$dump.load"
  if [ $loaded = 0 ]; then
    printf %s "$name" >"$dump.failed"
    module -t avail >"$dump.avail" 2>&1 </dev/null
    exit {MODULE_FAILED}
  fi
done
/usr/bin/env -0 >"$dump"
"""
# Arguments: the file for the variables, then the scripts that the environment brings for its activation.
RUN_ACTIVATION: Final = """
dump=$1; shift
for script; do printf %s "$script" >"$dump.at"; . "$script"; done
/usr/bin/env -0 >"$dump"
"""


def read_variables(dump: bytes) -> dict[str, str]:
    """The variables that `env -0` wrote."""
    pairs = (entry.partition(b"=") for entry in dump.split(b"\0") if b"=" in entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def changes_between(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that an environment sets, and with None those that it removes. What Phalanx sets for every task stays as it is."""
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return {name: after.get(name) for name in sorted(names - _OF_THE_SHELL) if not is_set_by_phalanx(name)}


def with_changes(variables: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The variables with the changes of an environment."""
    found = {name: value for name, value in variables.items() if name not in changes}
    return found | {name: value for name, value in changes.items() if value is not None}


def conda_variables(
    variables: Mapping[str, str], prefix: str, name: str, own: Mapping[str, str], program: str
) -> dict[str, str]:
    """The variables as `conda activate` sets them, before the scripts that the environment brings.

    Args:
        variables: before; another active environment is left.
        prefix: folder of the environment.
        name: as the user knows it; the folder for one without a name.
        own: variables that the environment itself keeps (`conda env config vars set`).
        program: conda or one that takes its place; "" if none was found.

    Source: conda/activate.py, `build_activate`.
    """
    left = {f"{variables[key].rstrip('/')}/bin" for key in ("CONDA_PREFIX", "VIRTUAL_ENV") if variables.get(key)}
    path = [part for part in variables.get("PATH", os.path.defpath).split(os.pathsep) if part not in left]
    found = {
        **variables,
        "PATH": os.pathsep.join([f"{prefix}/bin", *path]),
        "CONDA_PREFIX": prefix,
        "CONDA_DEFAULT_ENV": name,
        "CONDA_SHLVL": "1",
        "CONDA_PROMPT_MODIFIER": f"({name}) ",
        **own,
    }
    if program:
        found["CONDA_EXE"] = program
    for gone in ("PYTHONHOME", "VIRTUAL_ENV"):
        found.pop(gone, None)
    return found


def venv_variables(variables: Mapping[str, str], venv: str) -> dict[str, str]:
    """The variables as the virtual environment's `activate` sets them; another active one is left."""
    left = variables.get("VIRTUAL_ENV", "").rstrip("/")
    path = variables.get("PATH", os.path.defpath).split(os.pathsep)
    kept = os.pathsep.join(part for part in path if not left or part != f"{left}/bin")
    return activated({**variables, "PATH": kept}, venv)


def venv_setting(text: str, key: str) -> str:
    """A setting of a pyvenv.cfg; "" without it."""
    pairs = (line.partition("=") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip().lower() == key), "")


def modules_listed(text: str) -> list[str]:
    """The modules in the output of `module -t avail`, of Environment Modules or Lmod."""
    return [found[1] for line in text.splitlines() if (found := _LISTED.fullmatch(line.strip()))]


def absent_module(name: str, listed: Sequence[str], said: str) -> str:
    """Why a module could not be loaded. `said`: what the module command printed."""
    if name in listed or any(one.startswith(f"{name}/") for one in listed):
        why = " · ".join([line.strip() for line in said.splitlines() if line.strip()][:_SAID_LINES])[
            :_SAID_CHARACTERS_MAX
        ]
        return f"module {name} could not be loaded on this node{': ' + why if why else ''}"
    near = suggestion(name, listed) or _near_family(name, listed)
    return f"no module {name} on this node; {near or 'found: ' + listing(listed)}"


def absent_environment(what: str, word: str, known: Iterable[str], otherwise: str) -> str:
    """Why a conda or virtual environment is not used: it does not exist. `known`: the names that exist nearby."""
    names = sorted(set(known))
    near = suggestion(word, names)
    return f"{what} on this node; {near or ('found: ' + listing(names) if names else otherwise)}"


def listing(names: Sequence[str]) -> str:
    """A list short enough for one line."""
    shown = ", ".join(names[:_LISTED_MAX]) or "none"
    return f"{shown} and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else shown


def _near_family(name: str, listed: Sequence[str]) -> str:
    """Other versions of the same module."""
    family = [one for one in listed if one.partition("/")[0] == name.partition("/")[0]]
    return f"other versions: {listing(family)}" if family else ""
