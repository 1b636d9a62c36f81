"""Convert the cluster's nodes to fleet nodes with the usage of others, and declare places where nodes cannot be listed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import NO_FOREIGN_USAGE, Cordon, ForeignUsage, Node, NodeState
from phalanx.core.ids import NodeId
from phalanx.engines.kubernetes.options import ENGINE_NAME
from phalanx.engines.kubernetes.parse import KubernetesNode, PodState, tolerates

_WHO_MAX: Final = 4  # pods named in the list of a node's other users
_LABEL_MAX: Final = 128
_TOPOLOGY: Final = {
    "topology.kubernetes.io/zone": "zone",
    "topology.kubernetes.io/region": "region",
    "node.kubernetes.io/instance-type": "instance-type",
}
PLACE_CPUS: Final = 1024  # a declared place promises GPUs only: Kubernetes itself decides about CPUs and memory
PLACE_MEMORY_BYTES: Final = 16 << 40


def offers_pods(node: KubernetesNode, template: Mapping[str, Any]) -> bool:
    """Whether pods with this template may ever run there: its node selector fits, and the node has GPUs or none are needed."""
    spec = template.get("spec") or {}
    wanted = spec.get("nodeSelector") or {}
    if any(node.labels.get(str(key)) != str(value) for key, value in wanted.items()):
        return False
    return not any(
        "control-plane" in taint.key for taint in node.taints if not tolerates(tolerations_of(template), taint)
    )


def fleet_node(
    node: KubernetesNode,
    pods: Sequence[PodState],
    *,
    granted: frozenset[int],
    our_pods: frozenset[str],
    contended: str = "",
    template: Mapping[str, Any],
) -> Node:
    """Build the node's record.

    Args:
        node: of the cluster.
        pods: those on it that hold devices, as far as they may be read.
        granted: indices of the devices that the head has granted there, started or not.
        our_pods: uids of the pods of attempts that hold their allocation.
        contended: who got the node in place of a job of ours; for a while all free devices count as theirs.
        template: of all pods.
    """
    devices = tuple(
        Device(index=index, uuid="", model=node.model, memory_bytes=node.memory_per_gpu_bytes)
        for index in range(node.gpus)
    )
    others = [pod for pod in pods if pod.uid not in our_pods]
    taken = node.gpus if contended else min(node.gpus, sum(pod.gpus for pod in others))
    free = [index for index in range(node.gpus) if index not in granted]
    held = tuple(free[len(free) - min(taken, len(free)) :])
    who = tuple(f"pod {pod.namespace}/{pod.name}" for pod in others if pod.gpus)[:_WHO_MAX]
    foreign = (
        ForeignUsage(devices=held, owners=who or ((contended,) if contended else ())) if held else NO_FOREIGN_USAGE
    )
    return Node(
        id=NodeId(node.name),
        engine=ENGINE_NAME,
        devices=devices,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
        state=NodeState.UP,
        address=node.address,
        hostname=node.hostname,
        labels={name: node.labels[key][:_LABEL_MAX] for key, name in _TOPOLOGY.items() if key in node.labels},
        cordon=cordon_of(node, template),
        per_attempt=True,
        foreign_usage=foreign,
    )


def declared_node(
    index: int, gpus: int, *, contended: str = "", granted: frozenset[int] = frozenset(), awaited: str = ""
) -> Node:
    """Build the record of a place for pods, where the cluster's nodes cannot be listed. Any node of the cluster may run it.

    Args:
        index: of the place.
        gpus: that pods there may have together.
        contended: as in `fleet_node`.
        granted: as in `fleet_node`.
        awaited: which job's pod there waits for a node of an autoscaler; empty if none does.
    """
    free = tuple(place for place in range(gpus) if place not in granted)
    return Node(
        id=declared_name(index),
        engine=ENGINE_NAME,
        devices=tuple(Device(index=place, uuid="", model="gpu", memory_bytes=0) for place in range(gpus)),
        cpus=PLACE_CPUS,
        memory_bytes=PLACE_MEMORY_BYTES,
        state=NodeState.UP,
        address="127.0.0.1",  # each pod brings its own
        hostname="",
        per_attempt=True,
        foreign_usage=ForeignUsage(devices=free, owners=(contended,)) if contended and free else NO_FOREIGN_USAGE,
        provisioning_reason=f"no node in Kubernetes yet for {awaited}" if awaited else "",
    )


def declared_name(index: int) -> NodeId:
    """Return the name of a declared place."""
    return NodeId(f"pod-{index}")


def cordon_of(node: KubernetesNode, template: Mapping[str, Any]) -> Cordon | None:
    """Return why pods with this template may not start on the node; None if they may."""
    if node.cordoned:
        remedy = f"kubectl uncordon {node.name}"
        return Cordon(
            by=ENGINE_NAME, why="it is unschedulable in Kubernetes (kubectl cordon)", since_s=0.0, remedy=remedy
        )
    for taint in node.taints:
        if not tolerates(tolerations_of(template), taint):
            shown = f"{taint.key}={taint.value}" if taint.value else taint.key
            why = f"it has the taint {shown}:{taint.effect}, which our pods do not tolerate"
            remedy = f"a toleration in the pod template, or kubectl taint node {node.name} {shown}:{taint.effect}-"
            return Cordon(by=ENGINE_NAME, why=why, since_s=0.0, remedy=remedy)
    return None


def tolerations_of(template: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tolerations that all pods have."""
    # Kubernetes adds the toleration of a GPU's taint where its admission plugin is on; without, the template names it.
    found: Sequence[Mapping[str, Any]] = (template.get("spec") or {}).get("tolerations") or ()
    return found
