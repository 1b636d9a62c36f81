"""Prices of GPUs: list them, and replace them all at once."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.state.events import PutPrices
from phalanx.core.state.records import PRICE_LISTS
from phalanx.core.work.usage.electricity import PUE_MILLI, ElectricityRate, check_rates
from phalanx.core.work.usage.price_list import (
    PRICES,
    GpuPrice,
    PriceList,
    check_prices,
    micro_text,
    parse_currency,
    parse_price,
    parse_rate,
)
from phalanx.core.work.users import Action
from phalanx.wire.api.prices import (
    ElectricityBody,
    ElectricityView,
    PricesChanged,
    PricesReply,
    PricesRequest,
    PriceView,
)

routes = RouteTable()


@routes.get("/v1/prices", Action.VIEW, reply=PricesReply)
async def list_prices(request: Request) -> Response:
    """List all prices of GPUs, by model, pool and time."""
    return json_response(await run_in_thread(_stored, runtime_of(request).services))


@routes.put("/v1/prices", Action.OPERATE, body=PricesRequest, reply=PricesChanged)
async def put_prices(request: Request) -> Response:
    """Replace all prices of GPUs, and list what changes. With `dry_run` they are only compared. Idempotent."""
    runtime = runtime_of(request)
    body = await read_record(request, PricesRequest, runtime.services.limits.body_bytes)
    prices = check_prices(
        parse_price(one.gpu, one.since, one.per_gpu_hour, pool=one.pool, source=one.source) for one in body.prices
    )
    now_s = runtime.services.clock.now_s()
    known = await run_in_thread(runtime.services.store.record, PRICE_LISTS, PRICES)
    kept = known.electricity if known is not None and body.electricity is None else ()
    found = PriceList(
        currency=parse_currency(body.currency),
        prices=prices,
        by=caller_of(request).user,
        at_s=now_s,
        electricity=check_rates(map(_rate, body.electricity or ())) or kept,
    )
    if not body.dry_run:
        await runtime.request(PutPrices(prices=found, keep_electricity=body.electricity is None))
    return json_response(compare_prices(known, found, now_s))


def compare_prices(known: PriceList | None, found: PriceList, now_s: float) -> PricesChanged:
    """What the new list changes. In another currency, every price changes."""
    before = {} if known is None else {one.key: one for one in known.prices}
    after = {one.key: one for one in found.prices}
    other_currency = known is not None and known.currency != found.currency
    added = [one for key, one in after.items() if key not in before]
    removed = [one for key, one in before.items() if key not in after]
    both = [one for key, one in after.items() if key in before]
    changed = [one for one in both if other_currency or one.micro != before[one.key].micro]
    past = [one.from_s for one in (*added, *changed, *removed) if one.from_s < now_s]
    return PricesChanged(
        currency=found.currency,
        added=_views(added),
        changed=_views(changed),
        removed=_views(removed),
        unchanged=len(both) - len(changed),
        past_from_s=min(past, default=None),
        electricity_rates=len(found.electricity),
        electricity_changed=found.electricity != (() if known is None else known.electricity),
    )


def electricity_views(rates: Sequence[ElectricityRate]) -> list[ElectricityView]:
    """The rates of electricity, by time."""
    return [
        ElectricityView(
            from_s=one.from_s,
            per_kwh=None if one.micro_per_kwh is None else micro_text(one.micro_per_kwh),
            pue=one.pue_milli / PUE_MILLI,
            gco2_per_kwh=None if one.gco2_milli_per_kwh is None else one.gco2_milli_per_kwh / 1000,
            source=one.source,
        )
        for one in rates
    ]


def _rate(one: ElectricityBody) -> ElectricityRate:
    return parse_rate(one.since, per_kwh=one.per_kwh, pue=one.pue, gco2_per_kwh=one.gco2_per_kwh, source=one.source)


def _stored(services: HeadServices) -> PricesReply:
    found = services.store.record(PRICE_LISTS, PRICES)
    if found is None:
        return PricesReply(currency="", prices=[])
    return PricesReply(
        currency=found.currency,
        prices=_views(found.prices),
        by=found.by,
        stored_s=found.at_s,
        electricity=electricity_views(found.electricity),
    )


def _views(prices: Sequence[GpuPrice]) -> list[PriceView]:
    return [
        PriceView(gpu=one.gpu, pool=one.pool, from_s=one.from_s, per_gpu_hour=micro_text(one.micro), source=one.source)
        for one in prices
    ]
