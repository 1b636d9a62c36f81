"""The job in which a view runs: where its head is, and its number."""

from __future__ import annotations

import os

from phalanx.node.gang.job_link import NotInJob, read_batch_order


def use_head_of_job() -> None:
    """Use the head that the job was submitted to, unless the environment names another."""
    if "PHALANX_URL" in os.environ or "PHALANX_HOME" in os.environ:
        return
    try:
        place = str(read_batch_order()["batch"]["options"].get("home", ""))
    except NotInJob:  # at a prompt
        return
    if place:
        os.environ["PHALANX_URL" if "://" in place else "PHALANX_HOME"] = place


def job_id(number: str) -> str:
    """Return the id of a job's number: in an element of an array, SLURM_JOB_ID is a number of its own, and the id is `17_3`.

    The array's number stays: it means all elements, as in Slurm.
    """
    try:
        batch = read_batch_order()["batch"]
    except NotInJob:
        return number
    array = batch["array"]
    if not array or number != batch["job_number"] or number == array["SLURM_ARRAY_JOB_ID"]:
        return number
    return f"{array['SLURM_ARRAY_JOB_ID']}_{array['SLURM_ARRAY_TASK_ID']}"
