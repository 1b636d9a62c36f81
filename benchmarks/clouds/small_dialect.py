"""Lambda Cloud, RunPod and Crusoe as the tables of the provider `http` expect them: no idempotency tokens, names that may be used twice.

The forms are those that the tables name as their sources; what the clouds do beside them is not known here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks.clouds.cloud_faults import CloudFaults
from benchmarks.clouds.dialect import DialectAnswer, DialectCall
from phalanx.providers.http.signed_calls import sign_crusoe

KEY = "campaign-key"
SECRET = "Y2FtcGFpZ24tc2VjcmV0"
PROJECT = "campaign-project"
TYPES = ("gpu_1x_a10", "l4.1x")
FOLLOWED_S = 0.05  # an operation of Crusoe


@dataclass(frozen=True, slots=True)
class _Paths:
    """Where calls go: a method and a pattern for each."""

    start: tuple[str, str]
    stop: tuple[str, str]
    list: tuple[str, str]


_PATHS = {
    "lambda": _Paths(
        ("POST", r"/api/v1/instance-operations/launch"),
        ("POST", r"/api/v1/instance-operations/terminate"),
        ("GET", r"/api/v1/instances"),
    ),
    "runpod": _Paths(("POST", r"/v2/pods"), ("DELETE", r"/v2/pods/([^/]+)"), ("GET", r"/v2/pods")),
    "crusoe": _Paths(
        ("POST", rf"/v1alpha5/projects/{PROJECT}/compute/vms/instances"),
        ("DELETE", rf"/v1alpha5/projects/{PROJECT}/compute/vms/instances/([^/]+)"),
        ("GET", rf"/v1alpha5/projects/{PROJECT}/compute/vms/instances"),
    ),
}


class SmallDialect:
    """One of the clouds."""

    def __init__(self, cloud: str, faults: CloudFaults) -> None:
        self.cloud, self.faults, self.paths = cloud, faults, _PATHS[cloud]
        self.kept: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, tuple[float, str]] = {}
        self.refused: str = ""  # error of every start, for tests
        self.number = 0

    def name_of(self, call: DialectCall) -> tuple[str, bool, bool]:
        """See `Dialect`."""
        for name, changes in (("start", True), ("stop", True), ("list", False)):
            method, pattern = getattr(self.paths, name)
            if call.method == method and re.fullmatch(pattern, call.path):
                return name, changes, False
        return "other", False, True

    def throttled(self) -> DialectAnswer:
        """See `Dialect`."""
        return self._refusal(429, "global/too-many-requests", "Slow down", {"Retry-After": "0"})

    def leftovers(self) -> list[str]:
        """Return nothing: disks end with their machine."""
        return []

    def answer(self, call: DialectCall) -> DialectAnswer:
        """See `Dialect`."""
        if not self._signed(call):
            return self._refusal(401, "global/invalid-api-key", "API key was invalid")
        with self.faults.lock:
            name = self.name_of(call)[0]
            if name == "start":
                return self._start(call.body)
            if name == "stop":
                return self._stop(call)
            if name == "list":
                return self._list()
            return self._other(call)

    def _signed(self, call: DialectCall) -> bool:
        sent = call.headers.get("authorization", "")
        if self.cloud != "crusoe":
            return sent == f"Bearer {KEY}"
        at = call.headers.get("x-crusoe-timestamp", "")
        signed = sign_crusoe(SECRET, f"{call.path}\n\n{call.method}\n{at}\n")
        return sent == f"Bearer 1.0:{KEY}:{signed}"

    def _start(self, body: Mapping[str, Any]) -> DialectAnswer:
        where = str(body.get("region_name") or body.get("location") or body.get("dataCenterIds"))
        code = self.refused
        if not code and self.faults.is_empty(where):
            code = {
                "lambda": "instance-operations/launch/insufficient-capacity",
                "runpod": "no capacity",
                "crusoe": "out_of_stock",
            }[self.cloud]
        if code:
            self.faults.count("no capacity")
            if self.cloud == "crusoe":  # it shows in the operation
                return DialectAnswer(200, {"operation": self._operation("", code)})
            return self._refusal(400, code, code)
        self.number += 1
        machine, now_s = f"{self.cloud}-{self.number}", time.time()
        created = datetime.fromtimestamp(now_s, UTC).isoformat()
        self.kept[machine] = {"id": machine, "name": body["name"], "status": "active", "created_at": created}
        self.faults.created(machine, body["name"], body["name"], now_s)
        match self.cloud:
            case "lambda":
                return DialectAnswer(200, {"data": {"instance_ids": [machine]}})
            case "crusoe":
                return DialectAnswer(200, {"operation": self._operation(machine, "")})
            case _:
                return DialectAnswer(201, {"id": machine, "status": "PROVISIONING"})

    def _operation(self, machine: str, code: str) -> dict[str, Any]:
        self.number += 1
        name = f"operation-{self.number}"
        self.operations[name] = (time.time() + (FOLLOWED_S if self.faults.faults else 0.0), code)
        return {"operation_id": name, "state": "IN_PROGRESS", "metadata": {"id": machine or "none"}}

    def _stop(self, call: DialectCall) -> DialectAnswer:
        if self.cloud == "lambda":
            names = call.body["instance_ids"]
        else:
            names = [call.path.rpartition("/")[2]]
        if any(name not in self.kept for name in names):
            return self._refusal(404, "global/object-does-not-exist", "not found")
        for name in names:
            self.faults.ended(name, time.time())
            if self.cloud == "lambda":
                self.kept[name]["status"] = "terminated"
            else:
                del self.kept[name]
        return DialectAnswer(200, {"data": {"terminated_instances": names}})

    def _list(self) -> DialectAnswer:
        shown = [dict(one) for name, one in self.kept.items() if self.faults.is_listed(name)]
        match self.cloud:
            case "lambda":
                for one in shown:
                    del one["created_at"]
                return DialectAnswer(200, {"data": shown})
            case "crusoe":
                return DialectAnswer(200, {"items": [{**one, "state": "STATE_RUNNING"} for one in shown]})
            case _:
                return DialectAnswer(200, {"pods": [{**one, "status": "RUNNING"} for one in shown]})

    def _other(self, call: DialectCall) -> DialectAnswer:
        if call.path == "/api/v1/instance-types":
            return DialectAnswer(200, {"data": {name: {"instance_type": {"name": name}} for name in TYPES}})
        if call.path.endswith("/compute/vms/types"):
            return DialectAnswer(200, {"items": [{"product_name": name} for name in TYPES]})
        found = self.operations.get(call.path.rpartition("/")[2])
        if found is None:
            return self._refusal(404, "not_found", call.path)
        done_s, code = found
        if time.time() < done_s:
            return DialectAnswer(200, {"state": "IN_PROGRESS"})
        state = {"state": "FAILED", "result": {"code": code, "message": "no"}} if code else {"state": "SUCCEEDED"}
        return DialectAnswer(200, state)

    def _refusal(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> DialectAnswer:
        error = {"code": code, "message": message}
        return DialectAnswer(status, error if self.cloud == "crusoe" else {"error": error}, headers or {})
