"""A server asks to be a node; the head's CA for those who know its fingerprint; the line that brings the next server in."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.bodies import read_record, reply
from phalanx.api.gate import own_node
from phalanx.api.routes import Routes, Shown
from phalanx.api.runtime import caller_of, off_loop, runtime_of
from phalanx.core.access.roles import Caller
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.fleet.node import NodeState
from phalanx.core.work.people import Action
from phalanx.core.work.seat import read_seat
from phalanx.wire.join import JoinLine, JoinReply, JoinRequest

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # a label of a host name; a dot would part a node's token
routes = Routes()


@routes.get("/v1/ca", Action.SEE, reply=Shown.TEXT, open_to_all=True)
async def show_ca(request: Request) -> Response:
    """The certificate of the head's CA, in PEM form. It is public: what counts is that its fingerprint is the one you were told."""
    welcome = runtime_of(request).parts.welcome
    if welcome is None:
        raise NotFound(
            "this head has no CA: it listens on loopback alone", hint="phalanx up --listen ADDRESS makes one"
        )
    return Response(welcome.ca_pem, media_type="text/plain")


@routes.get("/v1/join", Action.ADMINISTER, reply=JoinLine)
async def show_join_line(request: Request) -> Response:
    """What to tell the next server: address, a token that is good for a day, and the CA's fingerprint."""
    parts = runtime_of(request).parts
    if parts.welcome is None:
        return reply(JoinLine(address="", token="", fingerprint="", expires_s=0.0))
    return reply(parts.welcome.line(parts.clock.now_s()))


@routes.post("/v1/join/renew", Action.ADMINISTER, body=Shown.NOTHING, reply=JoinLine)
async def renew_join_line(request: Request) -> Response:
    """End every join token that was given out, and say the new line. Nodes that are in stay in: they have tokens of their own."""
    parts = runtime_of(request).parts
    if parts.welcome is None:
        raise Conflict(
            "this head listens on loopback alone, so no join token is good", hint="phalanx up --listen ADDRESS"
        )
    await runtime_of(request).note("every join token ends")
    await off_loop(parts.welcome.salt.renew)
    return reply(parts.welcome.line(parts.clock.now_s()))


@routes.post("/v1/join", Action.JOIN, body=JoinRequest, reply=JoinReply)
async def join(request: Request) -> Response:
    """Become a node. The answer carries the node's own token; harmless when repeated by the same server."""
    runtime = runtime_of(request)
    parts = runtime.parts
    _refuse_seat(caller_of(request))
    wish = await read_record(request, JoinRequest, parts.limits.body_bytes)
    caller = runtime.gate.caller(request.headers.get("authorization"))  # join tokens may all have ended meanwhile
    if parts.welcome is None:
        raise Conflict("this head listens on loopback alone", hint="phalanx up --listen ADDRESS on the head")
    if not _NAME.fullmatch(wish.node_id):
        raise BadRequest(f"{wish.node_id[:80]!r} is no name for a node", hint="letters, digits, - and _, at most 63")
    if caller.node_id is not None:
        own_node(caller, wish.node_id)
    known = {node.id: node for node in await off_loop(parts.store.nodes)}.get(wish.node_id)
    up = known is not None and known.state is NodeState.UP
    # Whoever shows the node's own token is that node. Another server may take a name only over from a node that is down.
    if caller.node_id != wish.node_id and known is not None and up:
        raise Conflict(
            f"node {wish.node_id} is up already, at {known.address}; two servers cannot have one name",
            hint="phalanx join --name gives this one another",
        )
    await runtime.note(f"node {wish.node_id}")
    given = await off_loop(parts.welcome.take_in, wish)
    return reply(msgspec.structs.replace(given, up=up, heads=runtime.heads))


def _refuse_seat(caller: Caller) -> None:
    """Nothing, for all but a supervisor on a seat. Who holds an attempt's key signs for a seat on any node: none becomes a node for good.

    Raises:
        NotPermitted: the caller sits on one.
    """
    if caller.node_id is not None and read_seat(caller.node_id) is not None:
        raise NotPermitted(
            f"the supervisor on {caller.node_id} sits there for one attempt: it cannot join as a node",
            hint="phalanx join --print on the head prints the line for a server",
        )
