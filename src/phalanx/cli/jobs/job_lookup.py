"""Resolves a job argument: the id of a job, array or element (17, 17_3), or a name: then the newest job of that name.

NAME_3 is element 3 of the newest array of that name, unless a job has that very name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.core.errors import NotFound

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobView

_RANK_DIGITS_MAX: Final = 6


def resolve_node(head: Client, word: str) -> tuple[str, int]:
    """Return the id of a job and the rank of one of its nodes, from JOB or JOB.RANK. Raises as `resolve_job` does.

    The name of a job may itself end like a rank: `gpt-0.5`.
    """
    job, dot, rank = word.strip().rpartition(".")
    if not dot or not rank.isdigit() or len(rank) >= _RANK_DIGITS_MAX:
        return resolve_job(head, word), 0
    named = None if job.replace("_", "", 1).isdigit() else _newest(head, word.strip())
    if named is not None:
        return named.array_id or named.id, 0
    return resolve_job(head, job), int(rank)


def resolve_job(head: Client, word: str) -> str:
    """Return the id of a job. An id is returned unchecked; the name of an array gives the array, NAME_3 its element 3.

    Raises:
        NotFound: no job has this name.
    """
    text = word.strip()
    if text.replace("_", "", 1).isdigit() and text[0] != "_":
        return text
    if found := _newest(head, text):
        return found.array_id or found.id
    name, _, index = text.rpartition("_")
    if index.isdecimal() and (found := _newest(head, name)) and found.array_id:
        return f"{found.array_id}_{int(index)}"
    raise NotFound(f"no job {word!r}", hint="list all jobs with phalanx ps -a")


def _newest(head: Client, name: str) -> JobView | None:
    found = head.jobs(name=name, limit=1).jobs if name else []
    return found[0] if found else None
