"""Why a job waits, as every screen writes it."""

from __future__ import annotations

from phalanx.core.work.states import WaitReasonCode


def wait_text(reason: str, detail: str) -> str:
    """Return why a job waits, or `NEVER: ...` for one that can never start."""
    return f"NEVER: {detail}" if reason == WaitReasonCode.NEVER else detail or reason
