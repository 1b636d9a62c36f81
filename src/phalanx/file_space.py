"""Reserves and frees the disk space of a range of a file, by fallocate(2), which Python's own library offers without its modes."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""


def reserve_range(fd: int, offset: int, length: int) -> int:
    """Reserve space, also past the end; the size stays. Returns 0, or the error number of a full disk or of a file system that cannot."""
    return _fallocate(fd, _KEEP_SIZE, offset, length)


def free_range(fd: int, offset: int, length: int) -> bool:
    """Free a range: the size stays, and the range reads as zeros. False if the file system cannot; it then keeps its space.

    A crash leaves it freed or not, and no byte outside of it changes, so that it needs no failpoint.
    """
    return _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) == 0


def _fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    refused = _libc().fallocate(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length))
    return ctypes.get_errno() if refused else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
