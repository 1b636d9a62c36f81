"""Selects the checkpoint that a member resumes from: on a shared folder node rank 0 verifies it, otherwise each node downloads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.files import checkpoint_folders
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.head_link.head_connection import HeadAccess, RequestRejected
from phalanx.node.logic import local_copies
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.transfer import checkpoint_download
from phalanx.node.transfer.checkpoint_upload import CheckpointUploader
from phalanx.node.transfer.output_sync import OutputSync

_FOLDER_TRIES: Final = 3


def select_checkpoint(
    member: MemberRuntime, access: HeadAccess, uploader: CheckpointUploader, note: Callable[[str], None]
) -> PublishedCheckpoint | None:
    """The newest complete checkpoint; None if no checkpoint is complete, or if node rank 0 selects it for all.

    Raises:
        PreparationFailed: the head no longer accepts this attempt.
        OSError: the disk failed.
    """
    order = member.prepare
    if not local_copies.has_local_checkpoints(order):
        if member.grant.node_rank != 0:
            return None
        with acting_as(member.account):
            return checkpoint_folders.newest_valid(order.candidates, note, member.cancelled.is_set)
    # Each node needs a complete copy: a rank may load data that a rank of another node saved.
    own = [local_copies.local_checkpoint_path(order, candidate, member.checkpoints) for candidate in order.candidates]
    with acting_as(member.account):
        checkpoint_folders.remove_unneeded_copies(
            member.checkpoints, {path for path in own if path is not None} | uploader.unfinished_folders()
        )
        make_folder(local_copies.epoch_folder(member.checkpoints, order))
    try:
        member.local_checkpoint = checkpoint_download.newest_complete(member, access, member.checkpoints, note)
    except RequestRejected as error:
        raise PreparationFailed(
            f"the head refused to send a checkpoint to this attempt: {error}", charge=False
        ) from error
    return member.local_checkpoint


def check_storage(member: MemberRuntime, *, sees: bool | None) -> None:
    """Check that the head's folders are visible here if the gang was placed on nodes that share them.

    Raises:
        PreparationFailed: they no longer are. The head knows, and keeps copies for the next attempt.
    """
    if sees is False and not member.prepare.kept:
        raise PreparationFailed("the head's checkpoints and outputs are no longer visible on this node", charge=False)


def download_outputs(member: MemberRuntime, outputs: OutputSync) -> None:
    """If each node has its own outputs: download those of earlier attempts, so that appended files continue.

    Raises:
        PreparationFailed, OSError: as above.
    """
    if not member.prepare.kept or local_copies.outputs_in_object_store(member.prepare):
        return
    try:
        outputs.download_earlier(member)
    except RequestRejected as error:
        raise PreparationFailed(
            f"the head refused to send earlier outputs to this attempt: {error}", charge=False
        ) from error


def writable_folders(member: MemberRuntime) -> tuple[str, ...]:
    """The folders for outputs and checkpoints of a member's ranks. Empty strings and URLs are skipped."""
    order = member.prepare
    separate = local_copies.has_local_checkpoints(order)
    outputs = member.outputs if local_copies.has_local_outputs(order) else order.output_dir
    found = (outputs, local_copies.epoch_folder(member.checkpoints, order) if separate else order.checkpoint_dir)
    return tuple(folder for folder in found if folder and "://" not in folder)


def make_folder(folder: str) -> None:
    """Create it; retries if another thread removes the job's empty folder of an earlier attempt (`checkpoints.remove_empty_folders`)."""
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            os.makedirs(folder, exist_ok=True)
            return
    os.makedirs(folder, exist_ok=True)
