"""Finds a scheduling policy by its name: a built-in one, or `module:Class` of an installed package."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies import policy_named
from phalanx.core.scheduling.policy import Policy


def find_policy(name: str) -> Callable[[], Policy]:
    """Return the constructor of the policy.

    Raises:
        BadRequest: no policy has this name, or the class cannot be imported or is not a policy.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return policy_named(name)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is not ours: it may raise anything
        raise BadRequest(
            f"policy {name} cannot be imported: {error}",
            hint="install its package beside Phalanx, or add its folder to PYTHONPATH",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise BadRequest(f"policy {name} is not a subclass of phalanx.core.scheduling.policy.Policy")
    return found
