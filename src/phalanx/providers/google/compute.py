"""Calls of Compute Engine by REST, each once, and what its errors mean.

Source: cloud.google.com/compute/docs/reference/rest/v1 (instances, zoneOperations) and .../docs/troubleshooting/troubleshooting-vm-creation, read
2026-11.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from phalanx.ports.provider import CallUnanswered, OfferRefused
from phalanx.providers.clouds.rest_calls import CloudReply, RestCalls, one_line
from phalanx.providers.google.credentials import open_credentials, wrong_credentials
from phalanx.providers.google.pool_terms import GoogleProject

ENDPOINT_VARIABLE: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"  # as gcloud has it: .../compute/v1/
PROJECTS_VARIABLE: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER"
COMPUTE_URL: Final = "https://compute.googleapis.com/compute/v1"
PROJECTS_URL: Final = "https://cloudresourcemanager.googleapis.com"
PAGE_ITEMS: Final = 500  # the most of one page
NO_CAPACITY: Final = frozenset(
    {
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "RESOURCE_POOL_EXHAUSTED",
        "STOCKOUT",
        "QUOTA_EXCEEDED",
        "quotaExceeded",
        "LIMIT_EXCEEDED",
        "RESERVATION_CAPACITY_EXCEEDED",
        "UNSUPPORTED_OPERATION_STOCKOUT",
    }
)
UNKNOWN_OUTCOME: Final = frozenset(
    {
        "RATE_LIMIT_EXCEEDED",
        "rateLimitExceeded",
        "userRateLimitExceeded",
        "backendError",
        "internalError",
        "INTERNAL_ERROR",
        "RESOURCE_OPERATION_RATE_EXCEEDED",
        "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED",
        "resourceNotReady",
        "RESOURCE_NOT_READY",
    }
)


class GoogleError(OSError):
    """Google refused a call; nothing was done. `code`: its reason, such as `forbidden`; `status`: of HTTP, 0 for an operation's."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.status = code, status


@lru_cache(maxsize=4)
def _service(url: str) -> RestCalls:
    return RestCalls(url=url)


def compute_call(
    project: GoogleProject,
    method: str,
    path: str,
    *,
    query: Mapping[str, str | int] | None = None,
    body: object = None,
) -> Mapping[str, Any]:
    """Call Compute Engine once, and return the answer. `path`: below the project, such as `/zones`.

    Raises:
        OfferRefused: no capacity or quota.
        CallUnanswered: no answer, or one that asks to come again.
        GoogleError: any other error; nothing was done.
        BadRequest: there are no credentials, or they are not valid.
    """
    service = _service(os.environ.get(ENDPOINT_VARIABLE) or COMPUTE_URL)
    return _answer(_send(project, service, method, f"/projects/{project.project}{path}", query, body))


def held_permissions(project: GoogleProject, names: Sequence[str]) -> frozenset[str]:
    """Return which of these permissions the credentials have on the project. Raises as `compute_call` does."""
    service = _service(os.environ.get(PROJECTS_VARIABLE) or PROJECTS_URL)
    path = f"/v1/projects/{project.project}:testIamPermissions"
    answer = _answer(_send(project, service, "POST", path, None, {"permissions": list(names)}))
    return frozenset(answer.get("permissions", ()))


def _send(
    project: GoogleProject,
    service: RestCalls,
    method: str,
    path: str,
    query: Mapping[str, str | int] | None,
    body: object,
) -> CloudReply:
    """Send a call; if Google does not accept the access token, which carries nothing out, sign in again and send it once more.

    Raises:
        CallUnanswered: no answer.
        BadRequest: there are no credentials, or they are not valid.
    """
    token = open_credentials(from_instance=project.from_instance)
    header = token.header()
    reply = service.send(method, path, query=query, body=body, headers=header)
    if reply.status == http.client.UNAUTHORIZED:
        token.drop(header)
        header = token.header()
        reply = service.send(method, path, query=query, body=body, headers=header)
    if reply.status == http.client.UNAUTHORIZED:
        token.drop(header)
        raise wrong_credentials(str(reply.body.get("error", {}).get("message", "")) or reply.text)
    return reply


def pages(project: GoogleProject, path: str, query: Mapping[str, str | int]) -> Sequence[Mapping[str, Any]]:
    """Return all pages of a list. Raises as `compute_call` does."""
    found, token = [], ""
    while True:
        more = {"pageToken": token} if token else {}
        page = compute_call(project, "GET", path, query={**query, "maxResults": PAGE_ITEMS, **more})
        found.append(page)
        token = str(page.get("nextPageToken") or "")
        if not token:
            return found


def finish(project: GoogleProject, operation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wait until an operation is done, and return it: one call, which Google answers after 2 minutes at most, and we give up before.

    Raises:
        OfferRefused: the operation failed for want of capacity or quota; nothing is left of it.
        CallUnanswered: it is not done yet; the call that began it is repeated.
        GoogleError: it failed.
    """
    if operation.get("status") != "DONE":
        zone = str(operation.get("zone", "")).rpartition("/")[2]
        operation = compute_call(project, "POST", f"/zones/{zone}/operations/{operation['name']}/wait")
    if operation.get("status") != "DONE":
        raise CallUnanswered(f"the operation {operation.get('name')} is {str(operation.get('status')).lower()}")
    errors = operation.get("error", {}).get("errors", [])
    if errors:
        raise _error(str(errors[0].get("code", "")), str(errors[0].get("message", "")), 0)
    return operation


def _answer(reply: CloudReply) -> Mapping[str, Any]:
    if reply.status < 300:
        return reply.body
    error = reply.body.get("error", {})
    if not isinstance(error, Mapping):
        error = {"message": str(error)}
    reasons = error.get("errors") or [{}]
    code = str(reasons[0].get("reason") or error.get("status") or f"HTTP {reply.status}")
    raise _error(code, str(error.get("message") or reply.text), reply.status)


def _error(code: str, message: str, status: int) -> OSError:
    text = one_line(message)
    if code in NO_CAPACITY:
        return OfferRefused(f"{code}: {text}")
    if code in UNKNOWN_OUTCOME or status in {408, 429} or status >= 500:
        return CallUnanswered(f"{code}: {text}")
    return GoogleError(code, text, status)
