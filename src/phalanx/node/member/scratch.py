"""The scratch folder of one attempt on one node: lease page, report pipe, host files, spooled output, an unpacked upload.

    <node folder>/attempts/<job>.<epoch>/   hostfile  page  reports  <stream>.log  workdir/

For a job under another account it has two parts: ours (logs, markers) there, and the job's in a folder that the account owns, below one that
all accounts may pass (`accounts`). Created at Prepare, removed at Forget, once the output is sent. A starting supervisor removes the folders of a dead
one, whose ranks are dead too, after it has kept their unsent output.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.node.files.job_accounts import make_owned_folder
from phalanx.node.files.rmtree import remove_tree
from phalanx.node.logic.accounts import NodeAccount

_ATTEMPTS: Final = "attempts"
_SPARES: Final = "spare_attempts"
_LOG: Final = ".log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Paths of one attempt; creates nothing. `path`: the job's part; `supervisor_path`: ours, if it is separate."""

    path: str
    supervisor_path: str = ""
    account: NodeAccount | None = None

    @property
    def hostfile(self) -> str:
        """For Open MPI and DeepSpeed."""
        return os.path.join(self.path, "hostfile")

    @property
    def colon_hostfile(self) -> str:
        """For MPICH and Intel MPI."""
        return os.path.join(self.path, "hostfile.mpich")

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

    def private(self, name: str) -> str:
        """The path of a file that the job can neither write nor replace, unless it runs under our account."""
        return os.path.join(self.supervisor_path or self.path, name)

    def log(self, stream: str) -> str:
        """The spool file of a stream."""
        return self.private(stream + _LOG)

    def make(self) -> None:
        """Create the folders. Idempotent.

        Raises:
            OSError: they cannot be created.
        """
        make_owned_folder(self.path, self.account)
        if self.supervisor_path:
            os.makedirs(self.supervisor_path, mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def open_folder(self) -> Iterator[int | None]:
        """A descriptor of the job's part, if another account owns it: file access relative to it is safe while that account changes the folder."""
        if self.account is None:
            yield None
            return
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Remove all of it; folders that a rank made unreadable are made readable first. Idempotent."""
        if self.account is not None:
            remove_tree(self.path)  # root can read everything
        remove_tree(self.supervisor_path or self.path, make_accessible=True)


def scratch_of(
    node_folder: str, job_id: JobId, epoch: Epoch, *, shared_root: str = "", account: NodeAccount | None = None
) -> Scratch:
    """The scratch folder of an attempt. `shared_root`: parent of the folders of other accounts' jobs, if `account` is given."""
    own = os.path.join(node_folder, _ATTEMPTS, f"{job_id}.{epoch}")
    if account is None:
        return Scratch(path=own)
    return Scratch(path=os.path.join(shared_root, _ATTEMPTS, f"{job_id}.{epoch}"), supervisor_path=own, account=account)


def attempts_folder(node_folder: str) -> str:
    """The folder of all scratch folders of a node."""
    return os.path.join(node_folder, _ATTEMPTS)


def spares_folder(node_folder: str) -> str:
    """The folder that holds the folders of ended attempts until others take them over (`spare_scratch`)."""
    return os.path.join(node_folder, _SPARES)


def remove_old_scratch(node_folder: str, others: str = "") -> None:
    """Remove the folders that an earlier incarnation of the supervisor left."""
    for folder in (attempts_folder(node_folder), spares_folder(node_folder)):
        remove_tree(folder, make_accessible=True)
    if others:
        remove_tree(os.path.join(others, _ATTEMPTS))  # other accounts' files: change no permissions by path
