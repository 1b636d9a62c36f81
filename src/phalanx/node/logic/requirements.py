"""What a file of requirements asks for, which environment of this node serves it, and which environments go when room is wanted.

The command line asks too which file a copy brings. Pure: files are read by what the caller gives. Two jobs with equal text, equal included and local files, and the same Python share one
environment; so the name of an environment is a hash of all of these and of nothing else.
"""

from __future__ import annotations

import hashlib
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.requirements import PROJECT

LISTED: Final = "requirements.txt"
VENVS_BYTES_MAX: Final = 50 << 30  # seven environments with their own torch and CUDA, 7 GB each
_FORMAT: Final = "1"  # of what is hashed and of how an environment is made; another one makes all anew
_NAME_CHARACTERS: Final = 32  # of SHA-256 in hex: 128 bits
_DEPTH_MAX: Final = 16  # of files that include files
_WORDS_MAX: Final = 400  # characters of an installer's last words that fit into a line of `phalanx show`
_PYTHON: Final = re.compile(r"(?:.*/)?python(3(\.\d+)?)?")
_OPTION: Final = re.compile(
    r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s*=\s*|\s+|(?<=-[rcef]))(\S.*)"
)
_COMMENT: Final = re.compile(r"(^|\s)#.*$")
_ARCHIVE: Final = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tgz")


class BadRequirements(Exception):
    """The file cannot be understood, or names one that is not there. The job's own fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python of this node, as it says itself.

    Attributes:
        path: as found, links kept: through a virtual environment's link it is that environment.
        parents: folders with the packages that it sees, first come first.
        scripts: the folder of their commands.
    """

    path: str
    version: str
    abi: str
    platform: str
    parents: tuple[str, ...]
    scripts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A file of requirements with everything that it includes.

    Attributes:
        written: its lines as written, the included ones in their place: what is hashed.
        lines: the same for the installer, where only the working directory may be relative to.
        local: files and folders that it names, relative to the working directory or absolute; their contents are hashed.
    """

    written: tuple[str, ...]
    lines: tuple[str, ...]
    local: tuple[str, ...]


@dataclass(slots=True)
class _Reading:
    workdir: str
    read: Callable[[str], str | None]
    written: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)


def listed(path: str, *, workdir: str, read: Callable[[str], str | None]) -> Listed:
    """Everything that the file names.

    Args:
        path: in the working directory.
        workdir: absolute; where relative paths are meant from.
        read: a file's text by its path, relative to the working directory or absolute; None where there is none.

    Raises:
        BadRequirements: a file is not there, or they include each other.
        BadRequest: a pyproject.toml that cannot be read.
    """
    reading = _Reading(workdir, read)
    if os.path.basename(path) == PROJECT:
        named = project_dependencies(_text(reading, path, PROJECT))
        return Listed(written=named, lines=named, local=())
    _take(reading, path, named_in="", depth=0)
    return Listed(written=tuple(reading.written), lines=tuple(reading.lines), local=tuple(reading.local))


def used_by_itself(read: Callable[[str], bytes | None]) -> str:
    """Which file of a directory that travels is used where the job names none; "" for none of them.

    Args:
        read: gives a file of the directory by its path in it; None where there is none.
    """
    if read(LISTED) is not None:
        return LISTED
    project = read(PROJECT)
    try:
        return PROJECT if project is not None and project_dependencies(project.decode()) else ""
    except (BadRequest, UnicodeDecodeError):  # a file for some tool; only one that was asked for has to be sound
        return ""


def project_dependencies(text: str) -> tuple[str, ...]:
    """What `[project]` of a pyproject.toml depends on; empty where it says nothing.

    Raises:
        BadRequest: it is no TOML, or its dependencies are made when it is built.
    """
    import tomllib  # 20 ms that whoever has another file need not pay

    try:
        table = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{PROJECT}: {error}") from None
    if not isinstance(table, dict):
        return ()
    if "dependencies" in table.get("dynamic", ()):
        raise BadRequest(
            f"{PROJECT}: its dependencies are made when it is built", hint="name a requirements.txt, or `none`"
        )
    named = table.get("dependencies", [])
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise BadRequest(f"{PROJECT}: dependencies is no list of texts")
    return tuple(named)


def environment_name(python: Interpreter, wanted: Listed, contents: Sequence[tuple[str, str]]) -> str:
    """The name of the environment: equal for equal inputs on any node.

    Args:
        python: what it is made with.
        wanted: the lines.
        contents: each local file's path, and the SHA-256 of its contents.
    """
    parts = [
        _FORMAT,
        python.path,
        python.version,
        python.abi,
        python.platform,
        *python.parents,
        "",
        *wanted.written,
        "",
    ]
    parts += [text for pair in contents for text in pair]
    digest = hashlib.sha256()
    for part in parts:  # each with its length before it, so that no two lists give the same bytes
        encoded = part.encode("utf-8", "surrogateescape")
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()[:_NAME_CHARACTERS]


def with_environment(variables: Mapping[str, str], venv: str) -> dict[str, str]:
    """The variables as an activated environment has them."""
    path = variables.get("PATH", os.path.defpath)
    found = {**variables, "VIRTUAL_ENV": venv, "PATH": f"{venv}/bin:{path}"}
    found.pop("PYTHONHOME", None)
    return found


def pythons_of(argv: Sequence[str]) -> tuple[str, ...]:
    """Names to look for the job's Python under, the likeliest first."""
    if argv and _PYTHON.fullmatch(argv[0]):
        return (argv[0], "python", "python3")
    return ("python", "python3")


def passes_by(argv: Sequence[str]) -> bool:
    """Whether a command names its Python by path, and so runs without whatever environment is made for the job."""
    return bool(argv) and "/" in argv[0] and _PYTHON.fullmatch(argv[0]) is not None


def last_words(lines: Sequence[str]) -> str:
    """What an installer said last of what went wrong, for one line."""
    said = [line.strip() for line in lines if line.strip() and not line.startswith(("WARNING", "[notice]"))]
    error = next((index for index, line in enumerate(said) if line.lower().startswith(("error", "× "))), None)
    return " · ".join(said[-3:] if error is None else said[error : error + 3])[
        :_WORDS_MAX
    ]  # what follows it explains it


def to_drop(stored: Sequence[tuple[str, float, int]], bytes_max: int = VENVS_BYTES_MAX) -> list[str]:
    """Which environments go, so that the rest fits: those used longest ago, but never the one used last.

    Args:
        stored: name, last use in Unix seconds, and size in bytes of each.
        bytes_max: what all of them may have together.
    """
    oldest_first = sorted(stored, key=lambda one: (one[1], one[0]))
    total = sum(size for _, _, size in oldest_first)
    found: list[str] = []
    for name, _, size in oldest_first[:-1]:
        if total <= bytes_max:
            break
        found.append(name)
        total -= size
    return found


# ---- reading --------------------------------------------------------------------------------------------------------


def _text(reading: _Reading, path: str, named_in: str) -> str:
    text = reading.read(path)
    if text is None:
        by = f" ({named_in} names it)" if named_in else ""
        raise BadRequirements(f"{path}: no such file in {reading.workdir}{by}")
    return text


def _take(reading: _Reading, path: str, *, named_in: str, depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise BadRequirements(f"{path}: included from {named_in}, {_DEPTH_MAX} deep; do the files include each other?")
    for line in _logical_lines(_text(reading, path, named_in)):
        option = _OPTION.fullmatch(line)
        if option is None:
            _keep(reading, line, line, _local_path(line))
            continue
        kind, value = option[1], option[2].strip().strip("\"'")
        beside = os.path.normpath(os.path.join(os.path.dirname(path), value))  # as pip reads it: from the file's folder
        if "://" in value:
            _keep(reading, line, line, None)
        elif kind in {"-r", "--requirement"}:
            _take(reading, beside, named_in=path, depth=depth + 1)
        elif kind in {"-c", "--constraint"}:
            _text(reading, beside, path)
            _keep(reading, line, f"-c {os.path.join(reading.workdir, beside)}", beside)
        elif kind in {"-f", "--find-links"}:
            _keep(reading, line, f"--find-links {os.path.join(reading.workdir, beside)}", beside)
        else:  # editable: the copy is gone after the attempt, the environment is not; so the package itself is installed
            _keep(reading, line, value.partition("#egg=")[0], _local_path(value) or value)


def _keep(reading: _Reading, written: str, line: str, local: str | None) -> None:
    reading.written.append(written)
    reading.lines.append(line)
    if local is not None:
        reading.local.append(local)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines without comments, those that end in a backslash joined with the next."""
    waiting = ""
    for raw in text.splitlines():
        line = waiting + _COMMENT.sub("", raw).rstrip()
        if line.endswith("\\"):
            waiting = line[:-1]
            continue
        waiting = ""
        if line.strip():
            yield line.strip()
    if waiting.strip():
        yield waiting.strip()


def _local_path(line: str) -> str | None:
    """The file or folder that a requirement is, or None for one that an index knows by name."""
    if line.startswith("-"):
        return None
    head = line.split(";", 1)[0].split(" --", 1)[0].strip()
    _, at, place = head.partition(" @ ")
    target = (place if at else head).strip()
    if target.startswith("file:"):
        return re.sub(r"^file:(//(localhost)?)?", "", target).split("#", 1)[0]
    if "://" in target:
        return None
    path = re.sub(r"\[[^\]/]*\]$", "", target.split("#egg=", 1)[0])
    return path if "/" in path or path in {".", ".."} or path.endswith(_ARCHIVE) else None
