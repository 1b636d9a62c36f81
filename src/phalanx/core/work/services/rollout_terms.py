"""How a new revision of a service replaces the one before: the key `update`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import exact_duration, parse_duration_s
from phalanx.core.work.job_file.keys import InvalidKey

WHOLE: Final = 1000  # all sessions, in thousandths
STEP_DEFAULT_S: Final = 30.0
_STEP_MIN_S: Final = 5.0
_STEP_MAX_S: Final = 24 * 3600.0
_SHARE_MIN: Final = 1
_SHARE_MAX: Final = 500  # with more, too few sessions are left to compare with
_SHARES: Final = re.compile(r"(?:(\d{1,3}(?:\.\d)?)\s*%?\s*\.\.\s*)?(\d{1,3}(?:\.\d)?)\s*%", re.ASCII)
_ROLLING: Final = "rolling"
_BLUE_GREEN: Final = "blue-green"
_NAMES: Final = ("canary", _BLUE_GREEN, "step")
_HINT: Final = "write update: {canary: 5%..50%}, update: blue-green, or update: rolling"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTerms:
    """The steps of a rollout.

    Attributes:
        first, last: thousandths of the sessions that the first and the last step give to the new revision. Both WHOLE: blue-green.
        step_s: the least time that each step takes.
    """

    first: int
    last: int
    step_s: float = STEP_DEFAULT_S

    @property
    def blue_green(self) -> bool:
        """Whether all sessions go over at once, to a full set of new replicas."""
        return self.first == WHOLE

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares of all steps: each about twice the one before."""
        found = [self.first]
        while found[-1] < self.last:
            following = 2 * found[-1]
            found.append(following if 3 * following <= 2 * self.last else self.last)
        return tuple(found)

    def keys(self) -> dict[str, str]:
        """The mapping in a job file that gives these terms."""
        text = _percent(self.first) if self.first == self.last else f"{_percent(self.first)}..{_percent(self.last)}"
        found = {_BLUE_GREEN: "on"} if self.blue_green else {"canary": text}
        return found if self.step_s == STEP_DEFAULT_S else {**found, "step": exact_duration(self.step_s)}


def share_after(terms: RolloutTerms, share: int) -> int | None:
    """The share of the next step; None after the last one."""
    return next((one for one in terms.shares if one > share), None)


def parse_rollout_terms(value: object) -> RolloutTerms | None:
    """The terms of the key `update`; None for a rolling update.

    Raises:
        InvalidKey: an unknown name, or an invalid value.
    """
    if isinstance(value, list | tuple):
        value = dict(str(one).partition("=")[::2] for one in value)
    given = value if isinstance(value, Mapping) else {str(value).strip().lower(): "on"}
    texts = {str(name).strip().lower(): str(one).strip().lower() for name, one in given.items() if one is not None}
    if set(texts) == {_ROLLING}:
        return None
    for name in texts:
        if name not in _NAMES:
            raise InvalidKey(
                f"update: {name[:40]!r} is not one of {_ROLLING}, {', '.join(_NAMES)}", key="update", hint=_HINT
            )
    if ("canary" in texts) == (_BLUE_GREEN in texts):
        raise InvalidKey("update: expected either canary or blue-green", key="update", hint=_HINT)
    step_s = _step_s(texts.get("step"))
    if _BLUE_GREEN in texts:
        if texts[_BLUE_GREEN] not in ("on", "true", "yes"):
            raise InvalidKey(
                f"update: blue-green: {texts[_BLUE_GREEN][:40]!r} is not on",
                key="update",
                hint="write update: blue-green",
            )
        return RolloutTerms(first=WHOLE, last=WHOLE, step_s=step_s)
    first, last = _shares(texts["canary"])
    return RolloutTerms(first=first, last=last, step_s=step_s)


def _shares(text: str) -> tuple[int, int]:
    found = _SHARES.fullmatch(text)
    low, high = (0, 0) if found is None else (_thousandths(found[1] or found[2]), _thousandths(found[2]))
    if not _SHARE_MIN <= low <= high <= _SHARE_MAX:
        raise InvalidKey(
            f"update: canary: {text[:40]!r} is not a share or range from {_percent(_SHARE_MIN)} to {_percent(_SHARE_MAX)}",
            key="update",
            hint="write canary: 5%..50%, or canary: 10%",
        )
    return low, high


def _thousandths(text: str) -> int:
    return round(10 * float(text))


def _percent(share: int) -> str:
    return f"{share / 10:g}%"


def _step_s(text: str | None) -> float:
    if text is None:
        return STEP_DEFAULT_S
    try:
        seconds = parse_duration_s(text[:40], what="update: step")
    except BadRequest as error:
        raise InvalidKey(error.message, key="update", hint="write step: 30s, 5m, 1h") from None
    if not _STEP_MIN_S <= seconds <= _STEP_MAX_S:
        least, most = exact_duration(_STEP_MIN_S), exact_duration(_STEP_MAX_S)
        raise InvalidKey(
            f"update: step: {text[:40]!r} is not from {least} to {most}", key="update", hint="write step: 5m"
        )
    return seconds
