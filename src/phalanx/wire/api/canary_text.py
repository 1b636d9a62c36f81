"""How far a rollout by shares of the sessions is, in words for all views."""

from __future__ import annotations

from typing import Final

from phalanx.core.units import format_duration
from phalanx.wire.api.services import CanaryView

_TESTS: Final = {"errors": "errors", "first_tokens": "first tokens", "speeds": "tokens/s"}


def progress_of(canary: CanaryView, now_s: float | None) -> str:
    """Return the share of the new revision and for how long it has it (not with None), or what comes before it."""
    kind = "blue-green" if canary.blue_green else "canary"
    if canary.completing:
        return f"{kind}: revision {canary.revision} replaces all of revision {canary.stable}"
    share = f"{canary.share / 10:g} %"
    since = ""
    if canary.share and canary.step_s is not None and now_s is not None:
        since = f" for {format_duration(max(0.0, now_s - canary.step_s))}"
    found = f"{kind}: revision {canary.revision} gets {share} of the sessions{since}"
    return f"{found}; replicas for {canary.planned / 10:g} % start" if canary.planned > canary.share else found


def comparison_of(canary: CanaryView) -> str:
    """Return what was counted, and how much speaks against the new revision; "" if nothing is compared."""
    if canary.blue_green:
        return ""
    counted = (
        f"{canary.errors:,} {'error' if canary.errors == 1 else 'errors'} in {canary.answered:,} requests of revision {canary.revision}, "
        f"{canary.stable_errors:,} in {canary.stable_answered:,} of revision {canary.stable}"
    )
    against = ", ".join(
        f"{name} {min(1.0, canary.against[key]):.0%}" for key, name in _TESTS.items() if key in canary.against
    )
    return f"{counted}; against it: {against} (at 100% it goes back)" if against else counted
