"""Build the objects that the engine creates: pods, the ConfigMap that owns them, and Secrets. Pure; the engine sends them.

Tokens and certificates are in Secrets only: everyone who may read pods reads their specifications.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.engines.kubernetes.device_claims import claim_devices, claim_templates
from phalanx.engines.kubernetes.options import GPU_RESOURCE_DEFAULT
from phalanx.engines.kubernetes.own_images import bring_supervisor
from phalanx.engines.kubernetes.pod_template import CONTAINER, with_template
from phalanx.wire.seat import SEAT_VARIABLE

LABEL: Final = "phalanx"  # prefix of labels and annotations
HEAD_LABEL: Final = f"{LABEL}/head"
JOB_LABEL: Final = f"{LABEL}/job"
EPOCH_LABEL: Final = f"{LABEL}/epoch"
RANK_LABEL: Final = f"{LABEL}/node-rank"
SEAT_KEY: Final = "seat"
SEAT_COMMAND: Final = ("python3", "-P", "-m", "phalanx.app.seat_supervisor")
END_MARGIN_S: Final = 20.0  # beyond the job's own grace, for the last lines and files
DEADLINE_MARGIN_S: Final = 120.0  # beyond the job's time limit and grace, in case no head enforces ours
LIFE_MAX_S: Final = 30 * 86_400  # of a pod whose job has no time limit: it ends some day, also if no head comes back
USER: Final = 1000  # of a container, as the `restricted` profile wants: any but root
_NAME_MAX: Final = 60
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]+")
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """How this head uses its namespace.

    Attributes:
        tag: of this head; objects with another tag are not ours.
        image: of pods; with Phalanx, unless `supervisor_image` brings it.
        supervisor_image: with Phalanx, for pods whose image has none; empty if it has.
        node_wait_s: pods may wait so long for a node that an autoscaler starts, in seconds; 0 if there is no autoscaler.
        gpu_resource: what stands for a GPU.
        template: what all pods get besides, as `pod_template` reads it.
        head_url: where supervisors reach the head.
        ca_pem: the certificate of its CA; empty for plain HTTP on loopback.
    """

    tag: str
    namespace: str
    image: str
    head_url: str
    ca_pem: str = field(default="", repr=False)
    gpu_resource: str = GPU_RESOURCE_DEFAULT
    template: Mapping[str, Any] = field(default_factory=dict)
    supervisor_image: str = ""
    node_wait_s: float = 0.0

    @property
    def selector(self) -> str:
        """Label selector of this head's objects."""
        return f"{HEAD_LABEL}={self.tag}"

    @property
    def owner_name(self) -> str:
        """Name of the ConfigMap that owns all others."""
        return f"phalanx-{self.tag}"


def attempt_name(settings: PodSettings, job_id: JobId, epoch: Epoch) -> str:
    """Return the name of an attempt's Secret, and the beginning of the names of its pods."""
    return f"phalanx-{settings.tag}-j{str(job_id).replace('_', 'a')}-e{epoch}"


def pod_name(settings: PodSettings, job_id: JobId, epoch: Epoch, node_rank: int) -> str:
    """Return the name of one node's pod. It follows from the attempt, so that a repeated create makes no second pod."""
    return f"{attempt_name(settings, job_id, epoch)}-n{node_rank}"


def owner_config_map(settings: PodSettings) -> Manifest:
    """Return the ConfigMap that owns all objects of this head: deleting it deletes them."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_metadata(settings, settings.owner_name, {}),
        "data": {
            "head": settings.head_url,
            "about": "Owns all objects of a Phalanx head. Deleting it ends its jobs here.",
        },
    }


def owner_reference(name: str, uid: str) -> Manifest:
    """Return the reference to the ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}


def seat_secret(settings: PodSettings, owner: Manifest, attempt: Attempt, assignment: str) -> Manifest:
    """Return the Secret of an attempt: the order for its supervisors, with the key of their tokens and the head's certificate."""
    name = attempt_name(settings, attempt.job_id, attempt.epoch)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**object_metadata(settings, name, _attempt_labels(attempt)), "ownerReferences": [owner]},
        "type": "Opaque",
        "stringData": {SEAT_KEY: assignment},
    }


def seat_pod(
    settings: PodSettings, owner: Manifest, job: Job, attempt: Attempt, grant: NodeGrant, *, pinned: bool
) -> Manifest:
    """Return the pod of one node of an attempt.

    Args:
        settings: of the head.
        owner: from `owner_reference`.
        job: whose attempt it is.
        attempt: placed.
        grant: of this node.
        pinned: only this node of the cluster may run it; else the node is a place for any.
    """
    name = pod_name(settings, job.id, attempt.epoch, grant.node_rank)
    secret = attempt_name(settings, job.id, attempt.epoch)
    spec = job.spec
    limit_s = LIFE_MAX_S if spec.time_limit_s is None else spec.time_limit_s + spec.grace_s + DEADLINE_MARGIN_S
    about = object_metadata(settings, name, {**_attempt_labels(attempt), RANK_LABEL: str(grant.node_rank)})
    shown = _UNPRINTABLE.sub(" ", job.name)[:_NAME_MAX]
    about |= {"annotations": {f"{LABEL}/job-name": shown, f"{LABEL}/user": str(job.user)}, "ownerReferences": [owner]}
    pod = supervisor_pod(
        settings,
        about,
        command=SEAT_COMMAND,
        env=[
            {"name": SEAT_VARIABLE, "valueFrom": {"secretKeyRef": {"name": secret, "key": SEAT_KEY}}},
            {"name": "PHALANX_NODE_ID", "value": str(grant.node_id)},
            {"name": "PHALANX_SEAT_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PHALANX_NODE_STOP_GRACE_S", "value": str(int(spec.grace_s))},
        ],
        resources=_resources(settings, grant),
        grace_s=spec.grace_s + END_MARGIN_S,
    )
    pod["spec"]["activeDeadlineSeconds"] = max(1, int(limit_s))
    if grant.devices and (templates := claim_templates(settings.gpu_resource)):
        claim_devices(pod, templates, len(grant.devices))
    made = with_template(pod, settings.template)
    if pinned:
        _pin(made["spec"], str(grant.node_id))
    return made


def supervisor_pod(
    settings: PodSettings,
    about: Manifest,
    *,
    command: Sequence[str],
    env: Sequence[Manifest],
    resources: Manifest,
    grace_s: float,
) -> Manifest:
    """Return a pod with a supervisor, before the operator's template is applied. It passes the `restricted` profile.

    Args:
        settings: of the head.
        about: its metadata.
        command: of the supervisor's container.
        env: its variables.
        resources: that it requests.
        grace_s: between SIGTERM and SIGKILL.
    """
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": list(command),
        "env": [
            *env,
            {"name": "HOME", "value": "/tmp"},  # noqa: S108  # the account has none, and this volume is its own
        ],
        "resources": resources,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the reason of a supervisor that cannot start
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  # as above
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  # 64 MiB without it, too little for loaders
        ],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": about,
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": int(grace_s),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "scratch", "emptyDir": {}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }
    return bring_supervisor(pod, settings.supervisor_image) if settings.supervisor_image else pod


def _resources(settings: PodSettings, grant: NodeGrant) -> Manifest:
    """Ask for what the job asked for. A limit of memory too: a rank beyond it shall not take a neighbour with it."""
    limits, requests = {}, {}
    if grant.devices and not claim_templates(settings.gpu_resource):
        limits[settings.gpu_resource] = requests[settings.gpu_resource] = str(len(grant.devices))
    if grant.cpus:
        requests["cpu"] = str(grant.cpus)
    if grant.memory_bytes:
        limits["memory"] = requests["memory"] = str(grant.memory_bytes)
    return {"limits": limits, "requests": requests}


def _pin(spec: Manifest, node: str) -> None:
    """Let only this node run the pod, beside what the template demands; the scheduler still counts what is free there."""
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    field_of_node = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", []), field_of_node]} for term in terms
    ]


def _attempt_labels(attempt: Attempt) -> dict[str, str]:
    return {JOB_LABEL: str(attempt.job_id), EPOCH_LABEL: str(attempt.epoch)}


def object_metadata(settings: PodSettings, name: str, labels: Mapping[str, str]) -> Manifest:
    """Return the metadata of an object of this head."""
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": {"app.kubernetes.io/name": "phalanx", HEAD_LABEL: settings.tag, **labels},
    }
