"""The scratch folder of one attempt on one node: lease page, report pipe, host file, spooled output, an unpacked upload.

    <node folder>/attempts/<job>.<epoch>/   hostfile  page  reports  <stream>.log  workdir/

Made at Prepare, removed at Forget. What a dead supervisor left is removed by the next one: its ranks are dead too.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import Epoch, JobId

_ATTEMPTS: Final = "attempts"
_LOG: Final = ".log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Paths of one attempt; nothing is made by asking for them."""

    path: str

    @property
    def hostfile(self) -> str:
        """For MPI and DeepSpeed."""
        return os.path.join(self.path, "hostfile")

    @property
    def page(self) -> str:
        """The lease page."""
        return os.path.join(self.path, "page")

    @property
    def reports(self) -> str:
        """The report pipe."""
        return os.path.join(self.path, "reports")

    @property
    def workdir(self) -> str:
        """Where an upload is unpacked."""
        return os.path.join(self.path, "workdir")

    def log(self, stream: str) -> str:
        """The spool file of a stream."""
        return os.path.join(self.path, stream + _LOG)

    def streams(self) -> list[str]:
        """The streams that have a spool file, sorted."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(name.removesuffix(_LOG) for name in names if name.endswith(_LOG))

    def make(self) -> None:
        """Create the folder. Harmless twice.

        Raises:
            OSError: it cannot be made.
        """
        os.makedirs(self.path, mode=0o700, exist_ok=True)

    def remove(self) -> None:
        """Remove all of it; what a rank made unreadable is made readable first. Harmless twice."""
        try:  # a short job leaves a few files and nothing else: much the cheaper way
            for name in os.listdir(self.path):
                os.unlink(os.path.join(self.path, name))
            os.rmdir(self.path)
        except FileNotFoundError:
            return
        except OSError:
            shutil.rmtree(self.path, onerror=_pry_open)


def scratch_of(node_folder: str, job_id: JobId, epoch: Epoch) -> Scratch:
    """The scratch folder of an attempt."""
    return Scratch(path=os.path.join(node_folder, _ATTEMPTS, f"{job_id}.{epoch}"))


def sweep(node_folder: str) -> None:
    """Remove what an earlier life of the supervisor left."""
    path = os.path.join(node_folder, _ATTEMPTS)
    if os.path.isdir(path):
        shutil.rmtree(path, onerror=_pry_open)


def _pry_open(function: object, path: str, _error: object) -> None:
    """Once more with permissions; then leave it: a file that cannot be removed must not hold a node up."""
    try:
        os.chmod(os.path.dirname(path), 0o700)
        if function in (os.rmdir, os.scandir, os.open, os.lstat):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass
