"""What is wrong with a store that cannot be opened or read at all."""

from __future__ import annotations

from phalanx.core.errors import BadFile


class StoreUnusable(BadFile):
    """The database is damaged, of a newer release, or not ours. Nothing is written to it; another try does not help."""

    code = "store_unusable"
    http_status = 500
