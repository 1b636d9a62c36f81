"""Azure Resource Manager as its reference describes it: names instead of tokens, operations that are polled, failed machines that stay.

Source: learn.microsoft.com/rest/api/compute (virtual machines, with Retrieve Boot Diagnostics Data, disks, resource skus), /rest/api/virtualnetwork (network interfaces),
/rest/api/authorization/permissions, /rest/api/monitor/activity-logs, and learn.microsoft.com/azure/azure-resource-manager/management/async-operations,
read 2026-11. The entries of the activity log come within a second here; at Azure within minutes.
"""

from __future__ import annotations

import base64
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from benchmarks.clouds.cloud_faults import CloudFaults
from benchmarks.clouds.dialect import DialectAnswer, DialectCall

SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
GROUP = "campaign"
LOCATION = "eastus"
SECRET = "campaign-secret"
ACCESS = "campaign-access-token"
TAKES_S = (0.0, 0.0, 0.1, 0.3)  # an operation
LOG_LATE_S = (0.0, 0.2, 1.0)
ORPHANED = 0.01  # share of the deletions that leave a disk behind
PAGE_MOST = 20
_TYPES = {
    "virtualMachines": "Microsoft.Compute",
    "disks": "Microsoft.Compute",
    "networkInterfaces": "Microsoft.Network",
}
_RESOURCE = re.compile(
    rf"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/([A-Za-z.]+)/([A-Za-z]+)(?:/([^/]+))?"
)
SIZES = {
    "Standard_NC4as_T4_v3": {"vCPUs": "4", "MemoryGB": "28", "GPUs": "1"},
    "Standard_ND96isr_H100_v5": {"vCPUs": "96", "MemoryGB": "1900", "GPUs": "8"},
}


_CONSOLE = re.compile(
    rf"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Compute/virtualMachines/([^/]+)/retrieveBootDiagnosticsData"
)


class AzureDialect:
    """See the module. `actions`: those that the credentials may do."""

    def __init__(self, faults: CloudFaults) -> None:
        self.faults = faults
        self.actions: list[str] = ["*"]
        self.kept: dict[tuple[str, str], dict[str, Any]] = {}  # resources by type and name
        self.bills: dict[str, str] = {}  # the name in the bill of a machine that exists
        self.operations: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[float, dict[str, Any]]] = []
        self.refused: str = ""  # error code of every machine, for tests
        self.bodies: list[Any] = []

    def name_of(self, call: DialectCall) -> tuple[str, bool, bool]:
        """See `Dialect`."""
        if call.path.endswith("/token"):
            return "token", False, True
        match = _RESOURCE.fullmatch(call.path)
        what = call.path.rpartition("/")[2] if match is None else match[2]
        if "/operations/" in call.path:
            what = "operation"
        changes = call.method in {"PUT", "DELETE"} and what == "virtualMachines"
        return f"{call.method} {what}", changes, "permissions" in call.path or "skus" in call.path

    def throttled(self) -> DialectAnswer:
        """See `Dialect`."""
        return _refusal(429, "TooManyRequests", "The request is being throttled", {"Retry-After": "0"})

    def leftovers(self) -> list[str]:
        """Names of disks and interfaces whose machine is gone."""
        return sorted(
            name
            for (kind, name), _ in self.kept.items()
            if kind != "virtualMachines" and ("virtualMachines", re.sub(r"-(?:nic|disk)$", "", name)) not in self.kept
        )

    def answer(self, call: DialectCall) -> DialectAnswer:
        """See `Dialect`."""
        if call.path.endswith("/oauth2/v2.0/token"):
            return _token(call)
        if call.path.startswith(
            "/console/"
        ):  # a blob store: the right to read it is in the address, and no header is sent
            found = self.kept.get(("virtualMachines", call.path.rpartition("/")[2]))
            if found is None or call.query.get("sig") != "campaign" or "authorization" in call.headers:
                return _refusal(403, "AuthenticationFailed", "Server failed to authenticate the request")
            return DialectAnswer(200, base64.b64decode(found["properties"]["osProfile"]["customData"]))
        if call.headers.get("authorization") != f"Bearer {ACCESS}":
            return _refusal(401, "InvalidAuthenticationToken", "The access token is invalid")
        if "api-version" not in call.query:
            return _refusal(400, "MissingApiVersionParameter", "The api-version query parameter is required")
        with self.faults.lock:
            return self._manage(call)

    def _manage(self, call: DialectCall) -> DialectAnswer:
        if match := _CONSOLE.fullmatch(call.path):
            return self._console(call, match[1])
        if "/operations/" in call.path:
            return self._operation(call.path.rpartition("/")[2])
        if call.path == f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/skus":
            return _skus(call)
        if call.path.endswith("/providers/Microsoft.Insights/eventtypes/management/values"):
            return self._activity(call)
        match = _RESOURCE.fullmatch(call.path)
        if match is None:
            return _refusal(404, "ResourceNotFound", f"{call.path} was not found")
        if match[1] == "Microsoft.Authorization" and match[2] == "permissions":
            return DialectAnswer(200, {"value": [{"actions": self.actions, "notActions": []}]})
        kind, name = match[2], match[3]
        if _TYPES.get(kind) != match[1]:
            return _refusal(404, "InvalidResourceType", f"{match[1]}/{kind}")
        if name is None:
            return self._list(call, kind)
        if call.method == "GET":
            found = self.kept.get((kind, name))
            return DialectAnswer(200, found) if found else _refusal(404, "ResourceNotFound", f"{name} was not found")
        if call.method == "DELETE":
            return self._delete(call, kind, name)
        if kind == "networkInterfaces":
            known = self.kept.get((kind, name), {})
            made = {**call.body, "name": name, "id": call.path}
            made["properties"] = {**known.get("properties", {}), **call.body["properties"]}
            self.kept[kind, name] = made
            return DialectAnswer(200 if known else 201, made)
        if kind == "virtualMachines":
            return self._put_machine(call, name)
        return _refusal(405, "MethodNotAllowed", call.method)

    def _put_machine(self, call: DialectCall, name: str) -> DialectAnswer:
        body, known = call.body, self.kept.get(("virtualMachines", name))
        if why := self._invalid(body):
            return _refusal(400, "InvalidParameter", why)
        if known is not None and known["properties"]["provisioningState"] != "Failed":
            if known["properties"]["osProfile"] != body["properties"]["osProfile"]:
                return _refusal(409, "PropertyChangeNotAllowed", "Changing property 'osProfile' is not allowed.")
            self.faults.count("idempotent replays")
            return DialectAnswer(200, known)
        self.bodies.append(body)
        where = f"{body.get('zones')} {body['properties']['hardwareProfile']['vmSize']}"
        code = self.refused or ("ZonalAllocationFailed" if self.faults.is_empty(where) else "")
        if code == "OperationNotAllowed":
            return _refusal(
                409, code, "Operation could not be completed as it exceeds approved Total Regional Cores quota."
            )
        disk = body["properties"]["storageProfile"]["osDisk"]["name"]
        now_s = time.time()
        state = "Failed" if code else "Succeeded"
        properties = {**body["properties"], "provisioningState": state, "timeCreated": _stamp(now_s)}
        self.kept["virtualMachines", name] = {**body, "name": name, "id": call.path, "properties": properties}
        self.kept["disks", disk] = {"name": disk, "tags": body["tags"], "properties": {}}
        if code:
            self.faults.count("no capacity")
        else:
            earlier = sum(key.partition("#")[0] == name for key in self.faults.machines)
            bill = f"{name}#{earlier + 1}" if earlier else name
            self.bills[name] = bill
            self.faults.created(bill, body["tags"]["phalanx-token"], body["tags"]["phalanx-node"], now_s)
            self.faults.visible_s[name] = self.faults.visible_s[bill]
            self._write_log(call.path, "write", now_s)
        return self._begin(call, 201, self.kept["virtualMachines", name], code)

    def _console(self, call: DialectCall, name: str) -> DialectAnswer:
        """Answer with the address of the serial log: here the start script, as `set -x` would print it."""
        found = self.kept.get(("virtualMachines", name))
        if call.method != "POST" or found is None:
            return _refusal(404, "ResourceNotFound", f"{name} was not found")
        if not found["properties"].get("diagnosticsProfile", {}).get("bootDiagnostics", {}).get("enabled"):
            return _refusal(409, "OperationNotAllowed", "Boot diagnostics is not enabled")
        return DialectAnswer(200, {"serialConsoleLogBlobUri": f"{call.base}/console/{name}?sv=2024&sig=campaign"})

    def _delete(self, call: DialectCall, kind: str, name: str) -> DialectAnswer:
        found = self.kept.pop((kind, name), None)
        if found is None:
            return DialectAnswer(204)
        if kind != "virtualMachines":
            return DialectAnswer(200)
        answer = self._begin(call, 202, None, "")
        done_s = self.operations[answer.headers["Azure-AsyncOperation"].partition("?")[0].rpartition("/")[2]]["done_s"]
        for card in found["properties"]["networkProfile"]["networkInterfaces"]:
            if card["properties"].get("deleteOption") == "Delete":
                self.kept.pop(("networkInterfaces", card["id"].rpartition("/")[2]), None)
        disk = found["properties"]["storageProfile"]["osDisk"]
        if disk.get("deleteOption") == "Delete" and not self.faults.chance(ORPHANED):
            self.kept.pop(("disks", disk["name"]), None)
        if name in self.bills:
            self.faults.ended(self.bills.pop(name), done_s)
            self._write_log(call.path, "delete", done_s)
        return answer

    def _begin(self, call: DialectCall, status: int, body: Any, code: str) -> DialectAnswer:
        now_s = time.time()
        takes_s = self.faults.dice.choice(TAKES_S) if self.faults.faults else 0.0
        number = str(len(self.operations) + 1)
        self.operations[number] = {"began_s": now_s, "done_s": now_s + takes_s, "code": code}
        path = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/locations/{LOCATION}/operations/{number}"
        return DialectAnswer(status, body, {"Azure-AsyncOperation": f"{call.base}{path}?api-version=2024-07-01"})

    def _operation(self, number: str) -> DialectAnswer:
        found = self.operations[number]
        body: dict[str, Any] = {"name": number, "startTime": _stamp(found["began_s"]), "status": "InProgress"}
        if time.time() < found["done_s"]:
            return DialectAnswer(200, body)
        body |= {"endTime": _stamp(found["done_s"]), "status": "Failed" if found["code"] else "Succeeded"}
        if found["code"]:
            body["error"] = {"code": found["code"], "message": "Allocation failed. We do not have sufficient capacity."}
        return DialectAnswer(200, body)

    def _list(self, call: DialectCall, kind: str) -> DialectAnswer:
        names = sorted(
            name
            for which, name in self.kept
            if which == kind and self.faults.is_listed(re.sub(r"-(?:nic|disk)$", "", name))
        )
        first = int(call.query.get("$skiptoken", "0"))
        page: dict[str, Any] = {"value": [self.kept[kind, name] for name in names[first : first + PAGE_MOST]]}
        if len(names) > first + PAGE_MOST:
            version = call.query["api-version"]
            page["nextLink"] = f"{call.base}{call.path}?api-version={version}&$skiptoken={first + PAGE_MOST}"
        return DialectAnswer(200, page)

    def _write_log(self, path: str, what: str, at_s: float) -> None:
        late_s = self.faults.dice.choice(LOG_LATE_S) if self.faults.faults else 0.0
        entry = {
            "resourceId": path,
            "operationName": {"value": f"Microsoft.Compute/virtualMachines/{what}"},
            "status": {"value": "Succeeded"},
            "eventTimestamp": _stamp(at_s),
        }
        self.log.append((at_s + late_s, entry))

    def _activity(self, call: DialectCall) -> DialectAnswer:
        match = re.fullmatch(r"eventTimestamp ge '[^']+' and resourceUri eq '([^']+)'", call.query.get("$filter", ""))
        if match is None:
            return _refusal(400, "BadRequest", "The filter is not supported")
        now_s = time.time()
        shown = [entry for at_s, entry in self.log if at_s <= now_s and entry["resourceId"] == match[1]]
        return DialectAnswer(200, {"value": shown})

    def _invalid(self, body: Any) -> str:
        """Return what of the request Azure would refuse; empty if nothing."""
        properties = body["properties"]
        if body.get("location") != LOCATION or properties["hardwareProfile"]["vmSize"] not in SIZES:
            return "location or vmSize"
        for card in properties["networkProfile"]["networkInterfaces"]:
            if ("networkInterfaces", card["id"].rpartition("/")[2]) not in self.kept:
                return f"Resource {card['id']} referenced by the machine was not found"
        linux = properties["osProfile"].get("linuxConfiguration", {})
        if not linux.get("ssh", {}).get("publicKeys"):
            return "Authentication using either SSH or by user name and password must be enabled"
        if properties.get("evictionPolicy") and properties.get("priority") != "Spot":
            return "evictionPolicy"
        return ""


def _skus(call: DialectCall) -> DialectAnswer:
    if call.query.get("$filter") != f"location eq '{LOCATION}'":
        return DialectAnswer(200, {"value": []})
    where = [{"location": LOCATION, "zones": ["1", "2"]}]
    value = [
        {
            "resourceType": "virtualMachines",
            "name": name,
            "locationInfo": where,
            "restrictions": [],
            "capabilities": [{"name": key, "value": each} for key, each in has.items()],
        }
        for name, has in SIZES.items()
    ]
    return DialectAnswer(200, {"value": value})


def _token(call: DialectCall) -> DialectAnswer:
    words = {name: values[0] for name, values in parse_qs(call.body.decode()).items()}
    if words.get("grant_type") != "client_credentials" or not words.get("scope", "").endswith("/.default"):
        return DialectAnswer(400, {"error": "invalid_request"})
    if words.get("client_secret") != SECRET:
        why = "AADSTS7000215: Invalid client secret provided.\r\nTrace ID: 1"
        return DialectAnswer(401, {"error": "invalid_client", "error_description": why})
    return DialectAnswer(200, {"token_type": "Bearer", "expires_in": 3599, "access_token": ACCESS})


def _stamp(at_s: float) -> str:
    """Azure writes seven digits after the second."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f0Z")


def _refusal(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> DialectAnswer:
    return DialectAnswer(status, {"error": {"code": code, "message": message}}, headers or {})
