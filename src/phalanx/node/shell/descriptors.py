"""How many descriptors a process may have: head and supervisor take all that the system allows, ranks have what their user had."""

from __future__ import annotations

import resource

_given: list[tuple[int, int]] = []  # soft and hard, before we took more


def open_many() -> None:
    """Have as many as the system allows, where the usual soft limit is 1,024: a head takes five for a supervisor, that two for a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _given:
        _given.append((soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def of_ranks() -> tuple[int, int]:
    """Soft and hard limit of what runs for users: those that this process began with."""
    return _given[0] if _given else resource.getrlimit(resource.RLIMIT_NOFILE)
