"""Is the path that a user named for checkpoints the same folder on every node of the gang? Each leaves a mark there, and node rank 0 looks for all.

Where it is not, the job runs, but its checkpoints are not published: what is resumed from must be whole wherever the gang goes on.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from phalanx.node.shell.accounts import open_to_write
from phalanx.node.shell.present import Present

_PATIENCE_S: Final = 5.0  # a network file system may show a new name some seconds late
_LOOK_S: Final = 0.1


def leave_mark(member: Present) -> None:
    """Before the barrier, on every node.

    Raises:
        OSError: it cannot be written; nor could a checkpoint.
    """
    if _asked(member):
        os.close(open_to_write(_mark(member, member.grant.node_rank)))


def remove_mark(member: Present) -> None:
    """At the end, so that a folder without checkpoints is empty."""
    if _asked(member):
        with contextlib.suppress(OSError):
            os.unlink(_mark(member, member.grant.node_rank))


def unseen(member: Present) -> str:
    """Behind the barrier, on node rank 0: what is wrong with the path, and what to do; empty where nothing is."""
    if not _asked(member) or member.grant.node_rank != 0:
        return ""
    grants = member.prepare.allocation.grants
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        missing = [grant.node_id for grant in grants if not os.path.exists(_mark(member, grant.node_rank))]
        if not missing:
            return ""
        if time.monotonic() >= until_s or member.cancelled.wait(_LOOK_S):
            break
    return (
        f"checkpoint: {member.grant.node_id} does not see what {', '.join(missing)} left in {member.prepare.spec.checkpoint}: "
        "checkpoints of this attempt are not published, and the job cannot resume from them by itself. Name a folder that all nodes "
        "share; without `checkpoint`, the head keeps copies"
    )


def _asked(member: Present) -> bool:
    order = member.prepare
    return bool(order.spec.checkpoint) and "://" not in order.checkpoint_dir and len(order.allocation.grants) > 1


def _mark(member: Present, node_rank: int) -> str:
    return os.path.join(member.prepare.checkpoint_dir, f".reach-{member.key.generation}-{node_rank}")
