"""Checkpoints of this node's jobs in object stores, by a program under each job's account and with its credentials (`transfer.object_program`).

The program runs beside the job's processes and not below them, so that the last save is stored although the ranks have ended. It ends with the supervisor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.head_link.channels import Backoff
from phalanx.node.logic.local_copies import in_object_store
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.transfer.object_program import ObjectStoreUnavailable, run_program
from phalanx.wire.manifest import CheckpointInvalid

_BEGIN_TRIES: Final = 5
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ObjectUpload:
    """The transfer of one checkpoint to the store. `digest`: of what the store holds, on node rank 0 once it is complete."""

    member: MemberRuntime
    url: str
    folder: str
    local_digest: str
    digest: str = ""

    def run(self, on_bytes: Callable[[], None], dropped: Callable[[], bool]) -> bool:
        """Whether all of it is stored.

        Raises:
            ObjectStoreUnavailable: it can be tried again.
            CheckpointInvalid: it cannot.
        """
        order = {
            "do": "upload",
            "url": self.url,
            "folder": self.folder,
            "digest": self.local_digest,
            "rank": self.member.grant.node_rank,
            "nodes": len(self.member.prepare.allocation.grants),
        }
        found = run_program(self.member, order, dropped, on_bytes)
        if found is None:
            return False
        self.digest = str(found)
        return True


def begin(member: MemberRuntime, note: Callable[[str], None]) -> None:
    """Prove that the job can store checkpoints here, before its ranks start. On node rank 0: delete what earlier attempts left.

    Raises:
        PreparationFailed: it cannot, or the member was stopped.
    """
    order, backoff = member.prepare, Backoff(member.cancelled)
    request = {
        "do": "begin",
        "url": os.path.dirname(order.checkpoint_dir),
        "attempt": os.path.basename(order.checkpoint_dir),
        "keep": [one.path for one in order.candidates],
        "sweep": member.grant.node_rank == 0,
    }
    for number in range(_BEGIN_TRIES):
        try:
            removed = run_program(member, request, member.cancelled.is_set)
        except CheckpointInvalid as error:
            raise PreparationFailed(f"checkpoint: {error}", charge=True) from error
        except ObjectStoreUnavailable as error:
            if number == _BEGIN_TRIES - 1:
                raise PreparationFailed(f"checkpoint: {error}", charge=False) from error
            note(f"checkpoint: {error}; trying again")
            backoff.pause()
        else:
            if removed:
                note(f"removed {removed} objects of unfinished checkpoints of earlier attempts")
            return


def download(member: MemberRuntime, resume: PublishedCheckpoint, folder: str) -> None:
    """Make this checkpoint complete in a folder of this node. Retries while the store does not answer, until the member is stopped.

    Raises:
        CheckpointInvalid: no complete copy exists, or the member was stopped.
    """
    backoff = Backoff(member.cancelled)
    order = {"do": "download", "url": resume.path, "digest": resume.digest, "folder": folder}
    while not member.cancelled.is_set():
        try:
            run_program(member, order, member.cancelled.is_set)
        except ObjectStoreUnavailable as error:
            _log.debug("checkpoint of step %d of job %s: %s", resume.step, member.key.job_id, error)
            backoff.pause()
        else:
            if not member.cancelled.is_set():
                return
    raise CheckpointInvalid("the job was stopped during the download")


def remove(members: Sequence[MemberRuntime], urls: Iterable[str]) -> None:
    """Delete checkpoints that the job no longer needs, by one of its members on this node; only below the folder of the job."""
    found = list(urls)
    for member in members[:1]:
        root = f"{os.path.dirname(member.prepare.checkpoint_dir)}/"
        _quietly(member, {"do": "remove", "urls": [one for one in found if one.startswith(root) and ".." not in one]})


def end_attempt(members: Sequence[MemberRuntime]) -> None:
    """An attempt is over: delete what it did not complete, on node rank 0."""
    for member in members[:1]:
        if in_object_store(member.prepare) and member.grant.node_rank == 0:
            _quietly(member, {"do": "end", "url": member.prepare.checkpoint_dir})


def _quietly(member: MemberRuntime, order: dict[str, object]) -> None:
    """Carry out an order that the next attempt repeats if it fails."""
    try:
        run_program(member, order, lambda: False)
    except (ObjectStoreUnavailable, CheckpointInvalid) as error:
        _log.warning("checkpoints of job %s: %s", member.key.job_id, error)
