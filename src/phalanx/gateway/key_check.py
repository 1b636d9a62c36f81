"""Reads the key of a request, and asks whose it is."""

from __future__ import annotations

from aiohttp import web

from phalanx.gateway.head_link import HeadAway, HeadLink
from phalanx.gateway.refusals import Refused
from phalanx.wire.api.head import CurrentUser

_KEY_MAX = 1024


def key_of(request: web.Request) -> str:
    """Return the key.

    Raises:
        Refused: the request has no key.
    """
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > _KEY_MAX or not key.isascii():
        raise Refused(401, "send a token of Phalanx as the API key: Authorization: Bearer TOKEN", "invalid_api_key")
    return key


async def user_of(head: HeadLink, request: web.Request) -> CurrentUser:
    """Return whose key a request has.

    Raises:
        Refused: the key has no user, or the head does not answer and the key is not known.
    """
    try:
        user = await head.owner_of(key_of(request))
    except HeadAway:
        raise Refused(
            503, "the head does not answer, and this key is not known yet", "head_away", retry_after_s=5
        ) from None
    if user is None:
        raise Refused(401, "this key is not valid, or has expired", "invalid_api_key")
    return user
