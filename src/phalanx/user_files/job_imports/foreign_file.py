"""Finds out of which tool a file is, and converts each of its documents."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.job_file.keys import KEY_KINDS
from phalanx.core.work.sbatch_scripts.sbatch import is_sbatch_script
from phalanx.core.work.sbatch_scripts.script_file import script_job_file
from phalanx.user_files.job_imports.dstack_run import DSTACK_TYPES, OTHER_TYPES, import_dstack_run
from phalanx.user_files.job_imports.job_draft import ImportedJob
from phalanx.user_files.job_imports.sky_task import SKY_KEYS, import_sky_task
from phalanx.user_files.yaml_document import FileKind, YamlValue, parse_yaml

FILE_BYTES_MAX: Final = 256 << 10
_TASKS_MAX: Final = 50  # documents of one file
_START: Final = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_EXAMPLE: Final = "give a SkyPilot task, a run of dstack, or a script with #SBATCH lines"
_KIND: Final = FileKind(
    name="task file", example=_EXAMPLE, bytes_max=FILE_BYTES_MAX, depth_max=12, events_max=10_000, aliases=True
)
_SHARED: Final = SKY_KEYS & KEY_KINDS.keys() | {"name", "run"}
_DSTACK_ONLY: Final = frozenset({"commands", "ide", "init"})


class ForeignFormat(enum.StrEnum):
    """The tool that a file is written for."""

    SKY = "sky"
    DSTACK = "dstack"
    SBATCH = "sbatch"


def import_foreign_file(text: str, *, path: str, folder: str, form: ForeignFormat | None = None) -> list[ImportedJob]:
    """Return the jobs of a file, in order: several of a SkyPilot pipeline, else one.

    Args:
        text: of the file.
        path: for messages.
        folder: absolute; where a script would be submitted.
        form: the tool that the file is written for; None finds out.

    Raises:
        BadFile: it belongs to no known tool, or runs nothing; the message has the line.
        PhalanxError: its command is refused.
    """
    if form is ForeignFormat.SBATCH or (form is None and is_sbatch_script(text)):
        name = os.path.basename(path) if path != "-" else "script"
        keys, notes_of_script = script_job_file(text, path=path, name=name, folder=folder)
        return [ImportedJob(mapping=keys, notes=notes_of_script)]
    if text.startswith("#!"):
        if is_sbatch_script(text):
            raise BadFile(f"{path}:1: it is a batch script, not YAML", hint=f"phalanx import {path}")
        raise BadFile(
            f"{path}:1: it is a script without #SBATCH lines", hint=f"phalanx submit -- ./{os.path.basename(path)}"
        )
    found = [parse_yaml(document, _KIND, path=path) for document in _documents(text)]
    if len(found) > _TASKS_MAX:
        raise BadFile(f"{path}: {len(found)} documents; at most {_TASKS_MAX} are allowed")
    if not found:
        raise BadFile(f"{path}:1: empty file", hint=_EXAMPLE)
    form = form or _format(found)
    if form is ForeignFormat.DSTACK:
        return [import_dstack_run(one) for one in found]
    notes: list[str] = []
    header = found[0].content
    if len(found) > 1 and isinstance(header, dict) and not {"run", "resources", "setup"} & header.keys():
        notes = [
            f"{path}:{one.line}: {key} is not taken over: it is of the pipeline; its tasks are jobs of their own"
            for key, one in header.items()
        ]
        del found[0]
    jobs = [import_sky_task(one) for one in found]
    if notes:
        jobs[0] = ImportedJob(mapping=jobs[0].mapping, notes=(*notes, *jobs[0].notes))
    return jobs


def _documents(text: str) -> Iterator[str]:
    """The documents of a text, each at its lines. Only a line that begins with --- can start one, whatever the document before it."""
    bounds = [0, *(match.start() for match in _START.finditer(text)), len(text)]
    for begin, end in pairwise(bounds):
        document = text[begin:end]
        if document.removeprefix("---").strip() and any(
            line.strip() and not line.lstrip().startswith("#") for line in document.removeprefix("---").splitlines()
        ):
            yield "\n" * text.count("\n", 0, begin) + document


def _format(documents: Sequence[YamlValue]) -> ForeignFormat:
    """By the last document with a key of one tool only. The tasks of a pipeline need none: a name and a command are a job file too, but one alone."""
    distinct = [one for one in documents[1:] if not one.mapping("file").keys() <= _SHARED]
    if len(documents) > 1 and not distinct:
        return ForeignFormat.SKY
    source = distinct[-1] if distinct else documents[0]
    keys = source.mapping("file")
    kind = keys["type"].content if "type" in keys else ""
    if kind in OTHER_TYPES:
        raise source.error(f"type {kind} of dstack runs nothing", "give a task, a service or a dev-environment")
    if kind == DSTACK_TYPES[0] or kind == DSTACK_TYPES[2] or _DSTACK_ONLY & keys.keys():
        return ForeignFormat.DSTACK
    if keys.keys() <= KEY_KINDS.keys() and not (
        keys.keys() & {"resources", "service"} and _is_table(keys.get("resources"))
    ):
        raise source.error("it is a job file already", f"phalanx submit {source.path}")
    if kind == DSTACK_TYPES[1] and "run" not in keys:
        return ForeignFormat.DSTACK
    if keys.keys() & SKY_KEYS:
        return ForeignFormat.SKY
    raise source.error("it is no file of a known tool", _EXAMPLE)


def _is_table(value: YamlValue | None) -> bool:
    return value is not None and isinstance(value.content, dict)
