"""Node pools: list, show, add or change, remove."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import RouteTable
from phalanx.api.routes.queues import impossible_views
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.fleet.node_console import NodeConsole
from phalanx.core.fleet.node_pool import NodeOffer, NodePool, PoolNode, members_of, node_price_per_h
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import NodeId, PoolId, UserId
from phalanx.core.state.events import PutNodePool, RemoveNodePool
from phalanx.core.state.records import NODE_CONSOLES, NODE_POOLS, POOL_NODES
from phalanx.core.units import parse_duration_s
from phalanx.core.work.names import is_name
from phalanx.core.work.users import Action
from phalanx.ports.provider import PoolTerms
from phalanx.wire.api.pools import (
    CloudCheckBody,
    CloudChecked,
    CloudRightView,
    NodeConsoleReply,
    PoolBody,
    PoolConsoleView,
    PoolList,
    PoolNodeView,
    PoolOfferView,
    PoolRemoved,
    PoolReply,
    PoolView,
)

PRICE_MAX: Final = 1e6  # US dollars an hour, of one node
MONTH_CAP_MAX: Final = 1e9  # US dollars
SETTINGS_MAX: Final = 64  # of one pool; zones likewise
SETTING_CHARS_MAX: Final = 2048
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,55}")  # part of a name of a server that joins
routes = RouteTable()


@routes.get("/v1/pools", Action.VIEW, reply=PoolList)
async def list_pools(request: Request, after: AfterKey = "") -> Response:
    """List all node pools with their nodes."""
    services = runtime_of(request).services
    views = await run_in_thread(_views, services)
    page, further = key_page(views, after, lambda view: view.id, services.limits.answer_bytes)
    return json_response(PoolList(pools=page, next=further))


@routes.get("/v1/pools/{pool_id}", Action.VIEW, reply=PoolReply)
async def show_pool(request: Request, pool_id: PoolId) -> Response:
    """Show one node pool."""
    found = await run_in_thread(_views, runtime_of(request).services)
    pool = next((one for one in found if one.id == pool_id), None)
    if pool is None:
        raise NotFound(f"no node pool {pool_id!r}", hint=Hint(HintCode.LIST_POOLS))
    return json_response(PoolReply(pool=pool))


@routes.get("/v1/pools/{pool_id}/consoles/{node_id}", Action.OPERATE, reply=NodeConsoleReply)
async def show_node_console(request: Request, pool_id: PoolId, node_id: NodeId) -> Response:
    """Show what the machine of a node printed that never joined."""
    found = await run_in_thread(runtime_of(request).services.store.record, NODE_CONSOLES, node_id)
    if found is None or found.pool != pool_id:
        raise NotFound(f"no console output of node {node_id[:80]!r} is kept", hint=Hint(HintCode.LIST_POOLS))
    return json_response(NodeConsoleReply(node=found.id, machine=found.machine, at_s=found.at_s, text=found.text))


@routes.put("/v1/pools/{pool_id}", Action.OPERATE, body=PoolBody, reply=PoolReply)
async def put_pool(request: Request, pool_id: PoolId) -> Response:
    """Add a node pool, or change its limits, price and times. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, PoolBody, runtime.services.limits.body_bytes)
    wanted = await run_in_thread(_wanted, runtime.services, pool_id, body, caller_of(request).user)
    made = await runtime.request(PutNodePool(pool=wanted))
    members = await run_in_thread(runtime.services.store.records, POOL_NODES)
    return json_response(PoolReply(pool=_view(made, members, (), runtime.services.clock.now_s())))


@routes.delete("/v1/pools/{pool_id}", Action.OPERATE, reply=PoolRemoved)
async def remove_pool(request: Request, pool_id: PoolId) -> Response:
    """Release all nodes of a pool, whose jobs are saved and moved, and then remove it. Idempotent until it is removed."""
    runtime = runtime_of(request)
    found = await runtime.request(RemoveNodePool(pool_id=pool_id, by=caller_of(request).user))
    jobs, more = impossible_views(found)
    return json_response(PoolRemoved(impossible=jobs, impossible_more=more))


@routes.post("/v1/clouds/check", Action.OPERATE, body=CloudCheckBody, reply=CloudChecked)
async def check_cloud(request: Request) -> Response:
    """Check what the head's credentials for a provider may do. Nothing is started."""
    services = runtime_of(request).services
    body = await read_record(request, CloudCheckBody, services.limits.body_bytes)
    if services.check_provider is None:
        raise BadRequest("this head has no providers of nodes")
    _check_settings(body.settings)
    found = await run_in_thread(services.check_provider, body.provider, body.settings)
    rights = [CloudRightView(right=one.name, allowed=one.allowed, why=one.why) for one in found.rights]
    return json_response(CloudChecked(rights=rights, policy=found.policy))


def _check_settings(settings: Mapping[str, str]) -> None:
    """Check the names and lengths of settings.

    Raises:
        BadRequest: there are too many, or one is not valid.
    """
    if len(settings) > SETTINGS_MAX:
        raise BadRequest(f"a pool has at most {SETTINGS_MAX} settings")
    for name, value in settings.items():
        if not is_name(name) or len(value) > SETTING_CHARS_MAX or not value.isprintable():
            raise BadRequest(f"the setting {name[:80]!r} is not valid", hint="use a name and one line of text")


def _views(services: HeadServices) -> list[PoolView]:
    members, consoles = services.store.records(POOL_NODES), services.store.records(NODE_CONSOLES)
    now_s = services.clock.now_s()
    return [_view(pool, members, consoles, now_s) for pool in services.store.records(NODE_POOLS)]


def _view(pool: NodePool, members: Sequence[PoolNode], consoles: Sequence[NodeConsole], now_s: float) -> PoolView:
    own = members_of(pool.id, {member.id: member for member in members})
    return PoolView(
        id=pool.id,
        provider=pool.provider,
        node=pool.template.text,
        cap_per_h=pool.cap_per_h,
        cap_per_month=pool.cap_per_month,
        spent_this_month=round(pool.spent_this_month(own, now_s), 4),
        egress_per_gb=pool.egress_per_gb,
        billed=pool.billed,
        boot_s=pool.boot_s,
        settings=dict(pool.settings),
        offers=[_offer_view(pool, offer, now_s) for offer in pool.template.offers],
        list_problem=pool.list_problem,
        devices=len(pool.template.devices),
        min_nodes=pool.min_nodes,
        max_nodes=pool.max_nodes,
        price_per_h=pool.price_per_h,
        cost_per_h=sum(node_price_per_h(one, pool) for one in own),
        idle_s=pool.idle_s,
        start_limit_s=pool.start_limit_s,
        zone=pool.zone,
        removing=pool.removing,
        failures=pool.failures,
        failure=pool.failure,
        retry_at_s=pool.retry_at_s,
        nodes=[
            PoolNodeView(
                id=one.id,
                state=one.state,
                requested_s=one.requested_s,
                changed_s=one.changed_s,
                why=one.why,
                offer=one.offer,
                machine=one.machine,
                problem=one.problem,
            )
            for one in own
        ],
        consoles=[
            PoolConsoleView(node=one.id, machine=one.machine, at_s=one.at_s, chars=len(one.text))
            for one in sorted(consoles, key=lambda one: (one.at_s, one.id))
            if one.pool == pool.id
        ],
    )


def _offer_view(pool: NodePool, offer: NodeOffer, now_s: float) -> PoolOfferView:
    until_s = pool.refused_until_s(offer, now_s)
    why = next((one.why for one in pool.refusals if one.offer == offer.text), "") if until_s else ""
    return PoolOfferView(offer=offer.text, price_per_h=offer.price_per_h, refused_until_s=until_s, why=why)


def _wanted(services: HeadServices, pool_id: PoolId, body: PoolBody, by: UserId) -> NodePool:
    if not is_name(pool_id) or "+" in pool_id:
        raise BadRequest(
            f"{pool_id[:80]!r} is not a valid name for a pool",
            hint="use letters, digits and . _ - @, at most 63 characters, starting with a letter or digit",
        )
    for what, amount in (("price", body.price_per_h), ("cap", body.cap_per_h)):
        if amount is not None and not (math.isfinite(amount) and 0.0 <= amount <= PRICE_MAX):
            raise BadRequest(f"{what} {amount} is not an amount in US dollars an hour", hint=Hint(HintCode.POOL_PRICE))
    month, egress = body.cap_per_month, body.egress_per_gb
    if month is not None and not (math.isfinite(month) and 0.0 <= month <= MONTH_CAP_MAX):
        raise BadRequest(f"month cap {month} is not an amount in US dollars", hint="give 20000, or 0 to order no node")
    if not (math.isfinite(egress) and 0.0 <= egress <= PRICE_MAX):
        raise BadRequest(f"egress {egress} is not an amount in US dollars for 10^9 bytes", hint="give 0.09")
    if len(body.zones) > SETTINGS_MAX:
        raise BadRequest(f"a pool has at most {SETTINGS_MAX} zones")
    _check_settings(body.settings)
    for zone in body.zones:
        if not is_name(zone):
            raise BadRequest(f"{zone[:80]!r} is not a valid zone", hint="use letters, digits and . _ -")
    if body.zone and not is_name(body.zone):
        raise BadRequest(f"{body.zone[:80]!r} is not a valid zone", hint="use letters, digits and . _ -")
    if not (body.provider or body.node):
        return _changed(services, pool_id, body, by)
    if services.offer is None:
        raise BadRequest("this head has no providers of nodes")
    terms = PoolTerms(template=body.node, zones=tuple(body.zones), settings=body.settings, price_per_h=body.price_per_h)
    template = services.offer(body.provider, terms)
    if template.listed and not _LABEL.fullmatch(pool_id):
        raise BadRequest(
            f"{pool_id[:80]!r} cannot name a pool of provider {body.provider}, whose nodes join by their name",
            hint="use letters, digits, - and _",
        )
    price_per_h = body.price_per_h or min((offer.price_per_h for offer in template.offers), default=0.0)
    if body.cap_per_h is not None:
        _check_cap(body.cap_per_h, price_per_h, "an hour")
    if body.cap_per_month:
        _check_cap(body.cap_per_month, price_per_h, "a month")
    return NodePool(
        id=pool_id,
        provider=body.provider,
        template=template,
        min_nodes=body.min_nodes,
        max_nodes=body.max_nodes,
        price_per_h=price_per_h,
        idle_s=parse_duration_s(body.idle, what="idle"),
        start_limit_s=parse_duration_s(body.start_limit, what="start limit"),
        zone=body.zone,
        settings=tuple(sorted(body.settings.items())),
        cap_per_h=body.cap_per_h,
        cap_per_month=body.cap_per_month,
        egress_per_gb=body.egress_per_gb,
        billed=body.billed,
        by=by,
        created_s=services.clock.now_s(),
    )


def _changed(services: HeadServices, pool_id: PoolId, body: PoolBody, by: UserId) -> NodePool:
    """The pool that exists, with other limits, price and times.

    Raises:
        NotFound: no pool has this name.
        BadRequest: the body says what its nodes are, or a cap allows none.
    """
    known = services.store.record(NODE_POOLS, pool_id)
    if known is None:
        raise NotFound(f"no node pool {pool_id!r}", hint=Hint(HintCode.LIST_POOLS))
    if body.zone or body.zones or body.settings:
        raise BadRequest(
            f"node pool {pool_id}: its zones and settings cannot change", hint="add a pool with another name"
        )
    price_per_h = known.price_per_h if body.price_per_h is None else body.price_per_h
    if body.cap_per_h is not None:
        _check_cap(body.cap_per_h, price_per_h, "an hour")
    if body.cap_per_month:
        _check_cap(body.cap_per_month, price_per_h, "a month")
    return replace(
        known,
        min_nodes=body.min_nodes,
        max_nodes=body.max_nodes,
        price_per_h=price_per_h,
        idle_s=parse_duration_s(body.idle, what="idle"),
        start_limit_s=parse_duration_s(body.start_limit, what="start limit"),
        cap_per_h=body.cap_per_h,
        cap_per_month=body.cap_per_month,
        egress_per_gb=body.egress_per_gb,
        billed=body.billed,
        by=by,
    )


def _check_cap(cap: float, price_per_h: float, per: str) -> None:
    """Check that the cap allows a node.

    Raises:
        BadRequest: it does not, or the price of a node is unknown.
    """
    if price_per_h <= 0.0:
        raise BadRequest(
            "a pool with a cap needs the price of a node, which is not known", hint=Hint(HintCode.POOL_PRICE)
        )
    if cap < price_per_h:
        raise BadRequest(
            f"a cap of ${cap:g} {per} allows no node: the cheapest costs ${price_per_h:g} an hour",
            hint=f"raise the cap to {price_per_h:g} or more",
        )
