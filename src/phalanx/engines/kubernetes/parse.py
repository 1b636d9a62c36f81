"""Read what Kubernetes says of pods and nodes into small records. Pure.

An object that lacks what it should have is read as far as it goes: other programs write pods too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.ids import Epoch, JobId
from phalanx.engines.kubernetes.pod_template import CONTAINER
from phalanx.engines.kubernetes.render import EPOCH_LABEL, HEAD_LABEL, JOB_LABEL, RANK_LABEL

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,3}))?([numkKMGTPE]i?)?")
_UNITS: Final = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "K": 1e3,
    **{letter: 10.0**power for letter, power in (("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18))},
    **{f"{letter}i": 2.0 ** (10 * (power + 1)) for power, letter in enumerate("KMGTPE")},
}
INDEX_ANNOTATION: Final = "batch.kubernetes.io/job-completion-index"  # of the pods of a Job
_TEXT_MAX: Final = 300
_NO_JOB: Final = JobId("")
_NO_EPOCH: Final = Epoch(0)
_ENDED: Final = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """A pod.

    Attributes:
        owner_tag: of the head whose pod it is; empty for pods of others.
        job_id, epoch, node_rank: of an attempt's pod.
        node: where it was placed; empty before.
        gpus: how many it holds there.
        deleting: it was asked to end.
        unschedulable: why it is not placed; empty if it is, or if that is not known yet.
        waiting: why its container does not run, and the text to it; empty otherwise.
        exit_code: of its container; None while it has not ended, or if its end was not seen.
        reason: why the pod as a whole ended, such as Evicted; empty for an ordinary end.
    """

    name: str
    namespace: str
    uid: str
    phase: str
    owner_tag: str = ""
    job_id: JobId = _NO_JOB
    epoch: Epoch = _NO_EPOCH
    node_rank: int = 0
    node: str = ""
    gpus: int = 0
    deleting: bool = False
    unschedulable: str = ""
    waiting: str = ""
    waiting_text: str = ""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether Kubernetes counts it as ended: it holds no devices any more."""
        return self.phase in _ENDED

    @property
    def why_ended(self) -> str:
        """How it ended, in words."""
        parts = [f"ended as {self.reason or self.phase}"]
        if self.exit_code:
            parts.append(f"with code {self.exit_code}")
        if self.message:
            parts.append(f"({self.message})")
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesNode:
    """A node of the cluster. `not_ready`: why it is not; empty if it is ready. `memory_per_gpu_bytes`: 0 if unknown."""

    name: str
    not_ready: str
    cordoned: bool
    taints: tuple[Taint, ...]
    labels: Mapping[str, str]
    cpus: int
    memory_bytes: int
    gpus: int
    model: str
    memory_per_gpu_bytes: int
    address: str
    hostname: str


def parse_pod(item: Mapping[str, Any], gpu_resource: str) -> PodState:
    """Read a pod."""
    about, spec, status = item.get("metadata") or {}, item.get("spec") or {}, item.get("status") or {}
    labels = about.get("labels") or {}
    state = _container_state(status)
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    scheduled = condition(status, "PodScheduled")
    epoch, rank = str(labels.get(EPOCH_LABEL) or ""), str(labels.get(RANK_LABEL) or "")
    rank = rank or str((about.get("annotations") or {}).get(INDEX_ANNOTATION) or "")
    return PodState(
        name=str(about.get("name") or ""),
        namespace=str(about.get("namespace") or ""),
        uid=str(about.get("uid") or ""),
        phase=str(status.get("phase") or "Pending"),
        owner_tag=str(labels.get(HEAD_LABEL) or ""),
        job_id=JobId(str(labels.get(JOB_LABEL) or "")),
        epoch=Epoch(int(epoch) if epoch.isdecimal() else 0),
        node_rank=int(rank) if rank.isdecimal() else 0,
        node=str(spec.get("nodeName") or ""),
        gpus=_requested(spec, gpu_resource),
        deleting=bool(about.get("deletionTimestamp")),
        unschedulable=one_line(scheduled.get("message") or scheduled.get("reason"))
        if scheduled.get("status") == "False"
        else "",
        waiting=str(waiting.get("reason") or ""),
        waiting_text=one_line(waiting.get("message")),
        exit_code=_whole(ended.get("exitCode")) if ended else None,
        reason=str(status.get("reason") or (ended.get("reason") if ended.get("reason") != "Error" else "") or ""),
        message=one_line(status.get("message") or ended.get("message")),
    )


def parse_node(item: Mapping[str, Any], gpu_resource: str) -> KubernetesNode:
    """Read a node."""
    about, spec, status = item.get("metadata") or {}, item.get("spec") or {}, item.get("status") or {}
    labels = {str(key): str(value) for key, value in (about.get("labels") or {}).items()}
    amounts = status.get("allocatable") or {}
    ready = condition(status, "Ready")
    why = "" if ready.get("status") == "True" else one_line(ready.get("message") or ready.get("reason")) or "not ready"
    product, memory = labels.get("nvidia.com/gpu.product", ""), labels.get("nvidia.com/gpu.memory", "")
    addresses = {str(one.get("type")): str(one.get("address")) for one in status.get("addresses") or ()}
    name = str(about.get("name") or "")
    return KubernetesNode(
        name=name,
        not_ready=why,
        cordoned=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(key=str(one.get("key") or ""), value=str(one.get("value") or ""), effect=str(one.get("effect") or ""))
            for one in spec.get("taints") or ()
        ),
        labels=labels,
        cpus=int(parse_quantity(amounts.get("cpu"))),
        memory_bytes=int(parse_quantity(amounts.get("memory"))),
        gpus=int(parse_quantity(amounts.get(gpu_resource))),
        model=product.replace("-", " ") or "gpu",  # GPU Feature Discovery writes NVML's name with hyphens
        memory_per_gpu_bytes=int(memory) << 20 if memory.isdecimal() else 0,
        address=addresses.get("InternalIP") or addresses.get("ExternalIP") or name,
        hostname=addresses.get("Hostname") or name,
    )


def parse_quantity(text: object) -> float:
    """Read an amount such as `64Gi`, `1500m` or `2e3`; 0 for anything else."""
    match = _QUANTITY.fullmatch(str(text).strip()) if text is not None else None
    if match is None:
        return 0.0
    return float(match[1]) * 10.0 ** int(match[2] or 0) * _UNITS.get(match[3] or "", 1.0)


def tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Taint) -> bool:
    """Whether one of a pod's tolerations covers the taint; one that only prefers another node needs none."""
    return taint.effect not in {"NoSchedule", "NoExecute"} or any(
        one.get("effect") in {None, "", taint.effect}
        and (
            one.get("key") in {None, "", taint.key}
            if one.get("operator") == "Exists"
            else (one.get("key"), one.get("value") or "") == (taint.key, taint.value)
        )
        for one in tolerations
    )


def _container_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = status.get("containerStatuses") or ()
    first: Mapping[str, Any] = next(iter(containers), {})
    found: Mapping[str, Any] = next((one for one in containers if one.get("name") == CONTAINER), first)
    state: Mapping[str, Any] = found.get("state") or {}
    if state.get("running") or state.get("terminated"):
        return state
    # While an init container fails, the container itself only waits for it.
    stuck = [(one.get("state") or {}) for one in status.get("initContainerStatuses") or ()]
    failing = next(
        (
            one
            for one in stuck
            if (one.get("waiting") or {}).get("reason") not in {None, "PodInitializing"}
            or (one.get("terminated") or {}).get("exitCode")
        ),
        None,
    )
    return failing or state


def _requested(spec: Mapping[str, Any], resource: str) -> int:
    """How much of a resource a pod holds, as the scheduler counts: init containers run before the others, except those that stay."""
    together = sum(_amount(one, resource) for one in spec.get("containers") or ())
    most = 0
    for one in spec.get("initContainers") or ():
        amount = _amount(one, resource)
        if one.get("restartPolicy") == "Always":
            together += amount
        most = max(most, amount)
    return max(together, most)


def _amount(container: Mapping[str, Any], resource: str) -> int:
    resources = container.get("resources") or {}
    return int(
        parse_quantity((resources.get("limits") or {}).get(resource) or (resources.get("requests") or {}).get(resource))
    )


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of that type in a status; empty if it has none."""
    return next((one for one in status.get("conditions") or () if one.get("type") == kind), {})


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def one_line(text: object) -> str:
    """The text in one line, as long as a message may have."""
    return " ".join(str(text or "").split())[:_TEXT_MAX]
