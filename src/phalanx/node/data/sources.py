"""What a source of a dataset does: it lists files, and reads ranges of them.

Each read names the version that was listed: a file that changed meanwhile is an error, never a mixture of two versions.
"""

from __future__ import annotations

from typing import Protocol

from phalanx.node.logic.dataset import DataFile, Dataset


class SourceUnavailable(Exception):
    """The source does not answer now; the same read may succeed later."""


class ObjectsRefused(Exception):
    """The store does not do it, and would not if it were asked again: no right, no such bucket, or another object has the name."""


class ObjectMissing(ObjectsRefused):
    """There is no object of this name."""


class ObjectExists(ObjectsRefused):
    """There is an object of this name already, and it stays."""


class DataSource(Protocol):
    """A source. `threads`: reads at once that it serves well."""

    threads: int

    def list(self) -> Dataset:
        """List the files.

        Raises:
            DatasetInvalid: there is nothing, or the job may not read it.
            SourceUnavailable: no answer.
        """

    def read(self, file: DataFile, offset: int, size_bytes: int) -> bytes:
        """Read a range of a file. Thread-safe.

        Raises:
            DatasetInvalid: it is gone, or has another version.
            SourceUnavailable: no answer.
        """
