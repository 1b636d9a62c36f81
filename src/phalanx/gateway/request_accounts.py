"""What each request is counted for: the project that pays, its limits, and the tokens that it used."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Final

from phalanx.core.ids import ProjectId
from phalanx.core.work.request_limits import RequestLimits
from phalanx.gateway.head_link import may_use
from phalanx.gateway.metrics import GatewayMetrics
from phalanx.gateway.rate_limits import LimitReached, RateLimiter, TokenReservation, limit_headers
from phalanx.gateway.refusals import Refused
from phalanx.gateway.routing import BYTES_PER_TOKEN
from phalanx.gateway.services import RoutedService, ServiceTable
from phalanx.wire.api.head import CurrentUser

PROJECT_HEADER: Final = "OpenAI-Project"  # sent by OpenAI's clients for `project=...` and OPENAI_PROJECT_ID
ESTIMATE_MAX: Final = 10_000_000  # tokens reserved for one request: far beyond the context of any model


class RequestAccount:
    """One request. `used` gets its tokens as the replica counts them; `close` settles them, however the request ended."""

    def __init__(
        self,
        accounts: RequestAccounts,
        service: str,
        project: ProjectId,
        reservation: TokenReservation,
        prompt_bytes: int,
    ) -> None:
        self._accounts, self._reservation = accounts, reservation
        self._prompt_bytes = prompt_bytes
        self._prompt = self._answer = 0
        self.service, self.project = service, project

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the answer that tell the client its limits."""
        return limit_headers(self._reservation.states)

    def used(self, prompt: int, answer: int) -> None:
        """Count the tokens of an answer, or of the part of it that came. `prompt`: 0 if the replica does not say; it is then estimated."""
        self._prompt += prompt or self._prompt_bytes // BYTES_PER_TOKEN
        self._answer += answer

    def close(self) -> None:
        """Settle the request."""
        accounts = self._accounts
        accounts.limiter.settle(self._reservation, self._prompt + self._answer, time.monotonic())
        accounts.metrics.tokens(self.service, self.project, self._prompt, self._answer)


class RequestAccounts:
    """Opens the accounts of requests.

    Args:
        table: the terms of projects.
        limiter: the limits. metrics: count the tokens.
    """

    def __init__(self, table: ServiceTable, limiter: RateLimiter, metrics: GatewayMetrics) -> None:
        self._table, self.limiter, self.metrics = table, limiter, metrics

    def open(
        self, user: CurrentUser, service: RoutedService, asked_project: str, prompt_bytes: int, tokens: int
    ) -> RequestAccount:
        """Count a request for the project that pays for it. `tokens`: an estimate of what it will use.

        Raises:
            Refused: a limit is reached; or the user does not belong to the project that the request names.
        """
        project = self._project(user, service.view.project, asked_project)
        found = self.limiter.reserve(self._limits(user, project), min(tokens, ESTIMATE_MAX), time.monotonic())
        if isinstance(found, LimitReached):
            raise limit_refusal(found)
        return RequestAccount(self, str(service.view.name), project, found, prompt_bytes)

    def _project(self, user: CurrentUser, usual: ProjectId, asked: str) -> ProjectId:
        if not asked or asked == usual:
            return usual
        if not may_use(user, ProjectId(asked), self._table.is_open(ProjectId(asked)), as_member=True):
            raise Refused(
                403, f"{user.user} does not belong to project {asked[:80]!r} ({PROJECT_HEADER})", "project_not_found"
            )
        return ProjectId(asked)

    def _limits(self, user: CurrentUser, project: ProjectId) -> dict[str, RequestLimits]:
        terms = self._table.terms.get(project)
        found = {}
        if terms is not None:
            found[f"project {project}"] = RequestLimits(
                requests_per_minute=terms.requests_per_minute, tokens_per_minute=terms.tokens_per_minute
            )
        if user.requests_per_minute or user.tokens_per_minute:
            found[f"key {user.limited_as or user.token_id}"] = RequestLimits(
                requests_per_minute=user.requests_per_minute, tokens_per_minute=user.tokens_per_minute
            )
        return found


def limit_refusal(reached: LimitReached) -> Refused:
    """Return the answer to a request that must wait for a limit."""
    state, wait_s = reached.state, reached.retry_after_s
    return Refused(
        429,
        f"{state.scope} has reached its limit of {state.limit} {state.kind} per minute; try again in {wait_s:.1f} s",
        "rate_limit_exceeded",
        kind=state.kind,
        retry_after_s=max(1, math.ceil(wait_s)),
        headers={**limit_headers(reached.states), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))},
    )
