"""Calls of Azure Resource Manager by REST, each once, and what its errors mean.

Source: learn.microsoft.com/rest/api/compute, .../azure/azure-resource-manager/management/async-operations and
.../troubleshoot/azure/virtual-machines/windows/allocation-failure, read 2026-11.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from phalanx.ports.provider import CallUnanswered, OfferRefused
from phalanx.providers.azure.credentials import AzureTokens, wrong_credentials
from phalanx.providers.azure.pool_terms import AzureGroup
from phalanx.providers.clouds.rest_calls import CloudReply, RestCalls, one_line, retry_after_s

MANAGEMENT_URL: Final = "https://management.azure.com"
ENDPOINT_VARIABLE: Final = "PHALANX_AZURE_ENDPOINT"  # of a national cloud, or of a test
COMPUTE: Final = "2024-07-01"  # versions of the interfaces
NETWORK: Final = "2024-05-01"
DISKS: Final = "2024-03-02"
SKUS: Final = "2021-07-01"
PERMISSIONS: Final = "2022-04-01"
ACTIVITY: Final = "2015-04-01"
FINISH_S: Final = 25.0  # an operation is followed for so long, then the call that began it is repeated
POLL_S: Final = (0.2, 0.5, 1.0, 2.0)  # unless Azure asks for another pause; the last one again and again
NO_CAPACITY: Final = frozenset(
    {
        "AllocationFailed",
        "ZonalAllocationFailed",
        "OverconstrainedAllocationRequest",
        "OverconstrainedZonalAllocationRequest",
        "SkuNotAvailable",
        "QuotaExceeded",
        "SpotQuotaExceeded",
        "LowPriorityQuotaExceeded",
        "SpotVMNotAvailable",
        "CapacityReservationGroupFull",
    }
)
UNKNOWN_OUTCOME: Final = frozenset(
    {
        "TooManyRequests",
        "OperationPreempted",
        "RetryableError",
        "RetryableErrorDueToAnotherOperation",
        "AnotherOperationInProgress",
        "InternalServerError",
        "ServerTimeout",
        "GatewayTimeout",
        "ServiceUnavailable",
        "InternalExecutionError",
        "InternalOperationError",
    }
)


class AzureError(OSError):
    """Azure refused a call; nothing was done. `code`: of Azure; `status`: of HTTP, 0 for an operation's."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.status = code, status


@lru_cache(maxsize=4)
def _service(url: str) -> RestCalls:
    return RestCalls(url=url)


@lru_cache(maxsize=4)
def tokens(audience: str, *, from_instance: bool) -> AzureTokens:
    """Return the access tokens of the head's account for a service."""
    return AzureTokens(audience, from_instance)


def now_s() -> float:
    """Return the time by the clock of Azure, in Unix seconds."""
    return _service(os.environ.get(ENDPOINT_VARIABLE) or MANAGEMENT_URL).now_s()


def arm_reply(
    group: AzureGroup,
    method: str,
    path: str,
    version: str = "",
    *,
    query: Mapping[str, str] | None = None,
    body: object = None,
) -> CloudReply:
    """Call Azure once, and return its answer if it is no error.

    Args:
        group: whose credentials are used.
        method: of HTTP.
        path: below the service's address, or a whole URL that Azure named.
        version: of the interface; empty if the URL has it.
        query: further parameters.
        body: as JSON.

    Raises:
        OfferRefused: no capacity or quota.
        CallUnanswered: no answer, or one that asks to come again.
        AzureError: any other error; nothing was done.
        BadRequest: there are no credentials, or they are not valid.
    """
    service = _service(os.environ.get(ENDPOINT_VARIABLE) or MANAGEMENT_URL)
    if path.startswith("http") and not path.startswith(service.url + "/"):
        raise CallUnanswered(f"Azure names an address of another service: {path[:100]}")
    token = tokens(MANAGEMENT_URL, from_instance=group.from_instance)
    words = {**({"api-version": version} if version else {}), **(query or {})}
    header = token.header()
    reply = service.send(method, path, query=words, body=body, headers=header)
    if reply.status == http.client.UNAUTHORIZED:  # nothing was carried out: sign in again
        token.drop(header)
        reply = service.send(method, path, query=words, body=body, headers=token.header())
    if reply.status >= 300:
        error = reply.body.get("error", {})
        error = error if isinstance(error, Mapping) else {"message": str(error)}
        if reply.status == http.client.UNAUTHORIZED:
            token.drop(token.header())
            raise wrong_credentials(f"{error.get('code', '')}: {error.get('message', '')}")
        raise error_of(str(error.get("code") or f"HTTP {reply.status}"), str(error.get("message", "")), reply.status)
    return reply


def arm_items(group: AzureGroup, path: str, version: str, **query: str) -> Sequence[Mapping[str, Any]]:
    """Return all items of a list, of all its pages. Raises as `arm_reply` does."""
    reply = arm_reply(group, "GET", path, version, query=query)
    found = list(reply.body.get("value", ()))
    while link := reply.body.get("nextLink"):
        reply = arm_reply(group, "GET", str(link))
        found += reply.body.get("value", ())
    return found


def finish(group: AzureGroup, reply: CloudReply) -> Mapping[str, Any]:
    """Follow the operation that an answer has begun, and return its end; without an operation, an empty object.

    Raises:
        OfferRefused, AzureError: it failed.
        CallUnanswered: it is not done yet; the call that began it is repeated.
    """
    link = reply.headers.get("azure-asyncoperation", "")
    until_s, pauses = time.monotonic() + FINISH_S, list(POLL_S)
    while link:
        state = arm_reply(group, "GET", link)
        status = str(state.body.get("status", ""))
        if status == "Succeeded":
            return state.body
        if status in {"Failed", "Canceled"}:
            error = state.body.get("error") or {}
            raise error_of(str(error.get("code") or status), str(error.get("message", "")), 0)
        pause_s = retry_after_s(state.headers) or (pauses.pop(0) if len(pauses) > 1 else pauses[0])
        if time.monotonic() + pause_s > until_s:
            raise CallUnanswered(f"the operation is {status or 'not done'} yet")
        time.sleep(pause_s)
    return {}


def error_of(code: str, message: str, status: int) -> OSError:
    """Return what an error of Azure means."""
    text = one_line(message)
    # Quotas of cores have the code of everything that is not allowed.
    if code in NO_CAPACITY or (code == "OperationNotAllowed" and "quota" in message.lower()):
        return OfferRefused(f"{code}: {text}")
    if code in UNKNOWN_OUTCOME or status in {408, 429} or status >= 500:
        return CallUnanswered(f"{code}: {text}")
    return AzureError(code, text, status)
