"""The settings of a pool on EC2, and the offers that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import NodeOffer
from phalanx.core.units import parse_duration_s
from phalanx.planner.facts.instances import InstanceEntry
from phalanx.planner.facts.prices import PriceEntry

ON_DEMAND: Final = "on-demand"
SPOT: Final = "spot"
SILENCE_S: Final = (
    1800.0  # a machine ends itself when its head has been silent for so long, unless the pool has the setting `silence`
)
_TYPE: Final = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
_ZONE: Final = re.compile(r"[a-z]|([a-z]{2}(?:-[a-z]+)+-[0-9])[a-z]")
_REGION: Final = re.compile(r"[a-z]{2}(?:-[a-z]+)+-[0-9]")
_RESERVED: Final = re.compile(r"(reserved|block):(cr-[0-9a-z]+)")
_NAMES: Final = frozenset(
    {
        "region",
        "image",
        "market",
        "subnets",
        "security-groups",
        "placement-group",
        "efa",
        "instance-profile",
        "profile",
        "credentials",
        "endpoint",
        "silence",
        "virtual",
        "setup",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountTerms:
    """Whose account, and where: what decides which machines a list shows.

    Attributes:
        profile: of the AWS configuration files of the head's account; empty for the default chain.
        from_instance: credentials may come from the metadata service of the machine on which the head runs.
        endpoint: URL of EC2; empty for that of AWS.
    """

    region: str
    profile: str = ""
    from_instance: bool = False
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTerms:
    """What every instance of a pool has.

    Attributes:
        subnets: one or more; each is in one zone.
        efa_interfaces: network interfaces with EFA; 0 for a plain one.
        virtual: the instance joins with so many virtual devices; 0 for its GPUs.
        setup: a shell command that the machine runs before it joins.
    """

    account: AccountTerms
    image: str
    markets: tuple[str, ...]
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    placement_group: str = ""
    efa_interfaces: int = 0
    instance_profile: str = ""
    silence_s: float = SILENCE_S
    virtual: int = 0
    setup: str = ""


def parse_account(settings: Mapping[str, str]) -> AccountTerms:
    """Return the account of a pool.

    Raises:
        BadRequest: a setting is missing or invalid.
    """
    region = settings.get("region", "")
    if not _REGION.fullmatch(region):
        raise BadRequest(
            f"{region[:40]!r} is not a region" if region else "the region is missing", hint="--set region=us-east-1"
        )
    credentials = settings.get("credentials", "files")
    if credentials not in {"files", "instance"}:
        raise BadRequest(f"credentials {credentials!r} are neither files nor instance")
    endpoint = settings.get("endpoint", "")
    if endpoint and not re.fullmatch(r"https?://[^\s/]+", endpoint):
        raise BadRequest(f"the endpoint {endpoint!r} is not a URL such as https://ec2.us-east-1.amazonaws.com")
    profile = settings.get("profile", "")
    return AccountTerms(region=region, profile=profile, from_instance=credentials == "instance", endpoint=endpoint)


def parse_terms(settings: Mapping[str, str]) -> InstanceTerms:
    """Return the terms of a pool's instances.

    Raises:
        BadRequest: a setting is missing, unknown or invalid.
    """
    if unknown := sorted(settings.keys() - _NAMES):
        raise BadRequest(f"provider aws has no setting {unknown[0]}", hint=f"settings: {', '.join(sorted(_NAMES))}")
    image = settings.get("image", "")
    if not image.startswith("ami-"):
        raise BadRequest(
            "the image is missing", hint="--set image=ami-..., with the driver of the GPUs, Python 3.11 and Phalanx"
        )
    markets = tuple(dict.fromkeys(_words(settings.get("market", ON_DEMAND))))
    for market in markets:
        if market not in {ON_DEMAND, SPOT} and not _RESERVED.fullmatch(market):
            raise BadRequest(f"market {market!r} is not one of on-demand, spot, reserved:cr-..., block:cr-...")
    silence_s = parse_duration_s(settings["silence"], what="silence") if "silence" in settings else SILENCE_S
    if silence_s < 60.0:
        raise BadRequest("a machine cannot end itself after less than 60 s of silence: a head restarts in that time")
    return InstanceTerms(
        account=parse_account(settings),
        image=image,
        markets=markets,
        subnets=_words(settings.get("subnets", "")),
        security_groups=_words(settings.get("security-groups", "")),
        placement_group=settings.get("placement-group", ""),
        efa_interfaces=_count(settings, "efa", 32),
        instance_profile=settings.get("instance-profile", ""),
        silence_s=silence_s,
        virtual=_count(settings, "virtual", 256),
        setup=settings.get("setup", ""),
    )


def parse_types(text: str) -> tuple[str, ...]:
    """Return the instance types of a pool's template.

    Raises:
        BadRequest: one is not of the form of a type.
    """
    types = tuple(dict.fromkeys(_words(text)))
    for name in types:
        if not _TYPE.fullmatch(name):
            raise BadRequest(f"{name!r} is not an instance type", hint="--type p5.48xlarge")
    return types


def full_zones(zones: Sequence[str], region: str) -> tuple[str, ...]:
    """Return the names of zones, which may be given as letters.

    Raises:
        BadRequest: one is of another region, or not of that form.
    """
    found = []
    for zone in zones:
        match = _ZONE.fullmatch(zone)
        if match is None or match[1] not in {None, region}:
            raise BadRequest(f"{zone!r} is not a zone of region {region}", hint=f"{region}a, or only the letter")
        found.append(zone if match[1] else region + zone)
    return tuple(dict.fromkeys(found))


def make_offers(
    terms: InstanceTerms,
    types: Sequence[str],
    zones: Sequence[str],
    price_per_h: float | None,
    facts: tuple[Sequence[InstanceEntry], Sequence[PriceEntry]],
) -> tuple[NodeOffer, ...]:
    """Return the offers in order of price, then of market, type and zone as given.

    Raises:
        BadRequest: the price of one is not known, and another one's is: they cannot be compared.
    """
    offers = [
        NodeOffer(
            text=f"{zone} {kind} {market}",
            zone=zone,
            price_per_h=price_per_h
            if price_per_h is not None
            else known_price(kind, market, terms.account.region, facts),
        )
        for market in terms.markets
        for kind in types
        for zone in zones
    ]
    unknown = [offer.text for offer in offers if offer.price_per_h <= 0.0]
    if unknown and len(unknown) < len(offers):
        raise BadRequest(f"the price of {unknown[0]} is not known, so the offers have no order", hint="--price 30/h")
    return tuple(sorted(offers, key=lambda offer: offer.price_per_h))


def known_price(
    kind: str, market: str, region: str, facts: tuple[Sequence[InstanceEntry], Sequence[PriceEntry]]
) -> float:
    """Return the price of an instance in US dollars an hour: of the region, else the newest of another one; 0 if no fact has it."""
    wanted = "capacity block" if market.startswith("block:") else SPOT if market == SPOT else ON_DEMAND
    instance = next((one for one in facts[0] if one.cloud == "AWS" and one.name == kind), None)
    if instance is None:
        return 0.0
    found = [one.price for one in facts[1] if one.price.offer == instance.offer and one.price.kind == wanted]
    found.sort(key=lambda price: (price.region == region, price.fact.date))
    return round(found[-1].usd_per_gpu_hour * instance.gpus, 4) if found else 0.0


def parse_offer(text: str) -> tuple[str, str, str]:
    """Return zone, type and market of an offer."""
    zone, kind, market = text.split(" ")
    return zone, kind, market


def reservation_of(market: str) -> str:
    """The capacity reservation of a market; empty for on-demand and spot."""
    return market.partition(":")[2]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _count(settings: Mapping[str, str], name: str, most: int) -> int:
    text = settings.get(name, "0")
    if not text.isdecimal() or int(text) > most:
        raise BadRequest(f"the setting {name} is {text[:20]!r}, not a number from 0 to {most}")
    return int(text)
