"""What is wrong with a store that cannot be opened or read at all."""

from __future__ import annotations

from phalanx.core.errors import BadFile
from phalanx.ports.store import StoreRefused


class StoreUnusable(BadFile):
    """The database is damaged, of a newer release, or not ours. Nothing is written to it; another try does not help."""

    code = "store_unusable"
    http_status = 500


def as_refused(error: StoreRefused | StoreUnusable) -> StoreRefused:
    """What a commit raises: it is refused whatever the cause, so that the driver undoes its step and goes on."""
    return error if isinstance(error, StoreRefused) else StoreRefused(error.message, hint=error.hint)
