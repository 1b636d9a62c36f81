"""Frees the disk space of a range of a file. A crash leaves it freed or not; no byte outside of it changes, so that it needs no failpoint."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
"""Source: fallocate(2), linux/falloc.h: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""


def free_range(fd: int, offset: int, length: int) -> bool:
    """Free a range: the size stays, and the range reads as zeros. False if the file system cannot."""
    result = _libc().fallocate(
        ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE_KEEP_SIZE), ctypes.c_int64(offset), ctypes.c_int64(length)
    )
    return bool(result == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
