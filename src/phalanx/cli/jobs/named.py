"""Which job a word means: its number, an array's or one element's (17, 17_3), or the name of one's newest job of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.errors import NotFound

if TYPE_CHECKING:
    from phalanx.client import Client


def job_named(head: Client, word: str) -> str:
    """The job's number. A number is taken as it is; the head knows whether there is such a job. A name of an array gives the array.

    Raises:
        NotFound: no job has this name.
    """
    text = word.strip()
    if text.replace("_", "", 1).isdigit() and text[0] != "_":
        return text
    found = head.jobs(name=text, limit=1).jobs if text else []
    if not found:
        raise NotFound(f"no job is called {word!r}", hint="phalanx ps -a lists all")
    return found[0].array_id or found[0].id
