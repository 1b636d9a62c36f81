"""Converts an `#SBATCH` script to the keys of our job file, as a submit of the script does, without what only a submit knows."""

from __future__ import annotations

from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.job_file.keys import KEY_KINDS
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.sbatch_scripts.sbatch_job import SCRIPT_KEY, convert_script

_EXPORT: Final = (
    "write the variables of your shell that the script needs under env; a submit of the script itself sends them"
)


def script_job_file(text: str, *, path: str, name: str, folder: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the keys of the job file of a script, and the notes about what is missing. `path`: for messages; `name`: of its file; `folder`: absolute, where it would be submitted.

    Raises:
        BadFile: an option is wrong or unknown, with its line.
    """
    try:
        found = convert_script(text, name=name, folder=folder)
    except BadFile as error:
        raise BadFile(f"{path}: {error.message}", hint=error.hint) from None
    lost = {
        f"partition={found.partition}": f"write queue: {found.partition} if there is a queue of that name"
        if found.partition
        else "",
        f"account={found.account}": f"write project: {found.account} if there is a project of that name"
        if found.account
        else "",
        "exclusive": "write gpus and cpus of a whole node" if found.exclusive else "",
        f"export={found.export[:60]}": "" if found.export == "NONE" else _EXPORT,
    }
    notes = [*found.notes, *(f"--{option} is not taken over: {why}" for option, why in lost.items() if why)]
    mapping = dict(found.mapping)
    slurm = mapping.get("slurm")
    if isinstance(slurm, dict):
        mapping["slurm"] = {key: value for key, value in slurm.items() if key != SCRIPT_KEY}
    spec_from_mapping(mapping, workdir=folder, now_s=0.0)
    ordered = {key: mapping[key] for key in KEY_KINDS if key in mapping}
    return ordered, tuple(f"{path}: {note}" for note in notes)
