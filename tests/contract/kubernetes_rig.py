"""The contract suite's cluster on Kubernetes: the fake API server, three nodes of two devices whose pods are processes here, and the head on top."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from benchmarks.cluster import BenchmarkCluster, free_port
from tests.kubernetes.fake_api import FakeApi, fake_api
from tests.kubernetes.fake_nodes import FakeNodes
from tests.kubernetes.fake_store import KINDS

BACK_S = 4.0  # after a node's death until it starts again, as after a short power cut
NODES = ("n0", "n1", "n2")


@dataclass(slots=True, kw_only=True)
class KubernetesHead(BenchmarkCluster):
    """A head on a cluster that runs already."""

    kubeconfig: str
    revivals: list[threading.Timer] = field(default_factory=list)

    def start(self, *, wait_nodes: bool = True) -> None:
        """Start the head; the cluster runs already."""
        self.start_head(variables={"KUBECONFIG": self.kubeconfig})
        if wait_nodes:
            self.wait_for_nodes(len(NODES))

    def stop(self) -> None:
        """End the head, and start no node any more."""
        for revival in self.revivals:
            revival.cancel()
            revival.join()
        BenchmarkCluster.stop(self)


@dataclass(slots=True, kw_only=True)
class KubernetesRig(KubernetesHead):
    """A head on a fake cluster."""

    fake: FakeApi
    fake_nodes: FakeNodes

    def kill_node(self, name: str, signal_number: int = 9) -> float:
        """Everything on the node, which is ready again after a while."""
        at_s = time.time()
        self.fake_nodes.cut_power(name)
        self.revivals.append(threading.Timer(BACK_S, self.fake_nodes.restore_power, (name,)))
        self.revivals[-1].start()
        return at_s

    def objects(self) -> list[str]:
        """What is left in the head's namespace: `pods/NAME` and so on."""
        kinds = ("pods", "configmaps", "secrets", "jobs")
        return sorted(f"{kind.plural}/{name}" for kind, _, name in self.fake.store.items if kind.plural in kinds)


@contextlib.contextmanager
def kubernetes(
    words: tuple[str, ...] = (),
    *,
    wait_nodes: bool = True,
    prepare: Callable[[FakeApi], AbstractContextManager[object]] | None = None,
    kind: type[KubernetesRig] | None = None,
) -> Iterator[KubernetesRig]:
    """See `KubernetesRig`. `wait_nodes`: until all nodes of the cluster are nodes of the head; `prepare`: what the cluster has before the head."""
    home, folder = tempfile.mkdtemp(prefix="phalanx-engine-"), tempfile.mkdtemp(prefix="phalanx-fake-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        fake = stack.enter_context(fake_api(os.path.join(folder, "api")))
        if prepare is not None:
            stack.enter_context(prepare(fake))
        output = os.path.join(folder, "pods.out")
        nodes = FakeNodes(fake.store, NODES, environment={"TMPDIR": folder}, output=output)
        nodes.start()
        stack.callback(nodes.stop)
        rig = (kind or KubernetesRig)(
            home=home,
            port=free_port(),
            virtual="",
            lease_s=4.0,
            head_arguments=("--engine", "kubernetes", *words),
            fake=fake,
            fake_nodes=nodes,
            kubeconfig=fake.kubeconfig,
        )
        stack.callback(rig.stop)
        rig.start(wait_nodes=wait_nodes)
        yield rig


@dataclass(slots=True, kw_only=True)
class ResidentRig(KubernetesRig):
    """A head on a fake cluster whose jobs run in three resident pods of two GPUs."""

    names: tuple[str, ...] = tuple(f"resident-2gpu-{number}" for number in range(len(NODES)))

    def kill_node(self, name: str, signal_number: int = 9) -> float:
        """Everything on the node that has this resident pod."""
        found = self.fake.store.select(KINDS["", "pods"], "default", "", "")[0]
        [node] = [one["spec"]["nodeName"] for one in found if one["metadata"]["annotations"]["phalanx/node"] == name]
        return KubernetesRig.kill_node(self, node, signal_number)


@contextlib.contextmanager
def resident_kubernetes(words: tuple[str, ...] = ()) -> Iterator[ResidentRig]:
    """See `ResidentRig`."""
    with kubernetes((*words, "--kubernetes-resident", "3-3x2"), kind=ResidentRig) as rig:
        assert isinstance(rig, ResidentRig)
        yield rig
