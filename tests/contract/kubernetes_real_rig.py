"""The contract suite's cluster on a real API server: three nodes of two devices whose pods are processes here, and the head as a user with one Role."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import ROOT, free_port
from phalanx.engines.kubernetes import rights
from tests.contract.kubernetes_rig import BACK_S, NODES, KubernetesHead
from tests.kubernetes.real_cluster import TOOLS, RealCluster

USER = {"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}
# The image of the pods is this machine: its folders belong to root, and this checkout is no package of its Python.
TEMPLATE = {
    "spec": {
        "securityContext": None,
        "containers": [
            {
                "name": "phalanx",
                "env": [
                    {"name": "PATH", "value": f"{ROOT}/.venv/bin:/usr/bin:/bin"},
                    {"name": "PYTHONPATH", "value": os.path.join(ROOT, "src")},
                ],
            }
        ],
    }
}


@dataclass(slots=True, kw_only=True)
class RealKubernetesRig(KubernetesHead):
    """A head on a real cluster."""

    real: RealCluster

    def kill_node(self, name: str, signal_number: int = 9) -> float:
        """Its kubelet and everything on it, which starts again after a while."""
        at_s = time.time()
        self.real.kill_node(name)
        self.revivals.append(threading.Timer(BACK_S, self.real.start_node, (name, 2)))
        self.revivals[-1].start()
        return at_s


def grant(cluster: RealCluster) -> None:
    """Give the user of heads the Role of the engine, and the right to list nodes."""
    grants = [*rights.role_objects("default", subject=USER), *rights.cluster_role_objects(USER)]
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": grants}))


@contextlib.contextmanager
def real_kubernetes(
    words: tuple[str, ...] = (),
    *,
    nodes: bool = True,
    wait_nodes: bool = True,
    lease_s: float = 4.0,
    audited: bool = False,
    pod: Mapping[str, Any] = TEMPLATE,
) -> Iterator[RealKubernetesRig]:
    """See `RealKubernetesRig`.

    Args:
        words: further arguments of the head.
        nodes: whether the cluster has nodes.
        wait_nodes: wait until they are nodes of the head.
        lease_s: of the head.
        audited: the API server writes each request to a log.
        pod: the template of all pods.
    """
    with contextlib.ExitStack() as stack:
        home = tempfile.mkdtemp(prefix="engine-", dir=TOOLS)  # not below /tmp, where each pod has a volume of its own
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        real = stack.enter_context(
            RealCluster(nodes=dict.fromkeys(NODES if nodes else (), 2), shared=(ROOT, home), audited=audited)
        )
        grant(real)
        template = os.path.join(home, "pod.yaml")
        with open(template, "w", encoding="utf-8") as file:
            json.dump(pod, file)
        rig = RealKubernetesRig(
            home=home,
            port=free_port(),
            virtual="",
            lease_s=lease_s,
            head_arguments=("--engine", "kubernetes", "--kubernetes-template", template, *words),
            kubeconfig=real.kubeconfig(USER["name"]),
            real=real,
        )
        stack.callback(rig.stop)
        rig.start(wait_nodes=wait_nodes)
        yield rig
