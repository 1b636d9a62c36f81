"""Hostile states of a cluster: each ends an attempt with one clear line, and leaves nothing half-made.

The engine is real, and the API server is the fake; what scheduler, kubelet and administrators do is written into its objects. Time-outs pass by a
clock that the test moves. `tests/e2e/test_kubernetes.py` has more states, with real heads and pods.
"""

# mypy: disable-error-code="var-annotated, arg-type"

import time
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.cluster import wait_until
from phalanx.core.state.reports import AttemptWithdrawn, NodeListed, SeatLost
from phalanx.core.work.attempt import EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes import engine as engine_module
from phalanx.engines.kubernetes import render
from phalanx.engines.kubernetes.engine import ClusterScope, KubernetesEngine
from phalanx.engines.kubernetes.kubeconfig import find_access
from phalanx.engines.kubernetes.render import PodSettings
from phalanx.engines.kubernetes.rest import KubernetesApi
from tests.builders import job, placed
from tests.kubernetes.fake_api import FakeApi, fake_api
from tests.kubernetes.fake_store import KINDS, Refused, now

pytestmark = [pytest.mark.serial, pytest.mark.timeout(60)]
PODS, SECRETS, CONFIG_MAPS = (KINDS["", name] for name in ("pods", "secrets", "configmaps"))


class Clock:
    """The engine's clock: the real one, and what a test adds."""

    added_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.added_s


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with fake_api(str(tmp_path_factory.mktemp("fake"))) as made:
        yield made


class CountedEngine(KubernetesEngine):
    """Counts the looks of its thread."""

    looks = 0

    def _look(self):
        super()._look()
        self.looks += 1


@dataclass
class Scene:
    """One engine, and an attempt on two places of two GPUs."""

    fake: FakeApi
    clock: Clock
    number: int
    events: list = field(default_factory=list)

    def __post_init__(self):
        settings = PodSettings(
            tag=f"{self.number:08x}", namespace="default", image="x/y:1", head_url="https://head:7600"
        )
        api = KubernetesApi(find_access("", {"KUBECONFIG": self.fake.kubeconfig}), retry_for_s=5.0)
        scope = ClusterScope(lists_nodes=False, places=2, gpus_per_place=2)
        self.engine = CountedEngine(api=api, settings=settings, scope=scope, key_of=lambda *_: "the key")
        self.engine.discover([], [])
        self.engine.open()
        self.until(lambda: len(self.of(NodeListed)) == 2, "both places are there")
        self.case = placed(job(str(1000 + self.number), gpus="2x2"), on="pod-0:0,1 pod-1:0,1")
        self.names = [render.pod_name(settings, self.case.job.id, 1, rank) for rank in (0, 1)]

    def until(self, condition, what):
        def holds():
            self.events += self.engine.observe()
            self.engine._wake.set()
            return condition()

        return wait_until(holds, what, limit_s=20.0, every_s=0.01)

    def of(self, *kinds):
        return [one for one in self.events if isinstance(one, kinds)]

    def place(self, *, pods=2):
        """The head places the attempt; wait for its pods."""
        self.engine.follow(self.case.job, self.case.attempt)
        if pods:
            self.until(lambda: len(self.pods()) == pods, f"{pods} pods are there")

    def pods(self):
        return self.fake.store.select(PODS, "default", self.engine.settings.selector, "")[0]

    def secrets(self):
        return self.fake.store.select(SECRETS, "default", self.engine.settings.selector, "")[0]

    def on_node(self, rank=1):
        self.fake.store.bind("default", self.names[rank], f"n{rank}")

    def status(self, rank=1, **status):
        self.fake.store.merge(PODS, "default", self.names[rank], {"status": status}, part="status")

    def container(self, rank=1, phase="Pending", kind="containerStatuses", **state):
        self.on_node(rank)
        self.status(rank, phase=phase, **{kind: [{"name": "phalanx", "state": state}]})

    def seen(self, words):
        """Wait until the engine has seen the pod of rank 1 so."""
        self.until(lambda: words in repr(self.engine._pods.current().get(f"default/{self.names[1]}")), words)

    def noted_gone(self):
        """Wait until the engine has seen that rank 1 has no pod of ours, and noted when."""
        mine = f"owner_tag={self.engine.settings.tag!r}"
        key = f"default/{self.names[1]}"
        self.until(lambda: mine not in repr(self.engine._pods.current().get(key)), "the engine has seen it")
        whole = self.engine.looks + 2  # one may be under way
        self.until(lambda: self.engine.looks >= whole, "it has noted when")

    def run(self):
        """Both supervisors have connected, and the ranks run."""
        members = tuple(replace(one, state=MemberState.STARTED) for one in self.case.attempt.members)
        self.engine.follow(self.case.job, replace(self.case.attempt, state=AttemptState.RUNNING, members=members))

    def after(self, seconds):
        self.clock.added_s += seconds


def ended(scene, code=1, words="", **more):
    scene.place()
    scene.container(
        phase="Failed", terminated={"exitCode": code, "reason": more.pop("why", "Error"), "message": words}, **more
    )
    scene.seen("Failed")
    scene.after(3.0)


def waiting(reason, words, seconds):
    def arrange(scene):
        scene.place()
        scene.container(waiting={"reason": reason, "message": words})
        scene.seen(reason)
        scene.after(seconds)

    return arrange


def pod_reason(reason):
    def arrange(scene):
        scene.place()
        scene.on_node()
        scene.status(phase="Failed", reason=reason, message="the node says so")
        scene.seen(reason)
        scene.after(3.0)

    return arrange


def refuse(kind, error, *, only=""):
    """The server refuses objects of this kind."""

    def arrange(scene):
        def rule(made, item):
            if (
                made == kind
                and item["metadata"]["name"].startswith(f"phalanx-{scene.engine.settings.tag}")
                and only in item["metadata"]["name"]
            ):
                raise error

        scene.fake.store.admission.append(rule)
        scene.place(pods=0)

    return arrange


def denied(text):
    return Refused(403, "Forbidden", text)


def answer(code, reason, text, **more):
    """The server answers the creation of a pod so."""

    def arrange(scene):
        def fault(method, path):
            if method == "POST" and "/pods" in path:
                raise Refused(code, reason, text, **more)

        scene.fake.faults.append(fault)
        scene.place(pods=0)

    return arrange


def deleted_by_hand(scene):
    scene.place()
    scene.on_node()
    scene.fake.store.delete(PODS, "default", scene.names[1], {})


def deleted_unplaced(scene):
    scene.place()
    scene.seen(scene.names[1])
    scene.fake.store.delete(PODS, "default", scene.names[1], {"gracePeriodSeconds": 0})
    scene.noted_gone()
    scene.after(11.0)


def with_finalizer(scene):
    scene.place()
    scene.fake.store.merge(PODS, "default", scene.names[1], {"metadata": {"finalizers": ["example.com/audit"]}})
    scene.fake.store.delete(PODS, "default", scene.names[1], {"gracePeriodSeconds": 0})


def foreign_label(scene):
    scene.place()
    scene.seen(scene.names[1])
    scene.fake.store.merge(PODS, "default", scene.names[1], {"metadata": {"labels": {"phalanx/head": "another"}}})
    scene.noted_gone()
    scene.after(11.0)


def taken_name(scene):
    theirs = {
        "metadata": {"name": scene.names[1], "labels": {"app": "theirs"}},
        "spec": {"containers": [{"name": "x"}]},
    }
    scene.fake.store.create(PODS, "default", theirs)
    scene.place(pods=0)


def no_owner(scene):
    scene.place()
    scene.seen(scene.names[1])
    scene.fake.store.delete(CONFIG_MAPS, "default", scene.engine.settings.owner_name, {})
    scene.noted_gone()
    scene.after(11.0)


def unschedulable(scene):
    scene.place()
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/9 nodes are available",
    }
    for rank in (0, 1):
        scene.status(rank, conditions=[condition])
    scene.seen("0/9 nodes")
    scene.after(16.0)


def no_scheduler(scene):
    scene.place()
    scene.seen(scene.names[1])
    scene.after(16.0)


def preempted_by_a_pod(scene):
    scene.place()
    scene.on_node()
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "by kube-scheduler",
    }
    scene.status(conditions=[target])
    scene.fake.store.delete(PODS, "default", scene.names[1], {})


def killed_while_running(why):
    def arrange(scene):
        scene.place()
        scene.on_node(0)
        scene.on_node(1)
        scene.run()
        scene.status(
            phase="Failed",
            containerStatuses=[{"name": "phalanx", "state": {"terminated": {"exitCode": 137, "reason": why}}}],
        )
        scene.seen(why)
        scene.until(lambda: any(order.ended_s for order in scene.engine._orders.values()), "the engine has seen it")
        scene.after(3.0)

    return arrange


def init_fails(scene):
    ended(scene, 1, "no space left on device", kind="initContainerStatuses")


W, F = AttemptWithdrawn, EndCause
STATES = {
    "a pod is deleted by hand": (
        deleted_by_hand,
        F.CONTENDED,
        "was deleted in Kubernetes before its supervisor connected",
    ),
    "a pod without a node is deleted": (deleted_unplaced, F.CONTENDED, "was deleted before its supervisor started"),
    "a pod has a finalizer": (with_finalizer, F.CONTENDED, "was deleted in Kubernetes before its supervisor connected"),
    "a pod has the label of another head": (foreign_label, F.CONTENDED, "was deleted before its supervisor started"),
    "a pod of others has our name": (taken_name, F.CONTENDED, "another pod has the name"),
    "the ConfigMap is deleted": (no_owner, F.CONTENDED, "before its supervisor"),
    "the Secret is deleted": (
        waiting("CreateContainerConfigError", 'secret "s" not found', 3.0),
        F.START_FAIL,
        'secret "s" not found',
    ),
    "the quota of pods is used up": (
        refuse(PODS, denied("exceeded quota: gpus, used: 8, limited: 8"), only="n1"),
        F.LIMITED,
        "exceeded quota: gpus",
    ),
    "the quota of Secrets is used up": (
        refuse(SECRETS, denied("exceeded quota: objects")),
        F.LIMITED,
        "exceeded quota: objects",
    ),
    "a policy refuses pods": (
        refuse(PODS, denied('violates PodSecurity "restricted:latest"'), only="n1"),
        F.FAILED,
        "violates PodSecurity",
    ),
    "a LimitRange refuses pods": (
        refuse(PODS, denied("maximum cpu usage per Container is 2, but limit is 4")),
        F.FAILED,
        "maximum cpu usage",
    ),
    "a field is refused": (
        refuse(PODS, Refused(422, "Invalid", "spec.priorityClassName: not found")),
        F.FAILED,
        "priorityClassName",
    ),
    "a webhook does not answer": (
        answer(500, "InternalError", "failed calling webhook: timeout"),
        F.START_FAIL,
        "failed calling webhook",
    ),
    "the namespace ends": (
        refuse(PODS, denied("namespace default because it is being terminated")),
        F.LIMITED,
        "being terminated",
    ),
    "the namespace is gone": (
        answer(404, "NotFound", 'namespaces "default" not found'),
        F.LIMITED,
        'namespaces "default" not found',
    ),
    "a right is taken away": (
        answer(403, "Forbidden", 'User "ada" cannot create resource "pods"'),
        F.LIMITED,
        'cannot create resource "pods"',
    ),
    "a proxy answers": (answer(502, "", "Bad Gateway"), F.START_FAIL, "Bad Gateway"),
    "an image cannot be pulled": (
        waiting("ImagePullBackOff", "manifest unknown", 11.0),
        F.START_FAIL,
        "cannot pull the image x/y:1: manifest unknown",
    ),
    "an image has no valid name": (
        waiting("InvalidImageName", "invalid reference format", 0.0),
        F.START_FAIL,
        "invalid reference format",
    ),
    "a container crashes again and again": (
        waiting("CrashLoopBackOff", "back-off 10s", 3.0),
        F.START_FAIL,
        "CrashLoopBackOff: back-off 10s",
    ),
    "a container cannot be made": (
        waiting("RunContainerError", "no runtime nvidia", 3.0),
        F.START_FAIL,
        "no runtime nvidia",
    ),
    "an init container fails": (init_fails, F.START_FAIL, "with code 1 (no space left on device)"),
    "the image has no Python": (
        lambda scene: ended(scene, 127),
        F.START_FAIL,
        "check that the image x/y:1 has python3",
    ),
    "the image has another Python": (
        lambda scene: ended(scene, 78, "phalanx: Python 3.12"),
        F.FAILED,
        "cannot run the supervisor: phalanx: Python 3.12",
    ),
    "the head cannot be reached": (
        lambda scene: ended(scene, 69),
        F.START_FAIL,
        "cannot reach the head at https://head:7600",
    ),
    "a node's clock is wrong": (lambda scene: ended(scene, 76), F.START_FAIL, "compare the clocks with date -u"),
    "a supervisor is out of memory": (
        lambda scene: ended(scene, 137, why="OOMKilled"),
        F.START_FAIL,
        "ended as OOMKilled with code 137",
    ),
    "no node has room": (
        unschedulable,
        F.CONTENDED,
        "did not place the pods for pod-0, pod-1 within 10s: 0/9 nodes are available",
    ),
    "no scheduler has that name": (no_scheduler, F.CONTENDED, "no scheduler has answered"),
    "a pod is preempted by another": (
        preempted_by_a_pod,
        F.CONTENDED,
        "was deleted in Kubernetes before its supervisor connected",
    ),
    "a pod is evicted": (pod_reason("Evicted"), F.CONTENDED, "ended as Evicted (the node says so)"),
    "a node has no GPU left": (pod_reason("OutOfnvidia.com/gpu"), F.CONTENDED, "OutOfnvidia.com/gpu"),
    "a device plugin fails": (pod_reason("UnexpectedAdmissionError"), F.CONTENDED, "UnexpectedAdmissionError"),
    "a node shuts down": (pod_reason("Shutdown"), F.CONTENDED, "ended as Shutdown"),
    "a pod's deadline is over": (pod_reason("DeadlineExceeded"), F.START_FAIL, "ended as DeadlineExceeded"),
    "a running pod is out of memory": (killed_while_running("OOMKilled"), None, "ended as OOMKilled with code 137"),
    "a running pod is killed": (killed_while_running("ContainerStatusUnknown"), None, "ContainerStatusUnknown"),
}


@pytest.fixture
def scenes(server, monkeypatch):
    clock, made = Clock(), []
    monkeypatch.setattr(engine_module, "time", clock)

    def build(number):
        made.append(Scene(server, clock, number))
        return made[0]

    yield build
    server.faults.clear()
    server.silent.clear()
    server.store.admission.clear()
    server.double_events = False
    for scene in made:
        scene.engine.close(keep_nodes=True)
    for kind in (PODS, SECRETS, CONFIG_MAPS):
        for item in server.store.select(kind, "default", "", "")[0]:
            server.store.merge(kind, "default", item["metadata"]["name"], {"metadata": {"finalizers": None}})
            if (kind, "default", item["metadata"]["name"]) in server.store.items:
                server.store.delete(kind, "default", item["metadata"]["name"], {"gracePeriodSeconds": 0})


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state_has_one_line_and_leaves_nothing_half_made(scenes, name):
    arrange, cause, words = STATES[name]
    scene = scenes(list(STATES).index(name) + 1)
    arrange(scene)
    scene.until(lambda: scene.of(AttemptWithdrawn, SeatLost), "the attempt ends")
    [event] = scene.of(AttemptWithdrawn, SeatLost)
    assert words in event.why
    assert "\n" not in event.why
    assert getattr(event, "cause", None) is cause
    if cause is None:  # its gang is told to stop; pods and Secret go with the attempt
        assert event.node_ids == ("pod-1",)
        return
    scene.fake.faults.clear()
    scene.until(lambda: all("deletionTimestamp" in one["metadata"] for one in scene.pods()), "no pod of it stays")
    scene.until(lambda: not scene.secrets(), "its token is gone")
    scene.until(lambda: not scene.engine._deletions, "nothing is left to do")
    assert len(scene.of(AttemptWithdrawn, SeatLost)) == 1, "one line"


def flood(scene):
    """Two thousand changes of pods of others."""
    theirs = scene.fake.store.create(
        PODS, "default", {"metadata": {"name": "noisy"}, "spec": {"containers": [{"name": "x"}]}}
    )
    for turn in range(2000):
        scene.fake.store.merge(
            PODS, "default", theirs["metadata"]["name"], {"status": {"message": str(turn)}}, part="status"
        )


def compacted(scene):
    scene.fake.store.compact()
    scene.fake.cut_watches()


def doubled(scene):
    scene.fake.double_events = True
    scene.fake.cut_watches()


def lost(scene):
    """A watch that is cut, and a server that has forgotten what happened since."""
    scene.fake.cut_watches()
    scene.fake.store.compact()


def conflicts(scene):
    """Each object is created, and its answer says that it exists."""

    def fault(method, path):
        if method == "POST" and "/pods" in path and len(scene.fake.requests) % 2:
            raise Refused(429, "TooManyRequests", "slow down", headers={"Retry-After": "0"})

    scene.fake.faults.append(fault)


def odd_pods(scene):
    """Pods as other programs write them: without a status, with nonsense in our labels, from the future."""
    for number, labels in enumerate(
        ({}, {"phalanx/head": "x", "phalanx/epoch": "nonsense"}, {"phalanx/node-rank": "99"})
    ):
        item = {"metadata": {"name": f"odd-{number}", "labels": labels}, "spec": {"containers": [{"name": "x"}]}}
        scene.fake.store.create(PODS, "default", item)
        odd = {"startTime": "2099-01-01T00:00:00Z", "containerStatuses": [{"name": "x"}], "conditions": None}
        scene.fake.store.merge(PODS, "default", f"odd-{number}", {"status": odd}, part="status")


@pytest.mark.parametrize("fault", [flood, compacted, doubled, lost, conflicts, odd_pods])
def test_a_fault_of_the_server_costs_no_attempt(scenes, fault):
    scene = scenes(900)
    fault(scene)
    scene.place()
    for rank in (0, 1):
        scene.container(rank, phase="Running", running={"startedAt": now()})
    scene.until(lambda: all(one.phase.value == "placed" for one in scene.engine._orders.values()), "both have a node")
    scene.run()
    assert not scene.of(AttemptWithdrawn, SeatLost)
    assert len({one["metadata"]["name"] for one in scene.pods()}) == 2


def test_a_deletion_that_the_server_refuses_is_repeated(scenes):
    scene = scenes(902)
    left = [3]

    def fault(method, path):
        if method == "DELETE" and left[0]:
            left[0] -= 1
            raise Refused(500, "InternalError", "etcdserver: leader changed")

    scene.fake.faults.append(fault)
    deleted_by_hand(scene)
    scene.until(lambda: scene.of(AttemptWithdrawn), "it is withdrawn")
    scene.until(lambda: not scene.secrets() and not scene.engine._deletions, "all is deleted in the end")
    assert left == [0]
