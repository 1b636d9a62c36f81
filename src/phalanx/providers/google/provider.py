"""Starts and stops instances of Google Compute Engine, each by one call with a request id; `docs/google.md` has the settings.

A machine is named by its zone and its number, `us-central1-a/1234`: names of instances are used again, numbers never. The list of what exists is
that of the label `phalanx-owner`; node, token and offer are in the metadata of the instance, as labels cannot hold every text.
"""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

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
    PoolTerms,
    ProviderType,
    StartedMachine,
)
from phalanx.providers.clouds.closing import stop_everything
from phalanx.providers.clouds.offers import MachineShape, node_shape, parse_zone_offer
from phalanx.providers.clouds.rented_nodes import join_of, owner_of, refusal, rented_template, require_listening
from phalanx.providers.google import compute
from phalanx.providers.google.instance_request import (
    ORDER_KEY,
    OWNER_LABEL,
    instance_name,
    instance_request,
    label_text,
    request_id,
)
from phalanx.providers.google.pool_terms import (
    NAME,
    GoogleInstanceTerms,
    GoogleProject,
    check_zones,
    make_offers,
    parse_project,
    parse_terms,
    parse_types,
)
from phalanx.providers.google.rights import CONSOLE_PERMISSION, check_rights, least_role, needed_permissions

_ENDED: Final = frozenset({"STOPPING", "TERMINATED", "SUSPENDING", "SUSPENDED"})
_log = logging.getLogger("phalanx.providers")


class GoogleProviderType(ProviderType):
    """See the module."""

    name = NAME
    parallel_calls = 8

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider; nothing is called before a pool asks for it."""
        return GoogleProvider(head=head)


@dataclass(slots=True, kw_only=True)
class GoogleProvider:
    """The provider of one head. Compute Engine has the list of machines; this only knows the orders that it has seen, for a stop of the head."""

    head: EngineContext
    _seen: dict[str, NodeOrder] = field(default_factory=dict)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Ask Compute Engine for the zones and types, and for the permissions that the pool needs; nothing is started.

        Raises:
            BadRequest: a setting, type or zone is not valid; the credentials may not start or list instances; or the head listens only on
                loopback.
        """
        require_listening(self.head)
        wanted, types, zones = parse_terms(terms.settings), parse_types(terms.template), check_zones(terms.zones)
        project = wanted.project
        try:
            self._check_zones(project, zones)
            shapes = {kind: self._shape(wanted, zones, kind) for kind in types}
            shape = node_shape("GCP", shapes, wanted.machine.virtual)
            self.machines(terms.settings)
            names = needed_permissions(list(terms.settings))
            missing = [one.name for one in check_rights(project, names) if not one.allowed]
        except OSError as error:
            raise refusal("Google", NAME, error) from error
        if missing:
            raise BadRequest(
                f"the credentials have no permission {missing[0]} on project {project.project}",
                hint="phalanx clouds check google",
            )
        offers = make_offers(wanted, types, zones, terms.price_per_h, (read_instances(), read_prices()))
        return rented_template(",".join(types), shape, offers)

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Remember the orders; the head's sweeper compares the list with the records."""
        self._seen = {order.token: order for order in orders}

    def start(self, order: NodeOrder) -> StartedMachine:
        """Start the instance of the order by its offer.

        Raises:
            OfferRefused: no capacity or quota there.
            CallUnanswered: no answer, a throttled call, or an operation that is not done yet.
            OSError: Google refuses the call, or the instance has ended already.
        """
        self._seen[order.token] = order
        terms = parse_terms(order.settings)
        zone = parse_zone_offer(order.offer)[0]
        join = join_of(self.head, order)
        request = instance_request(order, terms, self._owner, join)
        query = {"requestId": request_id("start", order.token, order.offer)}
        project, path = terms.project, f"/zones/{zone}/instances"
        machine = ""
        try:
            operation = compute.compute_call(project, "POST", path, query=query, body=request)
            operation = compute.finish(project, operation)
            machine = str(operation.get("targetId", ""))
        except compute.GoogleError as error:
            if error.status == http.client.FORBIDDEN:
                raise refusal("Google", NAME, error) from error
            if error.status != 409 and error.code not in {"RESOURCE_ALREADY_EXISTS", "alreadyExists"}:
                raise
            # An earlier call with other words, such as another address of the head, has made it.
        instance = self._find(project, zone, machine or instance_name(order))
        if instance is None and machine:
            raise OSError(f"instance {machine} in {zone} has ended already")
        if instance is None:
            raise CallUnanswered(f"Google has an instance of this name in {zone}, but does not find it")
        if str(instance.get("status")) in _ENDED:
            raise OSError(f"instance {instance['name']} has ended: {instance.get('statusMessage', '')}")
        found = f"{zone}/{instance['id']}"
        self._seen[order.token] = replace(order, known_machine=found)
        return StartedMachine(machine=found, since_s=_since_s(instance))

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Delete the instances of the order.

        Raises:
            OSError: Google did not confirm that.
        """
        project = parse_project(order.settings)
        if order.machine:
            return self._delete(project, order.machine)
        listed = self._list(project, f" AND labels.phalanx-token={label_text(order.token)}")
        found = {one.machine for one in listed if one.token == order.token}
        found |= {order.known_machine} - {""}  # a list may lag behind
        stopped = [charged for machine in sorted(found) for charged in self._delete(project, machine)]
        if not found and order.offer:  # an earlier head may have deleted it, and been killed before it wrote that
            zone, name = parse_zone_offer(order.offer)[0], instance_name(order)
            stopped = _charges(_operations(project, zone, f'targetLink eq ".*/zones/{zone}/instances/{name}"'))
        self._seen.pop(order.token, None)
        return stopped

    def console(self, order: NodeOrder) -> str:
        """Return the output of the first serial port: Google keeps its last MiB.

        Raises:
            OSError: Google does not give it.
        """
        zone, _, number = order.known_machine.partition("/")
        path = f"/zones/{zone}/instances/{quote(number)}/serialPort"
        found = compute.compute_call(parse_project(order.settings), "GET", path, query={"port": 1})
        return str(found.get("contents", ""))

    def observe(self) -> Sequence[LostNode]:
        """Return nothing: the head's sweeper finds instances that ended."""
        return ()

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return the instances with the owner's label in all zones of the project. One that is switched off still costs its disk.

        Raises:
            OSError: the list is not complete.
        """
        return self._list(parse_project(settings))

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Ask which of the permissions that it needs the provider has.

        Raises:
            BadRequest: there are no credentials, or Google does not accept them.
        """
        names = (*needed_permissions(list(settings)), CONSOLE_PERMISSION)
        try:
            return CloudRights(rights=check_rights(parse_project(settings), names), policy=least_role(names))
        except OSError as error:
            raise BadRequest(f"Google does not answer: {error}") from error

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Unless `keep_nodes`, delete the instances."""
        return () if keep_nodes else stop_everything(self, list(self._seen.values()), parse_project)

    @property
    def _owner(self) -> str:
        return owner_of(self.head)

    def _list(self, project: GoogleProject, more: str = "") -> Sequence[ListedMachine]:
        """Return the instances with the owner's label, and with what else the filter asks for. Raises as `machines` does."""
        query = {"filter": f"labels.{OWNER_LABEL}={self._owner}{more}", "returnPartialSuccess": "false"}
        found = []
        for page in compute.pages(project, "/aggregated/instances", query):
            if page.get("unreachables"):
                raise OSError(f"the list has nothing of {', '.join(page['unreachables'])}")
            for scope, part in page.get("items", {}).items():
                if part.get("warning", {}).get("code") == "UNREACHABLE":
                    raise OSError(f"the list has nothing of {scope}")
                found += [_listed(one) for one in part.get("instances", [])]
        return found

    def _check_zones(self, project: GoogleProject, zones: Sequence[str]) -> None:
        pages = compute.pages(project, "/zones", {})
        names = sorted(str(one["name"]) for page in pages for one in page.get("items", []))
        if unknown := [zone for zone in zones if zone not in names]:
            raise BadRequest(f"project {project.project} has no zone {unknown[0]}", hint=f"zones: {', '.join(names)}")

    def _shape(self, terms: GoogleInstanceTerms, zones: Sequence[str], kind: str) -> MachineShape:
        """Return what a machine of a type has, which every zone of the pool must offer."""
        found: Mapping[str, Any] = {}
        for zone in zones:
            try:
                found = compute.compute_call(terms.project, "GET", f"/zones/{zone}/machineTypes/{quote(kind)}")
            except compute.GoogleError as error:
                if error.status != 404:
                    raise
                raise BadRequest(f"zone {zone} has no machine type {kind}") from error
        own = (found.get("accelerators") or [{}])[0]
        gpu, count = terms.accelerators if terms.accelerators[1] else ("", 0)
        return MachineShape(
            cpus=int(found["guestCpus"]),
            memory_bytes=int(found["memoryMb"]) << 20,
            gpu=gpu or str(own.get("guestAcceleratorType", "")),
            gpus=count or int(own.get("guestAcceleratorCount", 0)),
        )

    def _find(self, project: GoogleProject, zone: str, name: str) -> Mapping[str, Any] | None:
        """Return the instance of this name or number; None if Google does not have it."""
        try:
            return compute.compute_call(project, "GET", f"/zones/{zone}/instances/{quote(name)}")
        except compute.GoogleError as error:
            if error.status == 404:
                return None
            raise

    def _delete(self, project: GoogleProject, machine: str) -> Sequence[ChargedMachine]:
        """Delete an instance, and return what it is charged for; a repeated call finds the end that the first one brought about."""
        zone, _, number = machine.partition("/")
        instance = self._find(project, zone, number)
        if instance is not None:
            query = {"requestId": request_id("stop", machine)}
            try:
                operation = compute.compute_call(
                    project, "DELETE", f"/zones/{zone}/instances/{quote(number)}", query=query
                )
                compute.finish(project, operation)
            except compute.GoogleError as error:
                if error.status != 404:
                    raise
        stopped = _charges(_operations(project, zone, f"targetId={number}"))
        if instance is None:
            return stopped
        since_s, until_s = _since_s(instance), _switched_off_s(instance)
        return [replace(one, since_s=since_s, until_s=until_s or one.until_s) for one in stopped]


def _operations(project: GoogleProject, zone: str, words: str) -> Sequence[Mapping[str, Any]]:
    """Return the operations of a zone that a filter selects, without failed ones. Google keeps them for some weeks.

    It waits for one under way that ends an instance: the instance may be gone already, and only the operation says since when.

    Raises:
        OSError: one is not done yet, or Google does not answer.
    """
    pages = compute.pages(project, f"/zones/{zone}/operations", {"filter": words})
    found = [one for page in pages for one in page.get("items", []) if "error" not in one]
    return [compute.finish(project, one) if _ends_instance(str(one.get("operationType"))) else one for one in found]


def _charges(operations: Sequence[Mapping[str, Any]]) -> list[ChargedMachine]:
    """Return what each instance is charged for that these operations have ended."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for one in operations:
        machine = f"{str(one['zone']).rpartition('/')[2]}/{one['targetId']}"
        kind = str(one.get("operationType", ""))
        if kind == "insert":  # it may be under way yet, if the delete was faster
            starts[machine] = _seconds(str(one["insertTime"]))
        elif _ends_instance(kind) and one.get("status") == "DONE":
            ends[machine] = min(ends.get(machine, float("inf")), _seconds(str(one["endTime"])))
    return [
        ChargedMachine(machine=machine, since_s=starts.get(machine, 0.0), until_s=until_s)
        for machine, until_s in sorted(ends.items())
    ]


def _ends_instance(operation: str) -> bool:
    return operation == "delete" or operation.endswith((".preempted", ".terminateOnHostError"))


def _listed(instance: Mapping[str, Any]) -> ListedMachine:
    items = {one["key"]: one.get("value", "") for one in instance.get("metadata", {}).get("items", [])}
    try:
        node, token, offer = map(str, json.loads(items.get(ORDER_KEY, "")))
    except (ValueError, TypeError):
        node = token = offer = ""  # somebody has changed it: it is a stray
    zone = str(instance["zone"]).rpartition("/")[2]
    return ListedMachine(machine=f"{zone}/{instance['id']}", node_id=NodeId(node), token=token, offer=offer)


def _since_s(instance: Mapping[str, Any]) -> float:
    return _seconds(str(instance.get("lastStartTimestamp") or instance["creationTimestamp"]))


def _switched_off_s(instance: Mapping[str, Any] | None) -> float | None:
    """When an instance was switched off, by itself or by its spot end: since then it is not charged, but for its disk; None if it was not."""
    if instance is None or instance.get("status") != "TERMINATED" or not instance.get("lastStopTimestamp"):
        return None
    return _seconds(str(instance["lastStopTimestamp"]))


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
