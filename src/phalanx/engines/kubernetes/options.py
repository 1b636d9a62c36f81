"""The name of the engine, and its options."""

from __future__ import annotations

from typing import Final

from phalanx.ports.engine import EngineOption

ENGINE_NAME: Final = "kubernetes"
CONTEXT: Final = "context"
NAMESPACE: Final = "namespace"
IMAGE: Final = "kubernetes-image"
SUPERVISOR_IMAGE: Final = "kubernetes-supervisor-image"
TEMPLATE: Final = "kubernetes-template"
GPU_RESOURCE: Final = "kubernetes-gpu-resource"
SHAPE: Final = "kubernetes-nodes"
RESIDENT: Final = "kubernetes-resident"
IDLE: Final = "kubernetes-resident-idle"
QUEUE: Final = "kubernetes-queue"
NODE_WAIT: Final = "kubernetes-node-wait"
GPU_RESOURCE_DEFAULT: Final = "nvidia.com/gpu"
LISTED: Final = "listed"
OPTIONS: Final = (
    EngineOption(
        name=CONTEXT, metavar="NAME", help="Context of the kubeconfig; current: the current one.", reset="current"
    ),
    EngineOption(
        name=NAMESPACE, metavar="NAME", help="Kubernetes namespace of all objects. Default: that of the context."
    ),
    EngineOption(name=IMAGE, metavar="IMAGE", help="Image of pods, with Python 3.11 and Phalanx."),
    EngineOption(
        name=SUPERVISOR_IMAGE,
        metavar="IMAGE",
        help="Image with Phalanx that brings the supervisor into pods whose own image has only Python 3.11; none: it has Phalanx.",
        reset="none",
    ),
    EngineOption(
        name=TEMPLATE,
        metavar="FILE",
        help="YAML of a pod whose settings all pods get, such as tolerations and volumes; none: no such file.",
        reset="none",
    ),
    EngineOption(
        name=GPU_RESOURCE,
        metavar="NAME",
        help=f"Resource that stands for a GPU, or claims:NAME.  [{GPU_RESOURCE_DEFAULT}]",
    ),
    EngineOption(
        name=SHAPE,
        metavar="NxG",
        help="N nodes of G GPUs, where the cluster's nodes may not be listed; listed: list them.",
        reset=LISTED,
    ),
    EngineOption(
        name=RESIDENT,
        metavar="[MIN-]NxG",
        help="Run all jobs in at most N pods of G GPUs that stay between jobs; none: a pod for each node and attempt.",
        reset="none",
    ),
    EngineOption(
        name=IDLE,
        metavar="TIME",
        help="Delete resident pods above MIN that had no job for so long.  [10m]",
    ),
    EngineOption(
        name=QUEUE,
        metavar="NAME",
        help="Queue of Kueue for all jobs, or QUEUE=NAME,... by queue of Phalanx; none: no Kueue.",
        reset="none",
    ),
    EngineOption(
        name=NODE_WAIT,
        metavar="TIME",
        help="Let pods without a node wait for so long, for an autoscaler to start one; none: 10 s, resident pods 60 s.",
        reset="none",
    ),
)
