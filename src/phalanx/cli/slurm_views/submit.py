"""`sbatch` as a view: submits a script, with the options of the command line in front of those of the script."""

from __future__ import annotations

import os
import sys
from typing import Final

from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.request.job_request import job_request_of_sbatch
from phalanx.cli.jobs.submit import submit_job
from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile
from phalanx.core.work.job_file.request import VALUE_BYTES_MAX
from phalanx.core.work.sbatch_scripts.sbatch import (
    parse_option_line,
    parse_script_options,
    split_command_line,
    split_components,
)

_WRAP: Final = "--wrap"


def sbatch(words: list[str]) -> int:
    """Submit a script; print `Submitted batch job N`, or only N with --parsable.

    Raises:
        BadFile: there is no script, or an option is wrong.
    """
    words, wrapped = take_wrap(words)
    given, rest = split_command_line(words)
    if wrapped is not None:
        text, path, args = f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n", "wrap", rest
    elif rest:
        path, args = rest[0], rest[1:]
        text = read_file_bytes(path, VALUE_BYTES_MAX, "batch script").decode("utf-8", "replace")
    else:
        path, args, text = "sbatch", [], sys.stdin.read(VALUE_BYTES_MAX)
    if not text.startswith("#!"):
        raise BadFile(
            f"{path}: this does not look like a batch script: the first line must begin with #!", hint="#!/bin/bash"
        )
    first = split_components(given)[0]
    options = {option.name for option in (*parse_script_options(text), *parse_option_line(first))}
    head = connect()
    taken = submit_job(head, job_request_of_sbatch(text, path, args, given))
    for line in taken.warnings:
        warn(f"sbatch: {line}")
    number = taken.id
    print(number if "parsable" in options else f"Submitted batch job {number}", flush=True)
    if "wait" not in options:
        return 0
    from phalanx.cli.jobs.job_end import wait_for_end

    return wait_for_end(head, number, None)


def take_wrap(words: list[str]) -> tuple[list[str], str | None]:
    """The words without `--wrap`, and its command."""
    for place, word in enumerate(words):
        if word.startswith(f"{_WRAP}="):
            return [*words[:place], *words[place + 1 :]], word[len(_WRAP) + 1 :]
        if word == _WRAP and place + 1 < len(words):
            return [*words[:place], *words[place + 2 :]], words[place + 1]
        if not word.startswith("-") and os.path.isfile(word):
            break  # what follows the script are its own arguments
    return words, None
