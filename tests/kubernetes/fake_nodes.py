"""The scheduler and the nodes of the fake cluster: pods are placed by affinity, selectors, taints and amounts, and run as processes of this machine.

One thread for all nodes. An image is a name only, and one that begins with `missing/` cannot be pulled; a command is found on this machine.
Volumes are not mounted. A node that loses its power kills all its processes and reports nothing more.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster import ROOT
from phalanx.node.processes.proctable import descendants, read_table
from tests.kubernetes.fake_store import KINDS, FakeStore, Item, Refused, now, set_condition

PODS, NODES, SECRETS, CONFIG_MAPS = (KINDS["", plural] for plural in ("pods", "nodes", "secrets", "configmaps"))
NOT_READY_S = 2.0  # of silence; a real cluster takes 40 s
LOOK_S = 0.05  # at processes, which report no change


@dataclass
class RunningPod:
    """A pod with its process."""

    process: subprocess.Popen[bytes]
    started: str
    started_s: float
    stop_by_s: float | None = None
    ended: int | None = None
    overdue: bool = False


@dataclass
class FakeNodes:
    """Nodes with GPUs, by name.

    Attributes:
        environment: of all processes, beside what their pods say.
        unscheduled: no pod is placed while it is set.
    """

    store: FakeStore
    names: tuple[str, ...]
    gpus: int = 2
    resource: str = "nvidia.com/gpu"
    environment: dict[str, str] = field(default_factory=dict)
    output: str = os.devnull
    unscheduled: threading.Event = field(default_factory=threading.Event)
    dead: dict[str, float] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    running: dict[str, RunningPod] = field(default_factory=dict)
    hooks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Register the nodes, and play them."""
        for name in self.names:
            self._register(name)
        self.thread = threading.Thread(target=self._run, name="fake-nodes", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End all processes."""
        self.ended.set()
        with self.store.lock:
            self.store.lock.notify_all()
        if self.thread is not None:
            self.thread.join()
        for pod in self.running.values():
            kill_tree(pod.process)
        for hook in self.hooks:
            kill_tree(hook)

    def processes(self, node: str) -> dict[str, int]:
        """The process of each running pod of a node, by the pod's name."""
        with self.lock:
            found = {}
            for item in self.store.select(PODS, "", "", f"spec.nodeName={node}")[0]:
                pod = self.running.get(item["metadata"]["uid"])
                if pod is not None and pod.ended is None:
                    found[item["metadata"]["name"]] = pod.process.pid
            return found

    def cut_power(self, node: str) -> None:
        """Kill every process of a node; it reports nothing more until `restore_power`."""
        with self.lock:
            self.dead[node] = time.monotonic()
            for item in self.store.select(PODS, "", "", f"spec.nodeName={node}")[0]:
                pod = self.running.get(item["metadata"]["uid"])
                if pod is not None:
                    kill_tree(pod.process)

    def restore_power(self, node: str) -> None:
        """Start a node again: its pods have failed."""
        with self.lock:
            self.dead.pop(node, None)
            self._ready(node, "True", "KubeletReady")

    def pod_address(self, item: Item) -> str:
        """The address of a pod, which is not that of its node: one for each node, on loopback."""
        return f"127.0.1.{1 + self.names.index(item['spec']['nodeName'])}"

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        amounts = {"cpu": "16", "memory": "64Gi", "pods": "110", self.resource: str(self.gpus)}
        labels = {
            "kubernetes.io/hostname": name,
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "nvidia.com/gpu.memory": "81559",
        }
        self.store.create(NODES, "", {"metadata": {"name": name, "labels": labels}, "spec": {}})
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}]
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": addresses,
            "nodeInfo": {"kubeletVersion": "v1.35.0"},
        }
        self.store.merge(NODES, "", name, {"status": status}, part="status")
        self._ready(name, "True", "KubeletReady")

    def _ready(self, name: str, status: str, reason: str) -> None:
        with contextlib.suppress(Refused):
            node = self.store.get(NODES, "", name)
            held: Item = next(
                (one for one in node.get("status", {}).get("conditions", []) if one["type"] == "Ready"), {}
            )
            if held.get("status") != status:
                set_condition(
                    node, "Ready", status, reason, "Kubelet stopped posting node status." if status != "True" else ""
                )
                self.store.merge(NODES, "", name, {"status": node["status"]}, part="status")

    def _run(self) -> None:
        seen = -1
        while not self.ended.is_set():
            with self.store.lock:
                if self.store.version == seen:
                    self.store.lock.wait(LOOK_S)
                seen = self.store.version
            with self.lock:
                self._look()

    def _look(self) -> None:
        for name, since_s in self.dead.items():
            if time.monotonic() - since_s > NOT_READY_S:
                self._ready(name, "Unknown", "NodeStatusUnknown")
        pods = self.store.select(PODS, "", "", "")[0]
        known = {item["metadata"]["uid"] for item in pods}
        for uid in [uid for uid in self.running if uid not in known]:  # removed by force
            kill_tree(self.running.pop(uid).process)
        for item in pods:
            with contextlib.suppress(Refused):  # it went meanwhile
                if not item["spec"].get("nodeName"):
                    if not self.unscheduled.is_set():
                        self._schedule(item, pods)
                elif item["spec"]["nodeName"] not in self.dead and item["spec"]["nodeName"] not in self.frozen:
                    self._tend(item)

    def _schedule(self, item: Item, pods: list[Item]) -> None:
        why: dict[str, int] = {}
        for node in self.store.select(NODES, "", "", "")[0]:
            problem = self._problem(item, node, pods)
            if not problem:
                self.store.bind(item["metadata"]["namespace"], item["metadata"]["name"], node["metadata"]["name"])
                item["spec"]["nodeName"] = node["metadata"]["name"]
                return
            why[problem] = why.get(problem, 0) + 1
        told = f"0/{sum(why.values())} nodes are available: {', '.join(f'{count} {text}' for text, count in sorted(why.items()))}."
        if not any(one.get("message") == told for one in item["status"].get("conditions", ())):
            set_condition(item, "PodScheduled", "False", "Unschedulable", told)
            self._write(item)

    def _problem(self, item: Item, node: Item, pods: list[Item]) -> str:
        spec, name = item["spec"], node["metadata"]["name"]
        conditions = node.get("status", {}).get(
            "conditions", ()
        )  # none yet between the making of a node and its first report
        if not any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
            return "node(s) were not ready"
        if node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        for taint in node["spec"].get("taints", ()):
            if taint["effect"] in ("NoSchedule", "NoExecute") and not any(
                _tolerates(one, taint) for one in spec.get("tolerations", ())
            ):
                return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
        terms = (
            spec.get("affinity", {})
            .get("nodeAffinity", {})
            .get("requiredDuringSchedulingIgnoredDuringExecution", {})
            .get("nodeSelectorTerms")
        )
        labels = node["metadata"].get("labels", {})
        if terms is not None and not any(_term(term, name, labels) for term in terms):
            return "node(s) didn't match Pod's node affinity/selector"
        if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
            return "node(s) didn't match Pod's node affinity/selector"
        wanted = requests(item)
        used: dict[str, int] = {}
        for other in pods:
            if other["spec"].get("nodeName") == name and other["status"]["phase"] not in ("Succeeded", "Failed"):
                for key, amount in requests(other).items():
                    used[key] = used.get(key, 0) + amount
        for key, amount in wanted.items():
            if "/" in key and used.get(key, 0) + amount > int(node["status"]["allocatable"].get(key, 0)):
                return f"Insufficient {key}"
        return ""

    def _tend(self, item: Item) -> None:
        about = item["metadata"]
        running = self.running.get(about["uid"])
        if running is None:
            if item["status"]["phase"] in ("Succeeded", "Failed"):
                self._finish(item)
            elif item["status"].get("startTime") and item["status"]["phase"] == "Running":
                self._fail(item, 137, "ContainerStatusUnknown")  # the node was away; what ran is gone
            elif about.get("deletionTimestamp"):
                self._finish(item)
            else:
                self._start(item)
            return
        if about.get("deletionTimestamp") and running.ended is None:
            self._end(running, float(about.get("deletionGracePeriodSeconds") or 0), _pre_stop(item))
        deadline_s = item["spec"].get("activeDeadlineSeconds")
        if deadline_s and time.monotonic() - running.started_s > deadline_s and not running.overdue:
            running.overdue = True
            self._end(running, 1.0)
        if running.stop_by_s is not None and time.monotonic() > running.stop_by_s:
            kill_tree(running.process)
        code = running.process.poll()
        if code is not None and running.ended is None:
            running.ended = code = 128 - code if code < 0 else code
            reason = "Completed" if code == 0 else "Error"
            self._fail(
                item, code, reason, started=running.started, pod_reason="DeadlineExceeded" if running.overdue else ""
            )
        if running.ended is not None:
            self._finish(self.store.get(PODS, about["namespace"], about["name"]))

    def _end(self, running: RunningPod, grace_s: float, pre_stop: list[str] | None = None) -> None:
        if running.stop_by_s is None:
            if pre_stop:
                script = f"{shlex.join(pre_stop)}; kill -TERM {running.process.pid}"
                self.hooks.append(subprocess.Popen(["/bin/sh", "-c", script], stderr=subprocess.DEVNULL))
            else:
                with contextlib.suppress(ProcessLookupError):
                    running.process.send_signal(signal.SIGTERM)
            running.stop_by_s = time.monotonic() + grace_s
        running.stop_by_s = min(running.stop_by_s, time.monotonic() + grace_s)

    def _start(self, item: Item) -> None:
        spec, about = item["spec"], item["metadata"]
        container = spec["containers"][0]
        status = item["status"]
        address = self.pod_address(item)
        status.update(hostIP="127.0.0.1", podIP=address, podIPs=[{"ip": address}])
        status.setdefault("startTime", now())
        try:
            if container["image"].startswith("missing/"):
                raise LookupError(f'failed to pull image "{container["image"]}": not found', "ErrImagePull")
            environment = dict(self._environment(item, container))
        except LookupError as error:
            reason = error.args[1] if len(error.args) > 1 else "CreateContainerConfigError"
            waiting = {"waiting": {"reason": reason, "message": error.args[0]}}
            if (status.get("containerStatuses") or [{}])[0].get("state") != waiting:
                self._write(item, _container(container, waiting))
            return
        argv = [*container["command"], *container.get("args", ())]
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        inherited = {
            "HOME": os.environ.get("HOME", "/"),
            "PATH": path,
            "PYTHONPATH": os.path.join(ROOT, "src"),
            **self.environment,
        }
        with open(self.output, "ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, **environment},
                start_new_session=True,
            )
        self.running[about["uid"]] = RunningPod(process, now(), time.monotonic())
        status["phase"] = "Running"
        set_condition(item, "Ready", "True")
        self._write(item, _container(container, {"running": {"startedAt": now()}}, ready=True))

    def _environment(self, item: Item, container: Item) -> Iterator[tuple[str, str]]:
        about = item["metadata"]
        fields = {
            "metadata.name": about["name"],
            "metadata.namespace": about["namespace"],
            "metadata.uid": about["uid"],
            "status.podIP": self.pod_address(item),
            "status.hostIP": "127.0.0.1",
            "spec.nodeName": item["spec"]["nodeName"],
            **{f"metadata.annotations['{key}']": value for key, value in about.get("annotations", {}).items()},
        }
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                yield one["name"], fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                wanted = source["secretKeyRef"]
                data = self._data(SECRETS, about["namespace"], wanted["name"])
                if wanted["key"] not in data:
                    raise LookupError(
                        f"couldn't find key {wanted['key']} in Secret {about['namespace']}/{wanted['name']}"
                    )
                yield one["name"], base64.b64decode(data[wanted["key"]]).decode()
            else:
                yield one["name"], str(one.get("value", ""))

    def _data(self, kind: Any, namespace: str, name: str) -> Mapping[str, str]:
        try:
            return self.store.get(kind, namespace, name).get("data") or {}
        except Refused:
            raise LookupError(f'secret "{name}" not found') from None

    def _fail(self, item: Item, code: int, reason: str, *, started: str = "", pod_reason: str = "") -> None:
        ended = {"exitCode": code, "reason": reason, "startedAt": started or now(), "finishedAt": now()}
        item["status"]["phase"] = "Succeeded" if code == 0 and not pod_reason else "Failed"
        if pod_reason:
            item["status"]["reason"] = pod_reason
        self._write(item, _container(item["spec"]["containers"][0], {"terminated": ended}))

    def _finish(self, item: Item) -> None:
        """Let go of a pod that has ended and is to be deleted."""
        about = item["metadata"]
        if about.get("deletionTimestamp"):
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": about["uid"]}}
            self.store.delete(PODS, about["namespace"], about["name"], options)
            self.running.pop(about["uid"], None)

    def _write(self, item: Item, container: Item | None = None) -> None:
        status = copy.deepcopy(item["status"])
        if container is not None:
            status["containerStatuses"] = [container]
        self.store.merge(
            PODS, item["metadata"]["namespace"], item["metadata"]["name"], {"status": status}, part="status"
        )


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it."""
    for pid in [*sorted(descendants(read_table(), [process.pid])), process.pid]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def requests(pod: Item) -> dict[str, int]:
    """The extended resources that a pod asks for."""
    found: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for key, amount in container.get("resources", {}).get("limits", {}).items():
            if "/" in key:
                found[key] = found.get(key, 0) + int(amount)
    return found


def _pre_stop(item: Item) -> list[str] | None:
    hook = item["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {})
    return list(hook["exec"]["command"]) if "exec" in hook else None


def _container(container: Item, state: Item, *, ready: bool = False) -> Item:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "state": state,
        "lastState": {},
    }


def _tolerates(toleration: Item, taint: Item) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return bool(toleration.get("key") in (None, "", taint["key"]))
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def _term(term: Item, name: str, labels: Mapping[str, str]) -> bool:
    wanted = [
        *((labels.get(one["key"]), one) for one in term.get("matchExpressions", ())),
        *((name, one) for one in term.get("matchFields", ()) if one["key"] == "metadata.name"),
    ]
    operators = {
        "In": lambda value, one: value in one["values"],
        "NotIn": lambda value, one: value not in one["values"],
        "Exists": lambda value, one: value is not None,
        "DoesNotExist": lambda value, one: value is None,
    }
    return bool(wanted) and all(operators[one["operator"]](value, one) for value, one in wanted)
