"""The folder of what attempts share on a node (packages, images): it outlives them, and is made when something is first put there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Final

from phalanx.node.logic.accounts import Account

CACHE_VARIABLE: Final = "PHALANX_CACHE"  # where it is on a node whose supervisors come and go


def cache_folder(node_folder: str, *, seated: bool, given: Mapping[str, str]) -> str:
    """Its path: the node's folder, but where supervisors sit for one attempt that goes with it, and another is taken.

    In /tmp and not in the home, which is often one and the same on every node: once per node is meant.
    """
    if not seated:
        return node_folder
    return given.get(CACHE_VARIABLE) or os.path.join(tempfile.gettempdir(), f"phalanx-cache-{os.getuid()}")


def make_cache(folder: str, account: Account | None = None) -> None:
    """Have it, for its owner alone: us, or the account, with whose rights this is called then.

    Raises:
        OSError: it cannot be made, or one of this name can be written by others.
    """
    owner = os.getuid() if account is None else account.uid
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != owner or found.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others; set {CACHE_VARIABLE} to a folder of your own")
