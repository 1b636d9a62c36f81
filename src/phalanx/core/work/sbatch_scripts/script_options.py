"""The options of a script by name, for the modules that map them to a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.errors import BadFile
from phalanx.core.work.sbatch_scripts.sbatch import ParsedOption


@dataclass(slots=True)
class ScriptOptions:
    """The options by name, with their lines for error messages."""

    given: Mapping[str, ParsedOption]
    notes: list[str] = field(default_factory=list)
    honoured: set[str] = field(default_factory=set)  # options that are honoured in this script only

    def text(self, name: str) -> str:
        """The value of an option; "" if it is not given."""
        found = self.given.get(name)
        return "" if found is None else found.value.strip()

    def has(self, name: str) -> bool:
        """Whether the option is given."""
        return name in self.given

    def number(self, name: str, *, low: int = 1) -> int | None:
        """The value as a whole number; None if it is not given.

        Raises:
            BadFile: it is not one, or below `low`.
        """
        text = self.text(name)
        if not text:
            return None
        if not text.isdecimal() or not low <= int(text) <= 1_000_000:
            raise self.wrong(name, f"is not a number of at least {low}")
        return int(text)

    def wrong(self, name: str, why: str, hint: str = "") -> BadFile:
        """The error for an option's value, with the option's line."""
        found = self.given[name]
        at = f"line {found.line}: " if found.line else ""
        return BadFile(f"{at}--{name}={found.value}: {why}", hint=hint)
