"""Outputs of this node's jobs in object stores, by the program that also stores checkpoints (`transfer.object_program`)."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Final

from phalanx.node.data.output_objects import SETTLED_BYTES, SETTLED_S
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.head_link.channels import Backoff
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.transfer.object_program import AttemptSuperseded, ObjectStoreUnavailable, run_program
from phalanx.wire.manifest import CheckpointInvalid

STORE_STALL_S: Final = 300.0  # at the end of a member: give up after this time without a byte
_BEGIN_TRIES: Final = 5

FileTimes = dict[str, tuple[int, int]]


def begin(member: MemberRuntime, note: Callable[[str], None]) -> None:
    """Bring the outputs of earlier attempts, and prove that the job can store its own, before its ranks start.

    Raises:
        PreparationFailed: it cannot, or the member was stopped.
    """
    backoff = Backoff(member.cancelled)
    for number in range(_BEGIN_TRIES):
        try:
            found = run_program(member, _order(member, "begin_outputs"), member.cancelled.is_set)
        except (CheckpointInvalid, AttemptSuperseded) as error:
            raise PreparationFailed(f"outputs: {error}", charge=isinstance(error, CheckpointInvalid)) from error
        except ObjectStoreUnavailable as error:
            if number == _BEGIN_TRIES - 1:
                raise PreparationFailed(f"outputs: {error}", charge=False) from error
            note(f"outputs: {error}; trying again")
            backoff.pause()
        else:
            if found:
                note(f"outputs: {found} files of earlier attempts are here")
            return


def send(
    member: MemberRuntime, *, final: bool, on_bytes: Callable[[], None], dropped: Callable[[], bool]
) -> Sequence[tuple[str, str]]:
    """Store what changed; returns the files that are not stored, each with the reason.

    Raises:
        AttemptSuperseded: a newer attempt of the job stores its outputs.
        ObjectStoreUnavailable: it can be tried again.
    """
    try:
        found = run_program(member, {**_order(member, "send_outputs"), "final": final}, dropped, on_bytes)
    except CheckpointInvalid as error:
        return [("*", str(error))]
    return [(path, why) for path, why in found] if isinstance(found, list) else []


def file_times(member: MemberRuntime) -> FileTimes:
    """Size and time of the last change (ns) of each output, so that a pass starts a program only if something changed."""
    found: FileTimes = {}
    with acting_as(member.account):
        for folder, _, names in os.walk(member.outputs):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    seen = os.lstat(path)
                except OSError:
                    continue
                if stat.S_ISREG(seen.st_mode):
                    found[path] = (seen.st_size, seen.st_mtime_ns)
    return found


def settled(found: FileTimes) -> FileTimes:
    """The files that a pass sends before the end."""
    oldest_ns = time.time_ns() - int(SETTLED_S * 1e9)
    return {
        path: (size, changed_ns)
        for path, (size, changed_ns) in found.items()
        if size <= SETTLED_BYTES or changed_ns < oldest_ns
    }


def _order(member: MemberRuntime, do: str) -> dict[str, object]:
    return {
        "do": do,
        "url": member.prepare.output_dir,
        "folder": member.outputs,
        "rank": member.grant.node_rank,
        "epoch": member.key.epoch,
    }
