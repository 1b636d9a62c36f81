"""All handlers of users' requests, and their dispatch by type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from phalanx.controller.requests import (
    channels,
    fleet_requests,
    job_requests,
    labels,
    licences,
    node_requests,
    people,
    pools,
    power_caps,
    prices,
    queues,
    reservations,
    retention,
    secrets,
    service_use,
    services,
    sign_in,
    submits,
)
from phalanx.controller.requests.request_handlers import RequestHandler
from phalanx.controller.step_context import StepContext
from phalanx.core.state.events import Request

_MODULES: Final = (
    submits,
    job_requests,
    node_requests,
    power_caps,
    labels,
    people,
    pools,
    prices,
    licences,
    queues,
    reservations,
    retention,
    secrets,
    sign_in,
    channels,
    fleet_requests,
    services,
    service_use,
)
HANDLERS: Final[Mapping[type[Request[Any]], RequestHandler]] = {
    request: handler for module in _MODULES for request, handler in module.handlers.declared.items()
}


def handle_request(context: StepContext, request: Request[Any]) -> object:
    """Carry out one request, and return its answer.

    Raises:
        PhalanxError: refused; nothing was changed.
    """
    return HANDLERS[type(request)].apply(context, request)


def describe_request(request: Request[Any], answer: object) -> str:
    """Describe a request for the audit trail, given its answer or its error."""
    return HANDLERS[type(request)].audit(request, answer)
