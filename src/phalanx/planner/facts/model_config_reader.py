"""Strict access to the keys of a model config. A size may have several names; an error names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.errors import BadFile

SIZE_MAX: Final = 1 << 50  # more than any count of features or tokens; limits the arithmetic on a hostile file


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigReader:
    """The values of a config. As in Hugging Face, a key with the value null is missing."""

    where: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Return whether the key has a value."""
        return self.values.get(key) is not None

    def integer(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Return the whole number of the first key in `names` that exists, or the default.

        Raises:
            BadFile: no key exists and there is no default, or the value is not a whole number of at least `least`.
        """
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            if default is not None:
                return default
            raise BadFile(
                f"{self.where}: {names[0]} is missing",
                hint="use the original config.json of the model",
            )
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be a whole number")
        if not least <= value <= SIZE_MAX:
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]}; it must be {least} or more")
        return int(value)

    def number(self, name: str, *, default: float) -> float:
        """Return a number above 0, or the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= SIZE_MAX:
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be a number above 0")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return a boolean, or the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be true or false")
        return value

    def section(self, name: str) -> ModelConfigReader:
        """Return the object of a key, empty if the key is missing."""
        value = self.values.get(name)
        if value is None:
            return ModelConfigReader(where=f"{self.where}, {name}", values={})
        if not isinstance(value, Mapping):
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be an object")
        return ModelConfigReader(where=f"{self.where}, {name}", values=value)

    def list_length(self, name: str) -> int:
        """Return the length of a list, 0 if the key is missing."""
        value = self.values.get(name)
        if value is None:
            return 0
        if not isinstance(value, list):
            raise BadFile(f"{self.where}: {name} is {str(value)[:60]!r}; it must be a list")
        return len(value)

    def head_dim(self, hidden: int, heads: int, key: str = "head_dim") -> int:
        """Return the features per head: the value of `key`, or else hidden over heads.

        Raises:
            BadFile: the key is missing and the heads do not divide the hidden size.
        """
        if self.has(key):
            return self.integer(key)
        if hidden % heads:
            raise BadFile(f"{self.where}: {heads} heads do not divide the hidden size {hidden}, and {key} is missing")
        return hidden // heads
