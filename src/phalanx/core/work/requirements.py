"""The key that names a file with the Python packages of a job. What stands in such a file is `node.logic.requirements`' to read."""

from __future__ import annotations

from typing import Final

from phalanx.core.errors import BadRequest

NONE: Final = "none"  # the key's word for "install nothing"
PROJECT: Final = "pyproject.toml"
_PATH_MAX: Final = 1024  # characters; Linux' own limit of a path is 4096


def parse_requirements(value: object) -> str:
    """The key's value: a file of the working directory, or `none`.

    Raises:
        BadRequest: it lies elsewhere, or is of a kind that nobody could install from.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text in {"", NONE}:
        return text
    path = _inside(text)
    if not path or not path.isprintable() or len(path) > _PATH_MAX:
        raise BadRequest(f"requirements: {text[:80]!r} is no file of the working directory", hint="give its path in it")
    if path.rpartition("/")[2] != PROJECT and not path.endswith((".txt", ".in")):
        raise BadRequest(
            f"requirements: {text[:80]!r} is neither a list of packages nor a project",
            hint=f"name a requirements*.txt or a {PROJECT}",
        )
    return path


def requirements_note(requirements: str) -> list[str]:
    """What the user is told before the start."""
    if requirements in {"", NONE}:
        return []
    return [f"{requirements}: what it names is installed once on each node"]


def _inside(text: str) -> str:
    """The path without `.` and `..`; "" where it leads out of the folder that it is relative to."""
    if text.startswith("/"):
        return ""
    parts: list[str] = []
    for part in text.split("/"):
        if part == ".." and not parts:
            return ""
        if part == "..":
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)
