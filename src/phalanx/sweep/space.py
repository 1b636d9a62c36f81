"""The parameters of a sweep: `log:1e-5..1e-2`, `2..8`, `2,4,8`, and the text of each value. Pure.

LOW..HIGH        every number between; whole numbers if both ends are
log:LOW..HIGH    the same, evenly spread over the logarithm
LOW..HIGH:N      for a grid: N values, evenly spread
A,B,C            one of these words
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

POINTS_MAX: Final = 10_000  # of a grid: as many trials as an array may have elements
_PARAMETERS_MAX: Final = 32  # each is a label of the job, which has at most 64
_CHOICES_MAX: Final = 1000
_CHOICE_CHARS_MAX: Final = 200  # a label has at most 256
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,61}")
_RANGE: Final = re.compile(
    r"(?P<log>log:)?(?P<low>[^.,:]+(?:\.\d+[^.,:]*)?)\.\.(?P<high>[^:,]+)(?::(?P<points>\d{1,5}))?"
)
_WHOLE: Final = re.compile(r"[-+]?\d{1,15}")
_DIGITS: Final = 6  # of a value as the program receives it


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepParameter:
    """One parameter. Either `choices`, or a range.

    Attributes:
        whole: only whole numbers.
        points: values of a range in a grid; 0 if not given.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    points: int = 0

    def grid_values(self) -> list[str] | list[float] | list[int]:
        """Return its values in a grid.

        Raises:
            BadRequest: it is a range without a number of points.
        """
        if self.choices:
            return list(self.choices)
        points = self.points
        if not points:
            raise BadRequest(
                f"{self.name}: a grid needs the number of values of this range",
                hint=f"write {self.range_text()}:4, or list the values: A,B,C",
            )
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        spread = [low + (high - low) * place / max(1, points - 1) for place in range(points)]
        values = [min(self.high, max(self.low, math.exp(one) if self.log else one)) for one in spread]
        return sorted({round(one) for one in values}) if self.whole else values

    def text(self, value: object) -> str:
        """Return a value as the program receives it: six digits are enough for a number."""
        return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)

    def range_text(self) -> str:
        """Return the range without its number of points, as on the command line."""
        low, high = (f"{one:.0f}" if self.whole else f"{one:g}" for one in (self.low, self.high))
        return f"{'log:' if self.log else ''}{low}..{high}"


def parse_parameter(name: str, text: str) -> SweepParameter:
    """Return the parameter that `--NAME TEXT` describes.

    Raises:
        BadRequest: the name or the values are wrong.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{name[:80]!r} is not a name for a parameter", hint="use letters, digits and . _ -")
    if ".." in text:
        return _range(name, text.strip())
    return choice_parameter(name, text.split(","))


def choice_parameter(name: str, words: Sequence[str]) -> SweepParameter:
    """Return a parameter that takes one of the words.

    Raises:
        BadRequest: there are fewer than two, too many, an empty one or the same twice.
    """
    choices = tuple(word.strip() for word in words)
    if len(choices) < 2:
        raise BadRequest(
            f"{name}: one value is nothing to search", hint="write a range (log:1e-5..1e-2) or a list (2,4,8)"
        )
    if len(set(choices)) < len(choices) or not all(choices):
        raise BadRequest(f"{name}: an empty value, or the same value twice: {','.join(choices)[:80]}")
    if len(choices) > _CHOICES_MAX or max(map(len, choices)) > _CHOICE_CHARS_MAX:
        raise BadRequest(f"{name}: at most {_CHOICES_MAX} values of {_CHOICE_CHARS_MAX} characters")
    if not all(word.isprintable() for word in choices):
        raise BadRequest(f"{name}: a value has a control character")
    return SweepParameter(name=name, choices=choices)


def check_space(parameters: Sequence[SweepParameter]) -> None:
    """Check the parameters together.

    Raises:
        BadRequest: there are none, too many, or two of one name.
    """
    names = [one.name for one in parameters]
    if not names:
        raise BadRequest("no parameter to search", hint="give one as an option: --lr log:1e-5..1e-2")
    if len(names) > _PARAMETERS_MAX:
        raise BadRequest(f"{len(names)} parameters; at most {_PARAMETERS_MAX} are allowed")
    variables = [variable_of(name) for name in names]
    twice = next((name for name, one in zip(names, variables, strict=True) if variables.count(one) > 1), None)
    if twice is not None:
        raise BadRequest(f"{twice}: two parameters have this name, or names with the same environment variable")


def grid_size(parameters: Iterable[SweepParameter]) -> int:
    """Return the number of combinations of a grid.

    Raises:
        BadRequest: a range has no number of points, or there are too many combinations.
    """
    size = math.prod(len(one.grid_values()) for one in parameters)
    if size > POINTS_MAX:
        raise BadRequest(f"the grid has {size} combinations; at most {POINTS_MAX} are allowed", hint="search: random")
    return size


def variable_of(name: str) -> str:
    """Return the environment variable of a parameter: SWEEP_LR for lr."""
    return "SWEEP_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _range(name: str, text: str) -> SweepParameter:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise BadRequest(f"{name}: {text[:80]!r} is not a range", hint="write 1e-5..1e-2, log:1e-5..1e-2 or 2..8:4")
    low, high = (_number(name, found[end]) for end in ("low", "high"))
    log = found["log"] is not None
    if not low < high:
        raise BadRequest(f"{name}: {text}: the first number must be the lower one")
    if log and low <= 0:
        raise BadRequest(f"{name}: {text}: a range over the logarithm begins above 0")
    whole = all(_WHOLE.fullmatch(found[end]) for end in ("low", "high"))
    points = int(found["points"] or 0)
    if found["points"] is not None and not 2 <= points <= _CHOICES_MAX:
        raise BadRequest(f"{name}: {text}: {points} values; 2 to {_CHOICES_MAX} are allowed")
    return SweepParameter(name=name, low=low, high=high, log=log, whole=whole, points=points)


def _number(name: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"{name}: {word[:80]!r} is not a number", hint="write 1e-5..1e-2, log:1e-5..1e-2 or 2..8")
    return value
