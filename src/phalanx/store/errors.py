"""Errors of a store that cannot be opened or read."""

from __future__ import annotations

from phalanx.core.errors import BadFile
from phalanx.ports.store import StoreRefused


class StoreUnusable(BadFile):
    """The database is damaged, of a newer release, or not of Phalanx. Nothing is written to it; a retry does not help."""

    code = "store_unusable"
    http_status = 500


def as_refused(error: StoreRefused | StoreUnusable) -> StoreRefused:
    """Convert to the error that a commit raises, so that the driver undoes its step and continues."""
    return error if isinstance(error, StoreRefused) else StoreRefused(error.message, hint=error.hint)
