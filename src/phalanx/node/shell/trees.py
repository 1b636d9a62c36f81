"""Remove a folder with all that is in it, however deep: what lies there a job made, and a job may make ten thousand folders in each other.

`shutil.rmtree` calls itself for each level, holds a descriptor for each, and gives up at the thousandth; then the folder stays, and so does
whoever wanted it gone. Here what a folder holds is moved up to the top before the folder goes: two descriptors, whatever is there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PRIED: Final = 0o700


def remove_tree(path: str, *, pry: bool = False) -> None:
    """Remove it; what cannot be removed is left. Never raises OSError. No link in it, or in its place, is followed. Harmless twice.

    `pry`: folders that were closed to us are opened first, by name: for files of our own account alone.
    """
    if pry and not os.path.islink(path):
        _open_up(path)
    try:
        top = os.open(path, _FOLDER)
    except OSError:
        return
    with contextlib.suppress(OSError):
        try:
            _empty(top, pry=pry)
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(top: int, *, pry: bool) -> None:
    """Remove all that is in a folder.

    Raises:
        OSError: it cannot be listed.
    """
    moved = f".gone-{secrets.token_hex(8)}-"  # a name that whoever filled the folder could not foresee
    waiting = _files_gone(top, pry=pry)
    number = 0
    while waiting:
        name = waiting.pop()
        try:
            folder = os.open(name, _FOLDER, dir_fd=top)
        except OSError:
            continue
        try:
            for below in _files_gone(folder, pry=pry):
                with contextlib.suppress(OSError):  # empty, as most are
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


def _files_gone(folder: int, *, pry: bool) -> list[str]:
    """Remove what is no folder from one; gives its folders.

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
        os.chmod(path, _PRIED, dir_fd=folder)
