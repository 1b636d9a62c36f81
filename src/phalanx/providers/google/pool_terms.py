"""The settings of a pool on Compute Engine, and the offers that follow from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import NodeOffer
from phalanx.core.units import parse_duration_s, parse_memory_bytes
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

NAME: Final = "google"
FLEX: Final = "flex"
FLEX_RUN_MAX_S: Final = 7 * 86400.0  # docs.cloud.google.com/compute/docs/instances/about-flex-start-vms, read 2026-11
FLEX_WAIT_MIN_S: Final = 90.0  # likewise; less is asked for as 0: now or not at all
FLEX_WAIT_MAX_S: Final = 7200.0  # likewise
_PROJECT: Final = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_TYPE: Final = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
_ZONE: Final = re.compile(r"([a-z]+-[a-z]+[0-9]+)-[a-z]")
_RESERVED: Final = re.compile(r"(reserved|bound):([a-z](?:[-a-z0-9/]*[a-z0-9])?)")
_ACCELERATORS: Final = re.compile(r"([a-z][a-z0-9-]*):([1-9][0-9]?)")
_NAMES: Final = frozenset(
    {
        "project",
        "image",
        "market",
        "subnets",
        "external-ip",
        "placement-policy",
        "service-account",
        "accelerators",
        "disk",
        "disk-type",
        "max-run",
        "flex-wait",
        "credentials",
        *SHARED_SETTINGS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleProject:
    """Whose project: what decides which machines a list shows. `from_instance`: credentials of the machine on which the head runs."""

    project: str
    from_instance: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleInstanceTerms:
    """What every instance of a pool has.

    Attributes:
        image: path of an image or of a family.
        subnets: one for each network interface, all with gVNIC; the first one joins the head. Empty: the network `default`.
        placement_policy: name of a compact placement policy in the region.
        accelerators: type and count, for machine types to which GPUs are attached; empty for those that have them.
        disk_bytes: of the boot disk.
        max_run_s: Compute Engine deletes the instance after so long; 0: never.
        flex_wait_s: how long a flex start may wait for capacity; 0: not at all.
    """

    project: GoogleProject
    image: str
    markets: tuple[str, ...]
    subnets: tuple[str, ...] = ()
    external_ip: bool = True
    placement_policy: str = ""
    service_account: str = ""
    accelerators: tuple[str, int] = ("", 0)
    disk_bytes: int = 200 << 30
    disk_type: str = "pd-balanced"
    max_run_s: float = 0.0
    flex_wait_s: float = 0.0
    machine: MachineSettings = field(default_factory=MachineSettings)


def parse_project(settings: Mapping[str, str]) -> GoogleProject:
    """Return the project of a pool.

    Raises:
        BadRequest: a setting is missing or invalid.
    """
    project = settings.get("project", "")
    if not _PROJECT.fullmatch(project):
        raise BadRequest(
            f"{project[:40]!r} is not the id of a project" if project else "the project is missing",
            hint="--set project=my-project-123",
        )
    credentials = settings.get("credentials", "files")
    if credentials not in {"files", "instance"}:
        raise BadRequest(f"credentials {credentials[:20]!r} are neither files nor instance")
    return GoogleProject(project=project, from_instance=credentials == "instance")


def parse_terms(settings: Mapping[str, str]) -> GoogleInstanceTerms:
    """Return the terms of a pool's instances.

    Raises:
        BadRequest: a setting is missing, unknown or invalid.
    """
    check_names(NAME, settings, _NAMES)
    image = settings.get("image", "")
    if not re.fullmatch(r"projects/[^\s/]+/global/images/(?:family/)?[a-z0-9-]+", image):
        raise BadRequest(
            "the image is missing" if not image else f"{image[:80]!r} is not the path of an image",
            hint="--set image=projects/PROJECT/global/images/NAME or .../images/family/NAME, with the driver, Python 3.11 and Phalanx",
        )
    markets = tuple(dict.fromkeys(setting_words(settings.get("market", ON_DEMAND))))
    for market in markets:
        if market not in {ON_DEMAND, SPOT, FLEX} and not _RESERVED.fullmatch(market):
            raise BadRequest(f"market {market[:40]!r} is not one of on-demand, spot, flex, reserved:NAME, bound:NAME")
    max_run_s = parse_duration_s(settings["max-run"], what="max-run") if "max-run" in settings else 0.0
    flex_wait_s = parse_duration_s(settings["flex-wait"], what="flex-wait") if "flex-wait" in settings else 0.0
    if FLEX in markets and not 0.0 < max_run_s <= FLEX_RUN_MAX_S:
        raise BadRequest("a flex start needs the setting max-run, of at most 7 days", hint="--set max-run=24h")
    if flex_wait_s and not FLEX_WAIT_MIN_S <= flex_wait_s <= FLEX_WAIT_MAX_S:
        raise BadRequest("a flex start waits for 90 s to 2 h, or not at all", hint="--set flex-wait=90s")
    if "accelerators" in settings and not _ACCELERATORS.fullmatch(settings["accelerators"]):
        raise BadRequest(f"accelerators {settings['accelerators'][:40]!r} are not TYPE:COUNT", hint="nvidia-tesla-t4:4")
    kind, _, count = settings.get("accelerators", ":0").partition(":")
    return GoogleInstanceTerms(
        project=parse_project(settings),
        image=image,
        markets=markets,
        subnets=setting_words(settings.get("subnets", "")),
        external_ip=setting_flag(settings, "external-ip", default=True),
        placement_policy=settings.get("placement-policy", ""),
        service_account=settings.get("service-account", ""),
        accelerators=(kind, int(count)),
        disk_bytes=parse_memory_bytes(settings["disk"]) if "disk" in settings else 200 << 30,
        disk_type=settings.get("disk-type", "pd-balanced"),
        max_run_s=max_run_s,
        flex_wait_s=flex_wait_s,
        machine=parse_machine_settings(settings),
    )


def parse_types(text: str) -> tuple[str, ...]:
    """Return the machine types of a pool's template.

    Raises:
        BadRequest: one is not of the form of a type.
    """
    types = tuple(dict.fromkeys(setting_words(text)))
    for name in types:
        if not _TYPE.fullmatch(name):
            raise BadRequest(f"{name[:40]!r} is not a machine type", hint="--type a3-highgpu-8g")
    if not types:
        raise BadRequest("the machine type is missing", hint="--type a3-highgpu-8g")
    return types


def check_zones(zones: Sequence[str]) -> tuple[str, ...]:
    """Return the zones, each once.

    Raises:
        BadRequest: the zones are missing, or one is not of the form of a zone.
    """
    for zone in zones:
        if not _ZONE.fullmatch(zone):
            raise BadRequest(f"{zone[:40]!r} is not a zone", hint="--zones us-central1-a,us-east4-b")
    if not zones:
        raise BadRequest("the zones are missing", hint="--zones us-central1-a,us-east4-b")
    return tuple(dict.fromkeys(zones))


def region_of(zone: str) -> str:
    """The region of a zone."""
    return zone.rpartition("-")[0]


def make_offers(
    terms: GoogleInstanceTerms,
    types: Sequence[str],
    zones: Sequence[str],
    price_per_h: float | None,
    facts: tuple[Sequence[InstanceEntry], Sequence[PriceEntry]],
) -> tuple[NodeOffer, ...]:
    """Return the offers in order of price, then of market, type and zone as given. A reservation costs what its machines cost on demand.

    Raises:
        BadRequest: the price of one is not known, and another one's is: they cannot be compared.
    """

    def price(kind: str, market: str) -> float:
        if price_per_h is not None:
            return price_per_h
        wanted = market if market in {SPOT, FLEX} else ON_DEMAND
        return fact_price("GCP", kind, wanted, region_of(zones[0]), facts)

    return zone_offers(terms.markets, types, zones, price)


def reservation_of(market: str) -> str:
    """The reservation of a market; empty for others."""
    return market.partition(":")[2]
