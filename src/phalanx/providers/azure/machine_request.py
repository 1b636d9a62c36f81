"""The network interface and the virtual machine of an order, as Azure takes them. The same order and offer give the same requests.

The interface is made first and by a call of its own, though a machine could bring it along: the stop of an order deletes it, so that a create of the
machine that arrives after the stop fails for want of it, and makes no second machine. Azure has no idempotency tokens, only names.
Source: learn.microsoft.com/rest/api/compute/virtual-machines/create-or-update and .../virtualnetwork/network-interfaces/create-or-update, read 2026-11.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Final

from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import NodeOrder
from phalanx.providers.azure.pool_terms import REGIONAL, AzureMachineTerms, reservation_of
from phalanx.providers.clouds.offers import SPOT, parse_zone_offer
from phalanx.providers.clouds.start_script import start_script

PREFIX: Final = "phalanx-"
INTERFACE_SUFFIX: Final = "-nic"
DISK_SUFFIX: Final = "-disk"


def machine_name(order: NodeOrder) -> str:
    """Return the name of the machine of an order and offer: unique in its group, so that a second one cannot exist beside it."""
    return PREFIX + hashlib.sha256(f"{order.token} {order.offer}".encode()).hexdigest()[:24]


def interface_path(group_path: str, machine: str) -> str:
    """Return the path of a machine's network interface. `group_path`: of its group."""
    return f"{group_path}/providers/Microsoft.Network/networkInterfaces/{machine}{INTERFACE_SUFFIX}"


def machine_path(group_path: str, machine: str) -> str:
    """Return the path of a machine. `group_path`: of its group."""
    return f"{group_path}/providers/Microsoft.Compute/virtualMachines/{machine}"


def disk_path(group_path: str, machine: str) -> str:
    """Return the path of a machine's disk. `group_path`: of its group."""
    return f"{group_path}/providers/Microsoft.Compute/disks/{machine}{DISK_SUFFIX}"


def order_tags(order: NodeOrder, owner: str) -> dict[str, str]:
    """Return the tags of everything that an order has."""
    tags = {"owner": owner, "pool": order.pool, "node": order.node_id, "token": order.token, "offer": order.offer}
    return {f"phalanx-{name}": value for name, value in tags.items() if value}


def interface_request(order: NodeOrder, terms: AzureMachineTerms, owner: str) -> dict[str, Any]:
    """Return the body of the network interface."""
    subnet = terms.subnet
    if not subnet.startswith("/"):
        network, _, name = subnet.partition("/")
        subnet = f"{terms.group.path}/providers/Microsoft.Network/virtualNetworks/{network}/subnets/{name}"
    address: dict[str, Any] = {"subnet": {"id": subnet}, "primary": True, "privateIPAllocationMethod": "Dynamic"}
    return {
        "location": terms.location,
        "tags": order_tags(order, owner),
        "properties": {
            "enableAcceleratedNetworking": terms.accelerated_network,
            "ipConfigurations": [{"name": "main", "properties": address}],
        },
    }


def machine_request(order: NodeOrder, terms: AzureMachineTerms, owner: str, join: MachineJoin) -> dict[str, Any]:
    """Return the body of the machine.

    Args:
        order: of the node.
        terms: of the pool.
        owner: of the tag by which the machines of this head are listed.
        join: how the machine joins.
    """
    zone, size, market = parse_zone_offer(order.offer)
    name, group = machine_name(order), terms.group.path
    interface = {"id": interface_path(group, name), "properties": {"primary": True, "deleteOption": "Delete"}}
    properties: dict[str, Any] = {
        "hardwareProfile": {"vmSize": size},
        "storageProfile": {
            "imageReference": _image(terms.image),
            "osDisk": {
                "name": f"{name}{DISK_SUFFIX}",
                "createOption": "FromImage",
                "deleteOption": "Delete",
                "diskSizeGB": -(-terms.disk_bytes >> 30) or 1,
                "managedDisk": {"storageAccountType": terms.disk_type},
            },
        },
        "osProfile": _system(order, terms, name, join),
        "networkProfile": {"networkInterfaces": [interface]},
        "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},  # Azure keeps the console
    }
    if market == SPOT:
        properties |= {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": -1}}
    compute = f"{group}/providers/Microsoft.Compute"
    if reservation := reservation_of(market):
        held = {"capacityReservationGroup": {"id": f"{compute}/capacityReservationGroups/{reservation}"}}
        properties["capacityReservation"] = held
    if terms.proximity_group:
        properties["proximityPlacementGroup"] = {"id": f"{compute}/proximityPlacementGroups/{terms.proximity_group}"}
    if terms.scale_set:
        properties["virtualMachineScaleSet"] = {"id": f"{compute}/virtualMachineScaleSets/{terms.scale_set}"}
    if terms.availability_set:
        properties["availabilitySet"] = {"id": f"{compute}/availabilitySets/{terms.availability_set}"}
    request: dict[str, Any] = {
        "location": terms.location,
        "tags": order_tags(order, owner),
        "properties": properties,
    }
    if zone != REGIONAL:
        request["zones"] = [zone]
    if terms.plan:
        publisher, product, plan, _ = terms.image.split(":")
        request["plan"] = {"publisher": publisher, "product": product, "name": plan}
    if terms.identity:
        request["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {terms.identity: {}}}
    return request


def _system(order: NodeOrder, terms: AzureMachineTerms, name: str, join: MachineJoin) -> dict[str, Any]:
    keys = [{"path": "/home/phalanx/.ssh/authorized_keys", "keyData": terms.ssh_key}]
    script = start_script(order.node_id, join, terms.machine, notices="azure")
    return {
        "computerName": name,
        "adminUsername": "phalanx",
        "customData": base64.b64encode(script.encode()).decode(),  # cloud-init runs it as root
        "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": keys}},
    }


def _image(text: str) -> dict[str, str]:
    if text.startswith("/"):
        return {"id": text}
    publisher, offer, sku, version = text.split(":")
    return {"publisher": publisher, "offer": offer, "sku": sku, "version": version}
