"""Limits of open files: head and supervisor raise theirs to the maximum, ranks get the limit of the user's environment."""

from __future__ import annotations

import resource
import select

_original: list[tuple[int, int]] = []  # soft and hard limit before we raised it


def raise_file_limit() -> None:
    """Raise the soft limit, usually 1,024, to the hard limit: a head uses five descriptors for a supervisor, which uses two for a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _original:
        _original.append((soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def rank_file_limits() -> tuple[int, int]:
    """Soft and hard limit for the processes of users: those that this process started with."""
    return _original[0] if _original else resource.getrlimit(resource.RLIMIT_NOFILE)


def wait_readable(descriptor: int, limit_s: float) -> bool:
    """Wait until it can be read or has ended; whether it was in time. `select` would refuse numbers over 1,023, which a raised limit allows."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, limit_s) * 1000.0))
