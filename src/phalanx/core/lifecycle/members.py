"""The members of an attempt, one for each node of its gang: found, and changed one at a time. Called by the attempt machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.fast_replace import replace
from phalanx.core.work.attempt import Attempt, Member, MemberState

UNSENT_STREAMS_MAX: Final = 64  # a node with 16 ranks has at most 34 streams
ACCOUNTED_STATES: Final = (MemberState.STOPPED, MemberState.LOST)


def member_on(attempt: Attempt, node_id: NodeId) -> Member:
    """The member on the node; a stopped one if the gang has none there."""
    return next(
        (one for one in attempt.members if one.node_id == node_id), Member(node_id=node_id, state=MemberState.STOPPED)
    )


def change_member(attempt: Attempt, node_id: NodeId, change: Callable[[Member], Member]) -> Attempt:
    """The attempt with the member on the node changed; an equal one if the gang has none there."""
    members = tuple(change(one) if one.node_id == node_id else one for one in attempt.members)
    return replace(attempt, members=members)


def with_member(
    attempt: Attempt,
    node_id: NodeId,
    state: MemberState,
    *,
    port: int | None = None,
    why: str = "",
    unless: tuple[MemberState, ...] = (),
    disk_full: bool = False,
) -> Attempt:
    """The attempt with the member on the node in this state; a member whose state is in `unless` stays as it is."""

    def change(member: Member) -> Member:
        if member.state in unless:
            return member
        return replace(
            member,
            state=state,
            port=port if port is not None else member.port,
            why=why or member.why,
            disk_full=disk_full or member.disk_full,
        )

    return change_member(attempt, node_id, change)


def with_unsent(attempt: Attempt, node_id: NodeId, unsent: tuple[tuple[str, int], ...]) -> Attempt:
    """The attempt with the output that its node still sends; bounded, because a record has to stay small."""
    if not unsent:
        return attempt
    return change_member(attempt, node_id, lambda member: replace(member, unsent=unsent[:UNSENT_STREAMS_MAX]))
