"""Options of Slurm's listing commands: short, long, with or without a value. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.core.errors import BadRequest
from phalanx.core.work.nearest_match import nearest_match


def parse_words(
    words: Sequence[str], flags: Mapping[str, str], values: Mapping[str, str], verb: str
) -> tuple[dict[str, str], list[str]]:
    """Return the options by long name, and the other words.

    Args:
        words: of the command line.
        flags: long name -> short letter, of options without a value.
        values: the same of options with one.
        verb: our command that does more, for the hint.

    Raises:
        BadRequest: an option that the view does not have.
    """
    letters = {letter: name for name, letter in {**flags, **values}.items() if letter}
    found: dict[str, str] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            others.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=") if word.startswith("--") else ("", "", "")
        if not name:
            name, value = letters.get(word[1], ""), word[2:].removeprefix("=")
            equals = "=" if value else ""
            if name in flags and value:  # flags may be combined: -hl
                left.insert(0, f"-{value}")
                value = equals = ""
        if name not in flags and name not in values:
            near = nearest_match(name, [*flags, *values]) if name else ""
            hint = f"did you mean --{near}?" if near else f"{verb} has more options"
            raise BadRequest(f"{word.partition('=')[0]} is not an option of this view", hint=hint)
        if name in values and not equals:
            if not left:
                raise BadRequest(f"--{name} has no value")
            value = left.pop(0)
        found[name] = value
    return found, others
