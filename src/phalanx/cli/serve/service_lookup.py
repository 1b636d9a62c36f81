"""Finds the service that a word names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.errors import NotFound
from phalanx.core.work.nearest_match import suggestion

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.services import ServiceDetail


def require_service(head: Client, word: str) -> ServiceDetail:
    """Return the service of this name.

    Raises:
        NotFound: no service has it; the hint names the nearest.
    """
    name = word.strip()
    try:
        return head.service(name)
    except NotFound as error:
        names = [one.name for one in head.services(stopped=True)]
        raise NotFound(error.message, hint=suggestion(name, names, "phalanx serve ps lists the services")) from None


def prompt_readers(head: Client, name: str) -> list[str]:
    """Return the services that read the prompts of another one."""
    found = head.services()
    own = next((one for one in found if one.name == name), None)
    return [
        str(one.name)
        for one in found
        if own is not None and one.prefill_for == name and (one.user, one.project) == (own.user, own.project)
    ]
