"""Resolves a job argument: the id of a job, array or element (17, 17_3), or a name: then the newest job of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.core.errors import NotFound

if TYPE_CHECKING:
    from phalanx.client import Client

_RANK_DIGITS_MAX: Final = 6


def resolve_node(head: Client, word: str) -> tuple[str, int]:
    """Return the id of a job and the rank of one of its nodes, from JOB or JOB.RANK. Raises as `resolve_job` does."""
    job, dot, rank = word.strip().rpartition(".")
    if dot and rank.isdigit() and len(rank) < _RANK_DIGITS_MAX:
        return resolve_job(head, job), int(rank)
    return resolve_job(head, word), 0


def resolve_job(head: Client, word: str) -> str:
    """Return the id of a job. An id is returned unchecked; the name of an array element gives the array.

    Raises:
        NotFound: no job has this name.
    """
    text = word.strip()
    if text.replace("_", "", 1).isdigit() and text[0] != "_":
        return text
    found = head.jobs(name=text, limit=1).jobs if text else []
    if not found:
        raise NotFound(f"no job {word!r}", hint="list all jobs with phalanx ps -a")
    return found[0].array_id or found[0].id
