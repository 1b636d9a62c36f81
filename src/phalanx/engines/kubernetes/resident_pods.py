"""Resident pods: nodes of a node pool, each a pod with a supervisor that stays between attempts. The provider of that pool.

The pool (`core.fleet.node_pool`) decides how many there are: it orders them for waiting jobs, and releases those that idle. This module
creates and deletes the pods, and reports those that end, that Kubernetes deletes, or whose node may no longer run them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import ChargedMachine, NodeTemplate
from phalanx.core.ids import NodeId
from phalanx.core.units import format_duration
from phalanx.engines.kubernetes import inventory, render
from phalanx.engines.kubernetes.attempt_pods import (
    IMAGE_LIMIT_S,
    MISSING_S,
    NO_CONTAINER,
    NO_IMAGE,
    START_LIMIT_MAX_S,
    START_LIMIT_S,
)
from phalanx.engines.kubernetes.autoscaler_notes import AutoscalerNotes, notes_in_words
from phalanx.engines.kubernetes.cluster_view import ObjectTable
from phalanx.engines.kubernetes.departures import closing_taint
from phalanx.engines.kubernetes.errors import KubernetesError, KubernetesUnreachable
from phalanx.engines.kubernetes.options import ENGINE_NAME
from phalanx.engines.kubernetes.parse import KubernetesNode, PodState, parse_node, parse_pod
from phalanx.engines.kubernetes.pod_requests import apply_owner, create_pod, explain_refusal
from phalanx.engines.kubernetes.pod_template import CONTAINER, with_template
from phalanx.engines.kubernetes.render import Manifest, PodSettings
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath
from phalanx.engines.kubernetes.watch import ObjectWatch
from phalanx.engines.resident_nodes import EngineProvider, ReportedNode
from phalanx.engines.resident_option import GPUS_MAX
from phalanx.ports.provider import (
    CallUnanswered,
    DelayedNode,
    EndedOrder,
    LeavingNode,
    LostNode,
    NodeOrder,
    PoolTerms,
)
from phalanx.wire.resident import (
    ADDRESS_VARIABLE,
    GRACE_VARIABLE,
    RESIDENT_VARIABLE,
    ResidentAssignment,
    encode_resident,
)

RESIDENT_LABEL: Final = f"{render.LABEL}/resident"
COMMAND: Final = ("python3", "-P", "-m", "phalanx.app.resident_supervisor")
KEY: Final = "resident"
GRACE_S: Final = 90  # from Kubernetes' SIGTERM to its SIGKILL: the jobs of the pod are saved and moved
STOP_GRACE_S: Final = 15  # of a pod without jobs that the head stops
STOP_WAIT_S: Final = 2.0  # in one call for a pod to be gone; the head calls again
UNREACHABLE_POD_S: Final = (
    60.0  # a deleted pod that no kubelet ends counts as stopped: the leases of its ranks are over
)
NOT_READY_S: Final = (
    60.0  # a node that is not ready for longer is drained; shorter, as after an outage of the API server, leases decide
)
HEAD_GONE_S: Final = 3600.0
OWNER_KNOWN_S: Final = 5.0
_TEMPLATE: Final = re.compile(r"[0-9]{1,2}")
_NAME_MAX: Final = 30
_log = logging.getLogger("phalanx.engines.kubernetes")


@dataclass(slots=True)
class ResidentPod(ReportedNode):
    """An order and its pod. `created_s`: monotonic seconds; `seen`: the API server has listed the pod; `silent_s`: since when its node is not ready
    (monotonic), None while it is.
    """

    order: NodeOrder
    name: str
    created_s: float
    seen: bool = False
    silent_s: float | None = None


@dataclass(slots=True, kw_only=True)
class ResidentPods(EngineProvider):
    """The provider of one head.

    Args:
        api: of the cluster.
        settings: how this head uses its namespace.
        lists_nodes: nodes may be listed and watched.
        token_of: makes a node's token.
        head_gone_s: a pod ends when the head has not answered for so long.
        owner_stays: the ConfigMap that owns all objects is the engine's; else it goes with the last pod.
    """

    api: KubernetesApi
    settings: PodSettings
    lists_nodes: bool
    token_of: Callable[[NodeId], str]
    head_gone_s: float = HEAD_GONE_S
    owner_stays: bool = True
    _held: dict[NodeId, ResidentPod] = field(default_factory=dict)
    _pods: ObjectTable[PodState] = field(init=False)
    _nodes: ObjectTable[KubernetesNode] = field(init=False)
    _notes: AutoscalerNotes = field(init=False)
    _notes_asked: Future[object] | None = None
    _changed: threading.Event = field(default_factory=threading.Event)
    _failing: bool = False
    _owner: tuple[float, Manifest] | None = None
    _watches: list[ObjectWatch] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _deleting: set[str] = field(default_factory=set)
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "resident-pods"))

    def __post_init__(self) -> None:
        resource = self.settings.gpu_resource
        self._notes = AutoscalerNotes(api=self.api, namespace=self.settings.namespace)
        self._pods = ObjectTable(lambda item: parse_pod(item, resource), self._changed.set, self._note_answer)
        self._nodes = ObjectTable(lambda item: parse_node(item, resource), self._changed.set, self._note_answer)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Return what a pod with so many GPUs has, as far as that is known before it runs.

        Raises:
            BadRequest: the template is not a number of GPUs.
        """
        template = terms.template
        if not _TEMPLATE.fullmatch(template.strip()) or int(template) > GPUS_MAX:
            raise BadRequest(
                f"{template[:40]!r} is not a number of GPUs from 0 to {GPUS_MAX}", hint="8 is a pod of 8 GPUs"
            )
        gpus, node = int(template), self._typical_node(int(template))
        model, memory_bytes = ("gpu", 0) if node is None else (node.model, node.memory_per_gpu_bytes)
        return NodeTemplate(
            text=str(gpus),
            devices=tuple(
                Device(index=index, uuid="", model=model, memory_bytes=memory_bytes) for index in range(gpus)
            ),
            cpus=inventory.PLACE_CPUS if node is None else node.cpus,
            memory_bytes=inventory.PLACE_MEMORY_BYTES if node is None else node.memory_bytes,
        )

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Follow the pods of these orders. All others of this head are deleted once the server has listed them."""
        now_s = time.monotonic()
        for order in orders:
            name = pod_name(self.settings, order)
            self._held[order.node_id] = ResidentPod(order=order, name=name, created_s=now_s, seen=True, delay=None)
        labels = f"{self.settings.selector},{RESIDENT_LABEL}=true"
        watched: list[tuple[ResourcePath, Any, str]] = [(self._path("pods"), self._pods, labels)]
        if self.lists_nodes:
            watched.append((ResourcePath("nodes"), self._nodes, ""))
        for path, table, selector in watched:
            watch = ObjectWatch(api=self.api, path=path, handler=table, labels=selector)
            thread = threading.Thread(target=watch.run, name=f"watch-resident-{path.plural}", daemon=True)
            self._watches.append(watch)
            self._threads.append(thread)
            thread.start()

    def start(self, order: NodeOrder) -> None:
        """Create the pod and its Secret.

        Raises:
            CallUnanswered: the server did not answer.
            OSError: the node's earlier pod still ends.
            PhalanxError: the server refuses the pod.
        """
        known = self._held.get(order.node_id)
        if known is not None and known.order.token != order.token:
            self.stop(known.order)
        name = pod_name(self.settings, order)
        try:
            owner = self._owner_reference()
            secret = resident_secret(self.settings, owner, order, self._assignment(order))
            self.api.apply(self._path("secrets"), name, secret)
        except KubernetesUnreachable as error:
            raise CallUnanswered(error.message) from error
        refusal = create_pod(self.api, self._path("pods"), resident_pod(self.settings, owner, order))
        if isinstance(refusal, KubernetesUnreachable):
            raise CallUnanswered(refusal.message)
        if refusal is not None:
            raise BadRequest(explain_refusal(refusal)[0])
        self._held[order.node_id] = ResidentPod(order=order, name=name, created_s=time.monotonic())
        _log.info("node %s is pod %s in namespace %s", order.node_id, name, self.settings.namespace)

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Delete the pod and its Secret, and wait until it has ended.

        Raises:
            OSError: it still ends.
            PhalanxError: the server refuses, or does not answer.
        """
        name = pod_name(self.settings, order)
        held = self._held.get(order.node_id)
        there = self.api.delete(self._path("pods"), name, grace_s=STOP_GRACE_S)
        self.api.delete(self._path("secrets"), name)
        until_s = time.monotonic() + STOP_WAIT_S
        while there and not self._is_gone(name, held):
            if time.monotonic() > until_s:
                raise OSError(f"pod {name} has not ended yet")
            self._changed.wait(0.1)
            self._changed.clear()
        if held is not None and held.order.token == order.token:
            del self._held[order.node_id]
        if not self._held:
            self._delete_owner(self.api)
        return ()

    def observe(self) -> Sequence[LostNode | LeavingNode | DelayedNode]:
        """Return the pods that ended, that Kubernetes deletes, whose node may not run them any more, or that wait for a new reason."""
        if self._failing or not self._pods.listed or (self.lists_nodes and not self._nodes.listed):
            return ()  # what is known is old: nothing is concluded from it
        pods, now_s = {pod.name: pod for pod in self._pods.current().values()}, time.monotonic()
        nodes = self._nodes.current() if self.lists_nodes else {}
        self._delete_strays(pods)
        found: list[LostNode | LeavingNode | DelayedNode] = []
        for held in self._held.values():
            pod = pods.get(held.name)
            held.seen = held.seen or pod is not None
            node = None if pod is None else nodes.get(pod.node)
            silent_s = now_s if held.silent_s is None else held.silent_s
            held.silent_s = silent_s if node is not None and node.not_ready else None
            note = self._note(held, pod, now_s)
            event: LostNode | LeavingNode | DelayedNode | None = judge(held, pod, node, self.settings, now_s, note)
            if event is None and pod is not None:
                why = delay_of(held, pod, self.settings, now_s, note)
                event = DelayedNode(node_id=held.order.node_id, token=held.order.token, why=why)
            if event is not None and held.is_news(event):
                found.append(event)
        return found

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Stop following; unless `keep_nodes`, delete the pods and their Secrets."""
        for watch in self._watches:
            watch.close()
        self._worker.shutdown(wait=False, cancel_futures=True)
        if not keep_nodes:
            api = KubernetesApi(self.api.access, answer_s=5.0, retry_for_s=5.0)
            for held in self._held.values():
                try:
                    api.delete(self._path("pods"), held.name, grace_s=STOP_GRACE_S)
                    api.delete(self._path("secrets"), held.name)
                except PhalanxError as error:
                    _log.warning("pod %s could not be deleted: %s", held.name, error)
            try:
                self._delete_owner(api)
            except PhalanxError as error:
                _log.warning("ConfigMap %s could not be deleted: %s", self.settings.owner_name, error)
        self.api.ended.set()
        return ()

    def _note(self, held: ResidentPod, pod: PodState | None, now_s: float) -> str:
        """Return what an autoscaler said of a pod without a node, where the head's rights are for waiting for one.

        Events are read by the worker, as the server may be slow to list them.
        """
        if not self.settings.node_wait_s or pod is None or pod.node or now_s - held.created_s < START_LIMIT_S:
            return ""
        if self._notes_asked is None or self._notes_asked.done():
            self._notes_asked = self._worker.submit(self._notes.read)
        return notes_in_words([held.name], self._notes.found)

    def _delete_owner(self, api: KubernetesApi) -> None:
        if not self.owner_stays:
            self._owner = None
            api.delete(self._path("configmaps"), self.settings.owner_name)

    def _typical_node(self, gpus: int) -> KubernetesNode | None:
        """Return a node that can run such a pod, of the most frequent model; None if no node can, or nodes cannot be listed."""
        if not self.lists_nodes:
            return None
        try:
            listed = [parse_node(item, self.settings.gpu_resource) for item in self.api.list(ResourcePath("nodes"))]
        except PhalanxError as error:
            _log.warning("Nodes could not be listed for a template: %s", error)
            return None
        fit = [one for one in listed if one.gpus >= gpus and inventory.offers_pods(one, self.settings.template)]
        models = [one.model for one in fit]
        return max(fit, key=lambda one: (models.count(one.model), one.name), default=None)

    def _assignment(self, order: NodeOrder) -> str:
        return encode_resident(
            ResidentAssignment(
                node_id=order.node_id,
                token=self.token_of(order.node_id),
                engine=ENGINE_NAME,
                head_url=self.settings.head_url,
                ca_pem=self.settings.ca_pem,
                devices=int(order.template),
                head_gone_s=self.head_gone_s,
            )
        )

    def _owner_reference(self) -> Manifest:
        now_s = time.monotonic()
        if self._owner is None or now_s - self._owner[0] > OWNER_KNOWN_S:
            self._owner = (now_s, apply_owner(self.api, self.settings))
        return self._owner[1]

    def _is_gone(self, name: str, held: ResidentPod | None) -> bool:
        if self._failing or not self._pods.listed:
            return False
        pod = next((one for one in self._pods.current().values() if one.name == name), None)
        if pod is None or (pod.ended and pod.exit_code is not None) or not pod.node:
            return True
        return held is not None and held.leaves and pod.deleting and self._is_abandoned(pod)

    def _is_abandoned(self, pod: PodState) -> bool:
        """Whether no kubelet will end the pod: its node is gone or silent for long."""
        node = self._nodes.current().get(pod.node) if self.lists_nodes else None
        return self.lists_nodes and (node is None or bool(node.not_ready))

    def _delete_strays(self, pods: Mapping[str, PodState]) -> None:
        """Delete the pods of lost orders, as after the restore of an older backup, or of a create that arrived late."""
        known = {held.name for held in self._held.values()}
        for name, pod in pods.items():
            if name not in known and not pod.deleting and name not in self._deleting:
                self._deleting.add(name)
                self._worker.submit(self._delete_stray, name)

    def _delete_stray(self, name: str) -> None:
        try:
            self.api.delete(self._path("pods"), name, grace_s=STOP_GRACE_S)
            self.api.delete(self._path("secrets"), name)
        except PhalanxError as error:
            _log.warning("pod %s could not be deleted: %s", name, error)
        finally:
            self._deleting.discard(name)

    def _note_answer(self, error: PhalanxError | None) -> None:
        self._failing = error is not None and not (isinstance(error, KubernetesError) and error.is_expired)
        self._changed.set()

    def _path(self, plural: str) -> ResourcePath:
        return ResourcePath(plural, namespace=self.settings.namespace)


def judge(
    held: ResidentPod,
    pod: PodState | None,
    node: KubernetesNode | None,
    settings: PodSettings,
    now_s: float,
    note: str = "",
) -> LostNode | LeavingNode | None:
    """Return what the state of its pod means for a node: it is lost, it leaves, or None for neither.

    Lost means that no process of it is left. Only the node itself can say so, by the exit code of the container. `note`: what an autoscaler
    said of the pod.
    """
    order, age_s = held.order, now_s - held.created_s

    def leaves(why: str) -> LeavingNode:
        return LeavingNode(node_id=order.node_id, token=order.token, why=why)

    def lost(why: str) -> LostNode:
        return LostNode(node_id=order.node_id, token=order.token, why=why)

    if pod is None:
        return leaves(f"pod {held.name} is no longer in Kubernetes") if age_s >= MISSING_S or held.seen else None
    if pod.ended:
        why = f"pod {held.name} {pod.why_ended}"
        return lost(why) if pod.exit_code is not None else leaves(why)
    if pod.deleting:
        return leaves(f"pod {held.name} is being deleted in Kubernetes")
    if not pod.node:
        limit_s = _node_limit_s(settings)
        if age_s < limit_s:
            return None
        why = _why_no_node(pod, note)
        return leaves(f"Kubernetes did not place pod {held.name} within {format_duration(limit_s)}: {why}")
    failed = pod.waiting in NO_CONTAINER or pod.waiting in NO_IMAGE
    if failed and age_s >= IMAGE_LIMIT_S:
        return leaves(f"pod {held.name} cannot start on {pod.node}: {pod.waiting}: {pod.waiting_text}")
    if node is not None:
        if held.silent_s is not None and now_s - held.silent_s >= NOT_READY_S:
            return leaves(f"{pod.node}: {node.not_ready}")
        if node.cordoned:
            return leaves(f"{pod.node} is unschedulable in Kubernetes (kubectl cordon)")
        taint = closing_taint(node, settings.template)
        if taint is not None:
            return leaves(f"{pod.node} has the taint {taint.key}:{taint.effect}, which our pods do not tolerate")
    return None


def delay_of(held: ResidentPod, pod: PodState, settings: PodSettings, now_s: float, note: str) -> str:
    """Return why a pod does not run yet, once that takes longer than usual; empty if nothing delays it. `note`: as in `judge`."""
    if not pod.node:
        if now_s - held.created_s < START_LIMIT_S:
            return ""
        limit = format_duration(_node_limit_s(settings))
        return f"no node in Kubernetes yet: {_why_no_node(pod, note)}; given up after {limit} without one"
    if pod.waiting in NO_CONTAINER or pod.waiting in NO_IMAGE:
        return f"the pod cannot start yet on {pod.node}: {pod.waiting}: {pod.waiting_text}"
    return ""


def _node_limit_s(settings: PodSettings) -> float:
    return max(START_LIMIT_MAX_S, settings.node_wait_s)


def _why_no_node(pod: PodState, note: str) -> str:
    return "; ".join(filter(None, (pod.unschedulable or "no scheduler has answered", note)))


def pod_name(settings: PodSettings, order: NodeOrder) -> str:
    """Return the name of a node's pod and Secret. It follows from the order, so that a repeated create makes no second pod."""
    shown = re.sub(r"[^a-z0-9]+", "-", order.node_id.lower())[:_NAME_MAX].strip("-")
    return f"phalanx-{settings.tag}-{shown}-{hashlib.sha256(order.token.encode()).hexdigest()[:8]}"


def resident_secret(settings: PodSettings, owner: Manifest, order: NodeOrder, assignment: str) -> Manifest:
    """Return the Secret of a pod: the token of its node, and the head's certificate."""
    about = render.object_metadata(settings, pod_name(settings, order), {RESIDENT_LABEL: "true"})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**about, "ownerReferences": [owner]},
        "type": "Opaque",
        "stringData": {KEY: assignment},
    }


def resident_pod(settings: PodSettings, owner: Manifest, order: NodeOrder) -> Manifest:
    """Return the pod of an order. It has no deadline: a long job may run in it. It ends by itself when its head is gone."""
    name, gpus = pod_name(settings, order), int(order.template)
    amounts = {settings.gpu_resource: str(gpus)} if gpus else {}
    about = render.object_metadata(settings, name, {RESIDENT_LABEL: "true"})
    about |= {"annotations": {f"{render.LABEL}/node": str(order.node_id)}, "ownerReferences": [owner]}
    pod = render.supervisor_pod(
        settings,
        about,
        command=COMMAND,
        env=[
            {"name": RESIDENT_VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": KEY}}},
            {"name": ADDRESS_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        resources={"limits": amounts, "requests": dict(amounts)},
        grace_s=GRACE_S,
    )
    made = with_template(pod, settings.template)
    grace = {"name": GRACE_VARIABLE, "value": str(made["spec"]["terminationGracePeriodSeconds"])}
    container = next(one for one in made["spec"]["containers"] if one["name"] == CONTAINER)
    container["env"] = [*container["env"], grace]
    return made
