"""What credentials may do in a resource group of Azure, and the least role that lets the provider work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from phalanx.ports.provider import CloudRight
from phalanx.providers.azure import arm
from phalanx.providers.azure.pool_terms import AzureGroup

NEEDED: Final = (
    "Microsoft.Authorization/permissions/read",
    "Microsoft.Compute/disks/delete",
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/locations/operations/read",
    "Microsoft.Compute/skus/read",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Insights/eventtypes/values/read",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
)
CONSOLE_ACTION: Final = (
    "Microsoft.Compute/virtualMachines/retrieveBootDiagnosticsData/action"  # a pool works without it
)
ATTACHED: Final = {  # by the setting that needs it
    "proximity-group": ("Microsoft.Compute/proximityPlacementGroups/write",),
    "scale-set": ("Microsoft.Compute/virtualMachineScaleSets/write",),
    "availability-set": ("Microsoft.Compute/availabilitySets/write",),
    "identity": ("Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",),
}


def needed_actions(settings: Iterable[str]) -> tuple[str, ...]:
    """Return the actions that a pool with these settings needs."""
    return tuple(sorted({*NEEDED, *(name for setting in settings for name in ATTACHED.get(setting, ()))}))


def check_rights(group: AzureGroup, names: Sequence[str]) -> Sequence[CloudRight]:
    """Ask for the permissions in the group, and return which actions they allow. Raises as `arm.arm_reply` does."""
    held = arm.arm_items(group, f"{group.path}/providers/Microsoft.Authorization/permissions", arm.PERMISSIONS)
    return [
        CloudRight(
            name=name,
            allowed=(allowed := is_allowed(held, name)),
            why="" if allowed else f"no role allows it in group {group.group}",
        )
        for name in names
    ]


def is_allowed(permissions: Sequence[Mapping[str, Any]], action: str) -> bool:
    """Whether one of these permissions has the action, with wildcards, and does not take it away."""
    return any(
        _matches(one.get("actions", ()), action) and not _matches(one.get("notActions", ()), action)
        for one in permissions
    )


def least_role(group: AzureGroup, names: Sequence[str]) -> str:
    """Return the custom role as JSON, for `az role definition create --role-definition FILE`."""
    role = {
        "Name": "Phalanx node pools",
        "Description": "Starts, lists and deletes the machines of node pools",
        "Actions": list(names),
        "NotActions": [],
        "AssignableScopes": [group.path],
    }
    return json.dumps(role, indent=2)


def _matches(patterns: Iterable[str], action: str) -> bool:
    return any(
        re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), action, re.IGNORECASE)
        for pattern in patterns
    )
