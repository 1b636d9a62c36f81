"""What each request is counted for: the project that pays, its limits, and the tokens that it used."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import ProjectId
from phalanx.core.work.services.request_limits import RequestLimits
from phalanx.gateway.fair_queue import QueueTerms
from phalanx.gateway.head_link import may_use
from phalanx.gateway.metrics import GatewayMetrics
from phalanx.gateway.rate_limits import LimitReached, RateLimiter, TokenReservation, limit_headers
from phalanx.gateway.refusals import Refused
from phalanx.gateway.routing import BYTES_PER_TOKEN
from phalanx.gateway.services import RoutedService, ServiceTable
from phalanx.gateway.usage_meter import UsageMeter, request_use
from phalanx.wire.api.head import CurrentUser

PROJECT_HEADER: Final = "OpenAI-Project"  # sent by OpenAI's clients for `project=...` and OPENAI_PROJECT_ID
PRIORITY_HEADER: Final = "X-Request-Priority"
TIMEOUT_HEADER: Final = "X-Request-Timeout"
_INTEGER: Final = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
_OFFSET_MS: Final = int((time.time() - time.monotonic()) * 1000)
ESTIMATE_MAX: Final = 10_000_000  # tokens reserved for one request: far beyond the context of any model


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """What a client asks of the gateway itself.

    Attributes:
        project: that shall pay; "" for the service's own.
        priority: lower ones are served earlier among the requests of the project; None for that of the body.
        timeout_s: for the whole answer; None for no limit.
    """

    project: str = ""
    priority: int | None = None
    timeout_s: float | None = None


def read_headers(headers: Mapping[str, str]) -> RequestHeaders:
    """Read the headers of a request.

    Raises:
        Refused: a value is not a number above 0.
    """
    priority, timeout = headers.get(PRIORITY_HEADER), headers.get(TIMEOUT_HEADER)
    if priority is not None and not _INTEGER.fullmatch(priority):
        raise Refused(400, f"{PRIORITY_HEADER}: {priority[:40]!r} is not a whole number", "invalid_header")
    if timeout is not None and (not _SECONDS.fullmatch(timeout) or float(timeout) <= 0.0):
        raise Refused(400, f"{TIMEOUT_HEADER}: {timeout[:40]!r} is not a number of seconds", "invalid_header")
    return RequestHeaders(
        project=headers.get(PROJECT_HEADER, ""),
        priority=None if priority is None else int(priority),
        timeout_s=None if timeout is None else float(timeout),
    )


class RequestAccount:
    """One request. `place`: among those that wait. `used` gets its tokens as the replica counts them; `close` settles them, however the request ended."""

    def __init__(
        self,
        accounts: RequestAccounts,
        service: str,
        place: QueueTerms,
        reservation: TokenReservation,
        prompt_bytes: int,
        user: str,
    ) -> None:
        self._accounts, self._reservation = accounts, reservation
        self._prompt_bytes = prompt_bytes
        self._prompt = self._answer = self._stream_ms = 0
        self._answered = self._estimated = False
        self.user = user
        self.service, self.place = service, place

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of the answer with the client's limits."""
        return limit_headers(self._reservation.states)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer that were counted."""
        return self._answer

    @contextmanager
    def at_replica(self, job_id: str) -> Iterator[None]:
        """Count the time at a replica."""
        meter, began_ms = self._accounts.meter, now_ms()
        meter.begin(self.service, job_id, began_ms)
        try:
            yield
        finally:
            ended_ms = now_ms()
            meter.end(self.service, job_id, ended_ms)
            self._stream_ms += ended_ms - began_ms

    def used(self, prompt: int, answer: int) -> None:
        """Count the tokens of an answer, or of the part of it that came. `prompt`: 0 if the replica does not say; it is then estimated."""
        self._prompt += prompt or self._prompt_bytes // BYTES_PER_TOKEN
        self._answer += answer
        self._answered = True
        self._estimated = not prompt

    def close(self) -> None:
        """Settle the request."""
        accounts = self._accounts
        accounts.limiter.settle(self._reservation, self._prompt + self._answer, time.monotonic())
        if self._answered:
            use = request_use(
                self.service,
                self.place.project,
                self.user,
                prompt=self._prompt,
                answer=self._answer,
                estimated=self._estimated,
                stream_ms=self._stream_ms,
            )
            accounts.meter.add(use, now_ms())
        accounts.metrics.tokens(self.service, self.place.project, self._prompt, self._answer)


class RequestAccounts:
    """Opens the accounts of requests.

    Args:
        table: the terms of projects.
        limiter: the limits. metrics: count the tokens. meter: of the bill.
    """

    def __init__(self, table: ServiceTable, limiter: RateLimiter, metrics: GatewayMetrics, meter: UsageMeter) -> None:
        self._table, self.limiter, self.metrics, self.meter = table, limiter, metrics, meter

    def open(
        self,
        user: CurrentUser,
        service: RoutedService,
        asked: RequestHeaders,
        *,
        prompt_bytes: int,
        tokens: int,
        priority: int,
    ) -> RequestAccount:
        """Count a request for the project that pays for it. `tokens`: an estimate of what it will use. `priority`: of the body.

        Raises:
            Refused: a limit is reached; or the user does not belong to the project that the request names.
        """
        project = self._project(user, service.view.project, asked.project)
        tokens = min(tokens, ESTIMATE_MAX)
        found = self.limiter.reserve(self._limits(user, project), tokens, time.monotonic())
        if isinstance(found, LimitReached):
            raise limit_refusal(found)
        terms = self._table.terms.get(project)
        place = QueueTerms(
            project=project,
            weight=1.0 if terms is None else terms.weight,
            tokens=tokens,
            priority=priority if asked.priority is None else asked.priority,
        )
        return RequestAccount(self, str(service.view.name), place, found, prompt_bytes, user.user)

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


def now_ms() -> int:
    """Unix milliseconds that do not jump while the process runs."""
    return _OFFSET_MS + int(time.monotonic() * 1000)


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
