"""Nodes of a Kubernetes cluster without a kubelet, for benchmarks of many: they are ready, pods are bound to them, and nothing runs.

    with hollow_nodes(cluster, 100):
        ...

Their leases are renewed, and pods that were deleted there are removed, by threads of this process.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.engines.kubernetes.kubeconfig import find_access
from phalanx.engines.kubernetes.rest import KubernetesApi, RateLimit, ResourcePath
from phalanx.engines.kubernetes.watch import ObjectWatch
from tests.kubernetes.real_cluster import RealCluster

BEAT_S: Final = 10.0
PODS: Final = ResourcePath("pods")
_NODES: Final = ResourcePath("nodes")
_LEASES: Final = ResourcePath("leases", "coordination.k8s.io", namespace="kube-node-lease")


def admin_api(cluster: RealCluster) -> KubernetesApi:
    """Return a client of an administrator, without a limit of its own."""
    return KubernetesApi(find_access("", {"KUBECONFIG": cluster.kubeconfig()}), rate=RateLimit(10_000.0, 10_000))


@contextlib.contextmanager
def hollow_nodes(cluster: RealCluster, number: int, gpus: int = 1) -> Iterator[None]:
    """Add nodes `hollow-0`, ... with GPUs, and remove them."""
    api, names, ended = admin_api(cluster), [f"hollow-{index}" for index in range(number)], threading.Event()
    for name in names:
        _register(api, name, gpus)
    reaper = ObjectWatch(api=api, path=PODS, handler=_Reaper(api))
    threads = [threading.Thread(target=_beat, args=(api, names, ended)), threading.Thread(target=reaper.run)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for name in names:
            api.delete(_NODES, name)
            api.delete(_LEASES, name)
        for pod in api.list(PODS):
            if str(pod["spec"].get("nodeName", "")).startswith("hollow-"):
                api.delete(
                    ResourcePath("pods", namespace=pod["metadata"]["namespace"]), pod["metadata"]["name"], grace_s=0
                )
        reaper.close()
        for thread in threads:
            thread.join()


class _Reaper:
    """Removes deleted pods of hollow nodes, as their kubelets would."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    def replaced(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            self.changed(item)

    def changed(self, item: dict[str, Any]) -> None:
        about = item["metadata"]
        if about.get("deletionTimestamp") and str(item["spec"].get("nodeName", "")).startswith("hollow-"):
            with contextlib.suppress(PhalanxError):
                self._api.delete(ResourcePath("pods", namespace=about["namespace"]), about["name"], grace_s=0)

    def deleted(self, item: dict[str, Any]) -> None:
        del item

    def answered(self) -> None:
        pass

    def failed(self, error: PhalanxError) -> None:
        del error


def _register(api: KubernetesApi, name: str, gpus: int) -> None:
    labels = {"kubernetes.io/hostname": name}
    api.create(_NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "Hollow", "lastHeartbeatTime": at, "lastTransitionTime": at}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    api.patch(_NODES, name, {"status": status}, part="status")
    api.create(
        _LEASES,
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": _lease(name)},
    )


def _lease(name: str) -> dict[str, Any]:
    at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": at}


def _beat(api: KubernetesApi, names: list[str], ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        for name in names:
            with contextlib.suppress(PhalanxError):
                api.patch(_LEASES, name, {"spec": _lease(name)})
