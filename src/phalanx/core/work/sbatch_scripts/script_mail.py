"""Maps `--mail-user` and `--mail-type` of an `#SBATCH` script to the key `notify`. Pure.

Source: sbatch(1) of Slurm 22.05. Several `--mail-type` lines of a script add up, as in Slurm. Types without a counterpart are noted by line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from phalanx.core.work.job_file.notify import TARGETS_MAX, NotifyEvent, is_mail_address
from phalanx.core.work.sbatch_scripts.sbatch import ParsedOption
from phalanx.core.work.sbatch_scripts.script_options import ScriptOptions

_BEFORE_LIMIT: Final = "no message is sent before the time limit; --signal warns the script"
_EVENTS: Final[Mapping[str, tuple[NotifyEvent, ...]]] = {
    "NONE": (),
    "BEGIN": (NotifyEvent.START,),
    "END": (NotifyEvent.END,),
    "FAIL": (NotifyEvent.FAILURE,),
    "REQUEUE": (NotifyEvent.REQUEUE,),
    "INVALID_DEPEND": (NotifyEvent.FAILURE,),
    "TIME_LIMIT": (NotifyEvent.FAILURE,),  # a job that reaches its limit has failed
    "ALL": (NotifyEvent.START, NotifyEvent.END, NotifyEvent.FAILURE, NotifyEvent.REQUEUE),
}
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "TIME_LIMIT_50": _BEFORE_LIMIT,
    "TIME_LIMIT_80": _BEFORE_LIMIT,
    "TIME_LIMIT_90": _BEFORE_LIMIT,
    "ARRAY_TASKS": "an array sends one message at its start, at its first failure and at its end",
    "STAGE_OUT": "burst buffers are not supported",
}


def script_mail(options: ScriptOptions) -> dict[str, list[str]] | None:
    """Return the value of `notify`; None if no mail is requested.

    Raises:
        BadFile: a type of mail that Slurm does not know.
    """
    wanted = _events(options)
    addresses = [word.strip() for word in options.text("mail-user").split(",") if word.strip()]
    for address in addresses:
        if not is_mail_address(address):
            _note(options, options.given["mail-user"], address, "it is not a mail address")
    usable = list(dict.fromkeys(address for address in addresses if is_mail_address(address)))
    for address in usable[TARGETS_MAX:]:
        _note(options, options.given["mail-user"], address, f"a job notifies at most {TARGETS_MAX} addresses")
    if wanted and not addresses:
        given = options.given["mail-type"]
        _note(options, given, given.value, "no mail is sent without an address: add --mail-user")
    if usable and not options.has("mail-type"):
        given = options.given["mail-user"]
        _note(options, given, given.value, "no mail is sent without --mail-type, as in Slurm")
    if not wanted or not usable:
        return None
    return {"to": usable[:TARGETS_MAX], "on": [event.value for event in NotifyEvent if event in wanted]}


def _events(options: ScriptOptions) -> set[NotifyEvent]:
    given = options.given.get("mail-type")
    found: set[NotifyEvent] = set()
    for one in () if given is None else (*given.earlier, given):
        for word in [word.strip().upper() for word in one.value.split(",") if word.strip()]:
            if word in _UNSUPPORTED:
                _note(options, one, word, _UNSUPPORTED[word])
            elif word in _EVENTS:
                found.update(_EVENTS[word])
            else:
                raise options.wrong("mail-type", f"{word} is not a type of mail", f"choose among {', '.join(_EVENTS)}")
    return found


def _note(options: ScriptOptions, given: ParsedOption, value: str, why: str) -> None:
    at = f"line {given.line}: " if given.line else ""
    options.notes.append(f"{at}--{given.name}={value} is not honoured: {why}")
