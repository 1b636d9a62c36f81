"""Maps the options of a script that say when, in which order and where it runs, and which files it writes. Pure."""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.work.array import parse_array
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.sbatch_scripts.script_options import ScriptOptions

_TIME: Final = re.compile(r"(?:([0-9]{1,5})-)?([0-9]{1,7})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_SIGNAL: Final = re.compile(r"(?:([BR]{1,2}):)?([A-Za-z0-9]{1,12})(?:@([0-9]{1,5}))?")
_RELATIVE: Final = re.compile(r"now(?:\+([0-9]{1,9})([a-z]*))?", re.IGNORECASE)
_SIGNALS: Final = {
    "HUP": 1,
    "INT": 2,
    "QUIT": 3,
    "ABRT": 6,
    "KILL": 9,
    "USR1": 10,
    "USR2": 12,
    "ALRM": 14,
    "TERM": 15,
    "CONT": 18,
    "STOP": 19,
    "TSTP": 20,
    "URG": 23,
    "XCPU": 24,
}
# Sbatch(1): "If a sig_num is specified without any sig_time, the default time will be 60 seconds."
_SIGNAL_LEAD_S: Final = 60
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "0", "-1")
_UNITS_S: Final = {
    "": 1,
    "seconds": 1,
    "second": 1,
    "minutes": 60,
    "minute": 60,
    "hours": 3600,
    "hour": 3600,
    "days": 86400,
    "day": 86400,
    "weeks": 604800,
    "week": 604800,
}
DEFAULT_OUTPUT: Final = "slurm-%j.out"
DEFAULT_ARRAY_OUTPUT: Final = "slurm-%A_%a.out"


def parse_slurm_seconds(text: str) -> int | None:
    """Seconds of Slurm's times: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. None if invalid."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part) if part is not None else None for part in match.groups())
    assert first is not None
    if days is not None:
        return days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return first * 3600 + (second or 0) * 60 + third
    return first * 60 + (second or 0)


def script_time(options: ScriptOptions) -> str | None:
    """The time limit as a duration; None for none."""
    text = options.text("time")
    if not text or text.upper() in _UNLIMITED:
        return None
    seconds = parse_slurm_seconds(text)
    if not seconds:
        raise options.wrong("time", "is not a time in Slurm's format", "minutes, HH:MM:SS or D-HH:MM:SS")
    return f"{seconds}s"


def script_array(options: ScriptOptions) -> str | None:
    """The array, as Slurm writes it; None for none."""
    text = options.text("array")
    if not text:
        return None
    try:
        parse_array(text)
    except BadRequest as error:
        raise options.wrong("array", error.message.removeprefix("array: "), error.hint) from None
    return text


def script_dependency(options: ScriptOptions) -> list[str] | None:
    """All must hold (commas). Slurm's `?`, where one suffices, and `after` are not supported."""
    text = options.text("dependency")
    if not text:
        return None
    if "?" in text:
        raise options.wrong(
            "dependency",
            "one of several (?) is not supported",
            "separate dependencies by commas; all must hold",
        )
    words = []
    for part in text.split(","):
        kind, *ids = part.strip().split(":")
        words.append(":".join([kind, *(re.sub(r"_\*$", "", one) for one in ids)]))
    try:
        parse_dependencies(words)
    except BadRequest as error:
        raise options.wrong("dependency", error.message.removeprefix("depends_on: "), error.hint) from None
    return words


def script_begin(options: ScriptOptions) -> str | None:
    """Slurm's `now+1hour`, `16:00`, `2026-12-01T08:00`; the command line resolves local times."""
    text = options.text("begin")
    match = _RELATIVE.fullmatch(text)
    if match is None:
        if text.lower() in {"midnight", "noon", "fika", "teatime", "today", "tomorrow"}:
            raise options.wrong("begin", "words for times are not supported", "write 16:00 or 2026-12-01T08:00")
        return text or None
    unit = (match[2] or "").lower()
    if unit not in _UNITS_S:
        raise options.wrong("begin", f"{unit!r} is not a unit of time", "now+2hours")
    return f"{int(match[1] or 0) * _UNITS_S[unit]}s" if match[1] else None


def script_signal(options: ScriptOptions) -> str:
    """`target:number:seconds before the end` of `[B:]SIG[@TIME]`; the target is `batch` or `steps`."""
    text = options.text("signal")
    if not text:
        return ""
    match = _SIGNAL.fullmatch(text)
    word = "" if match is None else match[2].upper().removeprefix("SIG")
    if match is None or not (word in _SIGNALS or (word.isdecimal() and 0 < int(word) < 65)):
        raise options.wrong("signal", "is not [B:]SIGNAL[@SECONDS]", "--signal=B:USR1@120")
    if not options.text("time"):
        options.notes.append(
            "--signal has no effect: it is sent before the end of the time limit, and the job has none"
        )
    number = int(word) if word.isdecimal() else _SIGNALS[word]
    return f"{'batch' if 'B' in (match[1] or '') else 'steps'}:{number}:{match[3] or _SIGNAL_LEAD_S}"


def script_files(options: ScriptOptions) -> dict[str, str]:
    """The patterns of the output files, and how they are opened."""
    default = DEFAULT_ARRAY_OUTPUT if options.text("array") else DEFAULT_OUTPUT
    mode = options.text("open-mode") or "truncate"
    if mode not in {"append", "truncate"}:
        raise options.wrong("open-mode", "is neither append nor truncate")
    return {"output": options.text("output") or default, "error": options.text("error"), "open_mode": mode}


def script_hosts(options: ScriptOptions, option: str) -> str | None:
    """The node names of `nodelist` or `exclude`, without Slurm's brackets; None for none."""
    text = options.text(option)
    if not text:
        return None
    try:
        return ",".join(expand_hostlist(text))
    except BadRequest as error:
        raise options.wrong(option, error.message, error.hint) from None


def script_priority(options: ScriptOptions) -> int | None:
    """A positive --nice lowers the priority, a negative one raises it; Slurm's scale is a thousand times ours."""
    if not options.has("nice"):
        return None
    text = options.text("nice") or "100"
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        raise options.wrong("nice", "is not a whole number")
    return max(-10_000, min(10_000, -int(text)))
