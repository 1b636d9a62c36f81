"""Finds the files of jobs that the database does not know, since it was restored or lost.

The names of jobs' folders contain random keys, so a new job with the same number never uses these files. Nothing removes them.
"""

from __future__ import annotations

import os
import re
from typing import Final

_FOLDERS: Final = ("logs", "outputs", "checkpoints")
_JOB: Final = re.compile(r"([0-9]+)(?:_[0-9]+)?-[0-9a-z]+")
_SHOWN_MAX: Final = 10  # names in one line


def describe_unknown(files: str, last_job_seq: int) -> list[str]:
    """Describe the folders of jobs after the last known one: a line for each of `logs`, `outputs` and `checkpoints` that has any.

    Folders that cannot be listed are skipped. Cost: three listings.
    """
    lines = []
    for folder in (os.path.join(files, name) for name in _FOLDERS):
        found = sorted(one for one in _listed(folder) if (job := _JOB.fullmatch(one)) and int(job[1]) > last_job_seq)
        if found:
            more = f" and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
            names = ", ".join(found[:_SHOWN_MAX])
            lines.append(
                f"{folder} contains files of jobs that the database does not know: {names}{more}. "
                "No job uses them: remove those that you do not need."
            )
    return lines


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
