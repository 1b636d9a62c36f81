"""Parses queue files (YAML 1.2, a tree of queues by name) into the records sent to the head. Errors name the line.

queues:
  research:
    quota: 32                     # GPUs; none: no quota of its own; {gpus: 32, cpus: 512, memory: 2TiB, matlab: 4} for more than GPUs
    borrow: 16                    # GPUs beyond its quota; all (default) or none, of every resource; {gpus: 16, cpus: none}
    lend: all                     # idle GPUs of its quota that others may use; all (default) or none, of every resource; {matlab: none}
    weight: 2                     # share relative to its siblings; default 1
    priority: 0                   # added to the priority of its jobs; default 0
    users: {gpus: 8, jobs: 4}     # limits of each user: GPUs in use, running jobs; cpus, memory and extras too
    budget: 1000 GPU-h per 30d
    idle: {after: 1h, action: release, grace: 10m, states: [idle, unoccupied], exempt: keep-gpus=yes}   # warn, notify, release, stop; or off
    alarms: {idle: 15m, low: off} # time of waste after which `phalanx waste` lists it
    burst: when wait > 2h and price < 40   # when its jobs order nodes that cost money; always, never
    min_stay: 2m                  # least time between two moves of a job that the scheduler decides
    fair: users                   # of its jobs, those of users who used less lately go first; jobs: by jobs alone
    half_life: 7d                 # in which use halves for the fair share; only for a queue at the top
    open: true                    # unchanged if the key is missing
    queues:
      nlp: {quota: 16}
      vision: {quota: 8, weight: 3}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import format_duration, parse_duration_s, parse_memory_bytes
from phalanx.core.work.burst_rule import parse_burst_rule
from phalanx.core.work.extras import COUNT_MAX, check_extra_name, parse_amount
from phalanx.core.work.nearest_match import nearest_match
from phalanx.user_files.waste_keys import alarm_settings, alarms_text, idle_settings, idle_text, seconds_text
from phalanx.user_files.yaml_document import FileKind, YamlValue, parse_yaml

if TYPE_CHECKING:
    from phalanx.wire.api.queues import QueueSettings

FILE_BYTES_MAX: Final = 256 << 10  # the same as for a job file
QUEUE_FILE: Final = FileKind(
    name="queue file",
    example="write queues: and the tree below it",
    bytes_max=FILE_BYTES_MAX,
    depth_max=22,  # two for each level of queues; the head allows eight levels
    events_max=20_000,  # more than a thousand queues with all their keys; takes the scanner a second
)
_KEYS: Final = (
    "quota",
    "borrow",
    "lend",
    "weight",
    "priority",
    "users",
    "budget",
    "idle",
    "alarms",
    "burst",
    "min_stay",
    "fair",
    "half_life",
    "open",
    "queues",
)
_COUNTED: Final = ("gpus", "jobs", "cpus")
_OWN_AMOUNTS: Final = (*_COUNTED, "memory")
# Names of the same keys in Kueue, Slurm and YARN, to suggest the right key.
_SYNONYMS: Final = {
    **dict.fromkeys(("nominalquota", "capacity", "gpus"), "quota"),
    **dict.fromkeys(("fairshare", "shares"), "weight"),
    **dict.fromkeys(("children", "parent"), "queues"),
    "borrowinglimit": "borrow",
    "lendinglimit": "lend",
    "user": "users",
}
_WHOLE: Final = re.compile(r"[-+]?[0-9]{1,12}")
_NUMBER: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")
_BUDGET: Final = re.compile(
    r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*gpu-?h(?:ours?)?(?:\s+(?:per|/)\s*(\S+))?", re.IGNORECASE
)
_FLAGS: Final = {"true": True, "false": False}
_FAIR_WORDS: Final = {True: "users", False: "jobs"}


def parse_queue_file(text: str, *, path: str) -> list[QueueSettings]:
    """Return the queues of a text; `path` is for messages.

    Raises:
        BadFile: it is not YAML, or has a wrong key or value; the message names the line.
    """
    return queues_of_document(parse_yaml(text, QUEUE_FILE, path=path))


def queues_of_document(root: YamlValue) -> list[QueueSettings]:
    """Return the queues of a document, each after its parent.

    Raises:
        BadFile: a key or value is wrong.
    """
    return list(_level(root.mapping("queue file", ("queues",), _SYNONYMS)["queues"], None, {}))


def queue_file_text(queues: Sequence[QueueSettings]) -> str:
    """Return a queue file that describes these queues exactly; `parse_queue_file` reads it. Closed queues say so, open ones nothing."""
    below: dict[str | None, list[QueueSettings]] = {}
    for queue in sorted(queues, key=lambda one: one.id):
        below.setdefault(queue.parent, []).append(queue)
    lines = ["queues:"]
    pending = [(queue, 1) for queue in reversed(below.get(None, []))]
    while pending:
        queue, depth = pending.pop()
        own = [f"{key}: {value}" for key, value in _own_terms(queue).items() if value]
        inside = below.get(queue.id, [])
        lines.append(f"{'  ' * (2 * depth - 1)}{queue.id}:{'' if own or inside else ' {}'}")
        lines += [f"{'  ' * (2 * depth)}{line}" for line in own]
        if inside:
            lines.append(f"{'  ' * (2 * depth)}queues:")
        pending += [(child, depth + 1) for child in reversed(inside)]
    return "\n".join(lines) + "\n"


def _own_terms(queue: QueueSettings) -> dict[str, str]:
    """Return the keys of one queue; "" for those with their default."""
    users = {"jobs": queue.jobs_per_user, **queue.other_per_user}
    budget = queue.budget_gpu_h
    return {
        "quota": _terms_text(queue.quota_gpus, queue.other_quotas),
        "borrow": _terms_text(queue.borrow_gpus, queue.other_borrow),
        "lend": _terms_text(queue.lend_gpus, queue.other_lend),
        "weight": "" if queue.weight == 1.0 else _decimal(queue.weight),
        "priority": str(queue.priority) if queue.priority else "",
        "users": _amounts_text({"gpus": queue.gpus_per_user, **users}),
        "budget": "" if budget is None else f"{_decimal(budget)} GPU-h per {seconds_text(queue.budget_period_s)}",
        "idle": "" if queue.idle is None else idle_text(queue.idle),
        "alarms": alarms_text(queue.alarms),
        "burst": queue.burst or "",
        "min_stay": "" if queue.min_stay_s is None else seconds_text(queue.min_stay_s),
        "fair": "" if queue.fair_users is None else _FAIR_WORDS[queue.fair_users],
        "half_life": "" if queue.half_life_s is None else seconds_text(queue.half_life_s),
        "open": "false" if queue.open is False else "",
    }


def _terms_text(gpus: int | None, others: Mapping[str, int]) -> str:
    if others:
        return _amounts_text({"gpus": gpus, **others})
    return "" if gpus is None else str(gpus)


def _amounts_text(amounts: Mapping[str, int | None]) -> str:
    given = [f"{name}: {_amount_text(name, amount)}" for name, amount in amounts.items() if amount is not None]
    return f"{{{', '.join(given)}}}" if given else ""


def _amount_text(name: str, amount: int) -> str:
    """Return an amount exactly as it is written: memory, and extras past the largest count, with a unit."""
    if name == "memory" or (amount > COUNT_MAX and name not in _COUNTED):
        for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
            if amount % size == 0:
                return f"{amount // size}{unit}"
        whole, rest = divmod(amount, 1024)
        return f"{whole}.{-(-rest * 1_000_000_000 // 1024):09d}KiB"
    return str(amount)


def _decimal(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _level(level: YamlValue, parent: str | None, lines: dict[str, int]) -> Iterator[QueueSettings]:
    """Yield the queues of one level and below. `lines`: of each queue read so far."""
    for name, queue in level.mapping("queues").items():
        if name in lines:
            raise queue.error(
                f"queue {name} is defined twice, here and on line {lines[name]}",
                "names must be unique in the whole tree",
            )
        lines[name] = queue.line
        inside = queue.mapping(name, _KEYS, _SYNONYMS)
        yield _queue(name, parent, inside)
        if "queues" in inside:
            yield from _level(inside["queues"], name, lines)


def _queue(name: str, parent: str | None, inside: Mapping[str, YamlValue]) -> QueueSettings:
    from phalanx.wire.api.queues import QueueSettings

    found: dict[str, Any] = {"id": name, "parent": parent}
    for key, value in inside.items():
        match key:
            case "quota":
                found |= _terms("quota_gpus", "other_quotas", key, value, words={"none": None})
            case "borrow" | "lend":
                found |= _terms(f"{key}_gpus", f"other_{key}", key, value, words={"all": None, "none": 0})
            case "weight":
                found["weight"] = _number(key, value)
            case "priority":
                found["priority"] = _gpus(key, value, words={}, what="a whole number")
            case "users":
                found |= _users(value)
            case "budget":
                found |= _budget(value)
            case "idle":
                found["idle"] = idle_settings(value)
            case "alarms":
                found["alarms"] = alarm_settings(value)
            case "burst":
                found["burst"] = _burst(value)
            case "min_stay":
                found["min_stay_s"] = _duration(key, value)
            case "fair":
                found["fair_users"] = _fair(value)
            case "half_life":
                found["half_life_s"] = _duration(key, value)
            case "open":
                found["open"] = _flag(value)
            case _:  # `queues`: handled by _level
                pass
    for key in ("borrow", "lend"):
        if key in inside and inside[key].content == "none":  # of every resource of its quota, not of GPUs alone
            found[f"other_{key}"] = dict.fromkeys(found.get("other_quotas", ()), 0)
    return QueueSettings(**found)


def _terms(
    gpus_field: str, others_field: str, key: str, value: YamlValue, *, words: Mapping[str, int | None]
) -> dict[str, Any]:
    """Read a number of GPUs, or amounts by name."""
    if not isinstance(value.content, dict):
        return {gpus_field: _gpus(key, value, words=words)}
    amounts = _amounts(key, value, words)
    gpus = amounts.pop("gpus", None)
    return {gpus_field: gpus, others_field: {name: amount for name, amount in amounts.items() if amount is not None}}


def _users(users: YamlValue) -> dict[str, Any]:
    amounts = _amounts("users", users, {"all": None}, jobs=True)
    found: dict[str, Any] = {f"{name}_per_user": amounts.pop(name) for name in ("gpus", "jobs") if name in amounts}
    return {**found, "other_per_user": {name: amount for name, amount in amounts.items() if amount is not None}}


def _amounts(
    key: str, value: YamlValue, words: Mapping[str, int | None], *, jobs: bool = False
) -> dict[str, int | None]:
    """Read amounts of resources by name; the words stand for no limit (None) or 0."""
    found: dict[str, int | None] = {}
    for name, amount in value.mapping(key).items():
        what = f"{key}: {name}"
        if name in ("gpus", "cpus") or (jobs and name == "jobs"):
            kind = {"gpus": "GPUs", "cpus": "CPUs"}.get(name, name)
            found[name] = _gpus(what, amount, words=words, what=f"a number of {kind}")
        else:
            found[name] = _other_amount(key, name, amount, words)
    return found


def _other_amount(key: str, name: str, value: YamlValue, words: Mapping[str, int | None]) -> int | None:
    """Read an amount of memory, or of an extra."""
    text = value.text(f"{key}: {name}").strip()
    try:
        if name != "memory":
            near = nearest_match(name, _OWN_AMOUNTS)
            if near:
                raise BadRequest(f"unknown key {name!r}", hint=f"did you mean {near!r}?")
            check_extra_name(name, key=key)
        if text in words:
            return words[text]
        if name == "memory":
            return parse_memory_bytes(text, what=f"{key}: memory")
        return parse_amount(text, f"{key}: {name}", least=0)
    except BadRequest as error:
        raise value.error(error.message, error.hint) from None


def _budget(value: YamlValue) -> dict[str, float]:
    text = value.text("budget").strip()
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise value.error(f"budget: {text!r} is not a budget", "write 1000 GPU-h per 30d")
    found = {"budget_gpu_h": float(match[1])}
    if match[2]:
        try:
            found["budget_period_s"] = parse_duration_s(match[2], what="budget")
        except BadRequest as error:
            raise value.error(error.message, error.hint) from None
    return found


def _burst(value: YamlValue) -> str:
    try:
        return str(parse_burst_rule(value.text("burst")))
    except BadRequest as error:
        raise value.error(error.message, error.hint) from None


def _duration(key: str, value: YamlValue) -> float:
    try:
        return parse_duration_s(value.text(key), what=key)
    except BadRequest as error:
        raise value.error(error.message, error.hint) from None


def _gpus(key: str, value: YamlValue, *, words: Mapping[str, int | None], what: str = "a number of GPUs") -> int | None:
    text = value.text(key).strip()
    if text in words:
        return words[text]
    if not _WHOLE.fullmatch(text):
        others = "".join(f" or {word}" for word in words)
        raise value.error(f"{key}: {text!r} is not {what}", f"a whole number{others}")
    return int(text)


def _number(key: str, value: YamlValue) -> float:
    text = value.text(key).strip()
    if not _NUMBER.fullmatch(text):
        raise value.error(f"{key}: {text!r} is not a number", "write a number above 0; the default is 1")
    return float(text)


def _fair(value: YamlValue) -> bool:
    text = value.text("fair").strip().lower()
    for between_users, word in _FAIR_WORDS.items():
        if text == word:
            return between_users
    raise value.error(
        f"fair: {text!r} is neither users nor jobs", "users: who used less lately goes first; jobs: by jobs alone"
    )


def _flag(value: YamlValue) -> bool:
    text = value.text("open").strip()
    if text.lower() not in _FLAGS:
        raise value.error(f"open: {text!r} is neither true nor false")
    return _FLAGS[text.lower()]


def format_budget(gpu_h: float, period_s: float) -> str:
    """Format a budget as it is written in the file."""
    return f"{gpu_h:g} GPU-h per {_format_period(period_s)}"


def _format_period(period_s: float) -> str:
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h")):
        if period_s % unit_s == 0.0:
            return f"{period_s / unit_s:g}{unit}"
    return format_duration(period_s)
