"""Spare scratch folders: the folder of an ended attempt, with its host files, becomes that of the next one.

Making and removing a folder, its files and its report pipe costs a file system more than all else that a short job asks of it. A folder is kept only if it
has its host files as they were made, with their text, modes and one name each, no folder in it, and no other account. All other files are
removed, first of all the lease page, which must never be that of two attempts: a process that outlived its own must not read the deadline
of another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
from collections.abc import Mapping
from typing import Final

from phalanx.node.files.rmtree import remove_tree
from phalanx.node.member.rank_reports import unused_fifo
from phalanx.node.member.scratch import Scratch, spares_folder

SPARES_MAX: Final = 32  # as many jobs without GPUs, or with shares of them, may run at once (`attempt_processes`)
_TEXT_BYTES_MAX: Final = 4096  # of a host file that is compared: one of a larger gang is written again
_LEFT_MAX: Final = (
    64  # files of the attempt that are removed one by one: a page, the output of each rank, and what ranks leave there
)
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SpareScratch:
    """The spare folders of one supervisor. Calls may come from any thread; each scratch folder is handled by one at a time."""

    def __init__(self, node_folder: str) -> None:
        self._folder = spares_folder(node_folder)
        self._lock = threading.Lock()
        self._number = itertools.count()
        self._spares: dict[tuple[tuple[str, str], ...], list[str]] = {}
        self._count = 0

    def make(self, scratch: Scratch, texts: Mapping[str, str]) -> None:
        """Make the attempt's folder from a spare one with the same host files, or new. Idempotent; never changes a file that exists.

        Args:
            scratch: of the attempt.
            texts: the text of each host file, by its name in the folder.

        Raises:
            OSError: it cannot be made.
        """
        if scratch.account is None and not os.path.lexists(scratch.path):
            with self._lock:
                known = self._spares.get(_key(texts))
                spare = known.pop() if known else ""
                self._count -= bool(spare)
            if spare:
                with contextlib.suppress(OSError):
                    os.rename(spare, scratch.path)
                    return
        scratch.make()

    def keep_or_remove(self, scratch: Scratch, texts: Mapping[str, str]) -> None:
        """Keep the folder of an attempt that is over, without what the attempt left there, or remove it. Idempotent.

        Args:
            scratch: of the attempt.
            texts: as in `make`; empty if they are not known, and nothing is kept.
        """
        if texts and scratch.account is None and self._count < SPARES_MAX:
            with contextlib.suppress(OSError):
                if self._keep(scratch, texts):
                    return
        scratch.remove()

    def close(self) -> None:
        """Remove all spare folders."""
        with self._lock:
            self._spares.clear()
            self._count = SPARES_MAX
        remove_tree(self._folder, make_accessible=True)

    def _keep(self, scratch: Scratch, texts: Mapping[str, str]) -> bool:
        """Keep the folder if it can be kept.

        Raises:
            OSError: it cannot be read or moved, or has a folder in it.
        """
        path = scratch.path
        if not _is_private(os.lstat(path), stat.S_IFDIR | 0o700):
            return False
        left = set(os.listdir(path)) - texts.keys()
        if len(left) > _LEFT_MAX or not all(_has_text(os.path.join(path, name), text) for name, text in texts.items()):
            return False
        for name in left:
            below = os.path.join(path, name)
            if below != unused_fifo(scratch.reports) or not _is_private(os.lstat(below), stat.S_IFIFO | 0o600):
                os.unlink(below)
        spare = os.path.join(self._folder, str(next(self._number)))
        try:
            os.rename(path, spare)
        except FileNotFoundError:  # the first one
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            os.rename(path, spare)
        with self._lock:
            self._spares.setdefault(_key(texts), []).append(spare)
            self._count += 1
        return True


def _key(texts: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(texts.items()))


def _is_private(found: os.stat_result, mode: int) -> bool:
    return found.st_mode == mode and found.st_uid == os.geteuid()


def _has_text(path: str, text: str) -> bool:
    """Whether it is a file with this text and no other name, with the mode of a new file.

    Raises:
        OSError: it cannot be read.
    """
    wanted = text.encode()
    if len(wanted) > _TEXT_BYTES_MAX:
        return False
    descriptor = os.open(path, _READ)
    try:
        found = os.fstat(descriptor)
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
        usual = found.st_mode & 0o7111 == 0 and found.st_mode & 0o600 == 0o600
        return plain and usual and os.read(descriptor, _TEXT_BYTES_MAX + 1) == wanted
    finally:
        os.close(descriptor)
