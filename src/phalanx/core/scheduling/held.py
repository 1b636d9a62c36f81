"""The resources of a running attempt as a need: so that a board that did not start it can count it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.core.scheduling.need import Need
from phalanx.core.scheduling.pool import Places
from phalanx.core.work.attempt import Attempt


def held_as(needs: Iterable[Need], places: Places, kind: Sequence[int]) -> Need | None:
    """The need that these places satisfy, an elastic one with its actual width; None if none does, e.g. after a change of the fleet."""
    for need in needs:
        parts = need.nodes + (need.tail > 0)
        serves = (
            parts <= len(places) <= max(parts, need.nodes_max)
            and max((count for _, count in places), default=-1) == need.devices
        )
        if serves and kind[places[0][0]] in need.kinds:
            return replace(need, nodes=len(places)) if need.nodes_max else need
    return None


def need_of(attempt: Attempt) -> Need:
    """The resources of an attempt as a need; for a job whose request no longer has a shape on this fleet."""
    grants = attempt.allocation.grants
    return Need(
        nodes=len(grants),
        devices=max(len(grant.devices) for grant in grants),
        cpus=grants[0].cpus,
        memory_bytes=grants[0].memory_bytes,
    )
