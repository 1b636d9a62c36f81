"""The keys of a model's config file, read strictly: each size is found under one of its names, and an error names file and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import BadFile

SIZE_MAX: Final = 1 << 50  # past any count of features or tokens; bounds what arithmetic is done with a hostile file


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A config's values. A key that holds null counts as missing, as Hugging Face has it."""

    where: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Whether the key holds something."""
        return self.values.get(key) is not None

    def whole(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """The whole number under the first of `names` that is there, or the default.

        Raises:
            BadFile: none of them is there and there is no default, or it is no whole number of at least `least`.
        """
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            if default is not None:
                return default
            raise BadFile(
                f"{self.where}: {names[0]} is missing",
                hint="a shape cannot be guessed; use the model's own config.json",
            )
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be a whole number")
        if not least <= value <= SIZE_MAX:
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]}; it must be {least} or more")
        return int(value)

    def number(self, name: str, *, default: float) -> float:
        """A number above 0, or the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= SIZE_MAX:
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be a number above 0")
        return float(value)

    def truth(self, name: str, *, default: bool) -> bool:
        """True or false, or the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be true or false")
        return value

    def part(self, name: str) -> Keys:
        """The object under a key; an empty one where there is none."""
        value = self.values.get(name)
        if value is None:
            return Keys(where=f"{self.where}, {name}", values={})
        if not isinstance(value, Mapping):
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be an object")
        return Keys(where=f"{self.where}, {name}", values=value)

    def count(self, name: str) -> int:
        """Entries of a list; 0 where there is none."""
        value = self.values.get(name)
        if value is None:
            return 0
        if not isinstance(value, list):
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be a list")
        return len(value)

    def head_dim(self, hidden: int, heads: int, key: str = "head_dim") -> int:
        """Features per head: stated, or else hidden over heads.

        Raises:
            BadFile: it is not stated and the heads do not divide the hidden size.
        """
        if self.has(key):
            return self.whole(key)
        if hidden % heads:
            raise BadFile(f"{self.where}: {heads} heads do not divide the hidden size {hidden}, and no {key} is given")
        return hidden // heads
