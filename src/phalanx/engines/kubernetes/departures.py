"""Recognise pods and nodes that Kubernetes is about to take: deletions, evictions, and taints that announce the end of a node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.core.state.reports import AttemptReclaimed
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes.attempt_pods import AttemptPods
from phalanx.engines.kubernetes.inventory import tolerations_of
from phalanx.engines.kubernetes.parse import KubernetesNode, PodState, Taint, tolerates

# Set by autoscalers, cloud providers and handlers of spot notices some minutes or seconds before a node ends, with any effect.
ENDING_TAINTS: Final = frozenset(
    [
        "ToBeDeletedByClusterAutoscaler",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "node.cloudprovider.kubernetes.io/shutdown",
        "node.kubernetes.io/out-of-service",
    ]
)
# Kubernetes' own conditions, such as not-ready and disk-pressure: they may pass, and leases and the kubelet decide about them.
_CONDITION: Final = "node.kubernetes.io/"


def ending_taint(node: KubernetesNode, template: Mapping[str, Any]) -> Taint | None:
    """Return the taint by which Kubernetes ends pods with this template on the node; None without one."""
    for taint in node.taints:
        evicts = taint.effect == "NoExecute" and not taint.key.startswith(_CONDITION)
        if (evicts or taint.key in ENDING_TAINTS) and not tolerates(tolerations_of(template), taint):
            return taint
    return None


def closing_taint(node: KubernetesNode, template: Mapping[str, Any]) -> Taint | None:
    """Return a taint because of which no further pod with this template may start on the node; None without one."""
    for taint in node.taints:
        if not taint.key.startswith(_CONDITION) and not tolerates(tolerations_of(template), taint):
            return taint
    return ending_taint(node, template)


def reclaim(
    order: AttemptPods, pods: Sequence[PodState], nodes: Mapping[str, KubernetesNode], template: Mapping[str, Any]
) -> AttemptReclaimed | None:
    """Return that Kubernetes takes back a part of a started attempt; None if it does not.

    The ranks of all its nodes are stopped together, so that they save. Kubernetes itself would stop those of one pod only.
    """
    attempt = order.attempt
    if order.deleted or attempt.state not in (AttemptState.STARTING, AttemptState.RUNNING):
        return None
    why = ""
    for pod in pods:
        node = nodes.get(pod.node)
        taint = None if node is None else ending_taint(node, template)
        if pod.deleting:
            why = f"pod {pod.name} is being deleted in Kubernetes"
        elif taint is not None:
            why = f"{pod.node} has the taint {taint.key}:{taint.effect}, which ends its pods"
    return AttemptReclaimed(job_id=attempt.job_id, epoch=attempt.epoch, why=why) if why else None
