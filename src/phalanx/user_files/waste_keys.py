"""The keys `idle` and `alarms` of a queue file: what happens to jobs that waste GPUs, and after which time waste is an alarm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.usage.waste_terms import OF_QUEUES, POLICY_STATES, IdleAction, WasteKind
from phalanx.user_files.yaml_document import YamlValue

if TYPE_CHECKING:
    from phalanx.wire.api.queues import IdleSettings

_KEYS: Final = ("action", "after", "grace", "states", "exempt")
# Names of the same keys in dstack, SkyPilot and Kubernetes, to suggest the right key.
_SYNONYMS: Final = {
    **dict.fromkeys(("time_window", "idle_minutes", "idle_duration", "timeout"), "after"),
    **dict.fromkeys(("policy", "down"), "action"),
    "gracePeriodSeconds": "grace",
}
_OFF: Final = ("off", "false")  # YAML 1.1 reads off as false, and so do many editors


def idle_settings(value: YamlValue) -> IdleSettings:
    """Read an idle policy: keys and values, or `off`.

    Raises:
        BadFile: a wrong key or value.
    """
    from phalanx.wire.api.queues import IdleSettings

    if isinstance(value.content, str) and value.content.strip().lower() in _OFF:
        return IdleSettings(action=IdleAction.OFF)
    inside = value.mapping("idle", _KEYS, _SYNONYMS)
    missing = next((key for key in ("action", "after") if key not in inside), None)
    if missing is not None:
        raise value.error(f"idle: {missing} is missing", "write idle: {after: 1h, action: release}")
    found: dict[str, Any] = {
        "action": IdleAction(_word("idle: action", inside["action"], [one.value for one in IdleAction])),
        "after_s": _time("idle: after", inside["after"]),
    }
    if "grace" in inside:
        found["grace_s"] = _time("idle: grace", inside["grace"])
    if "states" in inside:
        states = inside["states"].content
        given = states if isinstance(states, list) else [inside["states"]]
        found["states"] = tuple(WasteKind(_word("idle: states", one, POLICY_STATES)) for one in given)
    if "exempt" in inside:
        found["exempt"] = _label(inside["exempt"])
    return IdleSettings(**found)


def alarm_settings(value: YamlValue) -> dict[WasteKind, float | None]:
    """Read the thresholds of alarms.

    Raises:
        BadFile: a wrong key or value.
    """
    found: dict[WasteKind, float | None] = {}
    for name, one in value.mapping("alarms").items():
        if name not in OF_QUEUES:
            raise one.error(
                f"alarms: {name[:40]!r} is no waste of jobs", suggestion(name, OF_QUEUES, _one_of(OF_QUEUES))
            )
        off = isinstance(one.content, str) and one.content.strip().lower() in _OFF
        found[WasteKind(name)] = None if off else _time(f"alarms: {name}", one)
    return found


def idle_text(idle: IdleSettings) -> str:
    """Return an idle policy as a file has it."""
    if idle.action is IdleAction.OFF:
        return "off"
    keys = {
        "action": idle.action.value,
        "after": seconds_text(idle.after_s),
        "grace": "" if idle.grace_s is None else seconds_text(idle.grace_s),
        "states": f"[{', '.join(idle.states)}]",
        "exempt": f"'{idle.exempt.replace(chr(39), chr(39) * 2)}'" if idle.exempt else "",
    }
    return f"{{{', '.join(f'{key}: {value}' for key, value in keys.items() if value)}}}"


def alarms_text(alarms: Mapping[WasteKind, float | None]) -> str:
    """Return thresholds of alarms as a file has them; "" for none."""
    given = [f"{kind}: {'off' if after_s is None else seconds_text(after_s)}" for kind, after_s in alarms.items()]
    return f"{{{', '.join(given)}}}" if given else ""


def seconds_text(seconds: float) -> str:
    """Return a time exactly, in the largest unit that divides it."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds and seconds % size == 0.0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def _word(key: str, value: YamlValue, known: tuple[str, ...] | list[str]) -> str:
    word = value.text(key).strip().lower()
    word = "off" if word == "false" else word
    if word not in known:
        raise value.error(f"{key}: {word[:40]!r} is not known", suggestion(word, known, _one_of(known)))
    return word


def _one_of(known: tuple[str, ...] | list[str]) -> str:
    return f"one of {', '.join(known)}"


def _time(key: str, value: YamlValue) -> float:
    try:
        return parse_duration_s(value.text(key).strip(), what=key)
    except BadRequest as error:
        raise value.error(error.message, error.hint) from None


def _label(value: YamlValue) -> str:
    """A label NAME=VALUE, or NAME."""
    if isinstance(value.content, dict) and len(value.content) == 1:
        ((name, inside),) = value.content.items()
        return f"{name.strip()}={inside.text('idle: exempt').strip()}"
    text = value.text("idle: exempt").strip()
    if not text.partition("=")[0]:
        raise value.error("idle: exempt: no label", "write exempt: NAME=VALUE, and give jobs labels: {NAME: VALUE}")
    return text
