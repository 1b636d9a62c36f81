"""Deletes checkpoints that retention dropped, with the rights of the job's owner: a link in the owner's path then reaches nothing else."""

from __future__ import annotations

import logging

from phalanx.core.ids import JobId
from phalanx.node.files import checkpoint_folders
from phalanx.node.files.job_accounts import JobAccountPolicy, acting_as
from phalanx.node.files.preparation_error import PreparationFailed

_log = logging.getLogger(__name__)


def delete_checkpoints_as_owner(accounts: JobAccountPolicy, job_id: JobId, paths: tuple[str, ...], user: str) -> None:
    """Remove these folders of this user's job; paths that are not its checkpoints stay and are logged."""
    try:
        with acting_as(accounts.account_for(user)):
            refused = checkpoint_folders.delete_checkpoints(job_id, paths)
    except PreparationFailed as refusal:
        _log.warning("checkpoints of job %s were not deleted: %s", job_id, refusal)
        return
    for path in refused:
        _log.warning("checkpoint %s of job %s was not deleted: not a checkpoint folder of that job", path, job_id)
