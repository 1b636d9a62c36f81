"""The command that runs after a job has ended: the key `on_end` of a job file.

on_end: ./report.sh                                a line, or several, for bash
on_end: {run: ./upload.sh, time: 1h}               with a time limit of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s

END_NAME: Final = "end-of-"  # of the job that runs it, with the id of the job that has ended
ON_END_LIMIT_S: Final = 600.0  # if the job gives none
ON_END_LIMIT_MAX_S: Final = 86_400.0
ENDED_VARIABLES: Final = "PHALANX_ENDED_"  # prefix of the variables that describe the job that has ended
_KEYS: Final = ("run", "time")
_HINT: Final = "write on_end: ./report.sh, or on_end: {run: ./report.sh, time: 1h}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnEnd:
    """A shell text for `bash -c`, and its time limit in seconds."""

    script: str
    time_limit_s: float = ON_END_LIMIT_S

    def __str__(self) -> str:
        """In one line for people."""
        return self.script.strip().splitlines()[0]


def parse_on_end(value: object) -> OnEnd:
    """Parse a text, or a mapping with `run` and `time`.

    Raises:
        BadRequest: an unknown key, no command, or a time outside 0 to 24 hours.
    """
    table = value if isinstance(value, Mapping) else {"run": value}
    for key in table:
        if key not in _KEYS:
            raise BadRequest(f"on_end: unknown key {str(key)[:40]!r}", hint=_HINT)
    script, time = table.get("run"), table.get("time")
    if not isinstance(script, str) or not script.strip():
        raise BadRequest("on_end: the command is missing", hint=_HINT)
    if "\0" in script or any("\ud800" <= char <= "\udfff" for char in script):
        raise BadRequest("on_end: the command is not UTF-8 text, or contains a NUL byte", hint=_HINT)
    if time is None:
        return OnEnd(script=script)
    limit_s = parse_duration_s(time, what="on_end: time")
    if not 0 < limit_s <= ON_END_LIMIT_MAX_S:
        raise BadRequest(f"on_end: time: {str(time)[:40]!r} is not between 0 and 24 hours", hint="write time: 1h")
    return OnEnd(script=script, time_limit_s=limit_s)
