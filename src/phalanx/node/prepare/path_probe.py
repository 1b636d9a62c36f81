"""Checks that a checkpoint path given by the user is the same folder on every node of the gang: each node creates a marker file, node rank 0 checks for all.

If it is not, the job runs, but its checkpoints are not published: a job may only resume from checkpoints that are complete on all its nodes.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from phalanx.node.files.job_accounts import open_for_writing
from phalanx.node.member.member_runtime import MemberRuntime

_PATIENCE_S: Final = 5.0  # a network file system may show a new file some seconds late
_POLL_S: Final = 0.1


def create_marker(member: MemberRuntime) -> None:
    """Create the marker, on every node before the barrier.

    Raises:
        OSError: it cannot be written; then a checkpoint could not be either.
    """
    if _applies(member):
        os.close(open_for_writing(_marker(member, member.grant.node_rank)))


def remove_marker(member: MemberRuntime) -> None:
    """Remove the marker at the end, so that a folder without checkpoints is empty."""
    if _applies(member):
        with contextlib.suppress(OSError):
            os.unlink(_marker(member, member.grant.node_rank))


def find_missing_markers(member: MemberRuntime) -> str:
    """Check for all markers, on node rank 0 after the barrier: the problem and its remedy; empty without a problem."""
    if not _applies(member) or member.grant.node_rank != 0:
        return ""
    grants = member.prepare.allocation.grants
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        missing = [grant.node_id for grant in grants if not os.path.exists(_marker(member, grant.node_rank))]
        if not missing:
            return ""
        if time.monotonic() >= until_s or member.cancelled.wait(_POLL_S):
            break
    return (
        f"checkpoint: {member.grant.node_id} does not see the files of {', '.join(missing)} in {member.prepare.spec.checkpoint}: "
        "checkpoints of this attempt are not published, and the job cannot resume from them by itself. Use a folder that all nodes "
        "share, or omit `checkpoint`: then the head keeps copies"
    )


def _applies(member: MemberRuntime) -> bool:
    order = member.prepare
    return bool(order.spec.checkpoint) and "://" not in order.checkpoint_dir and len(order.allocation.grants) > 1


def _marker(member: MemberRuntime, node_rank: int) -> str:
    return os.path.join(member.prepare.checkpoint_dir, f".reach-{member.key.generation}-{node_rank}")
