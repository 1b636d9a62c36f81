"""The instance of an order, as `instances.insert` takes it. The same order and offer give the same request.

Source: cloud.google.com/compute/docs/reference/rest/v1/instances/insert, read 2026-11.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from typing import Any, Final

from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import NodeOrder
from phalanx.providers.clouds.offers import SPOT, parse_zone_offer
from phalanx.providers.clouds.start_script import start_script
from phalanx.providers.google.pool_terms import FLEX, GoogleInstanceTerms, region_of, reservation_of

OWNER_LABEL: Final = "phalanx-owner"
ORDER_KEY: Final = "phalanx-order"  # metadata: node, token and offer as they are; labels have lower case letters only
_NAMESPACE: Final = uuid.UUID("6f3d2f0e-6f8c-5d0e-9d1e-3b7e5a4c9a10")
_NOT_LABEL: Final = re.compile(r"[^a-z0-9_-]")


def request_id(*words: str) -> str:
    """Return the UUID by which Google knows that a call is a repeated one."""
    return str(uuid.uuid5(_NAMESPACE, " ".join(words)))


def instance_name(order: NodeOrder) -> str:
    """Return the name of the instance of an order and offer: unique in its zone, so that a second one cannot exist beside it."""
    return "phalanx-" + hashlib.sha256(f"{order.token} {order.offer}".encode()).hexdigest()[:24]


def instance_request(order: NodeOrder, terms: GoogleInstanceTerms, owner: str, join: MachineJoin) -> dict[str, Any]:
    """Return the body of `instances.insert`.

    Args:
        order: of the node.
        terms: of the pool.
        owner: of the label by which the machines of this head are listed.
        join: how the machine joins.
    """
    zone, kind, market = parse_zone_offer(order.offer)
    mine = f"projects/{terms.project.project}"
    items = [{"key": ORDER_KEY, "value": json.dumps([order.node_id, order.token, order.offer])}]
    script = start_script(order.node_id, join, terms.machine, notices="google")
    items.append({"key": "startup-script", "value": script})
    labels = {"phalanx-pool": order.pool, "phalanx-node": order.node_id, "phalanx-token": order.token}
    request: dict[str, Any] = {
        "name": instance_name(order),
        "machineType": f"zones/{zone}/machineTypes/{kind}",
        "labels": {OWNER_LABEL: owner, **{key: label_text(value) for key, value in labels.items() if value}},
        "metadata": {"items": items},
        "disks": [
            {
                "boot": True,
                "autoDelete": True,
                "initializeParams": {
                    "sourceImage": terms.image,
                    "diskSizeGb": str(-(-terms.disk_bytes >> 30) or 1),
                    "diskType": f"{mine}/zones/{zone}/diskTypes/{terms.disk_type}",
                },
            }
        ],
        "networkInterfaces": _interfaces(terms, zone),
        "scheduling": _scheduling(terms, market),
    }
    if terms.placement_policy:
        request["resourcePolicies"] = [f"{mine}/regions/{region_of(zone)}/resourcePolicies/{terms.placement_policy}"]
    if terms.service_account:
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        request["serviceAccounts"] = [{"email": terms.service_account, "scopes": scopes}]
    if terms.accelerators[1]:
        path = f"{mine}/zones/{zone}/acceleratorTypes/{terms.accelerators[0]}"
        request["guestAccelerators"] = [{"acceleratorType": path, "acceleratorCount": terms.accelerators[1]}]
    if reservation := reservation_of(market):
        key = "compute.googleapis.com/reservation-name"
        affinity = {"consumeReservationType": "SPECIFIC_RESERVATION", "key": key, "values": [reservation]}
        request["reservationAffinity"] = affinity
    elif market in {SPOT, FLEX}:
        request["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
    if market == FLEX:
        request["params"] = {"requestValidForDuration": {"seconds": f"{terms.flex_wait_s:.0f}"}}
    return request


def _scheduling(terms: GoogleInstanceTerms, market: str) -> dict[str, Any]:
    """GPUs cannot migrate; an instance that ends is not started again, since its order is over then."""
    found: dict[str, Any] = {"onHostMaintenance": "TERMINATE", "automaticRestart": False}
    if market == SPOT:
        found |= {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"}
    if market == FLEX:
        found |= {"provisioningModel": "FLEX_START", "instanceTerminationAction": "DELETE"}
    if market.startswith("bound:"):
        found |= {"provisioningModel": "RESERVATION_BOUND", "instanceTerminationAction": "DELETE"}
    if terms.max_run_s:
        found |= {"maxRunDuration": {"seconds": f"{terms.max_run_s:.0f}"}, "instanceTerminationAction": "DELETE"}
    return found


def _interfaces(terms: GoogleInstanceTerms, zone: str) -> list[dict[str, Any]]:
    """One interface for each subnet, the further ones for GPUDirect; only the first may have an address outside."""
    if not terms.subnets:
        found: list[dict[str, Any]] = [{"network": "global/networks/default", "nicType": "GVNIC"}]
    else:
        found = [{"subnetwork": _subnet(name, terms, zone), "nicType": "GVNIC"} for name in terms.subnets]
    if terms.external_ip:
        found[0]["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    return found


def _subnet(name: str, terms: GoogleInstanceTerms, zone: str) -> str:
    if "/" in name:  # of another project, as with a shared network
        return name
    return f"projects/{terms.project.project}/regions/{region_of(zone)}/subnetworks/{name}"


def label_text(text: str) -> str:
    """Return a text as the value of a label: at most 63 characters, none in upper case."""
    return _NOT_LABEL.sub("_", text.lower())[:63]
