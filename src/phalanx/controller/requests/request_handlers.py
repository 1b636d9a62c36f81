"""Declares how the controller handles each type of request (docs/add-a-request.md).

handlers = RequestHandlers()

@handlers.add(CancelJob, Action.CHANGE_OWN, audit=lambda request, _: f"job {request.job_id}")
def cancel(context: StepContext, request: CancelJob) -> Job: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from phalanx.controller.step_context import StepContext
from phalanx.core.state.events import Request
from phalanx.core.work.users import Action

R = TypeVar("R", bound=Request[Any])
F = TypeVar("F", bound=Callable[[StepContext, Any], object])


@dataclass(frozen=True, slots=True)
class RequestHandler:
    """The handler of one type of request.

    Attributes:
        apply: validates the request, carries it out and returns its answer, or raises a PhalanxError and changes nothing.
        audit: describes the request for the audit trail, given its answer or error: names, numbers and roles, never a command, an
            environment or a token's hash.
        action: what a caller of the API must be permitted to do; None if only the head sends it.
    """

    apply: Callable[[StepContext, Any], object]
    audit: Callable[[Any, object], str]
    action: Action | None


@dataclass(slots=True)
class RequestHandlers:
    """The handlers of one module, by type of request."""

    declared: dict[type[Request[Any]], RequestHandler] = field(default_factory=dict)

    def add(self, request: type[R], action: Action | None, *, audit: Callable[[R, object], str]) -> Callable[[F], F]:
        """Return a decorator that declares a function as the handler of a type of request."""

        def declare(apply: F) -> F:
            self.declared[request] = RequestHandler(apply, audit, action)
            return apply

        return declare
