"""The settings of a pool on EC2, and the offers that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import NodeOffer
from phalanx.planner.facts.instances import InstanceEntry
from phalanx.planner.facts.prices import PriceEntry
from phalanx.providers.clouds.offers import ON_DEMAND, SPOT, fact_price, zone_offers
from phalanx.providers.clouds.pool_settings import (
    SHARED_SETTINGS,
    MachineSettings,
    check_names,
    parse_machine_settings,
    setting_count,
    setting_words,
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
        *SHARED_SETTINGS,
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
        machine: how it joins the head, and ends itself.
    """

    account: AccountTerms
    image: str
    markets: tuple[str, ...]
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    placement_group: str = ""
    efa_interfaces: int = 0
    instance_profile: str = ""
    machine: MachineSettings = field(default_factory=MachineSettings)


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
    check_names("aws", settings, _NAMES)
    image = settings.get("image", "")
    if not image.startswith("ami-"):
        raise BadRequest(
            "the image is missing", hint="--set image=ami-..., with the driver of the GPUs, Python 3.11 and Phalanx"
        )
    markets = tuple(dict.fromkeys(setting_words(settings.get("market", ON_DEMAND))))
    for market in markets:
        if market not in {ON_DEMAND, SPOT} and not _RESERVED.fullmatch(market):
            raise BadRequest(f"market {market!r} is not one of on-demand, spot, reserved:cr-..., block:cr-...")
    return InstanceTerms(
        account=parse_account(settings),
        image=image,
        markets=markets,
        subnets=setting_words(settings.get("subnets", "")),
        security_groups=setting_words(settings.get("security-groups", "")),
        placement_group=settings.get("placement-group", ""),
        efa_interfaces=setting_count(settings, "efa", 32),
        instance_profile=settings.get("instance-profile", ""),
        machine=parse_machine_settings(settings),
    )


def parse_types(text: str) -> tuple[str, ...]:
    """Return the instance types of a pool's template.

    Raises:
        BadRequest: one is not of the form of a type.
    """
    types = tuple(dict.fromkeys(setting_words(text)))
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
    region = terms.account.region

    def price(kind: str, market: str) -> float:
        return known_price(kind, market, region, facts) if price_per_h is None else price_per_h

    return zone_offers(terms.markets, types, zones, price)


def known_price(
    kind: str, market: str, region: str, facts: tuple[Sequence[InstanceEntry], Sequence[PriceEntry]]
) -> float:
    """Return the price of an instance in US dollars an hour: of the region, else the newest of another one; 0 if no fact has it."""
    wanted = "capacity block" if market.startswith("block:") else SPOT if market == SPOT else ON_DEMAND
    return fact_price("AWS", kind, wanted, region, facts)


def reservation_of(market: str) -> str:
    """The capacity reservation of a market; empty for on-demand and spot."""
    return market.partition(":")[2]
