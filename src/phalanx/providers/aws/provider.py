"""Starts and stops instances of Amazon EC2, each by one call with an idempotency token; `docs/aws.md` has the settings.

Instances have the tags `phalanx-owner`, `-pool`, `-node`, `-token`, `-offer` and `-silence`. The list of what exists is that of the owner's tag.
"""

from __future__ import annotations

import calendar
import hashlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from phalanx.providers.aws import ec2
from phalanx.providers.aws.pool_terms import (
    AccountTerms,
    InstanceTerms,
    full_zones,
    make_offers,
    parse_account,
    parse_terms,
    parse_types,
    reservation_of,
)
from phalanx.providers.aws.rights import check_rights, least_policy
from phalanx.providers.clouds.offers import SPOT, MachineShape, node_shape, parse_zone_offer
from phalanx.providers.clouds.rented_nodes import join_of, owner_of, refusal, rented_template, require_listening
from phalanx.providers.clouds.rest_calls import answer_time_s
from phalanx.providers.clouds.shared_list import SharedList
from phalanx.providers.clouds.start_script import start_script

NAME: Final = "aws"
_DRY_RUN: Final = "dry-run"
_ENDED: Final = frozenset({"shutting-down", "terminated"})
_STATES: Final = ["pending", "running", "stopping", "stopped", "shutting-down", "terminated"]
_ENDED_AT: Final = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_log = logging.getLogger("phalanx.providers")


class AwsProviderType(ProviderType):
    """See the module."""

    name = NAME
    parallel_calls = 8

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider; nothing is called before a pool asks for it."""
        return AwsProvider(head=head)


@dataclass(slots=True, kw_only=True)
class AwsProvider:
    """The provider of one head. EC2 has the list of machines; this only knows the orders that it has seen, for a stop of the head."""

    head: EngineContext
    _seen: dict[str, NodeOrder] = field(default_factory=dict)
    _called_s: dict[str, float] = field(default_factory=dict)  # when each order was last to be started, by this head
    _opened_s: float = field(default_factory=time.monotonic)
    _lists: SharedList[dict[str, Any]] = field(default_factory=SharedList)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Ask EC2 for the types and zones, and whether the first offer could be started; nothing is started.

        Raises:
            BadRequest: a setting, type or zone is not valid; the credentials may not start or list instances; or the head listens only on
                loopback.
        """
        require_listening(self.head)
        wanted, types = parse_terms(terms.settings), parse_types(terms.template)
        account = wanted.account
        try:
            zones = self._zones(wanted, full_zones(terms.zones, account.region))
            kinds = ec2.pages(account, "describe_instance_types", "InstanceTypes", InstanceTypes=list(types))
            self.machines(terms.settings)
            shape = node_shape("AWS", {kind["InstanceType"]: _shape(kind) for kind in kinds}, wanted.machine.virtual)
            offers = make_offers(wanted, types, zones, terms.price_per_h, (read_instances(), read_prices()))
            order = NodeOrder(
                node_id=NodeId(_DRY_RUN),
                token=_DRY_RUN,
                template=terms.template,
                offer=offers[0].text,
                settings=terms.settings,
            )
            self._dry_run(account, self._request(order, wanted))
        except OSError as error:
            raise refusal("AWS", NAME, error) from error
        return rented_template(",".join(types), shape, offers)

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Remember the orders; the head's sweeper compares the list with the records."""
        self._seen = {order.token: order for order in orders}

    def start(self, order: NodeOrder) -> StartedMachine:
        """Start the instance of the order by its offer.

        Raises:
            OfferRefused: no capacity or quota there.
            CallUnanswered: no answer, or a throttled call.
            OSError: EC2 refuses the call, or the instance has ended already.
        """
        self._seen[order.token] = order
        terms = parse_terms(order.settings)
        request = self._request(order, terms)
        try:
            found = self._run(terms.account, order, request)
        except ec2.Ec2Error as error:
            if error.code in ec2.NO_RIGHT:
                raise refusal("AWS", NAME, error) from error
            if error.code != "IdempotentParameterMismatch":
                raise
            # EC2 has an instance for this token, from a call with other words, such as an earlier address of the head.
            found = _instances(terms.account, {"client-token": [request["ClientToken"]]})
            if not found:
                raise CallUnanswered("EC2 knows the idempotency token, but does not list its instance yet") from error
        instance = found[0]
        if instance["State"]["Name"] in _ENDED:
            raise OSError(f"instance {instance['InstanceId']} has ended: {instance.get('StateTransitionReason', '')}")
        self._seen[order.token] = replace(order, known_machine=instance["InstanceId"])
        return StartedMachine(machine=instance["InstanceId"], since_s=instance["LaunchTime"].timestamp())

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Terminate the instances of the order.

        Raises:
            OSError: EC2 did not confirm that.
        """
        account = parse_account(order.settings)
        if order.machine:
            return self._terminate(account, [order.machine])
        owned = self._lists.get(
            account,
            lambda: _instances(account, {"tag:phalanx-owner": [self._owner]}),
            begun_after_s=self._called_s.get(order.token, self._opened_s),
        )
        found = {one["InstanceId"] for one in owned if _tags(one).get("phalanx-token") == order.token}
        found |= {order.known_machine} - {""}  # a list may lag behind
        stopped = self._terminate(account, sorted(found)) if found else []
        self._seen.pop(order.token, None)
        self._called_s.pop(order.token, None)
        return stopped

    def console(self, order: NodeOrder) -> str:
        """Return the console output: as it is now where the instance has the Nitro system, else as EC2 posted it after the boot.

        Raises:
            OSError: EC2 does not give it.
        """
        account, wanted = parse_account(order.settings), {"InstanceId": order.known_machine}
        try:
            found = ec2.call(account, "get_console_output", **wanted, Latest=True)
        except (ec2.Ec2Error, OfferRefused):  # some errors begin with Unsupported
            found = ec2.call(account, "get_console_output", **wanted)
        return str(found.get("Output", ""))  # botocore has decoded it

    def observe(self) -> Sequence[LostNode]:
        """Return nothing: the head's sweeper finds instances that ended."""
        return ()

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return the instances with the owner's tag in the region.

        Raises:
            OSError: the list is not complete.
        """
        found = []
        for one in _instances(parse_account(settings), {"tag:phalanx-owner": [self._owner]}):
            tags = _tags(one)
            found.append(
                ListedMachine(
                    machine=one["InstanceId"],
                    node_id=NodeId(tags.get("phalanx-node", "")),
                    token=tags.get("phalanx-token", ""),
                    offer=tags.get("phalanx-offer", ""),
                    ended=one["State"]["Name"] in _ENDED,
                )
            )
        return found

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Try every call that the provider makes as a dry run.

        Raises:
            BadRequest: there are no credentials, or EC2 does not accept them.
        """
        account = parse_account(settings)
        policy = least_policy(self._owner, passes_role=bool(settings.get("instance-profile")))
        return CloudRights(rights=check_rights(account, settings.get("image", "")), policy=policy)

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Unless `keep_nodes`, terminate the instances, by one list and one call for each region."""
        orders = [] if keep_nodes else list(self._seen.values())
        ended: list[EndedOrder] = []
        for account, settings in {parse_account(one.settings): one.settings for one in orders}.items():
            try:
                ended += self._end_region(
                    account, settings, [one for one in orders if parse_account(one.settings) == account]
                )
            except OSError as error:
                _log.error("instances in %s run until they end themselves: %s", account.region, error)
        return ended

    def _run(self, account: AccountTerms, order: NodeOrder, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Start the instance, and note until when that call could still start one."""
        try:
            found: list[dict[str, Any]] = ec2.call(account, "run_instances", **request)["Instances"]
        finally:
            self._called_s[order.token] = time.monotonic()
        return found

    @property
    def _owner(self) -> str:
        return owner_of(self.head)

    def _end_region(
        self, account: AccountTerms, settings: Mapping[str, str], orders: Sequence[NodeOrder]
    ) -> Sequence[EndedOrder]:
        """Terminate all instances of a region. Orders without one are left to the next head: a list may lag behind their start."""
        listed = {one.machine: one for one in self.machines(settings)}
        by_machine = {one.known_machine: one for one in orders if one.known_machine}
        due = sorted(name for name in {*listed, *by_machine} if name not in listed or not listed[name].ended)
        tokens = {one.token for one in orders}
        found: dict[str, EndedOrder] = {}
        for charged in self._terminate(account, due) if due else ():
            one = listed.get(charged.machine) or by_machine[charged.machine]
            stopped = (*found[one.token].stopped, charged) if one.token in found else (charged,)
            found[one.token] = EndedOrder(
                node_id=one.node_id, token=one.token, stopped=stopped, stray=one.token not in tokens
            )
        return list(found.values())

    def _request(self, order: NodeOrder, terms: InstanceTerms) -> dict[str, Any]:
        """Return the arguments of `run_instances`: the same for the same order and offer."""
        zone, kind, market = parse_zone_offer(order.offer)
        join = join_of(self.head, order)
        tags = {
            "Name": order.node_id,
            "phalanx-owner": self._owner,
            "phalanx-pool": order.pool,
            "phalanx-node": order.node_id,
            "phalanx-token": order.token,
            "phalanx-offer": order.offer,
            "phalanx-silence": f"{terms.machine.silence_s:g}",
        }
        listed = [{"Key": key, "Value": value} for key, value in tags.items() if value]
        request: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": hashlib.sha256(f"{order.token} {order.offer}".encode()).hexdigest(),
            "ImageId": terms.image,
            "InstanceType": kind,
            "Placement": {"AvailabilityZone": zone},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required"},
            "TagSpecifications": [{"ResourceType": what, "Tags": listed} for what in ("instance", "volume")],
        }
        request["UserData"] = start_script(order.node_id, join, terms.machine, notices=NAME)  # botocore encodes it
        if terms.placement_group:
            request["Placement"]["GroupName"] = terms.placement_group
        if terms.instance_profile:
            key = "Arn" if terms.instance_profile.startswith("arn:") else "Name"
            request["IamInstanceProfile"] = {key: terms.instance_profile}
        if reservation := reservation_of(market):
            target = {"CapacityReservationTarget": {"CapacityReservationId": reservation}}
            request["CapacityReservationSpecification"] = target
        if market.startswith("block:"):
            request["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
        if market == SPOT:
            once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
        return request | self._network(terms, zone)

    def _network(self, terms: InstanceTerms, zone: str) -> dict[str, Any]:
        subnet = self._subnets(terms).get(zone, "") if terms.subnets else ""
        groups = list(terms.security_groups)
        if not terms.efa_interfaces:
            return ({"SubnetId": subnet} if subnet else {}) | ({"SecurityGroupIds": groups} if groups else {})
        # The first interface has an address; the further ones, on cards of their own, carry EFA only.
        base = ({"SubnetId": subnet} if subnet else {}) | ({"Groups": groups} if groups else {})
        return {
            "NetworkInterfaces": [
                {
                    **base,
                    "DeviceIndex": 0 if card == 0 else 1,
                    "NetworkCardIndex": card,
                    "InterfaceType": "efa" if card == 0 else "efa-only",
                    "DeleteOnTermination": True,
                }
                for card in range(terms.efa_interfaces)
            ]
        }

    def _subnets(self, terms: InstanceTerms) -> dict[str, str]:
        """Return the subnet of each zone."""
        found = ec2.call(terms.account, "describe_subnets", SubnetIds=list(terms.subnets))["Subnets"]
        return {one["AvailabilityZone"]: one["SubnetId"] for one in found}

    def _zones(self, terms: InstanceTerms, zones: Sequence[str]) -> tuple[str, ...]:
        """Return the zones of the pool: those named, else those of its subnets, else all of the region.

        Raises:
            BadRequest: the region has no such zone, or no subnet is in one.
        """
        found = ec2.call(terms.account, "describe_availability_zones")["AvailabilityZones"]
        names = tuple(sorted(one["ZoneName"] for one in found))
        if unknown := [zone for zone in zones if zone not in names]:
            raise BadRequest(
                f"region {terms.account.region} has no zone {unknown[0]}", hint=f"zones: {', '.join(names)}"
            )
        if not terms.subnets:
            return tuple(zones) or names
        subnets = self._subnets(terms)
        if bare := [zone for zone in zones if zone not in subnets]:
            raise BadRequest(f"none of the subnets is in zone {bare[0]}")
        return tuple(zones) or tuple(subnets)

    def _dry_run(self, account: AccountTerms, request: Mapping[str, Any]) -> None:
        """Ask whether the credentials may start such an instance.

        Raises:
            OSError: they may not, or the request is not valid.
        """
        try:
            ec2.call(account, "run_instances", **request, DryRun=True)
        except ec2.Ec2Error as error:
            if error.code != "DryRunOperation":
                raise
        except OfferRefused:
            pass  # they may; there is no room now

    def _terminate(self, account: AccountTerms, machines: list[str]) -> list[ChargedMachine]:
        """Terminate instances, and return what they are charged for; without those that EC2 does not know."""
        try:
            answer = ec2.call(account, "terminate_instances", InstanceIds=machines)
        except ec2.Ec2Error as error:
            if error.code != "InvalidInstanceID.NotFound":
                raise
            # EC2 forgets an instance an hour after its end.
            return [] if len(machines) == 1 else [done for one in machines for done in self._terminate(account, [one])]
        ended_s = answer_time_s(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
        listed = {one["InstanceId"]: one for one in _instances(account, {"instance-id": machines})}
        return [  # a list may lag behind: the end is now, and the head knows the start
            ChargedMachine(machine=name, since_s=one["LaunchTime"].timestamp(), until_s=_ended_s(one, ended_s))
            if (one := listed.get(name)) is not None
            else ChargedMachine(machine=name, until_s=ended_s)
            for name in machines
        ]


def _instances(account: AccountTerms, filters: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    listed = [{"Name": name, "Values": values} for name, values in filters.items()]
    listed.append({"Name": "instance-state-name", "Values": _STATES})
    found = ec2.pages(account, "describe_instances", "Reservations", Filters=listed)
    return [instance for reservation in found for instance in reservation["Instances"]]


def _tags(instance: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}


def _ended_s(instance: Mapping[str, Any], else_s: float) -> float:
    """When the instance stopped to be charged, by EC2's words; `else_s` if they have no time."""
    match = _ENDED_AT.search(instance.get("StateTransitionReason", ""))
    return else_s if match is None else float(calendar.timegm(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")))


def _shape(kind: Mapping[str, Any]) -> MachineShape:
    gpus = kind.get("GpuInfo", {}).get("Gpus", [])
    return MachineShape(
        cpus=kind["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=kind["MemoryInfo"]["SizeInMiB"] << 20,
        gpu=gpus[0]["Name"] if gpus else "",
        gpus=sum(one["Count"] for one in gpus),
        gpu_bytes=gpus[0]["MemoryInfo"]["SizeInMiB"] << 20 if gpus else 0,
    )
