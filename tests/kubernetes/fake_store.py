"""The objects of the fake API server: versions, watches, server-side apply, deletion with grace, owners, roles. No HTTP here.

It follows the real server where the engine, or its tests, can tell the difference; `tests/contract/test_kubernetes_api.py` compares both.
"""

from __future__ import annotations

import copy
import datetime
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Item = dict[str, Any]
EVENTS_KEPT = 1000  # for watches from an earlier version
DEFAULT_GRACE_S = 30
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, code: int, reason: str, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.headers = code, reason, message, dict(headers or {})

    def status(self) -> Item:
        """The object of this answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


@dataclass(frozen=True)
class Kind:
    """One kind of objects."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def told(self) -> str:
        """As in messages: `roles.rbac.authorization.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


RBAC = "rbac.authorization.k8s.io"
KINDS = {
    (kind.group, kind.plural): kind
    for kind in (
        Kind("namespaces", "Namespace", namespaced=False),
        Kind("nodes", "Node", namespaced=False),
        Kind("pods", "Pod"),
        Kind("configmaps", "ConfigMap"),
        Kind("secrets", "Secret"),
        Kind("serviceaccounts", "ServiceAccount"),
        Kind("events", "Event"),
        Kind("jobs", "Job", "batch"),
        Kind("workloads", "Workload", "kueue.x-k8s.io", "v1beta1"),
        Kind("roles", "Role", RBAC),
        Kind("rolebindings", "RoleBinding", RBAC),
        Kind("clusterroles", "ClusterRole", RBAC, namespaced=False),
        Kind("clusterrolebindings", "ClusterRoleBinding", RBAC, namespaced=False),
    )
}


@dataclass
class Event:
    """One change."""

    version: int
    type: str
    kind: Kind
    item: Item
    before: Item | None = None


@dataclass
class FakeStore:
    """All objects of one fake cluster. Each method holds the lock for its whole time."""

    lock: threading.Condition = field(default_factory=threading.Condition)
    version: int = 1
    compacted: int = 0
    items: dict[tuple[Kind, str, str], Item] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=deque)
    admission: list[Callable[[Kind, Item], None]] = field(default_factory=list)

    # ---- reads ----------------------------------------------------------------------------------------------------------

    def get(self, kind: Kind, namespace: str, name: str) -> Item:
        """One object."""
        with self.lock:
            return copy.deepcopy(self._found(kind, namespace, name))

    def select(self, kind: Kind, namespace: str, labels: str, fields: str) -> tuple[list[Item], int]:
        """The objects in the order of their names, and the version of this list. An empty namespace is all of them."""
        with self.lock:
            found = [
                copy.deepcopy(item)
                for (one, where, _), item in sorted(self.items.items(), key=lambda pair: pair[0][1:])
                if one == kind and namespace in ("", where) and matches(item, labels, fields)
            ]
            return found, self.version

    def events_after(self, version: int) -> list[Event]:
        """What happened since a version.

        Raises:
            Refused: it has been compacted.
        """
        with self.lock:
            if version < self.compacted:
                raise Refused(410, "Expired", f"too old resource version: {version} ({self.compacted})")
            return [event for event in self.events if event.version > version]

    def compact(self) -> None:
        """Forget all changes so far."""
        with self.lock:
            self.events.clear()
            self.compacted = self.version

    # ---- writes ---------------------------------------------------------------------------------------------------------

    def create(self, kind: Kind, namespace: str, item: Item, manager: str = "", *, dry: bool = False) -> Item:
        """Create an object; only check it if `dry`."""
        with self.lock:
            item = copy.deepcopy(item)
            about = item.setdefault("metadata", {})
            if not about.get("name") and about.get("generateName"):
                about["name"] = about["generateName"] + uuid.uuid4().hex[:5]
            name = str(about.get("name") or "")
            self._check(kind, namespace, item)
            if (kind, namespace, name) in self.items:
                raise Refused(409, "AlreadyExists", f'{kind.told} "{name}" already exists')
            if "resourceVersion" in about:
                raise Refused(400, "BadRequest", "resourceVersion should not be set on objects to be created")
            for rule in self.admission:
                rule(kind, item)
            if dry:
                return item
            about.update(
                uid=str(uuid.uuid4()), creationTimestamp=now(), **({"namespace": namespace} if namespace else {})
            )
            if kind.plural == "pods":
                item["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
                item["spec"].setdefault("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
                item["spec"].setdefault("restartPolicy", "Always")
                item["spec"].setdefault("schedulerName", "default-scheduler")
            if kind.plural == "secrets":
                import base64

                for key, text in (item.pop("stringData", None) or {}).items():
                    item.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
            item.update(apiVersion=kind.api_version, kind=kind.kind)
            self._manage(item, manager or "unknown", "Update", item)
            made = self._put("ADDED", kind, item)
            if kind.plural == "namespaces":  # a controller does it soon after
                self.create(KINDS["", "serviceaccounts"], name, {"metadata": {"name": "default"}})
            return made

    def replace(self, kind: Kind, namespace: str, name: str, item: Item, *, part: str = "") -> Item:
        """Replace an object; 409 unless it is based on the newest version."""
        with self.lock:
            old = self._found(kind, namespace, name)
            given = item.get("metadata", {})
            if given.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
                raise Refused(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {kind.told} "{name}": the object has been modified; '
                    "please apply your changes to the latest version and try again",
                )
            return self._change(kind, old, copy.deepcopy(item), part)

    def merge(self, kind: Kind, namespace: str, name: str, change: Item, *, part: str = "") -> Item:
        """Merge a change into an object (RFC 7386)."""
        with self.lock:
            old = self._found(kind, namespace, name)
            given = (change.get("metadata") or {}).get("resourceVersion")
            if given and given != old["metadata"]["resourceVersion"]:
                raise Refused(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {kind.told} "{name}": the object has been modified',
                )
            return self._change(kind, old, merged(old, change), part)

    def apply(
        self, kind: Kind, namespace: str, name: str, item: Item, manager: str, *, force: bool
    ) -> tuple[Item, bool]:
        """Apply on the server's side; return the object, and whether it is new."""
        with self.lock:
            if not manager:
                raise Refused(400, "BadRequest", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
            about = item.setdefault("metadata", {})
            if about.setdefault("name", name) != name:
                raise Refused(400, "BadRequest", "the name of the object does not match the name on the URL")
            old = self.items.get((kind, namespace, name))
            if old is None:
                made = self.create(kind, namespace, item, manager)
                kept = self.items[kind, namespace, name]
                kept["metadata"]["managedFields"] = []
                self._manage(kept, manager, "Apply", item)
                return made, True
            mine, theirs = leaves(item), {}
            for entry in old["metadata"].get("managedFields", []):
                if entry["manager"] != manager:
                    theirs.update(dict.fromkeys(map(tuple, entry["paths"]), entry["manager"]))
            lost = [path for path, value in mine.items() if path in theirs and at(old, path) != value]
            if lost and not force:
                first = lost[0]
                raise Refused(
                    409,
                    "Conflict",
                    f'Apply failed with 1 conflict: conflict with "{theirs[first]}": .{".".join(first)}',
                )
            new = copy.deepcopy(old)
            for entry in old["metadata"].get("managedFields", []):
                if entry["manager"] == manager and entry["operation"] == "Apply":
                    for path in map(tuple, entry["paths"]):
                        if path not in mine and path not in theirs:
                            drop(new, path)
            for path, value in mine.items():
                put(new, path, value)
            for entry in new["metadata"].get("managedFields", []):
                if entry["manager"] != manager:
                    entry["paths"] = [path for path in entry["paths"] if tuple(path) not in lost]
            self._manage(new, manager, "Apply", item)
            return self._change(kind, old, new, ""), False

    def bind(self, namespace: str, name: str, node: str) -> None:
        """Assign a pod to a node."""
        pods = KINDS["", "pods"]
        with self.lock:
            old = self._found(pods, namespace, name)
            if old["spec"].get("nodeName"):
                raise Refused(409, "Conflict", f"pod {name} is already assigned to node {old['spec']['nodeName']!r}")
            new = copy.deepcopy(old)
            new["spec"]["nodeName"] = node
            set_condition(new, "PodScheduled", "True")
            self._put("MODIFIED", pods, new)

    def delete(self, kind: Kind, namespace: str, name: str, options: Item) -> Item:
        """Delete an object; a pod on a node only begins to end, until its node agrees."""
        with self.lock:
            old = self._found(kind, namespace, name)
            wanted = (options.get("preconditions") or {}).get("uid")
            if wanted and wanted != old["metadata"]["uid"]:
                raise Refused(
                    409, "Conflict", f'Operation cannot be fulfilled on {kind.told} "{name}": Precondition failed: UID'
                )
            new = copy.deepcopy(old)
            about = new["metadata"]
            if kind.plural == "pods":
                grace_s = options.get(
                    "gracePeriodSeconds", new["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
                )
                over = new["status"]["phase"] in ("Succeeded", "Failed") or not new["spec"].get("nodeName")
                if "deletionTimestamp" in about and grace_s >= about["deletionGracePeriodSeconds"] and grace_s > 0:
                    return new
                if grace_s > 0 and not over:
                    about.update(deletionTimestamp=now(grace_s), deletionGracePeriodSeconds=grace_s)
                    return self._put("MODIFIED", kind, new)
                about.update(deletionTimestamp=now(), deletionGracePeriodSeconds=0)
            if about.get("finalizers"):
                about.setdefault("deletionTimestamp", now())
                return self._put("MODIFIED", kind, new)
            return self._remove(kind, new)

    # ---- rights ---------------------------------------------------------------------------------------------------------

    def allows(self, user: str, verb: str, kind: Kind, namespace: str, part: str = "") -> bool:
        """Whether a role of this user allows it. Objects are not looked at by name."""
        resource = f"{kind.plural}/{part}" if part else kind.plural
        with self.lock:
            for binding, role in self._roles(user, namespace):
                del binding
                for rule in role.get("rules") or ():
                    if (
                        {verb, "*"} & set(rule.get("verbs", ()))
                        and {kind.group, "*"} & set(rule.get("apiGroups", ()))
                        and {resource, "*"} & set(rule.get("resources", ()))
                        and not rule.get("resourceNames")
                    ):
                        return True
        return False

    def _roles(self, user: str, namespace: str) -> Iterator[tuple[Item, Item]]:
        for (kind, where, _), binding in self.items.items():
            if kind.plural not in ("rolebindings", "clusterrolebindings") or (kind.namespaced and where != namespace):
                continue
            if not any(_names(subject, user, where) for subject in binding.get("subjects") or ()):
                continue
            reference = binding["roleRef"]
            clustered = reference["kind"] == "ClusterRole"
            role = KINDS[RBAC, "clusterroles" if clustered else "roles"]
            found = self.items.get((role, "" if clustered else where, reference["name"]))
            if found is not None:
                yield binding, found

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _found(self, kind: Kind, namespace: str, name: str) -> Item:
        found = self.items.get((kind, namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{kind.told} "{name}" not found')
        return found

    def _check(self, kind: Kind, namespace: str, item: Item) -> None:
        about = item["metadata"]
        name = str(about.get("name") or "")
        if item.get("kind") not in (None, kind.kind) or item.get("apiVersion") not in (None, kind.api_version):
            raise Refused(400, "BadRequest", f"the object provided is not a {kind.kind} of {kind.api_version}")
        if about.get("namespace") not in (None, "", namespace):
            raise Refused(
                400,
                "BadRequest",
                "the namespace of the provided object does not match the namespace sent on the request",
            )
        if kind.namespaced and (KINDS["", "namespaces"], "", namespace) not in self.items:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        wrong = []
        if not NAME.fullmatch(name) or len(name) > 253:
            wrong.append(
                f'metadata.name: Invalid value: "{name}": a DNS-1123 subdomain must consist of lower case alphanumeric characters'
            )
        for key, value in (about.get("labels") or {}).items():
            if not isinstance(value, str) or not re.fullmatch(
                r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value
            ):
                wrong.append(f'metadata.labels: Invalid value: "{value}" of {key}')
        if kind.plural == "pods" and not (item.get("spec") or {}).get("containers"):
            wrong.append("spec.containers: Required value")
        if wrong:
            raise Refused(422, "Invalid", f'{kind.kind} "{name}" is invalid: {wrong[0]}')

    def _change(self, kind: Kind, old: Item, new: Item, part: str) -> Item:
        if kind.plural == "pods" and part != "status":
            kept, wanted = copy.deepcopy(old["spec"]), copy.deepcopy(new.get("spec") or {})
            for spec in (kept, wanted):
                spec.pop("activeDeadlineSeconds", None)
                spec.pop("tolerations", None)
            if kept != wanted:
                raise Refused(
                    422,
                    "Invalid",
                    f'Pod "{old["metadata"]["name"]}" is invalid: spec: Forbidden: pod updates may not change fields other than '
                    "`spec.containers[*].image`, `spec.activeDeadlineSeconds` or `spec.tolerations`",
                )
        if part == "status":
            new = {**copy.deepcopy(old), "status": new.get("status", {})}
        elif "status" in old:
            new["status"] = copy.deepcopy(old["status"])
        about = new.setdefault("metadata", {})
        for key in ("uid", "creationTimestamp", "name", "namespace", "deletionTimestamp", "deletionGracePeriodSeconds"):
            if key in old["metadata"]:
                about[key] = old["metadata"][key]
        about["resourceVersion"] = old["metadata"]["resourceVersion"]
        new.update(apiVersion=kind.api_version, kind=kind.kind)
        if "deletionTimestamp" in about and not about.get("finalizers") and kind.plural != "pods":
            return self._remove(kind, new)
        if new == old:
            return copy.deepcopy(old)
        return self._put("MODIFIED", kind, new)

    def _manage(self, item: Item, manager: str, operation: str, given: Item) -> None:
        entries = item["metadata"].setdefault("managedFields", [])
        entries[:] = [one for one in entries if (one["manager"], one["operation"]) != (manager, operation)]
        # The real server writes a trie; this one a list of paths, which no client of ours reads.
        entries.append({"manager": manager, "operation": operation, "paths": [list(path) for path in leaves(given)]})

    def _put(self, event: str, kind: Kind, item: Item) -> Item:
        about, key = item["metadata"], (kind, item["metadata"].get("namespace", ""), item["metadata"]["name"])
        before = self.items.get(key)
        self.version += 1
        about["resourceVersion"] = str(self.version)
        self.items[key] = copy.deepcopy(item)
        self._record(Event(self.version, event, kind, copy.deepcopy(item), before))
        return copy.deepcopy(item)

    def _remove(self, kind: Kind, item: Item) -> Item:
        about = item["metadata"]
        before = self.items.pop((kind, about.get("namespace", ""), about["name"]))
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self._record(Event(self.version, "DELETED", kind, copy.deepcopy(item), before))
        self._collect(about["uid"])
        return item

    def _record(self, event: Event) -> None:
        self.events.append(event)
        while len(self.events) > EVENTS_KEPT:
            self.compacted = self.events.popleft().version
        self.lock.notify_all()

    def _collect(self, uid: str) -> None:
        """Delete what the object owned, as the garbage collector does soon after."""
        for (kind, namespace, name), item in list(self.items.items()):
            owners = item["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners) and (kind, namespace, name) in self.items:
                self.delete(kind, namespace, name, {})


def now(after_s: float = 0.0) -> str:
    """The time as Kubernetes writes it."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=after_s)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def set_condition(item: Item, kind: str, status: str, reason: str = "", message: str = "") -> None:
    """Set a condition of a status."""
    conditions = item.setdefault("status", {}).setdefault("conditions", [])
    conditions[:] = [one for one in conditions if one["type"] != kind]
    words = {key: value for key, value in (("reason", reason), ("message", message)) if value}
    conditions.append({"type": kind, "status": status, "lastTransitionTime": now(), **words})


def matches(item: Item, labels: str, fields: str) -> bool:
    """Whether an object matches the selectors: `a=b,c!=d,e,!f`, and fields by equality."""
    has = item["metadata"].get("labels") or {}
    for word in filter(None, labels.split(",")):
        found = re.fullmatch(r"(!?[^=!]+)(==|!=|=)?(.*)", word)
        assert found is not None, word
        key, sign, value = found.groups()
        held = {
            "!=": has.get(key) != value,
            "=": has.get(key) == value,
            "==": has.get(key) == value,
            None: key[1:] not in has if key.startswith("!") else key in has,
        }[sign]
        if not held:
            return False
    for word in filter(None, fields.split(",")):
        key, _, value = word.partition("!=" if "!=" in word else "=")
        if ((at(item, tuple(key.split("."))) or "") == value) == ("!=" in word):
            return False
    return True


def merged(old: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    found = copy.deepcopy(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def leaves(item: Any, before: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The values of an object by their paths; a list is one value, as most lists of ours are atomic."""
    if not isinstance(item, dict):
        return {before: item}
    found = {}
    for key, value in item.items():
        if before == () and key in ("apiVersion", "kind"):
            continue
        if before == ("metadata",) and key in (
            "name",
            "namespace",
            "managedFields",
            "resourceVersion",
            "uid",
            "creationTimestamp",
        ):
            continue
        found.update(leaves(value, (*before, key)))
    return found


def at(item: Any, path: tuple[str, ...]) -> Any:
    """The value at a path; None if there is none."""
    for key in path:
        if not isinstance(item, dict) or key not in item:
            return None
        item = item[key]
    return item


def put(item: Item, path: tuple[str, ...], value: Any) -> None:
    """Set the value at a path."""
    for key in path[:-1]:
        item = item.setdefault(key, {})
    item[path[-1]] = copy.deepcopy(value)


def drop(item: Item, path: tuple[str, ...]) -> None:
    """Remove the value at a path, and what is empty above it."""
    if len(path) == 1:
        item.pop(path[0], None)
    elif isinstance(item.get(path[0]), dict):
        drop(item[path[0]], path[1:])
        if not item[path[0]]:
            del item[path[0]]


def _names(subject: Item, user: str, namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return user == f"system:serviceaccount:{subject.get('namespace', namespace)}:{subject['name']}"
    return bool(subject["kind"] == "User" and user == subject["name"])
