"""Writes the keys of a file as YAML 1.2 that `yaml_document` reads back as the same texts: blocks for scripts, quotes where any reader needs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

# Words that neither YAML 1.1 nor 1.2 reads as anything but text, also inside of a list in brackets.
_PLAIN: Final = re.compile(
    r"(?:[A-Za-z_/][A-Za-z0-9_./%+@=~-]*|[0-9]+x[A-Za-z0-9:]+)(?: +[A-Za-z0-9_./%+@=~-]+)*(?::[A-Za-z0-9_./-]+)*"
)
_NOT_TEXT: Final = re.compile(r"(?i)null|true|false|yes|no|on|off|y|n|0x[0-9a-f]+")
# Of YAML's printable characters those that are no line break; a byte order mark is one that readers drop.
_PRINTABLE: Final = re.compile(r"[\t\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*")
_BLOCK_LINES_MIN: Final = 2


def yaml_text(keys: Mapping[str, object]) -> str:
    """Return the document. Values are texts, whole numbers, flags, lists of texts, or mappings of names to texts and lists of texts."""
    return "".join(_entry(key, value) for key, value in keys.items())


def _entry(key: str, value: object) -> str:
    match value:
        case Mapping():
            return f"{key}:\n" + "".join(f"  {_scalar(str(name))}: {_inner(one)}\n" for name, one in value.items())
        case list():
            return f"{key}: {_list(value)}\n"
        case bool():
            return f"{key}: {'true' if value else 'false'}\n"
        case int():
            return f"{key}: {value}\n"
        case _:
            return f"{key}: {_block(str(value), 2) or _scalar(str(value))}\n"


def _inner(value: object) -> str:
    return _list(value) if isinstance(value, list) else _block(str(value), 4) or _scalar(str(value))


def _list(items: list[object]) -> str:
    return f"[{', '.join(_scalar(str(item)) for item in items)}]"


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
        return text
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if _PRINTABLE.fullmatch(char) and char != "\t":
        return char
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char) or f"\\U{ord(char):08x}"


def _block(text: str, indent: int) -> str:
    """A text of several lines as a block without its last line break; empty if a block cannot hold it."""
    lines = text.rstrip("\n").split("\n")
    ends = len(text) - len(text.rstrip("\n"))
    if (
        len(lines) < _BLOCK_LINES_MIN
        or not lines[0].strip()
        or lines[0][0] in " \t"
        or not all(map(_PRINTABLE.fullmatch, lines))
    ):
        return ""
    keep = "-" if not ends else "" if ends == 1 else "+"
    return f"|{keep}\n" + "\n".join(" " * indent + line if line else "" for line in lines) + "\n" * max(0, ends - 1)
