"""Parameters in the command of a job: finds and replaces the value of `--lr 1e-4`, `--lr=1e-4` and `lr=1e-4`, in words and in shell text. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.launchers import SHELLS, shell_text

_NAME: Final = r"[A-Za-z][A-Za-z0-9_.-]*"
_OPTION: Final = re.compile(rf"--?({_NAME})")
_ASSIGNED: Final = re.compile(rf"(--?|[+~]{{0,2}})({_NAME})=(.*)", re.DOTALL)  # `+` and `~`: Hydra adds and removes
_SAFE: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")  # as `shlex.quote` leaves them
_NUMBER: Final = re.compile(r"-\.?\d.*")
# One word of a shell text; an unpaired quote ends it.
_WORD: Final = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|<>()'"\\])+"""
_START: Final = r"""(?<![^\s;&|('"`])"""
_GAP: Final = r"[ \t]+(?:\\\n[ \t]*)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCommand:
    """A command with another value of one parameter. `changes`: each place as it was and as it is; empty if the command has no such parameter."""

    argv: tuple[str, ...]
    script: str
    changes: tuple[tuple[str, str], ...]


def with_parameter(argv: Sequence[str], script: str, name: str, value: str) -> ChangedCommand:
    """The command with `value` for the parameter `name` wherever it has one. `-` and `_` in names are equal.

    Raises:
        BadRequest: the value needs quotes, and a place of the parameter lies inside quotes.
    """
    changes: list[tuple[str, str]] = []
    if script:
        return ChangedCommand(argv=(), script=_in_text(script, name, value, changes), changes=tuple(changes))
    words = list(argv)
    inner = shell_text(words[1:]) if words and words[0].rsplit("/", 1)[-1] in SHELLS else ""
    if inner:
        words[words.index(inner)] = _in_text(inner, name, value, changes)
    for place, word in enumerate(words):
        assigned, option = _ASSIGNED.fullmatch(word), _OPTION.fullmatch(word)
        if assigned is not None and _same(assigned[2], name):
            words[place] = f"{assigned[1]}{assigned[2]}={value}"
            changes.append((word, words[place]))
        elif option is not None and _same(option[1], name) and _is_value(words, place + 1):
            changes.append((f"{word} {words[place + 1]}", f"{word} {value}"))
            words[place + 1] = value
    return ChangedCommand(argv=tuple(words), script="", changes=tuple(changes))


def parameter_names(argv: Sequence[str], script: str) -> list[str]:
    """The names of the parameters that have a value, in the order of the command."""
    found: dict[str, None] = {}
    if script:
        for match in re.finditer(rf"{_START}(?:--?({_NAME})(?:=|{_GAP}(?!-\D)){_WORD}|[+~]{{0,2}}({_NAME})=)", script):
            if not _in_comment(script, match.start()):
                found[match[1] or match[2]] = None
    for place, word in enumerate(argv):
        assigned, option = _ASSIGNED.fullmatch(word), _OPTION.fullmatch(word)
        if assigned is not None:
            found[assigned[2]] = None
        elif option is not None and _is_value(argv, place + 1):
            found[option[1]] = None
    return list(found)


def _in_text(text: str, name: str, value: str, changes: list[tuple[str, str]]) -> str:
    """The shell text with the value in each place, except in comments, which include `#SBATCH` lines."""
    named = "".join("[-_]" if char in "-_" else re.escape(char) for char in name)
    pattern = re.compile(rf"{_START}(--?{named}(?:=|{_GAP}(?!-(?!\.?\d)))|[+~]{{0,2}}{named}=)((?:{_WORD})?)")
    quoted = quoted_word(value)

    def changed(match: re.Match[str]) -> str:
        if _in_comment(text, match.start()) or (match[1][-1] != "=" and not match[2]):
            return match[0]
        if quoted != value and _in_quotes(text[: match.start()]):
            raise BadRequest(
                f"{name}: {value[:40]!r} needs quotes, and {match[0][:60]!r} lies inside quotes",
                hint="write the job file with another command",
            )
        changes.append((match[0], match[1] + quoted))
        return match[1] + quoted

    return pattern.sub(changed, text)


def quoted_word(value: str) -> str:
    """The word as a shell reads it as one and nothing else."""
    return value if _SAFE.fullmatch(value) else "'" + value.replace("'", "'\\''") + "'"


def _in_comment(text: str, place: int) -> bool:
    return text[text.rfind("\n", 0, place) + 1 : place].lstrip().startswith("#")


def _in_quotes(before: str) -> bool:
    """Whether a quote is open behind this text."""
    quote, escaped = "", False
    for char in before:
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif char in "'\"" and quote in ("", char):
            quote = "" if quote else char
    return bool(quote)


def _same(written: str, name: str) -> bool:
    return written.replace("-", "_") == name.replace("-", "_")


def _is_value(words: Sequence[str], place: int) -> bool:
    return place < len(words) and (not words[place].startswith("-") or _NUMBER.fullmatch(words[place]) is not None)
