"""Files that decide what a head calls: only its own account, or root, may be able to change them."""

from __future__ import annotations

import os
import stat

from phalanx.core.errors import BadRequest


def check_own_file(path: str) -> None:
    """Check that only the head's account and root may change a file and its folder.

    Raises:
        BadRequest: it is missing, or others may write it.
    """
    for one in (os.path.dirname(path), path):
        try:
            found = os.stat(one)
        except OSError as error:
            raise BadRequest(f"{one}: {error.strerror}", hint="put the file there, on the head's machine") from error
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadRequest(f"{one} can be changed by others than the account of the head", hint=f"chmod go-w {one}")
