"""Removal of checkpoints that retention gave up, with the rights of the job's owner: a link in the owner's path leads nowhere else then."""

from __future__ import annotations

import logging

from phalanx.core.ids import JobId
from phalanx.node.shell import checkpoints
from phalanx.node.shell.accounts import JobAccounts, acting_as
from phalanx.node.shell.refusal import Refusal

_log = logging.getLogger(__name__)


def delete_of(accounts: JobAccounts, job_id: JobId, paths: tuple[str, ...], user: str) -> None:
    """Remove these folders of this user's job; what is none is left, and said in the supervisor's log."""
    try:
        with acting_as(accounts.of(user)):
            refused = checkpoints.delete(job_id, paths)
    except Refusal as refusal:
        _log.warning("checkpoints of job %s are not deleted: %s", job_id, refusal)
        return
    for path in refused:
        _log.warning("checkpoint %s of job %s is not deleted: it is no checkpoint folder of that job", path, job_id)
