"""`phalanx import`: makes a job file of a SkyPilot task, a run of dstack, or a script with `#SBATCH` lines."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Final

import click

from phalanx.cli.errors import warn
from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest, Conflict

_FORMATS: Final = ("sky", "dstack", "sbatch")


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write the job file here; of several tasks to FILE-1, FILE-2 and so on, before its ending. Replaces no file.",
)
@click.option("--from", "form", type=click.Choice(_FORMATS), help="Format of FILE; by default its content decides.")
def import_(file: str, output: str | None, form: str | None) -> int:
    """Make a job file of a SkyPilot task, a run of dstack, or a script with #SBATCH lines.

    What it cannot take over is named on stderr, one line each, with what to do instead. `-` reads standard input.

    \b
    phalanx import sky.yaml
    phalanx import train.dstack.yml -o train.yaml
    phalanx import job.sbatch | phalanx submit - --dry-run
    """  # noqa: D301 - click reads the backspace character itself
    from phalanx.user_files.job_imports.foreign_file import FILE_BYTES_MAX, ForeignFormat, import_foreign_file
    from phalanx.user_files.yaml_text import yaml_text

    data = read_file_bytes(file, FILE_BYTES_MAX, "task file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(f"{file}: byte {error.start} is not UTF-8") from None
    jobs = import_foreign_file(text, path=file, folder=os.getcwd(), form=None if form is None else ForeignFormat(form))
    output = None if output == "-" else output
    if output is None and len(jobs) > 1:
        raise BadRequest(
            f"{file} has {len(jobs)} tasks, and a job file is one",
            hint="write each to a file: -o job.yaml makes job-1.yaml, job-2.yaml",
        )
    names = [] if output is None else _file_names(output, len(jobs))
    for name in names:
        if os.path.lexists(name):
            raise Conflict(f"{name} exists already", hint="choose another name, or remove it")
    for job in jobs:
        for note in job.notes:
            warn(note)
    if output is None:
        print(yaml_text(jobs[0].mapping), end="")
        return 0
    for name, job in zip(names, jobs, strict=True):
        try:
            with open(name, "x", encoding="utf-8") as written:
                written.write(yaml_text(job.mapping))
        except OSError as error:
            raise BadFile(f"{name}: cannot be written: {error.strerror}") from None
    print(f"next: {_next(names)}", file=sys.stderr)
    return 0


def _file_names(output: str, count: int) -> list[str]:
    if count == 1:
        return [output]
    stem, ending = os.path.splitext(output)
    return [f"{stem}-{number}{ending}" for number in range(1, count + 1)]


def _next(names: Sequence[str]) -> str:
    """How to submit them: the tasks of a pipeline wait for each other."""
    words = [f"phalanx submit {shlex.quote(names[0])}"]
    if len(names) > 1:
        words[0] = f"job=$(phalanx submit --quiet {shlex.quote(names[0])})"
        words += [f"job=$(phalanx submit --quiet {shlex.quote(name)} --depends-on $job)" for name in names[1:]]
    return " && ".join(words)
