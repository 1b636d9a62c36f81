"""The key that names a job's file of Python packages. `node.logic.requirements` reads the file itself."""

from __future__ import annotations

from typing import Final

from phalanx.core.errors import BadRequest

NO_REQUIREMENTS: Final = "none"  # the value that means "install nothing"
PROJECT_FILE: Final = "pyproject.toml"
LOCK_FILE: Final = "uv.lock"
_PATH_MAX: Final = 1024  # characters; Linux' own limit of a path is 4096


def parse_requirements(value: object) -> str:
    """The key's value: a file of the working directory, or `none`.

    Raises:
        BadRequest: it lies elsewhere, or is not a file to install from.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text in {"", NO_REQUIREMENTS}:
        return text
    path = _inside(text)
    if not path or not path.isprintable() or len(path) > _PATH_MAX:
        raise BadRequest(f"requirements: {text[:80]!r} is not in the working directory", hint="give a relative path")
    if path.rpartition("/")[2] != PROJECT_FILE and not path.endswith((".txt", ".in")):
        raise BadRequest(
            f"requirements: {text[:80]!r} is neither a requirements file nor a project file",
            hint=f"name a requirements*.txt or a {PROJECT_FILE}",
        )
    return path


def parse_lock_file(value: object) -> str:
    """The lock file of a uv project in the working directory.

    Raises:
        BadRequest: it lies elsewhere, or has another name.
    """
    path = _inside(value.strip()) if isinstance(value, str) else ""
    if path.rpartition("/")[2] != LOCK_FILE or not path.isprintable() or len(path) > _PATH_MAX:
        raise BadRequest(
            f"software: uv: {str(value)[:80]!r} is not a {LOCK_FILE} in the working directory",
            hint=f"write uv: {LOCK_FILE}, or uv: folder/{LOCK_FILE}",
        )
    return path


def requirements_note(requirements: str) -> list[str]:
    """The note about it that is shown before the start."""
    if requirements in {"", NO_REQUIREMENTS}:
        return []
    return [f"{requirements}: its packages are installed once on each node"]


def _inside(text: str) -> str:
    """The path without `.` and `..`; "" if it leads out of its base folder."""
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
