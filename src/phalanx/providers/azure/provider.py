"""Starts and stops virtual machines of Azure, each under a name made of its order; `docs/azure.md` has the settings.

The list of what exists is that of the tag `phalanx-owner` in the resource group. Network interfaces and disks without a machine are in it too: they
cost money, and the head's sweeper deletes them as it does machines without a record.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine, NodeTemplate
from phalanx.core.ids import NodeId
from phalanx.planner.facts.instances import read_instances
from phalanx.planner.facts.prices import read_prices
from phalanx.ports.engine import EngineContext
from phalanx.ports.provider import (
    CallUnanswered,
    CloudRights,
    EndedOrder,
    LostNode,
    NodeOrder,
    NodeProvider,
    OfferRefused,
    PoolTerms,
    ProviderType,
    StartedMachine,
)
from phalanx.providers.azure import arm
from phalanx.providers.azure.machine_request import (
    DISK_SUFFIX,
    INTERFACE_SUFFIX,
    disk_path,
    interface_path,
    interface_request,
    machine_name,
    machine_path,
    machine_request,
)
from phalanx.providers.azure.pool_terms import (
    NAME,
    REGIONAL,
    SIZE_PREFIX,
    AzureGroup,
    AzureMachineTerms,
    check_zones,
    make_offers,
    parse_group,
    parse_sizes,
    parse_terms,
)
from phalanx.providers.azure.rights import CONSOLE_ACTION, check_rights, least_role, needed_actions
from phalanx.providers.clouds.closing import stop_everything
from phalanx.providers.clouds.offers import MachineShape, node_shape
from phalanx.providers.clouds.rented_nodes import join_of, owner_of, refusal, rented_template, require_listening
from phalanx.providers.clouds.rest_calls import fetch_text

LOG_WAIT_S: Final = 120.0  # for the entry of a deletion in the activity log; without one the end is unknown
LOG_AGE_S: Final = 86400.0  # entries that are looked at
_DELETED: Final = "microsoft.compute/virtualmachines/delete"
_WRITTEN: Final = "microsoft.compute/virtualmachines/write"
_log = logging.getLogger("phalanx.providers")


class AzureProviderType(ProviderType):
    """See the module."""

    name = NAME
    parallel_calls = 8

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider; nothing is called before a pool asks for it."""
        return AzureProvider(head=head)


@dataclass(slots=True, kw_only=True)
class AzureProvider:
    """The provider of one head. Azure has the list of machines; this only knows the orders that it has seen, for a stop of the head.

    Attributes:
        log_asked_s: since when (monotonic) the activity log is asked for the end of a machine that is gone.
    """

    head: EngineContext
    log_asked_s: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, NodeOrder] = field(default_factory=dict)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Ask Azure for the sizes in the location, and for the actions that the pool needs; nothing is started.

        Raises:
            BadRequest: a setting, size or zone is not valid; the credentials may not start or list machines; or the head listens only on
                loopback.
        """
        require_listening(self.head)
        wanted, sizes, zones = parse_terms(terms.settings), parse_sizes(terms.template), check_zones(terms.zones)
        try:
            shapes = _shapes(wanted, sizes, zones)
            shape = node_shape("Azure", shapes, wanted.machine.virtual)
            names = needed_actions(terms.settings)
            missing = [one.name for one in check_rights(wanted.group, names) if not one.allowed]
            if not missing:
                self.machines(terms.settings)
        except OSError as error:
            raise refusal("Azure", NAME, error) from error
        if missing:
            raise BadRequest(
                f"the credentials may not {missing[0]} in group {wanted.group.group}",
                hint="phalanx clouds check azure",
            )
        offers = make_offers(wanted, sizes, zones, terms.price_per_h, (read_instances(), read_prices()))
        return rented_template(",".join(sizes), shape, offers)

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Remember the orders; the head's sweeper compares the list with the records."""
        self._seen = {order.token: order for order in orders}

    def start(self, order: NodeOrder) -> StartedMachine:
        """Start the machine of the order by its offer.

        Raises:
            OfferRefused: no capacity or quota there; what Azure leaves of such a machine has been deleted.
            CallUnanswered: no answer, a throttled call, or an operation that is not done yet.
            OSError: Azure refuses the call.
        """
        self._seen[order.token] = order
        terms, name = parse_terms(order.settings), machine_name(order)
        group = terms.group
        join = join_of(self.head, order)
        try:
            found = _machine(group, name)
            if found is None or found["properties"].get("provisioningState") == "Failed":
                self._create(terms, order, machine_request(order, terms, self._owner, join))
                found = _machine(group, name)
            elif found["properties"].get("provisioningState") not in {"Succeeded", "Updating"}:
                raise CallUnanswered(f"machine {name} is {found['properties'].get('provisioningState')}")
        except OfferRefused as error:
            # A machine without capacity stays, as failed, with its disk and interface.
            if self._remove(group, name):  # an earlier call came late and started it: the order has had its machine
                raise OSError(f"it was started by a late call, and was deleted: {error}") from error
            raise
        except arm.AzureError as error:
            if error.status == http.client.FORBIDDEN:
                raise refusal("Azure", NAME, error) from error
            raise
        if found is None:
            raise CallUnanswered(f"Azure has made machine {name}, but does not find it")
        self._seen[order.token] = replace(order, known_machine=name)
        return StartedMachine(machine=name, since_s=_since_s(found))

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Delete the machine of the order, with its interface and disk. Its name is known without a list.

        Raises:
            OSError: Azure did not confirm that.
        """
        group = parse_group(order.settings)
        name = order.machine or order.known_machine or machine_name(order)
        stopped = self._remove(group, name, known=bool(order.machine or order.known_machine))
        if not order.machine:
            self._seen.pop(order.token, None)
        return stopped

    def console(self, order: NodeOrder) -> str:
        """Return the serial log of the boot diagnostics, from the address with a signature that Azure names for it.

        Raises:
            OSError: Azure does not give it.
        """
        group = parse_group(order.settings)
        path = f"{machine_path(group.path, order.known_machine)}/retrieveBootDiagnosticsData"
        query = {"sasUriExpirationTimeInMinutes": "5"}
        found = arm.arm_reply(group, "POST", path, arm.COMPUTE, query=query).body
        address = str(found.get("serialConsoleLogBlobUri") or "")
        return fetch_text(address) if address else ""

    def observe(self) -> Sequence[LostNode]:
        """Return nothing: the head's sweeper finds machines that ended."""
        return ()

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return the machines with the owner's tag in the group, and the interfaces and disks whose machine is gone.

        Raises:
            OSError: the list is not complete.
        """
        group = parse_group(settings)
        compute, network = f"{group.path}/providers/Microsoft.Compute", f"{group.path}/providers/Microsoft.Network"
        # Machines last: what is made along with one is listed only beside it.
        interfaces = arm.arm_items(group, f"{network}/networkInterfaces", arm.NETWORK)
        disks = arm.arm_items(group, f"{compute}/disks", arm.DISKS)
        machines = arm.arm_items(group, f"{compute}/virtualMachines", arm.COMPUTE)
        found = {str(one["name"]): _listed(one, str(one["name"])) for one in machines if self._owns(one)}
        for items, suffix in ((interfaces, INTERFACE_SUFFIX), (disks, DISK_SUFFIX)):
            for one in filter(self._owns, items):
                name = str(one["name"]).removesuffix(suffix)
                found.setdefault(name, _listed(one, name))
        return list(found.values())

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Ask which of the actions that it needs the provider may do.

        Raises:
            BadRequest: there are no credentials, or Azure does not accept them.
        """
        group, names = parse_group(settings), (*needed_actions(settings), CONSOLE_ACTION)
        try:
            return CloudRights(rights=check_rights(group, names), policy=least_role(group, names))
        except OSError as error:
            raise BadRequest(f"Azure does not answer: {error}") from error

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Unless `keep_nodes`, delete the machines."""
        return () if keep_nodes else stop_everything(self, list(self._seen.values()), parse_group)

    @property
    def _owner(self) -> str:
        return owner_of(self.head)

    def _owns(self, item: Mapping[str, Any]) -> bool:
        return (item.get("tags") or {}).get("phalanx-owner") == self._owner

    def _create(self, terms: AzureMachineTerms, order: NodeOrder, request: Mapping[str, Any]) -> None:
        """Make the interface, then the machine, and wait until it runs. Raises as `start` does."""
        group, name = terms.group, machine_name(order)
        interface = interface_request(order, terms, self._owner)
        arm.finish(group, arm.arm_reply(group, "PUT", interface_path(group.path, name), arm.NETWORK, body=interface))
        made = arm.arm_reply(group, "PUT", machine_path(group.path, name), arm.COMPUTE, body=request)
        arm.finish(group, made)

    def _remove(self, group: AzureGroup, name: str, *, known: bool = False) -> Sequence[ChargedMachine]:
        """Delete a machine, its interface and its disk, and return what it is charged for.

        Args:
            group: where it is.
            name: of the machine.
            known: it has existed, so that the activity log has its end.
        """
        found, until_s = _machine(group, name), 0.0
        if found is not None:
            done = _delete(group, machine_path(group.path, name), arm.COMPUTE)
            until_s = _seconds(str(done["endTime"])) if "endTime" in done else 0.0
        # With `deleteOption` they go along, but not if the machine was never made or Azure did only half of it.
        _delete(group, interface_path(group.path, name), arm.NETWORK)
        _delete(group, disk_path(group.path, name), arm.DISKS)
        if found is not None and found["properties"].get("provisioningState") == "Failed":
            return []  # it never ran
        since_s = 0.0 if found is None else _since_s(found)
        if not until_s:
            since_s, until_s = self._logged_span(group, name, since_s, known=known or found is not None)
        if not until_s and not known:
            return []
        return [ChargedMachine(machine=name, since_s=since_s, until_s=until_s)]

    def _logged_span(self, group: AzureGroup, name: str, since_s: float, *, known: bool) -> tuple[float, float]:
        """Return from when to when a machine that is gone ran, by the activity log; zeros for what it does not have.

        Raises:
            CallUnanswered: the machine is known, and the log does not have its end yet: entries come late.
        """
        first = datetime.fromtimestamp(arm.now_s() - LOG_AGE_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        words = f"eventTimestamp ge '{first}' and resourceUri eq '{machine_path(group.path, name)}'"
        path = f"/subscriptions/{group.subscription}/providers/Microsoft.Insights/eventtypes/management/values"
        times: dict[str, list[float]] = {_WRITTEN: [], _DELETED: []}
        for one in arm.arm_items(group, path, arm.ACTIVITY, **{"$filter": words}):
            what = str(one["operationName"]["value"]).lower()
            if what in times and one["status"]["value"] == "Succeeded":
                times[what].append(_seconds(str(one["eventTimestamp"])))
        since_s = since_s or min(times[_WRITTEN], default=0.0)
        until_s = max(times[_DELETED], default=0.0)
        if not until_s and (known or since_s):
            asked_s = self.log_asked_s.setdefault(name, time.monotonic())
            if time.monotonic() < asked_s + LOG_WAIT_S:
                raise CallUnanswered(f"machine {name} is gone; the activity log does not have its end yet")
        self.log_asked_s.pop(name, None)
        return since_s, until_s


def _machine(group: AzureGroup, name: str) -> Mapping[str, Any] | None:
    """Return a machine; None if no machine has this name."""
    try:
        return arm.arm_reply(group, "GET", machine_path(group.path, name), arm.COMPUTE).body
    except arm.AzureError as error:
        if error.status == 404:
            return None
        raise


def _delete(group: AzureGroup, path: str, version: str) -> Mapping[str, Any]:
    """Delete a resource, and return the end of the operation; nothing if it does not exist."""
    try:
        return arm.finish(group, arm.arm_reply(group, "DELETE", path, version))
    except arm.AzureError as error:
        if error.status == 404 or error.code in {"ResourceNotFound", "NotFound"}:
            return {}
        raise


def _shapes(terms: AzureMachineTerms, sizes: Sequence[str], zones: Sequence[str]) -> dict[str, MachineShape]:
    """Return what a machine of each size has.

    Raises:
        BadRequest: the location or a zone does not have it, or not for this subscription.
    """
    path = f"/subscriptions/{terms.group.subscription}/providers/Microsoft.Compute/skus"
    items = arm.arm_items(terms.group, path, arm.SKUS, **{"$filter": f"location eq '{terms.location}'"})
    known = {str(one["name"]).lower(): one for one in items if one.get("resourceType") == "virtualMachines"}
    shapes = {}
    for size in sizes:
        one = known.get(size.lower())
        if one is None:
            raise BadRequest(f"location {terms.location} has no size {size.removeprefix(SIZE_PREFIX)}")
        if any(why.get("type") == "Location" for why in one.get("restrictions", ())):
            raise BadRequest(f"this subscription may not have {size} in {terms.location}: ask Azure for a quota")
        within = {zone for where in one.get("locationInfo", ()) for zone in where.get("zones", ())}
        if outside := [zone for zone in zones if zone != REGIONAL and zone not in within]:
            raise BadRequest(f"zone {outside[0]} of {terms.location} has no size {size}")
        has = {str(each["name"]): str(each["value"]) for each in one.get("capabilities", ())}
        shapes[size] = MachineShape(
            cpus=int(has["vCPUs"]),
            memory_bytes=int(float(has["MemoryGB"]) * (1 << 30)),
            gpu=size.removeprefix(SIZE_PREFIX) if int(has.get("GPUs", "0")) else "",
            gpus=int(has.get("GPUs", "0")),
        )
    return shapes


def _listed(item: Mapping[str, Any], machine: str) -> ListedMachine:
    tags = item.get("tags") or {}
    return ListedMachine(
        machine=machine,
        node_id=NodeId(tags.get("phalanx-node", "")),
        token=tags.get("phalanx-token", ""),
        offer=tags.get("phalanx-offer", ""),
    )


def _since_s(machine: Mapping[str, Any]) -> float:
    return _seconds(str(machine["properties"]["timeCreated"]))


def _seconds(text: str) -> float:
    """Azure writes seven digits after the second."""
    return datetime.fromisoformat(text[:26] + "+00:00" if text.endswith("Z") and len(text) > 27 else text).timestamp()
