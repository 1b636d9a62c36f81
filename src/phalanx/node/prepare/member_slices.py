"""The MIG slices of one member: made before its tasks start, while neighbours run, and removed when none of its processes is left."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from phalanx.core.errors import Conflict, PhalanxError
from phalanx.core.work.share import GrantedSlice
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.mig.slice_keeper import SliceKeeper
from phalanx.node.probes.devices import DeviceFacts

_TRIES: Final = 20  # the driver may report a killed process for a second or two
_RETRY_S: Final = 0.5
_log = logging.getLogger(__name__)


def hold_slices(member: MemberRuntime, keeper: SliceKeeper | None, devices: Sequence[DeviceFacts]) -> None:
    """Make the member's MIG slices, if it is granted some, and remove them with its other resources.

    Args:
        member: to prepare.
        keeper: of the node; None if none of its devices can be divided.
        devices: of the node, by index.

    Raises:
        PreparationFailed: one cannot be made, by a fault of the node.
        OSError: it cannot be recorded.
    """
    granted = () if member.grant.share is None else member.grant.share.slices
    if not granted:
        return
    if keeper is None:
        raise PreparationFailed("no GPU of this node can be divided by MIG", charge=False, node_fault=True)
    owner = f"{member.key.job_id}.{member.key.epoch}.{member.key.generation}"
    wanted = [(devices[one.device], one) for one in granted]
    try:
        member.slices = member.cleanup.enter_context(slices_of_member(keeper, wanted, owner))
    except PhalanxError as error:
        raise PreparationFailed(f"a MIG slice cannot be made: {error}", charge=False, node_fault=True) from error


@contextlib.contextmanager
def slices_of_member(
    keeper: SliceKeeper,
    granted: Sequence[tuple[DeviceFacts, GrantedSlice]],
    owner: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, ...]]:
    """The granted slices while in the context; yields their UUIDs in this order. If one cannot be made, none is left.

    A slice that cannot be removed at the end stays on the keeper's record: it is removed when another takes its place, or at the next start.

    Raises:
        PhalanxError: one cannot be made.
        OSError: it cannot be recorded.
    """
    made: list[str] = []
    try:
        for facts, one in granted:
            made.append(_make(keeper, facts, one, owner, sleep))
        yield tuple(made)
    finally:
        for uuid in reversed(made):
            _remove(keeper, uuid, sleep)


def _make(
    keeper: SliceKeeper, facts: DeviceFacts, granted: GrantedSlice, owner: str, sleep: Callable[[float], None]
) -> str:
    """Make one slice; returns its UUID. The head grants a place only after the last attempt there ended, so what this supervisor has there goes.

    It may be of a member that the supervisor has yet to hear about, or left over, with processes that the driver still reports.
    """
    for _ in range(_TRIES):
        try:
            return keeper.make(facts, granted.profile, granted.start, owner).uuid
        except Conflict:
            if not keeper.has_own_at(facts, granted.profile, granted.start):
                raise
            sleep(_RETRY_S)
    return keeper.make(facts, granted.profile, granted.start, owner).uuid


def _remove(keeper: SliceKeeper, uuid: str, sleep: Callable[[float], None]) -> None:
    why = ""
    for _ in range(_TRIES):
        try:
            keeper.remove(uuid)
        except (PhalanxError, OSError) as error:
            why = str(error)
            sleep(_RETRY_S)
        else:
            return
    _log.warning("MIG slice %s stays: %s", uuid, why)
