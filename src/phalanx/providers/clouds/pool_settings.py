"""Settings that pools of all clouds have: how a machine ends itself, virtual devices to try a pool out, and a command before it joins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import parse_duration_s

SILENCE_S: Final = 1800.0  # of the head, until a machine ends itself, unless the pool has the setting `silence`
SILENCE_MIN_S: Final = 60.0  # a head restarts in that time
SHARED_SETTINGS: Final = frozenset({"silence", "virtual", "setup"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    """What the start script of a machine needs.

    Attributes:
        silence_s: the machine ends itself when its head has been silent for so long.
        virtual: it joins with so many virtual devices; 0 for its GPUs.
        setup: a shell command that it runs before it joins.
    """

    silence_s: float = SILENCE_S
    virtual: int = 0
    setup: str = ""


def parse_machine_settings(settings: Mapping[str, str]) -> MachineSettings:
    """Return these settings of a pool.

    Raises:
        BadRequest: one is invalid.
    """
    silence_s = parse_duration_s(settings["silence"], what="silence") if "silence" in settings else SILENCE_S
    if silence_s < SILENCE_MIN_S:
        raise BadRequest("a machine cannot end itself after less than 60 s of silence: a head restarts in that time")
    return MachineSettings(
        silence_s=silence_s, virtual=setting_count(settings, "virtual", 256), setup=settings.get("setup", "")
    )


def check_names(provider: str, settings: Mapping[str, str], known: Collection[str]) -> None:
    """Check that a pool has only settings that its provider knows.

    Raises:
        BadRequest: it has another one.
    """
    if unknown := sorted(settings.keys() - set(known)):
        raise BadRequest(
            f"provider {provider} has no setting {unknown[0]}", hint=f"settings: {', '.join(sorted(known))}"
        )


def setting_words(text: str) -> tuple[str, ...]:
    """Return the words of a setting, which commas separate."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def setting_count(settings: Mapping[str, str], name: str, most: int, default: int = 0) -> int:
    """Return a setting that is a number from 0 to `most`.

    Raises:
        BadRequest: it is not.
    """
    text = settings.get(name, str(default))
    if not text.isdecimal() or int(text) > most:
        raise BadRequest(f"the setting {name} is {text[:20]!r}, not a number from 0 to {most}")
    return int(text)


def setting_flag(settings: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return a setting that is yes or no.

    Raises:
        BadRequest: it is neither.
    """
    text = settings.get(name, "yes" if default else "no")
    if text not in {"yes", "no"}:
        raise BadRequest(f"the setting {name} is {text[:20]!r}, neither yes nor no")
    return text == "yes"
