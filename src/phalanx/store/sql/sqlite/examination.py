"""Reads the whole of a database that is too large to be read before a head serves, beside the head; what it finds ends the store."""

from __future__ import annotations

import logging
import threading
from typing import Final

import apsw

from phalanx.store.errors import StoreUnusable

RESTORE: Final = "restore the database from a copy; nothing more is written to this one"
_log = logging.getLogger("phalanx.store")


def found_in(connection: apsw.Connection) -> str:
    """What SQLite finds wrong with the file, in one line; empty for a sound one. Reads all of it, at 400 MB/s (2 cores, file cached)."""
    rows = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(3)")]  # three tell enough
    return "" if rows == ["ok"] else " ".join("; ".join(rows).split())


class Examination:
    """One look at a whole file, in a thread of its own.

    Args:
        path: the file.
        connection: read-only, this look's own; closed when it is over.
    """

    def __init__(self, path: str, connection: apsw.Connection) -> None:
        self._path = path
        self._connection = connection
        self._damage = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="store-examination", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Nothing, while nothing is known to be wrong.

        Raises:
            StoreUnusable: damage was found.
        """
        if self._damage:
            raise StoreUnusable(f"{self._path} is damaged: {self._damage}", hint=RESTORE)

    def wait(self, timeout_s: float) -> bool:
        """Whether the look is over, waiting so long for it."""
        return self._over.wait(timeout_s)

    def close(self) -> None:
        """End it, also before it is through. Harmless twice."""
        if not self._over.is_set():
            self._connection.interrupt()
        self._thread.join()

    def _look(self) -> None:
        try:
            self._damage = found_in(self._connection)
        except apsw.InterruptError:
            pass
        except (apsw.Error, ValueError) as error:
            self._damage = " ".join(str(error).split())
        finally:
            self._connection.close(force=True)
            self._over.set()
        if self._damage:
            _log.critical("%s is damaged: %s; %s", self._path, self._damage, RESTORE)
