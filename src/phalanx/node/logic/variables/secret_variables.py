"""The variables that hold secrets. Our own programs beside the ranks keep them out of files and out of messages between nodes."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.work.secret import SECRETS_VARIABLE


def secret_names(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the variables that hold secrets."""
    return frozenset(filter(None, environment.get(SECRETS_VARIABLE, "").split(",")))


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without its secrets."""
    hidden = secret_names(environment)
    return {name: value for name, value in environment.items() if name not in hidden}


def only_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of an environment."""
    hidden = secret_names(environment)
    return {name: value for name, value in environment.items() if name in hidden}
