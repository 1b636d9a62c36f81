"""The settings of a pool on Azure, and the offers that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import NodeOffer
from phalanx.core.units import parse_memory_bytes
from phalanx.planner.facts.instances import InstanceEntry
from phalanx.planner.facts.prices import PriceEntry
from phalanx.providers.clouds.offers import ON_DEMAND, SPOT, fact_price, zone_offers
from phalanx.providers.clouds.pool_settings import (
    SHARED_SETTINGS,
    MachineSettings,
    check_names,
    parse_machine_settings,
    setting_flag,
    setting_words,
)

NAME: Final = "azure"
REGIONAL: Final = "any"  # the zone of offers that leave it to Azure
SIZE_PREFIX: Final = "Standard_"
_SUBSCRIPTION: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_GROUP: Final = re.compile(r"[A-Za-z0-9._()-]{1,89}[A-Za-z0-9_()-]")
_LOCATION: Final = re.compile(r"[a-z]+[a-z0-9]*")
_SIZE: Final = re.compile(r"(?:Standard_)?[A-Z][A-Za-z0-9_-]+")
_RESERVED: Final = re.compile(r"reserved:([A-Za-z0-9._-]+)")
_NAMES: Final = frozenset(
    {
        "subscription",
        "group",
        "location",
        "image",
        "ssh-key",
        "market",
        "subnet",
        "accelerated-network",
        "proximity-group",
        "scale-set",
        "availability-set",
        "identity",
        "disk",
        "disk-type",
        "plan",
        "credentials",
        *SHARED_SETTINGS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureGroup:
    """A resource group: what decides which machines a list shows. `from_instance`: credentials of the machine on which the head runs."""

    subscription: str
    group: str
    from_instance: bool = False

    @property
    def path(self) -> str:
        """Of the group, below the service's address."""
        return f"/subscriptions/{self.subscription}/resourceGroups/{self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureMachineTerms:
    """What every virtual machine of a pool has.

    Attributes:
        image: the id of an image, or a publisher's `PUBLISHER:OFFER:SKU:VERSION`.
        ssh_key: public; Azure makes no Linux machine without one or a password.
        subnet: the id, or `NETWORK/SUBNET` in the group.
        proximity_group, scale_set, availability_set: names in the group; empty for none.
        identity: id of a user-assigned identity of the machines; empty for none.
    """

    group: AzureGroup
    location: str
    image: str
    ssh_key: str
    subnet: str
    markets: tuple[str, ...]
    accelerated_network: bool = True
    proximity_group: str = ""
    scale_set: str = ""
    availability_set: str = ""
    identity: str = ""
    disk_bytes: int = 200 << 30
    disk_type: str = "Premium_LRS"
    plan: bool = False
    machine: MachineSettings = field(default_factory=MachineSettings)


def parse_group(settings: Mapping[str, str]) -> AzureGroup:
    """Return the resource group of a pool.

    Raises:
        BadRequest: a setting is missing or invalid.
    """
    subscription, group = settings.get("subscription", ""), settings.get("group", "")
    if not _SUBSCRIPTION.fullmatch(subscription):
        raise BadRequest(
            f"{subscription[:40]!r} is not the id of a subscription" if subscription else "the subscription is missing",
            hint="--set subscription=00000000-0000-0000-0000-000000000000",
        )
    if not _GROUP.fullmatch(group):
        raise BadRequest(
            f"{group[:40]!r} is not the name of a resource group" if group else "the resource group is missing",
            hint="--set group=NAME, one that holds nothing but these machines",
        )
    credentials = settings.get("credentials", "environment")
    if credentials not in {"environment", "instance"}:
        raise BadRequest(f"credentials {credentials[:20]!r} are neither environment nor instance")
    return AzureGroup(subscription=subscription.lower(), group=group, from_instance=credentials == "instance")


def parse_terms(settings: Mapping[str, str]) -> AzureMachineTerms:
    """Return the terms of a pool's machines.

    Raises:
        BadRequest: a setting is missing, unknown or invalid.
    """
    check_names(NAME, settings, _NAMES)
    group, location = parse_group(settings), settings.get("location", "")
    if not _LOCATION.fullmatch(location):
        raise BadRequest(
            f"{location[:40]!r} is not a location" if location else "the location is missing",
            hint="--set location=eastus",
        )
    image = settings.get("image", "")
    if not image.startswith("/subscriptions/") and image.count(":") != 3:
        raise BadRequest(
            "the image is missing" if not image else f"{image[:80]!r} is not an image",
            hint="--set image=/subscriptions/.../images/NAME or PUBLISHER:OFFER:SKU:VERSION, with the driver, Python 3.11 and Phalanx",
        )
    if not re.match(r"(?:ssh-rsa|ssh-ed25519) \S+", settings.get("ssh-key", "")):
        raise BadRequest("the setting ssh-key is no public key", hint='--set ssh-key="$(cat ~/.ssh/id_ed25519.pub)"')
    if "/" not in settings.get("subnet", ""):
        raise BadRequest("the subnet is missing", hint="--set subnet=NETWORK/SUBNET, or the id of one")
    markets = tuple(dict.fromkeys(setting_words(settings.get("market", ON_DEMAND))))
    for market in markets:
        if market not in {ON_DEMAND, SPOT} and not _RESERVED.fullmatch(market):
            raise BadRequest(f"market {market[:40]!r} is not one of on-demand, spot, reserved:GROUP")
    if settings.get("scale-set") and settings.get("availability-set"):
        raise BadRequest("a machine is in a scale set or in an availability set, not in both")
    return AzureMachineTerms(
        group=group,
        location=location,
        image=image,
        ssh_key=settings["ssh-key"],
        subnet=settings["subnet"],
        markets=markets,
        accelerated_network=setting_flag(settings, "accelerated-network", default=True),
        proximity_group=settings.get("proximity-group", ""),
        scale_set=settings.get("scale-set", ""),
        availability_set=settings.get("availability-set", ""),
        identity=settings.get("identity", ""),
        disk_bytes=parse_memory_bytes(settings["disk"]) if "disk" in settings else 200 << 30,
        disk_type=settings.get("disk-type", "Premium_LRS"),
        plan=setting_flag(settings, "plan", default=False),
        machine=parse_machine_settings(settings),
    )


def parse_sizes(text: str) -> tuple[str, ...]:
    """Return the sizes of a pool's template, each with its prefix `Standard_`.

    Raises:
        BadRequest: one is not of the form of a size.
    """
    sizes = tuple(dict.fromkeys(setting_words(text)))
    for name in sizes:
        if not _SIZE.fullmatch(name):
            raise BadRequest(f"{name[:40]!r} is not a size of machines", hint="--type ND96isr_H100_v5")
    if not sizes:
        raise BadRequest("the size is missing", hint="--type ND96isr_H100_v5")
    return tuple(SIZE_PREFIX + name.removeprefix(SIZE_PREFIX) for name in sizes)


def check_zones(zones: Sequence[str]) -> tuple[str, ...]:
    """Return the zones, each once: 1, 2 or 3; without one, Azure chooses.

    Raises:
        BadRequest: one is another text.
    """
    for zone in zones:
        if zone not in {"1", "2", "3"}:
            raise BadRequest(f"{zone[:40]!r} is not a zone", hint="--zones 1,2")
    return tuple(dict.fromkeys(zones)) or (REGIONAL,)


def make_offers(
    terms: AzureMachineTerms,
    sizes: Sequence[str],
    zones: Sequence[str],
    price_per_h: float | None,
    facts: tuple[Sequence[InstanceEntry], Sequence[PriceEntry]],
) -> tuple[NodeOffer, ...]:
    """Return the offers in order of price, then of market, size and zone as given. Reserved capacity costs what it costs on demand.

    Raises:
        BadRequest: the price of one is not known, and another one's is: they cannot be compared.
    """

    def price(size: str, market: str) -> float:
        if price_per_h is not None:
            return price_per_h
        wanted = SPOT if market == SPOT else ON_DEMAND
        return fact_price("Azure", size.removeprefix(SIZE_PREFIX), wanted, terms.location, facts)

    return zone_offers(terms.markets, sizes, zones, price)


def reservation_of(market: str) -> str:
    """The capacity reservation group of a market; empty for others."""
    return market.partition(":")[2]
