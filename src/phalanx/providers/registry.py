"""Finds provider types by name: the built-in ones, and those that installed packages declare as entry points `phalanx.providers`."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import ProviderType

ENTRY_POINTS: Final = "phalanx.providers"
_BUILT_IN: Final = {
    "aws": "phalanx.providers.aws.provider:AwsProviderType",
    "azure": "phalanx.providers.azure.provider:AzureProviderType",
    "command": "phalanx.providers.command.provider:CommandProviderType",
    "google": "phalanx.providers.google.provider:GoogleProviderType",
    "http": "phalanx.providers.http.provider:HttpProviderType",
    "virtual": "phalanx.providers.virtual.provider:VirtualProviderType",
}


def provider_type(name: str) -> ProviderType:
    """Return the type with this name.

    Raises:
        BadRequest: it is not installed, or cannot be imported.
    """
    points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    # A built-in name means the same everywhere, whatever else is installed.
    points |= {own: importlib.metadata.EntryPoint(own, value, ENTRY_POINTS) for own, value in _BUILT_IN.items()}
    if name not in points:
        raise BadRequest(f"the provider {name} is not installed here", hint=f"installed: {', '.join(sorted(points))}")
    try:
        made: ProviderType = points[name].load()()
    except Exception as error:
        raise BadRequest(
            f"the provider {name} cannot be imported: {error}", hint=f"see {points[name].value}"
        ) from error
    return made
