"""The node's cache folder (packages, images), shared by attempts. It outlives them, and is created on first use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Final

from phalanx.node.logic.accounts import NodeAccount

CACHE_VARIABLE: Final = "PHALANX_CACHE"  # its path on nodes where each attempt brings its own supervisor


def cache_folder(node_folder: str, *, per_attempt: bool, environment: Mapping[str, str]) -> str:
    """The path of the cache: the node folder; where each attempt brings its own supervisor, a folder that outlives the attempt.

    It is in /tmp and not in the home folder, which nodes often share: each node needs its own cache.
    """
    if not per_attempt:
        return node_folder
    return environment.get(CACHE_VARIABLE) or os.path.join(tempfile.gettempdir(), f"phalanx-cache-{os.getuid()}")


def make_cache(folder: str, account: NodeAccount | None = None) -> None:
    """Create the folder for its owner alone: this process, or the account. Call it with the account's rights then.

    Raises:
        OSError: it cannot be created, or others can write an existing folder of this name.
    """
    owner = os.getuid() if account is None else account.uid
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != owner or found.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others; set {CACHE_VARIABLE} to a folder of your own")
