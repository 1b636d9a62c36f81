"""Removes a folder tree of any depth: a job may nest ten thousand folders.

`shutil.rmtree` recurses, holds a descriptor for each level, and fails at the thousandth. Here the content of a folder is moved up to the top
before the folder is removed: two descriptors at any depth.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_MODE: Final = 0o700


def remove_tree(path: str, *, make_accessible: bool = False) -> None:
    """Remove it; entries that cannot be removed stay. Never raises OSError. Follows no link in it or in its place. Idempotent.

    `make_accessible`: closed folders are opened first, by name: only for files of our own account.
    """
    if make_accessible and not os.path.islink(path):
        _open_up(path)
    try:
        top = os.open(path, _FOLDER)
    except OSError:
        return
    with contextlib.suppress(OSError):
        try:
            _empty(top, pry=make_accessible)
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(top: int, *, pry: bool) -> None:
    """Remove all entries of a folder.

    Raises:
        OSError: it cannot be listed.
    """
    moved = f".gone-{secrets.token_hex(8)}-"  # a name that the job could not predict
    waiting = _remove_files(top, pry=pry)
    number = 0
    while waiting:
        name = waiting.pop()
        try:
            folder = os.open(name, _FOLDER, dir_fd=top)
        except OSError:
            continue
        try:
            for below in _remove_files(folder, pry=pry):
                with contextlib.suppress(OSError):  # empty, the usual case
                    os.rmdir(below, dir_fd=folder)
                    continue
                number += 1
                with contextlib.suppress(OSError):
                    os.rename(below, f"{moved}{number}", src_dir_fd=folder, dst_dir_fd=top)
                    waiting.append(f"{moved}{number}")
        except OSError:  # it cannot be listed
            pass
        finally:
            os.close(folder)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=top)


def _remove_files(folder: int, *, pry: bool) -> list[str]:
    """Remove all files in a folder; returns the names of its folders.

    Raises:
        OSError: it cannot be listed.
    """
    below = []
    with os.scandir(folder) as entries:
        listed = list(entries)
    for entry in listed:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                if pry:
                    _open_up(entry.name, folder)
                below.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return below


def _open_up(path: str, folder: int | None = None) -> None:
    with contextlib.suppress(OSError):
        os.chmod(path, _OPEN_MODE, dir_fd=folder)
