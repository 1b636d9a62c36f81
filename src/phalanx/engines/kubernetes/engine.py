"""The Kubernetes engine: each attempt is one pod on each of its nodes, with a supervisor that calls home.

Watches keep a view of pods and nodes. One thread compares it with the attempts and acts; `follow` and `observe` only pass values to and from
it. `attempt_pods` and `inventory` hold its decisions, `render` and `parse` the objects.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.state.events import Event
from phalanx.core.state.reports import AttemptWithdrawn, NodeDied, NodeListed
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes import attempt_pods, departures, inventory, render
from phalanx.engines.kubernetes.attempt_pods import AttemptPods, PodsPhase
from phalanx.engines.kubernetes.autoscaler_notes import AutoscalerNotes
from phalanx.engines.kubernetes.cluster_view import ObjectTable
from phalanx.engines.kubernetes.errors import KubernetesError
from phalanx.engines.kubernetes.kueue import uneven_parts
from phalanx.engines.kubernetes.kueue_jobs import KueueJobs
from phalanx.engines.kubernetes.options import ENGINE_NAME
from phalanx.engines.kubernetes.parse import KubernetesNode, PodState, parse_node, parse_pod
from phalanx.engines.kubernetes.pod_requests import apply_owner, create_pod, explain_refusal
from phalanx.engines.kubernetes.render import PodSettings
from phalanx.engines.kubernetes.rest import KubernetesApi, ResourcePath
from phalanx.engines.kubernetes.watch import ObjectWatch
from phalanx.engines.observations import Observations
from phalanx.ports.engine import Admission, Discovery
from phalanx.wire.seat import SeatAssignment, SeatNode, encode_assignment

LOOK_BUSY_S: Final = 0.5  # between looks while pods of ours start or end: their time-outs are checked then
LOOK_S: Final = 5.0  # between looks otherwise; a change of a pod or a node is looked at once
FIRST_ANSWER_S: Final = 2.0  # for the server to answer a starting head: its supervisors wait
SILENT_S: Final = 5.0  # without an answer, until no new jobs are placed
CONTENDED_S: Final = 30.0  # a node that others got counts as taken for this long
PARALLEL: Final = 8  # requests at once for the pods of a gang
CLOSE_S: Final = 20.0
_Key = tuple[JobId, Epoch]
_log = logging.getLogger("phalanx.engines.kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterScope:
    """How much of the cluster may be read, and what stands for its nodes.

    Attributes:
        lists_nodes: nodes may be listed.
        reads_all_pods: pods of all namespaces may be listed.
        places: number of declared places for pods, if nodes are not listed.
        gpus_per_place: of each.
        queues: Kueue's queue by queue of Phalanx, as `kueue.parse_queues` returns; empty: Kueue is not used.
        workload_version: of Kueue's Workloads; empty: they may not be read.
    """

    lists_nodes: bool
    reads_all_pods: bool = False
    places: int = 0
    gpus_per_place: int = 0
    queues: Mapping[str, str] = field(default_factory=dict)
    workload_version: str = ""


@dataclass(slots=True, kw_only=True)
class KubernetesEngine:
    """Runs attempts as pods.

    Args:
        api: of the cluster.
        settings: how this head uses its namespace.
        scope: what may be read.
        key_of: makes an attempt's key for its supervisors.
    """

    api: KubernetesApi
    settings: PodSettings
    scope: ClusterScope
    key_of: Callable[[JobId, Epoch], str]
    _updates: queue.SimpleQueue[tuple[Job, Attempt]] = field(default_factory=queue.SimpleQueue)
    _events: Observations[Event] = field(default_factory=Observations)
    _orders: dict[_Key, AttemptPods] = field(default_factory=dict)
    _deletions: dict[_Key, tuple[tuple[str, ...], int | None]] = field(default_factory=dict)
    _reported: dict[NodeId, Node | None] = field(default_factory=dict)
    _reclaimed: set[_Key] = field(default_factory=set)
    _contended: dict[NodeId, tuple[float, str]] = field(default_factory=dict)
    _failing_since_s: float | None = None
    _failure: str = ""
    _unreachable: bool = False
    _listed: bool = False
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _watches: list[ObjectWatch] = field(default_factory=list)
    _workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PARALLEL, thread_name_prefix="kubernetes-request")
    )
    _pods: ObjectTable[PodState] = field(init=False)
    _nodes: ObjectTable[KubernetesNode] = field(init=False)
    _kueue: KueueJobs | None = None
    _notes: AutoscalerNotes = field(init=False)

    def __post_init__(self) -> None:
        resource = self.settings.gpu_resource
        self._pods = ObjectTable(lambda item: parse_pod(item, resource), self._wake.set, self._note_answer)
        self._nodes = ObjectTable(lambda item: parse_node(item, resource), self._wake.set, self._note_answer)
        self._notes = AutoscalerNotes(api=self.api, namespace=self.settings.namespace)
        if self.scope.queues:
            self._kueue = KueueJobs(
                api=self.api,
                settings=self.settings,
                queues=self.scope.queues,
                workload_version=self.scope.workload_version,
                changed_hook=self._wake.set,
                answered_hook=self._note_answer,
            )

    @property
    def name(self) -> str:
        """The engine's name."""
        return ENGINE_NAME

    def discover(self, known: Sequence[Node], live: Sequence[tuple[Job, Attempt]]) -> Discovery:
        """Take over the pods of live attempts. Those of ended attempts are deleted once the server has listed them."""
        # Nodes with a supervisor of their own, such as resident pods, belong to node pools.
        elsewhere = {node.id for node in known if node.engine != ENGINE_NAME or not node.per_attempt}
        now_s = time.monotonic()
        ours = [node for node in known if node.id not in elsewhere]
        self._reported = {node.id: node if node.state is NodeState.UP else None for node in ours}
        for job, attempt in live:
            if elsewhere.isdisjoint(grant.node_id for grant in attempt.allocation.grants):
                self._orders[job.id, attempt.epoch] = self._order(attempt, now_s)
        if self.scope.lists_nodes or self.scope.places:
            return Discovery()  # nodes come with the first list
        self._reported.clear()
        why = "jobs run in resident pods now"
        return Discovery(
            deaths=[NodeDied(node_id=node.id, supervisor_id=None, why=why, confirmed=False) for node in ours],
            retired=[node.id for node in ours],
        )

    def admit(self, node_id: NodeId, address: str, hostname: str) -> Admission | None:
        """Admit no server: nodes come and go in Kubernetes."""

    def open(self) -> None:
        """Start to follow the cluster."""
        if self._threads:
            return
        namespace = "" if self.scope.reads_all_pods else self.settings.namespace
        watched: list[tuple[ResourcePath, Any]] = [(ResourcePath("pods", namespace=namespace), self._pods)]
        if self.scope.lists_nodes:
            watched.append((ResourcePath("nodes"), self._nodes))
        self._watches = [ObjectWatch(api=self.api, path=path, handler=table) for path, table in watched]
        if self._kueue is not None:
            self._watches += self._kueue.watches()
        runs = [("kubernetes-engine", self._run), *((f"watch-{one.path.plural}", one.run) for one in self._watches)]
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs]
        for thread in self._threads:
            thread.start()

    def close(self, *, keep_nodes: bool) -> None:
        """Stop following; unless `keep_nodes`, delete all objects of this head."""
        until_s = time.monotonic() + CLOSE_S
        self._ended.set()
        self._wake.set()
        for watch in self._watches:
            watch.close()
        self.api.ended.set()
        for thread in self._threads:
            thread.join(timeout=max(0.1, until_s - time.monotonic()))
        self._workers.shutdown(wait=False, cancel_futures=True)
        if keep_nodes:
            return
        try:
            self._delete_everything(replace_ended(self.api))
        except PhalanxError as error:  # the next head of this state folder finds them by their label
            _log.warning(
                "Could not delete the objects of this head in namespace %s: %s", self.settings.namespace, error
            )

    def expected_nodes(self) -> list[NodeId] | None:
        """Return no node, as all come by `observe`; None before the cluster's first answer."""
        return [] if self._listed else None

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Queue an attempt whose newest record is durable."""
        ours = all(grant.node_id in self._reported for grant in attempt.allocation.grants)
        if ours or (job.id, attempt.epoch) in self._orders:
            self._updates.put((job, attempt))
            self._wake.set()

    def observe(self) -> list[Event]:
        """Return the events since the last call."""
        return self._events.take()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each event."""
        self._events.listen(wake)

    # ---- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            busy = any(self._is_changing(key, order) for key, order in self._orders.items()) or bool(self._deletions)
            self._wake.wait(LOOK_BUSY_S if busy else LOOK_S)
            self._wake.clear()
            if self._ended.is_set():
                return
            try:
                self._look()
            except PhalanxError as error:
                _log.warning("%s", error)

    def _look(self) -> None:
        self._check_reachable()
        if self._unreachable or not self._pods.listed or (self.scope.lists_nodes and not self._nodes.listed):
            return  # what is known is old: nothing is concluded from it
        if self._kueue is not None and not self._kueue.listed:
            return
        self._drain_updates()
        # Nodes come first, so that requeued jobs are not placed on nodes that others took.
        pods = self._pods.current()
        reports = self._evaluate_orders(pods)
        self._events.extend(self._node_events(pods))
        self._events.extend(reports)
        self._listed = True
        self._delete_strays(pods)
        self._delete_pods()

    def _is_changing(self, key: _Key, order: AttemptPods) -> bool:
        if self._kueue is not None and self._kueue.waits(key):
            return False
        if self._kueue is not None and self._kueue.is_stopping(key):
            return True
        return order.phase is PodsPhase.WAITING or order.attempt_ended_s is not None or bool(order.ended_s)

    def _drain_updates(self) -> None:
        while not self._updates.empty():
            job, attempt = self._updates.get()
            key = (job.id, attempt.epoch)
            order = self._orders.get(key)
            if order is not None:
                over = not attempt.holds_allocation and order.attempt_ended_s is None
                ended_s = time.monotonic() if over else order.attempt_ended_s
                self._orders[key] = replace(order, attempt=attempt, attempt_ended_s=ended_s)
            elif attempt.state is AttemptState.PLACED and attempt.generation == 0:
                self._start(job, attempt)

    # ---- reaching the server --------------------------------------------------------------------------------------------

    def _note_answer(self, error: PhalanxError | None) -> None:
        """Called by the watches: the server has answered, or not."""
        if error is None:
            self._failing_since_s = None
        elif self._failing_since_s is None:
            self._failing_since_s, self._failure = time.monotonic(), error.message
        self._wake.set()

    def _check_reachable(self) -> None:
        """Cordon all nodes while the server does not answer. Running jobs continue, governed by their leases."""
        since_s = self._failing_since_s
        silent = since_s is not None and time.monotonic() - since_s >= SILENT_S
        if silent and not self._unreachable:
            _log.warning("Kubernetes cannot be followed; its nodes get no new jobs: %s", self._failure)
            cordon = Cordon(by=ENGINE_NAME, why=f"Kubernetes cannot be followed: {self._failure}", since_s=0.0)
            for node_id, node in self._reported.items():
                if node is not None:
                    self._reported[node_id] = excluded = replace(node, cordon=cordon)
                    self._events.append(NodeListed(node=excluded))
        elif self._unreachable and not silent:
            _log.info("Kubernetes is followed again")
            now_s = time.monotonic()  # the outage hid what happened: all time-outs start again
            self._orders = {
                key: replace(order, created_s=now_s, ended_s=None, pulling_s=None)
                for key, order in self._orders.items()
            }
        self._unreachable = silent

    # ---- attempts -------------------------------------------------------------------------------------------------------

    def _order(self, attempt: Attempt, now_s: float) -> AttemptPods:
        grants = attempt.allocation.grants
        names = (render.pod_name(self.settings, attempt.job_id, attempt.epoch, grant.node_rank) for grant in grants)
        return AttemptPods(attempt=attempt, names=tuple(names), created_s=now_s)

    def _start(self, job: Job, attempt: Attempt) -> None:
        """Create the Secret and all pods of an attempt, or none."""
        key, order = (job.id, attempt.epoch), self._order(attempt, time.monotonic())
        gone = [grant.node_id for grant in attempt.allocation.grants if self._reported.get(grant.node_id) is None]
        if gone:
            self._withdraw(attempt, f"{', '.join(gone)} is no longer in the cluster", EndCause.CONTENDED)
            return
        queue = "" if self._kueue is None else self._kueue.queue_of(job)
        if queue and (uneven := uneven_parts(attempt)):
            self._withdraw(attempt, uneven, EndCause.FAILED)
            return
        try:
            owner = apply_owner(self.api, self.settings)
            secret = render.seat_secret(self.settings, owner, attempt, encode_assignment(self._assignment(attempt)))
            self.api.apply(self._path("secrets"), secret["metadata"]["name"], secret)
            if self._kueue is not None and queue:
                refusals: list[PhalanxError] = []
                self._kueue.create(owner, job, attempt, queue)
            else:
                refusals = self._create_pods(owner, job, attempt)
        except PhalanxError as error:
            refusals = [error]
        if refusals:
            self._deletions[key] = (order.names, attempt_pods.HURRIED_GRACE_S)
            why, cause = explain_refusal(refusals[0], "a Job" if queue else "a pod")
            _log.warning("job %s attempt %d: %s", job.id, attempt.epoch, why)
            self._withdraw(attempt, why, cause)
            return
        self._orders[key] = replace(order, created_s=time.monotonic())
        _log.info(
            "job %s attempt %d has %d pods in namespace %s",
            job.id,
            attempt.epoch,
            len(order.names),
            self.settings.namespace,
        )

    def _create_pods(self, owner: dict[str, Any], job: Job, attempt: Attempt) -> list[PhalanxError]:
        """Create all pods of an attempt; return why some could not be."""
        pods = [
            render.seat_pod(self.settings, owner, job, attempt, grant, pinned=self.scope.lists_nodes)
            for grant in attempt.allocation.grants
        ]
        created = self._workers.map(lambda pod: create_pod(self.api, self._path("pods"), pod), pods)
        return [error for error in created if error is not None]

    def _assignment(self, attempt: Attempt) -> SeatAssignment:
        nodes = {
            grant.node_id: SeatNode(address="127.0.0.1", devices=len(grant.devices))
            for grant in attempt.allocation.grants
        }
        return SeatAssignment(
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            key=self.key_of(attempt.job_id, attempt.epoch),
            engine=ENGINE_NAME,
            head_url=self.settings.head_url,
            ca_pem=self.settings.ca_pem,
            nodes=nodes,
        )

    def _withdraw(self, attempt: Attempt, why: str, cause: EndCause) -> None:
        nodes = tuple(grant.node_id for grant in attempt.allocation.grants)
        self._events.append(
            AttemptWithdrawn(job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=nodes, cause=cause)
        )

    def _evaluate_orders(self, pods: Mapping[str, PodState]) -> list[Event]:
        """Return what the attempts' pods tell, and note which pods are to be deleted."""
        now_s = time.monotonic()
        mine = {pod.name: pod for pod in pods.values() if self._is_ours(pod)}
        holding = self._holding(mine)
        nodes, template = self._nodes.current(), self.settings.template
        reports: list[Event] = []
        for key, known in list(self._orders.items()):
            order = known
            found, queued = mine, self._kueue is not None and self._kueue.follows(key)
            if self._kueue is not None and queued:
                order, waits = self._evaluate_kueue(self._kueue, key, order, now_s, reports)
                if waits:
                    continue
                found = self._kueue.slots(order, mine.values())
            there = [pod for pod in pods.values() if pod.node in order.nodes and not pod.ended and pod.gpus]
            holders = [f"pod {pod.namespace}/{pod.name}" for pod in there if not self._is_ours(pod)]
            update = attempt_pods.evaluate(
                order,
                found,
                now_s,
                holders=holders[:3],
                cleaning_up=queued or any(self._is_ours(pod) and pod.uid not in holding for pod in there),
                head_url=self.settings.head_url,
                image=self.settings.image,
                creator=f"job/{render.attempt_name(self.settings, *key)}" if queued else "",
                node_wait_s=self.settings.node_wait_s,
                notes=self._notes.read() if self._awaits_nodes(order, found, now_s) else None,
            )
            reports += update.events
            taken = (
                None
                if queued
                else departures.reclaim(order, [found[n] for n in order.names if n in found], nodes, template)
            )
            if taken is not None and key not in self._reclaimed:
                self._reclaimed.add(key)
                reports.append(taken)
            if update.delete:
                self._deletions[key] = (order.names, update.grace_s)
            for node in update.contended:
                self._contended[node] = (now_s + CONTENDED_S, f"pods that Kubernetes preferred to job {key[0]}")
            if update.pods is None:
                del self._orders[key]
                self._reclaimed.discard(key)
            else:
                self._orders[key] = update.pods
        return reports

    def _awaits_nodes(self, order: AttemptPods, found: Mapping[str, PodState], now_s: float) -> bool:
        """Whether an autoscaler has had the time to say something of pods without a node."""
        if not self.settings.node_wait_s or now_s - order.created_s < attempt_pods.START_LIMIT_S:
            return False
        return any(name in found and not found[name].node for name in order.names)

    def _evaluate_kueue(
        self, kueue: KueueJobs, key: _Key, order: AttemptPods, now_s: float, reports: list[Event]
    ) -> tuple[AttemptPods, bool]:
        """Evaluate the Job of an attempt in Kueue; return its order, and whether it has no pods yet."""
        verdict = None if order.attempt_ended_s is not None else kueue.evaluate(key, order.attempt, now_s)
        if verdict is None:
            return order, False
        reports += verdict.events
        if verdict.admitted_now:
            order = replace(order, created_s=now_s, ended_s=None)
        if verdict.withdrawn:
            order = replace(order, phase=PodsPhase.SETTLED, deleted=True)
            self._deletions[key] = (order.names, attempt_pods.HURRIED_GRACE_S)
        self._orders[key] = order
        return order, verdict.waits

    def _holding(self, mine: Mapping[str, PodState]) -> frozenset[str]:
        """Return the uids of the pods of attempts that hold their allocation."""
        live = [order for order in self._orders.values() if order.attempt.holds_allocation and not order.deleted]
        return frozenset(mine[name].uid for order in live for name in order.names if name in mine)

    def _is_ours(self, pod: PodState) -> bool:
        return pod.owner_tag == self.settings.tag and pod.namespace == self.settings.namespace

    # ---- nodes ----------------------------------------------------------------------------------------------------------

    def _node_events(self, pods: Mapping[str, PodState]) -> list[Event]:
        """Return events for the nodes that changed since the last look."""
        now_s = time.monotonic()
        self._contended = {node: mark for node, mark in self._contended.items() if mark[0] > now_s}
        reports: list[Event] = []
        fresh = self._listed_nodes(pods) if self.scope.lists_nodes else self._declared_nodes()
        for node_id, node in fresh.items():
            if isinstance(node, str):
                if self._reported.get(node_id) is not None or node_id not in self._reported:
                    self._reported[node_id] = None
                    reports.append(NodeDied(node_id=node_id, supervisor_id=None, why=node, confirmed=False))
            elif self._reported.get(node_id) != node:
                self._reported[node_id] = node
                reports.append(NodeListed(node=node))
        for node_id in [one for one, node in self._reported.items() if node is not None and one not in fresh]:
            self._reported[node_id] = None
            why = "it is no longer in the cluster"
            reports.append(NodeDied(node_id=node_id, supervisor_id=None, why=why, confirmed=False))
        return reports

    def _listed_nodes(self, pods: Mapping[str, PodState]) -> dict[NodeId, Node | str]:
        """Return each node of the cluster, or why it is down."""
        mine = {pod.name: pod for pod in pods.values() if self._is_ours(pod)}
        holding = self._holding(mine)
        by_node: dict[str, list[PodState]] = {}
        for pod in pods.values():
            if pod.node and not pod.ended:
                by_node.setdefault(pod.node, []).append(pod)
        found: dict[NodeId, Node | str] = {}
        for node in self._nodes.current().values():
            node_id = NodeId(node.name)
            if not inventory.offers_pods(node, self.settings.template):
                continue
            found[node_id] = node.not_ready or inventory.fleet_node(
                node,
                by_node.get(node.name, []),
                granted=self._granted(node_id),
                our_pods=holding,
                contended=self._contended.get(node_id, (0.0, ""))[1],
                template=self.settings.template,
            )
        return found

    def _declared_nodes(self) -> dict[NodeId, Node | str]:
        found: dict[NodeId, Node | str] = {}
        holding = [one for one in self._orders.values() if one.attempt.holds_allocation]
        for index in range(self.scope.places):
            name = inventory.declared_name(index)
            found[name] = inventory.declared_node(
                index,
                self.scope.gpus_per_place,
                contended=self._contended.get(name, (0.0, ""))[1],
                granted=self._granted(name),
                awaited=attempt_pods.awaited_by(name, holding),
            )
        return found

    def _granted(self, node_id: NodeId) -> frozenset[int]:
        found: set[int] = set()
        for order in self._orders.values():
            grant = order.attempt.allocation.grant_on(node_id)
            if grant is not None and order.attempt.holds_allocation and order.phase is not PodsPhase.SETTLED:
                found |= set(grant.devices)
        return frozenset(found)

    # ---- deletion -------------------------------------------------------------------------------------------------------

    def _delete_strays(self, pods: Mapping[str, PodState]) -> None:
        """Delete our pods without an order: of ended attempts, or of a create that failed midway."""
        known = {name for order in self._orders.values() for name in order.names}
        for pod in pods.values():
            key = (pod.job_id, pod.epoch)
            if (
                self._is_ours(pod)
                and pod.job_id
                and pod.name not in known
                and not pod.deleting
                and key not in self._deletions
                and not (key in self._orders and self._kueue is not None and self._kueue.follows(key))
            ):
                self._deletions[key] = ((pod.name,), attempt_pods.HURRIED_GRACE_S)
        if self._kueue is not None:
            for key in self._kueue.strays((*self._orders, *self._deletions)):
                self._deletions[key] = ((), attempt_pods.HURRIED_GRACE_S)

    def _delete_pods(self) -> None:
        """Delete what is to be deleted. A failed deletion is repeated at the next look."""
        for key, (known, grace_s) in list(self._deletions.items()):
            names = known
            try:
                if self._kueue is not None and self._kueue.follows(key):
                    self._kueue.delete(key)
                    ours = (pod for pod in self._pods.current().values() if self._is_ours(pod))
                    names = tuple(pod.name for pod in ours if (pod.job_id, pod.epoch) == key)
                self._delete_named(key, names, grace_s)
                self._delete("secrets", render.attempt_name(self.settings, *key), None)
            except PhalanxError as error:
                _log.warning("job %s attempt %d: its pods could not be deleted yet: %s", *key, error)
            else:
                del self._deletions[key]

    def _delete_named(self, key: _Key, names: Sequence[str], grace_s: int | None) -> None:
        """Delete the pods of an attempt; those of a large gang by one request, where that is allowed."""
        if len(names) > PARALLEL:
            labels = f"{self.settings.selector},{render.JOB_LABEL}={key[0]},{render.EPOCH_LABEL}={key[1]}"
            try:
                self.api.delete_all(self._path("pods"), labels=labels, grace_s=grace_s)
            except KubernetesError as error:
                if not error.is_forbidden:
                    raise
            else:
                return
        for _ in self._workers.map(lambda name: self._delete("pods", name, grace_s), names):
            pass

    def _delete(self, plural: str, name: str, grace_s: int | None) -> None:
        self.api.delete(self._path(plural), name, grace_s=grace_s)

    def _delete_everything(self, api: KubernetesApi) -> None:
        """Delete all objects of this head: the pods now, the rest with its owner."""
        if self._kueue is not None:
            self._kueue.delete_all(api)
        try:
            api.delete_all(self._path("pods"), labels=self.settings.selector, grace_s=attempt_pods.HURRIED_GRACE_S)
        except KubernetesError as error:
            if not error.is_forbidden:  # without that right, they go with their owner
                raise
        for key in dict.fromkeys((*self._orders, *self._deletions)):
            api.delete(self._path("secrets"), render.attempt_name(self.settings, *key))
        api.delete(self._path("configmaps"), self.settings.owner_name)

    def _path(self, plural: str) -> ResourcePath:
        return ResourcePath(plural, namespace=self.settings.namespace)


def replace_ended(api: KubernetesApi) -> KubernetesApi:
    """Return a client of the same cluster that still works after the engine's was ended."""
    return KubernetesApi(api.access, answer_s=5.0, retry_for_s=5.0)
