"""Joining servers: the request to become a node, the head's CA certificate, and the command line that joins the next server."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_own_node
from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.nodes.checkpoint_routes import stream_file
from phalanx.api.runtime import ApiRuntime, caller_of, run_in_thread, runtime_of
from phalanx.core.access.caller import Caller
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.hints import Hint, HintCode
from phalanx.core.state.records import POOL_NODES
from phalanx.core.state.reports import ProviderOutcome, ProviderReported
from phalanx.core.work.seats import parse_seat
from phalanx.core.work.users import Action
from phalanx.wire.join import JoinArguments, JoinReply, JoinRequest, MachineLeaving, MachineOrder

_NAME: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
)  # a label of a host name; a dot separates the parts of a node's token
_WHY_MAX: Final = 200
routes = RouteTable()


@routes.get("/v1/ca", Action.VIEW, reply=MediaType.TEXT, open_to_all=True)
async def show_ca(request: Request) -> Response:
    """Return the certificate of the head's CA, in PEM form. It is public: compare its fingerprint with the one in the join line."""
    welcome = runtime_of(request).services.join_service
    if welcome is None:
        raise NotFound("this head has no CA, as it listens only on loopback", hint=Hint(HintCode.LISTEN_WITH_TLS))
    return Response(welcome.ca_pem, media_type="text/plain")


@routes.get("/v1/join", Action.ADMINISTER, reply=JoinArguments)
async def show_join_line(request: Request) -> Response:
    """Show what the next server needs: address, a token valid for one day, and the CA's fingerprint."""
    services = runtime_of(request).services
    if services.join_service is None:
        return json_response(JoinArguments(address="", token="", fingerprint="", expires_s=0.0))
    return json_response(services.join_service.join_line(services.clock.now_s()))


@routes.post("/v1/join/renew", Action.ADMINISTER, body=MediaType.NOTHING, reply=JoinArguments)
async def renew_join_line(request: Request) -> Response:
    """Revoke all join tokens, and return a new line. Joined nodes are not affected, as they have their own tokens."""
    services = runtime_of(request).services
    if services.join_service is None:
        raise Conflict(
            "this head listens only on loopback, so it has no join tokens", hint=Hint(HintCode.LISTEN_WITH_TLS)
        )
    await runtime_of(request).record_call("all join tokens are revoked")
    await run_in_thread(services.join_service.salt.renew)
    return json_response(services.join_service.join_line(services.clock.now_s()))


@routes.get("/v1/join/order", Action.JOIN, reply=MachineOrder)
async def show_machine_order(request: Request) -> Response:
    """Show whether the caller's machine is still wanted by its pool. Machines ask with the token of their node, and end themselves if not."""
    caller = caller_of(request)
    node_id = caller.node_id or caller.joins_as
    members = await run_in_thread(runtime_of(request).services.store.records, POOL_NODES)
    member = next((one for one in members if one.id == node_id), None)
    if member is None:
        return json_response(MachineOrder(wanted=False, why=f"no pool has an order for {node_id}"))
    # A node whose jobs are saved and moved is stopped by its provider afterwards.
    return json_response(MachineOrder(wanted=not member.given_up, why=member.why))


@routes.post("/v1/join/order", Action.JOIN, body=MachineLeaving, reply=MachineOrder)
async def announce_leaving(request: Request) -> Response:
    """Drain the caller's node, since its cloud will take the machine back: its jobs save, and run again elsewhere. Idempotent."""
    runtime = runtime_of(request)
    caller = caller_of(request)
    _reject_seat(caller)
    command = await read_record(request, MachineLeaving, runtime.services.limits.body_bytes)
    node_id = caller.node_id or caller.joins_as
    members = await run_in_thread(runtime.services.store.records, POOL_NODES)
    member = next((one for one in members if one.id == node_id), None)
    if member is None:
        return json_response(MachineOrder(wanted=False, why=f"no pool has an order for {node_id}"))
    why = "".join(one for one in command.why if one.isprintable())[:_WHY_MAX] or "its cloud takes it back"
    leaving = ProviderReported(node_id=member.id, token=member.token, outcome=ProviderOutcome.LEAVING, why=why)
    await runtime.report([leaving])
    return json_response(MachineOrder(wanted=not member.given_up, why=why))


@routes.get("/v1/join/files", Action.JOIN, reply=MediaType.TAR)
async def download_machine_files(request: Request) -> Response:
    """Download the program of a rented machine: what its start script unpacks and runs if its image has no Phalanx."""
    _reject_seat(caller_of(request))
    welcome = runtime_of(request).services.join_service
    if welcome is None:
        raise Conflict("this head listens only on loopback", hint=Hint(HintCode.LISTEN_WITH_TLS))
    return await stream_file(await run_in_thread(welcome.files_for_machines), 0)


@routes.post("/v1/join", Action.JOIN, body=JoinRequest, reply=JoinReply)
async def join(request: Request) -> Response:
    """Join as a node. The answer carries the node's own token. Idempotent for the same server."""
    runtime = runtime_of(request)
    services = runtime.services
    _reject_seat(caller_of(request))
    command = await read_record(request, JoinRequest, services.limits.body_bytes)
    caller = runtime.authenticator.authenticate(
        request.headers.get("authorization")
    )  # again: all join tokens may have been revoked meanwhile
    if services.join_service is None:
        raise Conflict("this head listens only on loopback", hint=Hint(HintCode.LISTEN_WITH_TLS))
    if not _NAME.fullmatch(command.node_id):
        raise BadRequest(
            f"{command.node_id[:80]!r} is not a valid name for a node",
            hint="use letters, digits, - and _, at most 63 characters",
        )
    if caller.node_id is not None:
        require_own_node(caller, command.node_id)
    if caller.joins_as not in (None, command.node_id):
        raise NotPermitted(f"this join token is for {caller.joins_as} only")
    known = {node.id: node for node in await run_in_thread(services.store.nodes)}.get(command.node_id)
    up = known is not None and known.state is NodeState.UP and _is_heard(runtime, known)
    # A caller with the node's own token is that node. Another server may take over a name only from a node that is down or silent, as one
    # that left while the head was down: what still runs there keeps its long lease until the newcomer's supervisor registers.
    if caller.node_id != command.node_id and known is not None and up:
        raise Conflict(
            f"node {command.node_id} is already up, at {known.address}; two servers cannot have the same name",
            hint=Hint(HintCode.RENAME_SERVER),
        )
    await runtime.record_call(f"node {command.node_id}")
    given = await run_in_thread(services.join_service.accept, command)
    return json_response(msgspec.structs.replace(given, up=up, heads=runtime.head_urls))


def _is_heard(runtime: ApiRuntime, node: Node) -> bool:
    services = runtime.services
    return node.supervisor_id is None or services.controller.leases.renewed_recently(
        node.id, node.supervisor_id, services.clock.boottime_s()
    )


def _reject_seat(caller: Caller) -> None:
    """Check that the caller is not the supervisor of a seat. An attempt's key can sign for a seat on any node, so none may join as a node.

    Raises:
        NotPermitted: the caller is the supervisor of a seat.
    """
    if caller.node_id is not None and parse_seat(caller.node_id) is not None:
        raise NotPermitted(
            f"the supervisor on {caller.node_id} runs for one attempt only: it cannot join as a node",
            hint=Hint(HintCode.PRINT_JOIN_LINE),
        )
