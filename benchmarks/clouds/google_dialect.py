"""Compute Engine as its reference describes it: request ids, operations that take a while, errors in operations, aggregated lists in pages.

Source: cloud.google.com/compute/docs/reference/rest/v1 (instances insert, delete, get, aggregatedList, getSerialPortOutput; zoneOperations list, wait; machineTypes get;
zones list), cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions and developers.google.com/identity/protocols/oauth2/service-account,
read 2026-11. A request id is kept for ever here; Google says only that it is kept for a while.
"""

from __future__ import annotations

import base64
import json
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from benchmarks.clouds.cloud_faults import CloudFaults
from benchmarks.clouds.dialect import DialectAnswer, DialectCall

PROJECT = "campaign-project"
ZONES = ("us-central1-a", "us-central1-b", "us-east4-a")
TYPES: dict[str, dict[str, Any]] = {
    "g2-standard-4": {
        "guestCpus": 4,
        "memoryMb": 16384,
        "accelerators": [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": 1}],
    },
    "a3-highgpu-8g": {
        "guestCpus": 208,
        "memoryMb": 1916928,
        "accelerators": [{"guestAcceleratorType": "nvidia-h100-80gb", "guestAcceleratorCount": 8}],
    },
}
ACCESS = "campaign-access-token"
TAKES_S = (0.0, 0.0, 0.1, 0.3)  # an operation
WAIT_S = 1.0  # of `wait`: Google's is 2 minutes
PAGE_MOST = 20
_PATH = re.compile(r"/compute/v1/projects/([^/]+)(/.*)")
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_FILTER = re.compile(r"labels\.([a-z-]+)=([a-z0-9_-]+)")


class GoogleDialect:
    """See the module. `permissions`: those that the credentials have; None for all."""

    def __init__(self, faults: CloudFaults) -> None:
        self.faults = faults
        self.permissions: set[str] | None = None
        self.instances: dict[tuple[str, str], dict[str, Any]] = {}  # by zone and name
        self.operations: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.number = 1000
        self.refused: str = ""  # error code of every insert, for tests
        self.bodies: list[Any] = []

    def name_of(self, call: DialectCall) -> tuple[str, bool, bool]:
        """See `Dialect`."""
        if call.path == "/token":
            return "token", False, True
        changes = call.method == "DELETE" or (call.method == "POST" and call.path.endswith("/instances"))
        last = re.sub(r"(/instances|/operations|/machineTypes)/[^/]+", r"\1/NAME", call.path).rpartition("/")[2]
        return f"{call.method} {last}", changes, call.path.endswith(":testIamPermissions")

    def throttled(self) -> DialectAnswer:
        """See `Dialect`."""
        return _refusal(403, "rateLimitExceeded", "Queries per minute exceeded")

    def leftovers(self) -> list[str]:
        """Return nothing: boot disks are deleted with their instance, as `autoDelete` asks."""
        return []

    def answer(self, call: DialectCall) -> DialectAnswer:
        """See `Dialect`."""
        if call.path == "/token":
            return _token(call)
        if call.headers.get("authorization") != f"Bearer {ACCESS}":
            return _refusal(401, "authError", "Invalid Credentials")
        with self.faults.lock:
            if call.path == f"/v1/projects/{PROJECT}:testIamPermissions":
                asked = call.body["permissions"]
                held = [name for name in asked if self.permissions is None or name in self.permissions]
                return DialectAnswer(200, {"permissions": held} if held else {})
            match = _PATH.fullmatch(call.path)
            if match is None or match[1] != PROJECT:
                return _refusal(404, "notFound", f"The resource '{call.path}' was not found")
            return self._compute(call, match[2].strip("/").split("/"))

    def _compute(self, call: DialectCall, parts: list[str]) -> DialectAnswer:
        match (call.method, *parts):
            case ("GET", "zones"):
                return DialectAnswer(200, {"items": [{"name": zone, "status": "UP"} for zone in ZONES]})
            case ("GET", "zones", zone, "machineTypes", name) if zone in ZONES and name in TYPES:
                return DialectAnswer(200, {"name": name, **TYPES[name]})
            case ("GET", "aggregated", "instances"):
                return self._list(call)
            case ("POST", "zones", zone, "instances") if zone in ZONES:
                return self._insert(call, zone)
            case ("GET", "zones", zone, "instances", name):
                found = self._found(zone, name)
                return _missing(call.path) if found is None else DialectAnswer(200, found)
            case ("GET", "zones", zone, "instances", name, "serialPort"):
                return self._console(call, zone, name)
            case ("DELETE", "zones", zone, "instances", name):
                return self._delete(call, zone, name)
            case ("GET", "zones", zone, "operations"):
                return self._list_operations(call, zone)
            case ("POST", "zones", zone, "operations", name, "wait") if (zone, name) in self.operations:
                return self._wait(zone, name)
        return _missing(call.path)

    def _insert(self, call: DialectCall, zone: str) -> DialectAnswer:
        request, body = call.query.get("requestId", ""), call.body
        if request in self.requests:
            self.faults.count("idempotent replays")
            return DialectAnswer(200, self._seen(self.requests[request]))
        if why := _invalid(body, zone):
            return _refusal(400, "invalid", why)
        self.bodies.append(body)
        name = body["name"]
        if (zone, name) in self.instances:
            return _refusal(409, "alreadyExists", f"The resource '{name}' already exists")
        code = self.refused or (
            "ZONE_RESOURCE_POOL_EXHAUSTED" if self.faults.is_empty(f"{zone} {body['machineType']}") else ""
        )
        operation = self._begin(zone, "insert", request, (self._next_number(), name), code)
        if not code:
            began_s = time.time()
            node, token, _ = json.loads(
                next(one["value"] for one in body["metadata"]["items"] if one["key"] == "phalanx-order")
            )
            self.instances[zone, name] = {
                **body,
                "id": operation["targetId"],
                "zone": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}",
                "status": "RUNNING",
                "creationTimestamp": _stamp(began_s),
                "lastStartTimestamp": _stamp(began_s),
            }
            self.faults.created(f"{zone}/{operation['targetId']}", token, node, began_s)
        else:
            self.faults.count("no capacity")
        return DialectAnswer(200, self._seen(operation))

    def _console(self, call: DialectCall, zone: str, name: str) -> DialectAnswer:
        """Answer with the output of the first serial port: here the start script, as `set -x` would print it."""
        found = self._found(zone, name)
        if found is None or call.query.get("port", "1") != "1":
            return _missing(call.path)
        script = next(one["value"] for one in found["metadata"]["items"] if one["key"] == "startup-script")
        return DialectAnswer(200, {"contents": script, "start": "0", "next": str(len(script))})

    def _delete(self, call: DialectCall, zone: str, name: str) -> DialectAnswer:
        request = call.query.get("requestId", "")
        if request in self.requests:
            self.faults.count("idempotent replays")
            return DialectAnswer(200, self._seen(self.requests[request]))
        found = self._found(zone, name)
        if found is None:
            return _missing(call.path)
        operation = self._begin(zone, "delete", request, (found["id"], found["name"]), "")
        del self.instances[zone, found["name"]]
        self.faults.ended(f"{zone}/{found['id']}", operation["done_s"])
        return DialectAnswer(200, self._seen(operation))

    def _begin(self, zone: str, kind: str, request: str, target: tuple[str, str], code: str) -> dict[str, Any]:
        now_s = time.time()
        takes_s = self.faults.dice.choice(TAKES_S) if self.faults.faults else 0.0
        name = f"operation-{self._next_number()}"
        made = {
            "name": name,
            "zone": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}",
            "operationType": kind,
            "targetId": target[0],
            "targetLink": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}/instances/{target[1]}",
            "insertTime": _stamp(now_s),
            "done_s": now_s + takes_s,
            "code": code,
        }
        self.operations[zone, name] = made
        if request:
            self.requests[request] = made
        return made

    def _seen(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Return the operation as it stands now."""
        shown = {key: value for key, value in operation.items() if key not in {"done_s", "code"}}
        if time.time() < operation["done_s"]:
            return {**shown, "status": "RUNNING", "progress": 0}
        if operation["code"]:
            error = {"code": operation["code"], "message": "The zone does not have enough resources available"}
            shown |= {"error": {"errors": [error]}, "httpErrorStatusCode": 503}
        return {**shown, "status": "DONE", "progress": 100, "endTime": _stamp(operation["done_s"])}

    def _wait(self, zone: str, name: str) -> DialectAnswer:
        operation = self.operations[zone, name]
        self.faults.lock.release()  # others go on meanwhile
        try:
            time.sleep(max(0.0, min(WAIT_S, operation["done_s"] - time.time() + 0.001)))
        finally:
            self.faults.lock.acquire()
        return DialectAnswer(200, self._seen(operation))

    def _list(self, call: DialectCall) -> DialectAnswer:
        words = [_FILTER.fullmatch(part) for part in call.query.get("filter", "").split(" AND ")]
        wanted = {match[1]: match[2] for match in words if match is not None}
        if len(wanted) != len(words):
            return _refusal(400, "invalid", "Invalid value for field 'filter'")
        shown = [
            (zone, one)
            for (zone, _), one in sorted(self.instances.items())
            if all(one["labels"].get(key) == value for key, value in wanted.items())
            and self.faults.is_listed(f"{zone}/{one['id']}")
        ]
        size = min(PAGE_MOST, int(call.query.get("maxResults", "500")))
        after = call.query.get("pageToken", "")
        rest = [pair for pair in shown if f"{pair[0]} {pair[1]['name']}" > after]
        items: dict[str, Any] = {f"zones/{zone}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}} for zone in ZONES}
        for zone, one in rest[:size]:
            part = items[f"zones/{zone}"]
            part.pop("warning", None)
            part.setdefault("instances", []).append(one)
        more = {"nextPageToken": f"{rest[size - 1][0]} {rest[size - 1][1]['name']}"} if len(rest) > size else {}
        return DialectAnswer(200, {"items": items, **more})

    def _list_operations(self, call: DialectCall, zone: str) -> DialectAnswer:
        words = call.query.get("filter", "")
        own = [self._seen(one) for (where, _), one in self.operations.items() if where == zone]
        if words.startswith("targetId="):
            return DialectAnswer(200, {"items": [one for one in own if one["targetId"] == words.partition("=")[2]]})
        match = re.fullmatch(r'targetLink eq "(.+)"', words)
        if match is None:
            return _refusal(400, "invalid", "Invalid value for field 'filter'")
        return DialectAnswer(200, {"items": [one for one in own if re.fullmatch(match[1], one["targetLink"])]})

    def _found(self, zone: str, name: str) -> dict[str, Any] | None:
        """Return the instance of this name or number."""
        if not name.isdecimal():
            return self.instances.get((zone, name))
        return next((one for (where, _), one in self.instances.items() if where == zone and one["id"] == name), None)

    def _next_number(self) -> str:
        self.number += 1
        return str(self.number)


def _invalid(body: Any, zone: str) -> str:
    """Return what of the request Compute Engine would refuse; empty if nothing."""
    if not _NAME.fullmatch(body.get("name", "")):
        return "Invalid value for field 'resource.name'"
    if body["machineType"].rpartition("/")[2] not in TYPES or f"zones/{zone}/" not in body["machineType"]:
        return "Invalid value for field 'resource.machineType'"
    if not all(_LABEL.fullmatch(value) for value in body.get("labels", {}).values()):
        return "Invalid value for field 'resource.labels'"
    if not body.get("disks") or not body["disks"][0].get("initializeParams", {}).get("sourceImage"):
        return "Invalid value for field 'resource.disks'"
    if not body.get("networkInterfaces"):
        return "Invalid value for field 'resource.networkInterfaces'"
    scheduling = body.get("scheduling", {})
    if scheduling.get("provisioningModel") == "FLEX_START" and "maxRunDuration" not in scheduling:
        return "Flex-start instances need maxRunDuration"
    if scheduling.get("onHostMaintenance") != "TERMINATE":
        return "Instances with guest accelerators do not support live migration"
    return ""


def _token(call: DialectCall) -> DialectAnswer:
    """Answer the exchange of a signed assertion for an access token. The signature is not verified."""
    words = parse_qs(call.body.decode() if isinstance(call.body, bytes) else "")
    try:
        claims = json.loads(base64.urlsafe_b64decode(words["assertion"][0].split(".")[1] + "=="))
    except (KeyError, ValueError, IndexError):
        return DialectAnswer(400, {"error": "invalid_request"})
    if claims["iss"].startswith("wrong") or "cloud-platform" not in claims["scope"]:
        return DialectAnswer(400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."})
    return DialectAnswer(200, {"access_token": ACCESS, "expires_in": 3599, "token_type": "Bearer"})


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def _missing(path: str) -> DialectAnswer:
    return _refusal(404, "notFound", f"The resource '{path}' was not found")


def _refusal(status: int, reason: str, message: str) -> DialectAnswer:
    error = {"code": status, "message": message, "errors": [{"reason": reason, "message": message, "domain": "global"}]}
    return DialectAnswer(status, {"error": error})
