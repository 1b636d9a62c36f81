"""A stand-in kubelet: one node of a Kubernetes cluster, whose pods are processes of this machine.

    python -m tests.kubernetes.kubelet --kubeconfig FILE --name n0 --gpus 8 --folder DIR      root

It registers the node, renews its lease, runs the pods that the scheduler binds to it, and writes their status as a kubelet does: init
containers in order, exit codes, restarts, probes of readiness by their containers alone, deletion with grace, deadlines, and images that
cannot be pulled. An image is a name only: what it would hold is this machine's own root folder (see `pod_init.py`) and the variables of
`--image`, and a name that begins with `missing/` cannot be pulled. Containers die with their kubelet. There is no pod network: a pod has the
address of its node; with `--names`, pods that a headless Service names find each other as by DNS (`cluster_names.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from tests.kubernetes.cluster_names import PODS, SERVICES, hosts_text, named_pods, rewrite

INIT: Final = str(Path(__file__).with_name("pod_init.py"))
HEARTBEAT_S: Final = 10.0
BACK_OFF_S: Final = 1.0  # of a container that is started again; doubled up to 30 s
WATCH_S: Final = 300
NAMES_S: Final = 1.0  # between two looks at the names of the cluster
MERGE: Final = "application/merge-patch+json"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][\w.-]*)\)")
Json = dict[str, Any]


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_kubeconfig(path: str) -> tuple[str, ssl.SSLContext | None, str]:
    """The server, its certificate and the token of the current context."""
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    data = cluster.get("certificate-authority-data")
    trust = ssl.create_default_context(cadata=base64.b64decode(data).decode()) if data else None
    return cluster["server"], trust, user["token"]


@dataclass(slots=True, kw_only=True)
class Api:
    """Requests to the API server as this kubelet."""

    server: str
    trust: ssl.SSLContext | None
    session: aiohttp.ClientSession

    async def ask(
        self, method: str, path: str, body: Json | None = None, kind: str = "application/json"
    ) -> tuple[int, Json]:
        """The status and the answer; 599 while the server is away."""
        data = None if body is None else json.dumps(body)
        try:
            async with self.session.request(
                method,
                self.server + path,
                data=data,
                headers={"Content-Type": kind},
                ssl=self.trust or True,
                timeout=aiohttp.ClientTimeout(total=20),
            ) as reply:
                return reply.status, await reply.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 599, {}

    async def watch(self, path: str, version: str) -> AsyncIterator[Json]:
        """Events from a version on, until the server ends the watch."""
        query = f"&watch=1&timeoutSeconds={WATCH_S}&resourceVersion={version}&allowWatchBookmarks=true"
        time_out = aiohttp.ClientTimeout(total=WATCH_S + 30, sock_connect=10)
        async with self.session.get(self.server + path + query, ssl=self.trust or True, timeout=time_out) as reply:
            async for line in reply.content:
                yield json.loads(line)


@dataclass(slots=True, kw_only=True)
class Container:
    """What is known of one container of a pod."""

    spec: Json
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last: Json = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    process: asyncio.subprocess.Process | None = None
    hosts: str = ""

    @property
    def name(self) -> str:
        """As its pod names it."""
        name: str = self.spec["name"]
        return name

    def status(self) -> Json:
        """As a pod's status shows it."""
        image = self.spec.get("image", "")
        return {
            "name": self.name,
            "image": image,
            "imageID": "",
            "state": self.state,
            "lastState": self.last,
            "ready": self.ready,
            "restartCount": self.restarts,
            "started": "running" in self.state,
        }


@dataclass(slots=True, kw_only=True)
class RunningPod:
    """One pod that this node runs."""

    pod: Json
    folder: str
    devices: tuple[int, ...]
    inits: list[Container]
    containers: list[Container]
    started: str = field(default_factory=now)
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    initialized: bool = False
    stopping: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Namespace, name, uid."""
        meta = self.pod["metadata"]
        return meta["namespace"], meta["name"], meta["uid"]

    @property
    def path(self) -> str:
        """Of the pod at the API server."""
        return f"/api/v1/namespaces/{self.key[0]}/pods/{self.key[1]}"


class Kubelet:
    """One node."""

    def __init__(self, api: Api, options: argparse.Namespace) -> None:
        self.api = api
        self.options = options
        self.name: str = options.name
        self.pods: dict[tuple[str, str, str], RunningPod] = {}
        self.free = set(range(options.gpus))
        self.port = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.names: list[str] = []

    async def run(self) -> None:
        """Until killed."""
        os.makedirs(self.options.folder, exist_ok=True)
        await self._serve_logs()
        while True:
            if await self._register():
                break
            await asyncio.sleep(0.2)
        heart = asyncio.create_task(self._beat())
        if self.options.names:
            self._spawn(self._follow_names())
        try:
            await self._follow()
        finally:
            heart.cancel()

    async def _register(self) -> bool:
        amounts = {"cpu": self.options.cpus, "memory": "64Gi", "pods": "250", "ephemeral-storage": "100Gi"}
        if self.options.gpus:
            amounts[self.options.resource] = str(self.options.gpus)
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        labels |= dict(pair.split("=", 1) for pair in self.options.label)
        node: Json = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels}}
        status, _ = await self.api.ask("POST", "/api/v1/nodes", node)
        if status not in (201, 409):
            return False
        status, _ = await self.api.ask(
            "PATCH",
            f"/api/v1/nodes/{self.name}/status",
            {
                "status": {
                    "capacity": amounts,
                    "allocatable": amounts,
                    "addresses": [
                        {"type": "InternalIP", "address": self.options.address},
                        {"type": "Hostname", "address": self.name},
                    ],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
                    "nodeInfo": {
                        "machineID": self.name,
                        "systemUUID": self.name,
                        "bootID": str(time.time_ns()),
                        "kernelVersion": os.uname().release,
                        "osImage": "stand-in",
                        "containerRuntimeVersion": "processes://1",
                        "kubeletVersion": "v1.20.2",
                        "kubeProxyVersion": "",
                        "operatingSystem": "linux",
                        "architecture": "amd64",
                    },
                    "conditions": [self._condition("Ready", "True", "KubeletReady")],
                }
            },
            "application/strategic-merge-patch+json",
        )
        return status == 200 and await self._renew()

    def _condition(self, kind: str, status: str, reason: str) -> Json:
        at = now()
        return {"type": kind, "status": status, "reason": reason, "lastHeartbeatTime": at, "lastTransitionTime": at}

    async def _renew(self) -> bool:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": at}
        status, _ = await self.api.ask("PATCH", f"{path}/{self.name}", {"spec": spec}, MERGE)
        if status == 404:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self.name},
                "spec": spec,
            }
            status, _ = await self.api.ask("POST", path, lease)
        return status in (200, 201)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if await self._renew():
                ready = {"status": {"conditions": [self._condition("Ready", "True", "KubeletReady")]}}
                kind = "application/strategic-merge-patch+json"
                status, _ = await self.api.ask("PATCH", f"/api/v1/nodes/{self.name}/status", ready, kind)
                if status == 404:
                    await self._register()

    async def _follow_names(self) -> None:
        while True:
            (seen, pods), (served, services) = await self.api.ask("GET", PODS), await self.api.ask("GET", SERVICES)
            found = named_pods(pods["items"], services["items"]) if seen == served == 200 else self.names
            if found != self.names:
                self.names = found
                for pod in self.pods.values():
                    for one in (*pod.inits, *pod.containers):
                        if one.hosts:
                            rewrite(one.hosts, self._hosts(pod))
            await asyncio.sleep(NAMES_S)

    def _hosts(self, pod: RunningPod) -> str:
        hostname = pod.pod["spec"].get("hostname") or pod.key[1]
        return hosts_text(self.options.address, pod.pod, hostname, self.names)

    async def _follow(self) -> None:
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.name}"
        while True:
            status, answer = await self.api.ask("GET", path)
            if status != 200:
                await asyncio.sleep(0.5)
                continue
            for pod in answer["items"]:
                self._see(pod)
            listed = {
                (one["metadata"]["namespace"], one["metadata"]["name"], one["metadata"]["uid"])
                for one in answer["items"]
            }
            for key in set(self.pods) - listed:
                self._gone(key)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async for event in self.api.watch(path, answer["metadata"]["resourceVersion"]):
                    if event["type"] == "ERROR":
                        break
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._see(event["object"])
                    elif event["type"] == "DELETED":
                        meta = event["object"]["metadata"]
                        self._gone((meta["namespace"], meta["name"], meta["uid"]))

    def _see(self, pod: Json) -> None:
        meta = pod["metadata"]
        key = meta["namespace"], meta["name"], meta["uid"]
        known = self.pods.get(key)
        if known is None:
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                if "deletionTimestamp" in meta:
                    self._spawn(self._remove(pod))
                return
            known = self._admit(pod)
            self.pods[key] = known
            known.task = asyncio.create_task(self._life(known))
        known.pod = pod
        if "deletionTimestamp" in meta and not known.stopping:
            known.stopping = True
            self._spawn(self._stop(known, float(meta.get("deletionGracePeriodSeconds") or 0)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _gone(self, key: tuple[str, str, str]) -> None:
        """The pod was removed by force."""
        known = self.pods.get(key)
        if known is not None and not known.stopping:
            known.stopping = True
            self._spawn(self._stop(known, 0.0))

    def _admit(self, pod: Json) -> RunningPod:
        spec = pod["spec"]
        known = RunningPod(
            pod=pod,
            folder=os.path.join(self.options.folder, "pods", pod["metadata"]["uid"]),
            devices=(),
            inits=[Container(spec=one) for one in spec.get("initContainers", [])],
            containers=[Container(spec=one) for one in spec["containers"]],
        )
        wanted = sum(
            int(one.get("resources", {}).get("limits", {}).get(self.options.resource, 0)) for one in spec["containers"]
        )
        if wanted > len(self.free):
            known.phase, known.reason = "Failed", "UnexpectedAdmissionError"
            known.message = f"{wanted} devices wanted, {len(self.free)} are free"
        else:
            known.devices = tuple(sorted(self.free)[:wanted])
            self.free -= set(known.devices)
        return known

    async def _life(self, pod: RunningPod) -> None:
        try:
            if pod.phase == "Failed":
                return
            if pod.pod.get("status", {}).get(
                "startTime"
            ):  # this kubelet died and came back: its containers died with it
                pod.phase, pod.reason, pod.message = "Failed", "", "the kubelet restarted"
                for one in pod.containers:
                    one.state = _terminated(137, "ContainerStatusUnknown", pod.started)
                return
            os.makedirs(pod.folder, exist_ok=True)
            deadline = pod.pod["spec"].get("activeDeadlineSeconds")
            async with asyncio.timeout(deadline):
                await self._mount_all(pod)
                await self._containers(pod)
        except TimeoutError:
            await self._end_processes(pod, 2.0)
            pod.phase, pod.reason = "Failed", "DeadlineExceeded"
            pod.message = "Pod was active on the node longer than the specified deadline"
        finally:
            self.free |= set(pod.devices)
            pod.devices = ()
            await self._report(pod)
            if pod.stopping or "deletionTimestamp" in pod.pod["metadata"]:
                await self._remove(pod.pod)
                self.pods.pop(pod.key, None)
            shutil.rmtree(pod.folder, ignore_errors=True) if pod.stopping else None

    async def _containers(self, pod: RunningPod) -> None:
        await self._report(pod)
        restart = pod.pod["spec"].get("restartPolicy", "Always")
        for one in pod.inits:
            while True:
                code = await self._run_once(pod, one)
                if code == 0 or pod.stopping:
                    break
                if restart == "Never":
                    pod.phase = "Failed"
                    return
                await self._again(pod, one)
            if pod.stopping:
                pod.phase = "Failed"
                return
        pod.initialized = True
        await asyncio.gather(*(self._keep(pod, one, restart) for one in pod.containers))
        codes = [one.state.get("terminated", {}).get("exitCode", 1) for one in pod.containers]
        pod.phase = "Succeeded" if not any(codes) else "Failed"

    async def _keep(self, pod: RunningPod, one: Container, restart: str) -> None:
        while True:
            code = await self._run_once(pod, one)
            if pod.stopping or restart == "Never" or (restart == "OnFailure" and code == 0):
                return
            await self._again(pod, one)

    async def _again(self, pod: RunningPod, one: Container) -> None:
        one.last = one.state
        one.state = {"waiting": {"reason": "CrashLoopBackOff"}}
        await self._report(pod)
        await asyncio.sleep(min(30.0, BACK_OFF_S * 2**one.restarts))
        one.restarts += 1

    async def _run_once(self, pod: RunningPod, one: Container) -> int:
        while one.spec.get("image", "").startswith("missing/"):
            for reason in ("ErrImagePull", "ImagePullBackOff"):
                one.state = {"waiting": {"reason": reason, "message": f"image {one.spec['image']!r} not found"}}
                await self._report(pod)
                await asyncio.sleep(1.0)
                if pod.stopping:
                    return 1
        try:
            plan = await self._plan(pod, one)
        except LookupError as error:
            one.state = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
            await self._report(pod)
            await asyncio.sleep(1.0)
            return 1 if pod.stopping else await self._run_once(pod, one)
        under = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private", "--"]
        started = now()
        log = self._open_log(pod, one.name)
        try:
            one.process = await asyncio.create_subprocess_exec(
                "setpriv",
                "--pdeathsig",
                "KILL",
                "--",
                *under,
                sys.executable,
                "-I",
                "-S",
                INIT,
                json.dumps(plan),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            log.close()
        one.state, one.ready = {"running": {"startedAt": started}}, True
        if one in pod.containers:
            pod.phase = "Running"
        await self._report(pod)
        code = await one.process.wait()
        code = 128 - code if code < 0 else code
        one.process, one.ready = None, False
        one.state = _terminated(code, "Completed" if code == 0 else "Error", started)
        if code and one.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            one.state["terminated"]["message"] = _tail(log.name)
        await self._report(pod)
        return code

    async def _plan(self, pod: RunningPod, one: Container) -> Json:
        spec, container = pod.pod["spec"], one.spec
        env = await self._environment(pod, container)
        argv = [_expand(word, env) for word in (*container.get("command", ()), *container.get("args", ()))]
        if not container.get("command"):
            raise LookupError("an image has no command here: the container must name one")
        security = spec.get("securityContext", {}) | container.get("securityContext", {})
        user, group = security.get("runAsUser"), security.get("runAsGroup", security.get("runAsUser"))
        extra = [security["fsGroup"]] if "fsGroup" in security else []
        mounts = [
            {
                "source": os.path.join(pod.folder, "volumes", one["name"], one.get("subPath", "")),
                "path": one["mountPath"],
                "read_only": one.get("readOnly", False),
            }
            for one in container.get("volumeMounts", ())
        ]
        _resolve(mounts)
        root = os.path.join(pod.folder, "root", f"{one.name}-{one.restarts}")
        one.hosts = os.path.join(root, "hosts")
        return {
            "root": root,
            "hosts": self._hosts(pod),
            "shared": self.options.shared,
            "hostname": env["HOSTNAME"],
            "mounts": mounts,
            "read_only": security.get("readOnlyRootFilesystem", False),
            "folder": container.get("workingDir", ""),
            "argv": argv,
            "env": env,
            "user": user,
            "group": group,
            "groups": extra,
        }

    async def _environment(self, pod: RunningPod, container: Json) -> dict[str, str]:
        namespace = pod.key[0]
        env = {"PATH": os.environ["PATH"], "HOME": "/root", "HOSTNAME": pod.pod["spec"].get("hostname") or pod.key[1]}
        env |= dict(pair.split("=", 1) for pair in self.options.image)
        server = urlsplit(self.api.server)
        env |= {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port or 443)}
        if pod.devices:
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(map(str, pod.devices))
        for source in container.get("envFrom", ()):
            for kind, data in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
                if kind in source:
                    env |= {
                        source.get("prefix", "") + key: value
                        for key, value in (await self._data(namespace, data, source[kind]["name"])).items()
                    }
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = self._field(pod, source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source or "configMapKeyRef" in source:
                kind = "secrets" if "secretKeyRef" in source else "configmaps"
                reference = source.get("secretKeyRef") or source["configMapKeyRef"]
                try:
                    value = (await self._data(namespace, kind, reference["name"]))[reference["key"]]
                except LookupError:
                    if reference.get("optional"):
                        continue
                    raise
            else:
                value = _expand(variable.get("value", ""), env)
            env[variable["name"]] = value
        return env

    def _field(self, pod: RunningPod, path: str) -> str:
        meta = pod.pod["metadata"]
        for kind in ("labels", "annotations"):
            if path.startswith(f"metadata.{kind}['"):
                return str(meta.get(kind, {}).get(path[len(kind) + 11 : -2], ""))
        fields: dict[str, str] = {
            "metadata.name": meta["name"],
            "metadata.namespace": meta["namespace"],
            "metadata.uid": meta["uid"],
            "spec.nodeName": self.name,
            "spec.serviceAccountName": pod.pod["spec"].get("serviceAccountName", "default"),
            "status.podIP": self.options.address,
            "status.hostIP": self.options.address,
        }
        return fields[path]

    async def _data(self, namespace: str, kind: str, name: str) -> dict[str, str]:
        status, answer = await self.api.ask("GET", f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        if status != 200:
            raise LookupError(f'{kind[:-1]} "{name}" not found')
        if kind == "configmaps":
            return dict(answer.get("data") or {})
        return {key: base64.b64decode(value).decode() for key, value in (answer.get("data") or {}).items()}

    async def _mount_all(self, pod: RunningPod) -> None:
        for volume in pod.pod["spec"].get("volumes", ()):
            while not pod.stopping:
                try:
                    await self._mount(pod, volume)
                    break
                except LookupError as error:
                    pod.containers[0].state = {"waiting": {"reason": "ContainerCreating", "message": str(error)}}
                    await self._report(pod)
                    await asyncio.sleep(0.5)

    async def _mount(self, pod: RunningPod, volume: Json) -> None:
        folder = os.path.join(pod.folder, "volumes", volume["name"])
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        if "hostPath" in volume:
            _link(volume["hostPath"]["path"], folder)
            return
        if "persistentVolumeClaim" in volume:
            claim = os.path.join(self.options.claims, pod.key[0], volume["persistentVolumeClaim"]["claimName"])
            os.makedirs(claim, exist_ok=True)
            _give_group(claim, pod.pod["spec"].get("securityContext", {}).get("fsGroup"))
            _link(claim, folder)
            return
        os.makedirs(folder, exist_ok=True)
        group = pod.pod["spec"].get("securityContext", {}).get("fsGroup")
        if "emptyDir" in volume:
            os.chmod(folder, 0o777)
        for source in volume.get("projected", {}).get("sources", [volume]):
            await self._fill(pod, folder, source)
        _give_group(folder, group)

    async def _fill(self, pod: RunningPod, folder: str, source: Json) -> None:
        found: dict[str, str] = {}
        items, mode = None, 0o644
        for kind, name_key, data in (("secret", "secretName", "secrets"), ("configMap", "name", "configmaps")):
            if kind in source:
                part = source[kind]
                found = await self._data(pod.key[0], data, part.get(name_key) or part["name"])
                items, mode = part.get("items"), part.get("defaultMode", mode)
        if "downwardAPI" in source:
            found = {
                one["path"]: self._field(pod, one["fieldRef"]["fieldPath"]) for one in source["downwardAPI"]["items"]
            }
        if items is not None:
            found = {one["path"]: found[one["key"]] for one in items}
        for name, text in found.items():
            path = os.path.join(folder, name)
            _write(path, text, mode)

    async def _stop(self, pod: RunningPod, grace_s: float) -> None:
        await self._end_processes(pod, grace_s)
        if pod.task is None or pod.task.done():
            await self._remove(pod.pod)
            self.pods.pop(pod.key, None)
            shutil.rmtree(pod.folder, ignore_errors=True)

    async def _end_processes(self, pod: RunningPod, grace_s: float) -> None:
        living = [one.process for one in (*pod.inits, *pod.containers) if one.process is not None]
        for process in living:
            leaf = _leaf(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(leaf, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        if living:
            _, waiting = await asyncio.wait([asyncio.ensure_future(one.wait()) for one in living], timeout=grace_s)
            for process in living if waiting else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(_leaf(process.pid), signal.SIGKILL)

    async def _remove(self, pod: Json) -> None:
        meta = pod["metadata"]
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": meta["uid"]},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        while True:
            if (await self.api.ask("DELETE", path, body))[0] != 599:
                return
            await asyncio.sleep(0.5)

    async def _report(self, pod: RunningPod) -> None:
        ready = pod.phase == "Running" and all(one.ready for one in pod.containers)
        done = pod.phase in ("Succeeded", "Failed")
        flags = {"Initialized": pod.initialized, "Ready": ready, "ContainersReady": ready, "PodScheduled": True}
        at = now()
        conditions = [{"type": kind, "status": str(value), "lastTransitionTime": at} for kind, value in flags.items()]
        status = {
            "phase": pod.phase,
            "conditions": conditions,
            "hostIP": self.options.address,
            "podIP": self.options.address,
            "podIPs": [{"ip": self.options.address}],
            "startTime": pod.started,
            "containerStatuses": [one.status() for one in pod.containers],
            "initContainerStatuses": [one.status() for one in pod.inits],
            "reason": pod.reason or None,
            "message": pod.message or None,
        }
        body = {"metadata": {"uid": pod.key[2]}, "status": status}
        while True:
            if (await self.api.ask("PATCH", pod.path + "/status", body, MERGE))[0] != 599 or not done:
                return
            await asyncio.sleep(0.5)

    def _open_log(self, pod: RunningPod, container: str) -> BinaryIO:
        folder = os.path.join(self.options.folder, "logs", pod.key[2])
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, f"{container}.log"), "a+b")  # noqa: SIM115, closed by the caller
        file.seek(0)
        return file

    async def _serve_logs(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/containerLogs/{namespace}/{pod}/{container}", self._logs)])
        runner = web.AppRunner(app)
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.options.certificate, self.options.key)
        site = web.TCPSite(runner, self.options.address, 0, ssl_context=context)
        await site.start()
        self.port = runner.addresses[0][1]

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        match = request.match_info
        for (namespace, name, _), pod in self.pods.items():
            if (namespace, name) == (match["namespace"], match["pod"]):
                break
        else:
            return web.Response(status=404, text="no such pod here")
        with self._open_log(pod, match["container"]) as file:
            content = file.read()
        if tail := request.query.get("tailLines"):
            content = b"".join(content.splitlines(keepends=True)[-int(tail) :])
        return web.Response(body=content)


def _tail(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-80:])[-2048:]


def _terminated(code: int, reason: str, started: str) -> Json:
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": now()}}


def _expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` in commands and values; unknown names stay, `$$` is a dollar."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else env.get(match[1], match[0]), text)


def _resolve(mounts: Sequence[dict[str, Any]]) -> None:
    for mount in mounts:
        mount["source"] = os.path.realpath(mount["source"])
        if not os.path.exists(mount["source"]):
            raise LookupError(f"volume for {mount['path']} not found")


def _write(path: str, text: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)


def _give_group(folder: str, group: int | None) -> None:
    """Give a volume to the pod's group. Unless its top folder is so already: `fsGroupChangePolicy: OnRootMismatch`."""
    about = os.stat(folder)
    if group is None or (about.st_gid == group and about.st_mode & 0o2070 == 0o2070):
        return
    for root, _, files in os.walk(folder):
        for path in (root, *(os.path.join(root, file) for file in files)):
            os.chown(path, -1, group)
            os.chmod(path, os.stat(path).st_mode | (0o2070 if path == root else 0o060))


def _link(source: str, target: str) -> None:
    if not os.path.exists(source):
        raise LookupError(f"hostPath {source} does not exist")
    with contextlib.suppress(FileExistsError):
        os.symlink(source, target)


def _leaf(pid: int) -> int:
    """The container's own first process: the only child of the only child."""
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
        except OSError:
            return pid
        if name != "unshare" or not children:
            return pid
        pid = int(children[0])


async def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--claims", required=True, help="folder that stands for the storage of all claims")
    parser.add_argument("--certificate", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", default="16")
    parser.add_argument("--resource", default="nvidia.com/gpu")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--names", action="store_true", help="pods that a headless Service names find each other")
    parser.add_argument("--image", action="append", default=[], help="NAME=VALUE, a variable that all images set")
    parser.add_argument(
        "--shared", action="append", default=[], help="folder of this machine that pods share, as a network file system"
    )
    options = parser.parse_args()
    server, trust, token = read_kubeconfig(options.kubeconfig)
    headers = {"Authorization": f"Bearer {token}", "User-Agent": "stand-in-kubelet"}
    async with aiohttp.ClientSession(headers=headers, read_bufsize=1 << 22) as session:
        await Kubelet(Api(server=server, trust=trust, session=session), options).run()


if __name__ == "__main__":
    asyncio.run(main())
