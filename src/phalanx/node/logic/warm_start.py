"""Decide which commands can start warm: those that a zygote can run exactly as a new interpreter would.

Only `python[3[.x]] [-u] script.py args...` and `python[3[.x]] [-u] -m module args...`, as words or as a bash line that needs no bash.
Pure; the supervisor calls it before each start. Any other command starts cold, which is always correct.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_INTERPRETER: Final = re.compile(r"python(3(\.\d+)?)?")
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# In such a line bash only splits at blanks: it has no quote, variable, glob, redirection, comment or second command.
_PLAIN_LINE: Final = re.compile(r"[A-Za-z0-9_@%+=:,./ \t-]*")
# Read when the interpreter starts, or when torch and its dependencies are imported; a zygote serves only ranks with equal values of all.
_PREFIXES: Final = (
    "PYTHON",
    "LD_",
    "LC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "NUMEXPR_",
    "NPY_",
    "ATEN_",
    "DNNL_",
    "ONEDNN_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "TRITON_",
    "MALLOC_",
    "GLIBC_",
    "TF_CPP_",
)
_NAMES: Final = frozenset({"LANG", "LANGUAGE", "TZ", "HOME", "PATH", "VIRTUAL_ENV"})
# Read at first use, after the fork; they differ between ranks or jobs.
_LATE_PREFIXES: Final = ("TORCHELASTIC_",)
_LATE_NAMES: Final = frozenset({"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "TF_CONFIG"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmCommand:
    """A parsed Python command; exactly one of `script` and `module` is given."""

    interpreter: str
    unbuffered: bool
    script: str | None
    module: str | None
    arguments: tuple[str, ...]


def parse_warm_command(command: tuple[str, ...] | str) -> WarmCommand | None:
    """Parse a command that can start warm; None if it must start cold."""
    if isinstance(command, str):
        if not _PLAIN_LINE.fullmatch(command):
            return None
        words = tuple(command.split())
    else:
        words = command
    if not words or not _INTERPRETER.fullmatch(words[0].rpartition("/")[2]):
        return None
    rest = words[1:]
    unbuffered = rest[:1] == ("-u",)
    if unbuffered:
        rest = rest[1:]
    if not rest:
        return None
    if rest[0] == "-m":
        if len(rest) < 2 or not _MODULE.fullmatch(rest[1]):
            return None
        return WarmCommand(
            interpreter=words[0], unbuffered=unbuffered, script=None, module=rest[1], arguments=tuple(rest[2:])
        )
    if rest[0].startswith("-") or not rest[0].endswith(".py"):
        return None
    return WarmCommand(
        interpreter=words[0], unbuffered=unbuffered, script=rest[0], module=None, arguments=tuple(rest[1:])
    )


def startup_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a rank's environment that is read before its script runs; its zygote must start with the same."""
    return {name: value for name, value in sorted(env.items()) if _read_early(name)}


def _read_early(name: str) -> bool:
    if name in _LATE_NAMES or name.startswith(_LATE_PREFIXES):
        return False
    return name in _NAMES or name.startswith(_PREFIXES)
