"""Find the checkpoint that a member resumes from: where the gang's nodes share a folder node rank 0 verifies it, else each node has it brought."""

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
    """The newest checkpoint that is whole; None where there is none, or where node rank 0 judges for all.

    Raises:
        Refusal: the head does not give this attempt anything any more.
        OSError: the disk.
    """
    order = member.prepare
    if not kept.keeps_checkpoints(order):
        if member.grant.node_rank != 0:
            return None
        with acting_as(member.account):
            return checkpoints.newest_valid(order.candidates, note, member.cancelled.is_set)
    # Every node has its own, and needs all of it: a rank may load what another node's rank has saved.
    own = [kept.own_copy(order, candidate, member.checkpoints) for candidate in order.candidates]
    with acting_as(member.account):
        checkpoints.tidy_own(member.checkpoints, {path for path in own if path is not None} | porter.folders())
        make_folder(kept.epoch_folder(member.checkpoints, order.epoch))
    try:
        member.brought = fetching.newest_valid(member, access, member.checkpoints, note)
    except Rejected as error:
        raise Refusal(f"the head gives this attempt no checkpoint: {error}", charge=False) from error
    return member.brought


def check_storage(member: Present, *, sees: bool | None) -> None:
    """The gang was placed as one whose nodes share the head's folders: so they must lie here.

    Raises:
        Refusal: they do not, any more. The head has heard so, and keeps copies for the next attempt.
    """
    if sees is False and not member.prepare.kept:
        raise Refusal("the head's checkpoints and outputs are no longer to be seen on this node", charge=False)


def bring_outputs(member: Present, outputs: Outputs) -> None:
    """Where nodes have outputs of their own: what earlier attempts left, so that a file that is added to goes on.

    Raises:
        Refusal, OSError: as above.
    """
    if not member.prepare.kept:
        return
    try:
        outputs.bring(member)
    except Rejected as error:
        raise Refusal(f"the head gives this attempt no outputs of earlier ones: {error}", charge=False) from error


def folders_of(member: Present) -> tuple[str, ...]:
    """What a member's ranks find made: where they write outputs and checkpoints. Empty words and URLs are no folders."""
    order = member.prepare
    apart = kept.keeps_checkpoints(order)
    outputs = member.outputs if order.kept else order.output_dir
    found = (outputs, kept.epoch_folder(member.checkpoints, order.epoch) if apart else order.checkpoint_dir)
    return tuple(folder for folder in found if folder and "://" not in folder)


def make_folder(folder: str) -> None:
    """Also while somebody tidies away the job's empty folder of an earlier attempt (`checkpoints.tidy`)."""
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            os.makedirs(folder, exist_ok=True)
            return
    os.makedirs(folder, exist_ok=True)
