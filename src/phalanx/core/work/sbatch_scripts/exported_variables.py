"""The variables of the submitter's shell that a job gets, where a job inherits them as under Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from phalanx.core.work.job_file.request import VALUE_BYTES_MAX

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables of this shell or machine, or set by Phalanx itself: not exported.
_NOT_EXPORTED: Final = re.compile(
    r"(PHALANX|SLURM|SBATCH|SSH|TMUX|DBUS|XDG|GPG|WINDOW|DISPLAY|XAUTHORITY|STY|BASH_FUNC)[A-Z0-9_]*"
    r"|PWD|OLDPWD|SHLVL|_|HOSTNAME|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK"
)
_ENVIRONMENT_BYTES_MAX: Final = 512 << 10  # half of the limit of a job


def select_variables(words: str, here: Mapping[str, str], *, nested: bool = False) -> tuple[dict[str, str], list[str]]:
    """Return the variables to send, and the names of those that are left out because they are too long or not UTF-8.

    Args:
        words: the value of sbatch's `--export`: ALL, NONE, or names and NAME=value.
        here: the submitter's environment.
        nested: ALL includes `SLURM_*`.
    """
    parts = [part.strip() for part in words.split(",") if part.strip()]
    found: dict[str, str] = {}
    if any(part.upper() == "ALL" for part in parts):
        found = {
            name: value
            for name, value in here.items()
            if _NAME.fullmatch(name) and (not _NOT_EXPORTED.fullmatch(name) or (nested and name.startswith("SLURM_")))
        }
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            found[name] = value
        elif name in here and name.upper() not in {"ALL", "NONE", "NIL"}:
            found[name] = here[name]
    left, kept, dropped = _ENVIRONMENT_BYTES_MAX, {}, []
    for name, value in sorted(found.items(), key=lambda pair: len(pair[1])):
        left -= len(name) + len(value.encode(errors="replace")) + 1
        if left < 0 or len(value) > VALUE_BYTES_MAX // 2 or any("\ud800" <= char <= "\udfff" for char in value):
            dropped.append(name)
        else:
            kept[name] = value
    return kept, dropped
