"""Selects the checkpoint that a member resumes from: on a shared folder node rank 0 verifies it, otherwise each node downloads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from phalanx.core.work.job import Resume
from phalanx.node.logic import kept
from phalanx.node.shell import checkpoints, fetching
from phalanx.node.shell.accounts import acting_as
from phalanx.node.shell.link import HeadAccess, Rejected
from phalanx.node.shell.outputs import Outputs
from phalanx.node.shell.porter import Porter
from phalanx.node.shell.present import Present
from phalanx.node.shell.refusal import Refusal

_FOLDER_TRIES: Final = 3


def find(member: Present, access: HeadAccess, porter: Porter, note: Callable[[str], None]) -> Resume | None:
    """The newest complete checkpoint; None if there is none, or if node rank 0 selects it for all.

    Raises:
        Refusal: the head no longer accepts this attempt.
        OSError: the disk failed.
    """
    order = member.prepare
    if not kept.keeps_checkpoints(order):
        if member.grant.node_rank != 0:
            return None
        with acting_as(member.account):
            return checkpoints.newest_valid(order.candidates, note, member.cancelled.is_set)
    # Each node needs a complete copy: a rank may load data that a rank of another node saved.
    own = [kept.own_copy(order, candidate, member.checkpoints) for candidate in order.candidates]
    with acting_as(member.account):
        checkpoints.tidy_own(member.checkpoints, {path for path in own if path is not None} | porter.folders())
        make_folder(kept.epoch_folder(member.checkpoints, order.epoch))
    try:
        member.brought = fetching.newest_valid(member, access, member.checkpoints, note)
    except Rejected as error:
        raise Refusal(f"the head refused to send a checkpoint to this attempt: {error}", charge=False) from error
    return member.brought


def check_storage(member: Present, *, sees: bool | None) -> None:
    """Check that the head's folders are visible here if the gang was placed on nodes that share them.

    Raises:
        Refusal: they no longer are. The head knows, and keeps copies for the next attempt.
    """
    if sees is False and not member.prepare.kept:
        raise Refusal("the head's checkpoints and outputs are no longer visible on this node", charge=False)


def bring_outputs(member: Present, outputs: Outputs) -> None:
    """If each node has its own outputs: download those of earlier attempts, so that appended files continue.

    Raises:
        Refusal, OSError: as above.
    """
    if not member.prepare.kept:
        return
    try:
        outputs.bring(member)
    except Rejected as error:
        raise Refusal(f"the head refused to send earlier outputs to this attempt: {error}", charge=False) from error


def folders_of(member: Present) -> tuple[str, ...]:
    """The folders for outputs and checkpoints of a member's ranks. Empty strings and URLs are skipped."""
    order = member.prepare
    separate = kept.keeps_checkpoints(order)
    outputs = member.outputs if order.kept else order.output_dir
    found = (outputs, kept.epoch_folder(member.checkpoints, order.epoch) if separate else order.checkpoint_dir)
    return tuple(folder for folder in found if folder and "://" not in folder)


def make_folder(folder: str) -> None:
    """Create it; retries if another thread removes the job's empty folder of an earlier attempt (`checkpoints.tidy`)."""
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            os.makedirs(folder, exist_ok=True)
            return
    os.makedirs(folder, exist_ok=True)
