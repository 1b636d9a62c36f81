"""What credentials may do on Compute Engine, and the least role that lets the provider work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from phalanx.ports.provider import CloudRight
from phalanx.providers.google import compute
from phalanx.providers.google.pool_terms import GoogleProject

NEEDED: Final = (
    "compute.disks.create",
    "compute.images.useReadOnly",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.machineTypes.get",
    "compute.networks.useExternalIp",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    "compute.zoneOperations.get",
    "compute.zoneOperations.list",
    "compute.zones.list",
)
CONSOLE_PERMISSION: Final = "compute.instances.getSerialPortOutput"  # a pool works without it
ATTACHED: Final = {  # by the setting that needs it
    "service-account": ("compute.instances.setServiceAccount",),
    "placement-policy": ("compute.resourcePolicies.use",),
}


def needed_permissions(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the permissions that a pool with these settings needs."""
    more = [name for setting in settings for name in ATTACHED.get(setting, ())]
    return tuple(sorted({*NEEDED, *more}))


def check_rights(project: GoogleProject, names: Sequence[str]) -> Sequence[CloudRight]:
    """Ask which of these permissions the credentials have on the project. Raises as `compute.compute_call` does."""
    held = compute.held_permissions(project, names)
    return [
        CloudRight(name=name, allowed=name in held, why="" if name in held else "not granted on the project")
        for name in names
    ]


def least_role(names: Sequence[str]) -> str:
    """Return the custom role as JSON, for `gcloud iam roles create phalanx --project PROJECT --file FILE`."""
    role = {
        "title": "Phalanx node pools",
        "description": "Starts, lists and deletes the instances of node pools",
        "stage": "GA",
        "includedPermissions": list(names),
    }
    return json.dumps(role, indent=2)
