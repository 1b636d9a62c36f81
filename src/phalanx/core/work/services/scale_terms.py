"""What the number of replicas follows: the key `scale` of a service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import exact_duration, parse_duration_s
from phalanx.core.work.job_file.keys import InvalidKey

IDLE_DEFAULT_S: Final = 600.0
IDLE_MIN_S: Final = 10.0  # below it, two requests with a pause would cost a start
IN_FLIGHT_MAX: Final = 100_000
_TARGET_MIN_S: Final = 0.01
_TARGET_MAX_S: Final = 3600.0
_IDLE_MAX_S: Final = 30 * 86_400.0
_MILLISECONDS: Final = re.compile(r"(\d{1,7}(?:\.\d{1,3})?)\s*ms")
_PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)\s*%")
_NAMES: Final = ("ttft", "queue", "kv", "in_flight", "idle")
_HINT: Final = "write scale: {ttft: 500ms, queue: 2s, kv: 80%, in_flight: 16, idle: 10m}, or some of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTerms:
    """Targets; None where one is not set. More replicas start when one is missed, within the range of the service.

    Attributes:
        ttft_s: time to the first token that 90 of 100 streams keep.
        queue_s: how long a request may wait for a replica.
        kv: share of the KV cache of replicas in use, on average, 0 to 1.
        in_flight: requests of one replica.
        idle_s: after so long without any request no replica is needed, if the range begins at 0.
    """

    ttft_s: float | None = None
    queue_s: float | None = None
    kv: float | None = None
    in_flight: int | None = None
    idle_s: float = IDLE_DEFAULT_S

    def keys(self) -> dict[str, str]:
        """The mapping in a job file that gives these terms."""
        found = {
            name: "" if value is None else _duration_text(value)
            for name, value in (("ttft", self.ttft_s), ("queue", self.queue_s))
        }
        found["kv"] = "" if self.kv is None else f"{round(100 * self.kv, 3):g}%"
        found["in_flight"] = "" if self.in_flight is None else str(self.in_flight)
        found["idle"] = exact_duration(self.idle_s)
        return {name: text for name, text in found.items() if text}


def parse_scale_terms(value: object) -> ScaleTerms:
    """The terms of the key `scale`.

    Raises:
        InvalidKey: no mapping, an unknown name, or an invalid value.
    """
    if isinstance(value, list | tuple):
        value = dict(str(one).partition("=")[::2] for one in value)
    if not isinstance(value, Mapping):
        raise InvalidKey("scale: expected names with targets", key="scale", hint=_HINT)
    for name in value:
        if name not in _NAMES:
            raise InvalidKey(f"scale: {str(name)[:40]!r} is not one of {', '.join(_NAMES)}", key="scale", hint=_HINT)
    texts = {name: str(one).strip().lower() for name, one in value.items() if one is not None}
    return ScaleTerms(
        ttft_s=_seconds(texts, "ttft", _TARGET_MIN_S, _TARGET_MAX_S),
        queue_s=_seconds(texts, "queue", _TARGET_MIN_S, _TARGET_MAX_S),
        kv=_share(texts),
        in_flight=_in_flight(texts),
        idle_s=_seconds(texts, "idle", IDLE_MIN_S, _IDLE_MAX_S) or IDLE_DEFAULT_S,
    )


def _seconds(texts: Mapping[str, str], name: str, least_s: float, most_s: float) -> float | None:
    text = texts.get(name)
    if text is None:
        return None
    what = f"scale: {name}"
    if found := _MILLISECONDS.fullmatch(text):
        seconds = float(found[1]) / 1000
    else:
        try:
            seconds = parse_duration_s(text[:40], what=what)
        except BadRequest as error:
            raise InvalidKey(error.message, key="scale", hint="write 500ms, 2s or 10m") from None
    if not least_s <= seconds <= most_s:
        between = f"{_duration_text(least_s)} to {_duration_text(most_s)}"
        raise InvalidKey(f"{what}: {text[:40]!r} is not from {between}", key="scale", hint=_HINT)
    return seconds


def _share(texts: Mapping[str, str]) -> float | None:
    text = texts.get("kv")
    if text is None:
        return None
    found = _PERCENT.fullmatch(text)
    if found is None or not 1 <= float(found[1]) <= 100:
        raise InvalidKey(f"scale: kv: {text[:40]!r} is not from 1% to 100%", key="scale", hint="write kv: 80%")
    return float(found[1]) / 100


def _in_flight(texts: Mapping[str, str]) -> int | None:
    text = texts.get("in_flight")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= IN_FLIGHT_MAX:
        why = f"scale: in_flight: {text[:40]!r} is not a number from 1 to {IN_FLIGHT_MAX}"
        raise InvalidKey(why, key="scale", hint="write in_flight: 16")
    return int(text)


def _duration_text(seconds: float) -> str:
    return f"{round(seconds * 1000, 3):g}ms" if seconds < 1 else exact_duration(seconds)
