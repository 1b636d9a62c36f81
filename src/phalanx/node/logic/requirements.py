"""Read requirements files, name the environments that they need, and choose environments to evict when space runs out.

Pure: the caller reads the files. Two jobs with equal text, equal included and local files, and the same Python share one environment, so
the name of an environment is a hash of exactly these.
"""

from __future__ import annotations

import hashlib
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.requirements import LOCK_FILE, PROJECT_FILE

REQUIREMENTS_FILE: Final = "requirements.txt"
VENVS_BYTES_MAX: Final = 50 << 30  # seven environments with their own torch and CUDA, 7 GB each
_FORMAT: Final = (
    "1"  # version of the hash input and of how an environment is built; a new one rebuilds all environments
)
_NAME_CHARACTERS: Final = 32  # of SHA-256 in hex: 128 bits
_DEPTH_MAX: Final = 16  # of files that include files
_SUMMARY_CHARS_MAX: Final = 400  # characters of an installer's error that fit into a line of `phalanx show`
_PYTHON: Final = re.compile(r"(?:.*/)?python(3(\.\d+)?)?")
_OPTION: Final = re.compile(
    r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s*=\s*|\s+|(?<=-[rcef]))(\S.*)"
)
_COMMENT: Final = re.compile(r"(^|\s)#.*$")
_ARCHIVE: Final = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tgz")


class InvalidRequirements(Exception):
    """The file cannot be read, or names a missing file. The job is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonInterpreter:
    """A Python of this node, as it describes itself.

    Attributes:
        path: as found, with links unresolved: the link of a virtual environment selects that environment.
        parents: folders of the packages that it can import, in search order.
        scripts: the folder of their commands.
    """

    path: str
    version: str
    abi: str
    platform: str
    parents: tuple[str, ...]
    scripts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementsList:
    """A requirements file with everything that it includes.

    Attributes:
        source_lines: its lines as written, with included lines in place; these are hashed.
        installer_lines: the same for the installer, with paths relative to the working directory.
        local_paths: files and folders that it names, relative to the working directory or absolute; their contents are hashed.
    """

    source_lines: tuple[str, ...]
    installer_lines: tuple[str, ...]
    local_paths: tuple[str, ...]


@dataclass(slots=True)
class _Reading:
    workdir: str
    read: Callable[[str], str | None]
    written: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)


def read_requirements(path: str, *, workdir: str, read: Callable[[str], str | None]) -> RequirementsList:
    """Read a requirements file and all that it includes.

    Args:
        path: in the working directory.
        workdir: absolute base of relative paths.
        read: returns a file's text by its path, relative to the working directory or absolute; None for a missing file.

    Raises:
        InvalidRequirements: a file is missing, or files include each other.
        BadRequest: a pyproject.toml cannot be read.
    """
    reading = _Reading(workdir, read)
    if os.path.basename(path) == PROJECT_FILE:
        named = project_dependencies(_text(reading, path, PROJECT_FILE))
        return RequirementsList(source_lines=named, installer_lines=named, local_paths=())
    _read_file(reading, path, named_in="", depth=0)
    return RequirementsList(
        source_lines=tuple(reading.written), installer_lines=tuple(reading.lines), local_paths=tuple(reading.local)
    )


def default_requirements_file(read: Callable[[str], bytes | None]) -> str:
    """Return the file of an uploaded directory that is used if the job names none; "" for none.

    Args:
        read: returns a file of the directory by its relative path; None for a missing file.
    """
    if read(REQUIREMENTS_FILE) is not None:
        return REQUIREMENTS_FILE
    project = read(PROJECT_FILE)
    try:
        return PROJECT_FILE if project is not None and project_dependencies(project.decode()) else ""
    except (BadRequest, UnicodeDecodeError):  # written for another tool; only a file that the job names must be valid
        return ""


def project_dependencies(text: str) -> tuple[str, ...]:
    """Return the dependencies in `[project]` of a pyproject.toml; empty without any.

    Raises:
        BadRequest: it is not TOML, or its dependencies are dynamic.
    """
    import tomllib  # takes 20 ms, needed for this file alone

    try:
        table = tomllib.loads(text).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{PROJECT_FILE}: {error}") from None
    if not isinstance(table, dict):
        return ()
    if "dependencies" in table.get("dynamic", ()):
        raise BadRequest(
            f"{PROJECT_FILE}: its dependencies are dynamic, known only when it is built",
            hint="name a requirements.txt, or `none`",
        )
    named = table.get("dependencies", [])
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise BadRequest(f"{PROJECT_FILE}: dependencies must be a list of strings")
    return tuple(named)


def locked_sources(text: str) -> tuple[tuple[str, ...], bool]:
    """Return the folders, relative to its own, from which a uv.lock installs, and whether its project itself is a package.

    Raises:
        InvalidRequirements: it is not a lock file of uv.
    """
    import tomllib  # as above

    try:
        packages = tomllib.loads(text)["package"]
        sources = [one["source"] for one in packages]
        project = any(source.get("editable") == "." for source in sources)
        folders = {source.get("directory") or source.get("editable") or "." for source in sources}
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequirements(f"{LOCK_FILE} cannot be read: {type(error).__name__}: {error}") from None
    return tuple(sorted(str(folder) for folder in folders - {"."})), project


def environment_name(python: PythonInterpreter, wanted: RequirementsList, contents: Sequence[tuple[str, str]]) -> str:
    """Return the name of the environment: equal for equal inputs on any node.

    Args:
        python: the interpreter it is built with.
        wanted: the requirements.
        contents: path and SHA-256 of each local file.
    """
    parts = [
        _FORMAT,
        python.path,
        python.version,
        python.abi,
        python.platform,
        *python.parents,
        "",
        *wanted.source_lines,
        "",
    ]
    parts += [text for pair in contents for text in pair]
    digest = hashlib.sha256()
    for part in parts:  # length-prefixed, so that no two lists give the same bytes
        encoded = part.encode("utf-8", "surrogateescape")
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()[:_NAME_CHARACTERS]


def activated(variables: Mapping[str, str], venv: str) -> dict[str, str]:
    """Return the variables as in an activated environment."""
    path = variables.get("PATH", os.path.defpath)
    found = {**variables, "VIRTUAL_ENV": venv, "PATH": f"{venv}/bin:{path}"}
    found.pop("PYTHONHOME", None)
    return found


def python_candidates(argv: Sequence[str]) -> tuple[str, ...]:
    """Return names under which to search for the job's Python, the likeliest first."""
    if argv and _PYTHON.fullmatch(argv[0]):
        return (argv[0], "python", "python3")
    return ("python", "python3")


def names_python_by_path(argv: Sequence[str]) -> bool:
    """Whether a command names its Python by path, and so bypasses an environment built for the job."""
    return bool(argv) and "/" in argv[0] and _PYTHON.fullmatch(argv[0]) is not None


def error_summary(lines: Sequence[str]) -> str:
    """Summarise an installer's error in one line: the first error line and the two after it, which explain it."""
    printed = [line.strip() for line in lines if line.strip() and not line.startswith(("WARNING", "[notice]"))]
    error = next((index for index, line in enumerate(printed) if line.lower().startswith(("error", "× "))), None)
    return " · ".join(printed[-3:] if error is None else printed[error : error + 3])[:_SUMMARY_CHARS_MAX]


def environments_to_evict(stored: Sequence[tuple[str, float, int]], bytes_max: int = VENVS_BYTES_MAX) -> list[str]:
    """Return the environments to evict so that the rest fits: least recently used first, never the newest.

    Args:
        stored: name, last use in Unix seconds, and size in bytes of each.
        bytes_max: most bytes for all of them together.
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


# ---- parsing --------------------------------------------------------------------------------------------------------


def _text(reading: _Reading, path: str, named_in: str) -> str:
    text = reading.read(path)
    if text is None:
        by = f" ({named_in} names it)" if named_in else ""
        raise InvalidRequirements(f"{path}: no such file in {reading.workdir}{by}")
    return text


def _read_file(reading: _Reading, path: str, *, named_in: str, depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise InvalidRequirements(
            f"{path}: included from {named_in}, more than {_DEPTH_MAX} levels deep; do the files include each other?"
        )
    for line in _logical_lines(_text(reading, path, named_in)):
        option = _OPTION.fullmatch(line)
        if option is None:
            _add(reading, line, line, _local_path(line))
            continue
        kind, value = option[1], option[2].strip().strip("\"'")
        beside = os.path.normpath(os.path.join(os.path.dirname(path), value))  # relative to the file, as for pip
        if "://" in value:
            _add(reading, line, line, None)
        elif kind in {"-r", "--requirement"}:
            _read_file(reading, beside, named_in=path, depth=depth + 1)
        elif kind in {"-c", "--constraint"}:
            _text(reading, beside, path)
            _add(reading, line, f"-c {os.path.join(reading.workdir, beside)}", beside)
        elif kind in {"-f", "--find-links"}:
            _add(reading, line, f"--find-links {os.path.join(reading.workdir, beside)}", beside)
        else:  # editable: installed as a plain package, because the environment outlives the attempt's copy of the files
            _add(reading, line, value.partition("#egg=")[0], _local_path(value) or value)


def _add(reading: _Reading, written: str, line: str, local: str | None) -> None:
    reading.written.append(written)
    reading.lines.append(line)
    if local is not None:
        reading.local.append(local)


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines without comments; a line that ends in a backslash continues on the next."""
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
    """Return the file or folder that a requirement names; None for a package name."""
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
