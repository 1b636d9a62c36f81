"""The Ray engine, its driver and its actor, without Ray: whose death is told, what goes on after an error, who is released."""

# The driver's Ray is played here, as are the supervisors.
# mypy: disable-error-code="arg-type, assignment, method-assign, var-annotated, attr-defined, union-attr"

import itertools
import logging
import queue
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from phalanx.app import node as app_node
from phalanx.core.ids import NodeId
from phalanx.engines.local import engine as local_engine
from phalanx.engines.local import records
from phalanx.engines.ray import engine, node_actor
from phalanx.engines.ray.driver import RayDriver, _ActorState
from phalanx.engines.ray.engine import RayEngine
from phalanx.engines.ray.protocol import (
    DriverProblem,
    NodeReleased,
    NodesListed,
    RayNode,
    ReleaseNode,
    StartSupervisor,
    SupervisorDied,
    SupervisorSpec,
    decode_event,
)
from phalanx.node.files.job_accounts import JobAccountPolicy
from phalanx.node.probes.devices import node_facts
from phalanx.node.probes.virtual_devices import VirtualProbe
from tests.harness import Harness
from tests.simulated_node import JobBehaviour

N0, N1 = NodeId("n0"), NodeId("n1")
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(engine, "DRIVER_PAUSE_S", 0.05)
    monkeypatch.setattr(engine, "reachable", lambda address: True)


def made(tmp_path):
    return RayEngine(
        address="",
        cluster=None,
        files=None,
        cluster_id="c",
        environment=dict,
        ca_pem="",
        token_of=lambda _: "t",
        home=str(tmp_path),
    )


def ray_node(name="n0", ray_id="r0"):
    return RayNode(node_id=NodeId(name), ray_id=ray_id, address="127.0.0.2", alive=True, gpus=2.0, virtual_devices=2)


def carried(name="n0"):
    return SupervisorSpec(
        node_id=NodeId(name), token="t", environment={}, ca_pem="", virtual_devices=2, address="127.0.0.2", cluster="c"
    )


def until(what, told="it comes"):
    end_s = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < end_s, f"not within {WITHIN_S:.0f} s: {told}"
        time.sleep(0.01)


# ---- whose death ------------------------------------------------------------------------------------------------------


def test_an_old_death_that_an_actor_kept_takes_nothing_from_the_life_after_it(tmp_path):
    """Found by reading: heard after the hello of the next life it ended that one, and two epochs of its job ran at once."""
    cluster = Harness("r: n0=4")
    before = cluster.nodes[N0].supervisor_id
    cluster.kill_node("n0", silent=True)
    cluster.revive_node("n0")
    cluster.run(3.0)
    job = cluster.submit(gpus="4", behaviour=JobBehaviour(run_s=20.0))
    cluster.runs(job)
    ray = made(tmp_path)
    ray._on_message(SupervisorDied(node_id=N0, why="its supervisor died", supervisor_id=before))
    cluster.turn(ray.observe())
    assert cluster.ends(job).epoch == 1


def test_death_of_the_present_life_is_believed_at_once_and_one_without_a_name_is_left_to_the_lease(tmp_path):
    cluster = Harness("r: n0=4")
    ray = made(tmp_path)
    ray._on_message(SupervisorDied(node_id=N0, why="its supervisor died"))
    cluster.turn(ray.observe())
    assert cluster.world.nodes[N0].state == "up"
    ray._on_message(
        SupervisorDied(node_id=N0, why="its supervisor died", supervisor_id=cluster.nodes[N0].supervisor_id)
    )
    cluster.turn(ray.observe())
    assert cluster.world.nodes[N0].state == "down"


def test_an_actor_names_the_life_that_died_as_that_life_named_itself(tmp_path, monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(argv, **given):
        started.append((real(["sleep", "60"], env=given["env"], start_new_session=True), given["env"]))
        return started[-1][0]

    monkeypatch.setattr(local_engine.subprocess, "Popen", popen)
    monkeypatch.setattr(node_actor, "_assigned_devices", lambda: [0, 1])
    monkeypatch.setenv(node_actor.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(node_actor, "REVIVE_AFTER_S", 0.01)
    actor = node_actor.NodeActor()
    try:
        assert actor.start_supervisor(msgspec.to_builtins(carried())) == ""
        started[0][0].send_signal(signal.SIGKILL)
        until(lambda: len(started) == 2, "the next life is started though nobody has asked for deaths")
        (death,) = actor.poll()["deaths"]
        assert death["supervisor_id"] == started[0][1]["PHALANX_NODE_LIFE"] != started[1][1]["PHALANX_NODE_LIFE"]
        assert actor.poll()["deaths"] == []
    finally:
        actor.release()


def test_a_supervisor_calls_itself_as_its_engine_told_it_and_by_itself_otherwise(tmp_path):
    folder = str(tmp_path)
    given = {
        "PHALANX_NODE_ID": "n0",
        "PHALANX_NODE_ENGINE": "ray",
        "PHALANX_NODE_KEY": "k",
        "PHALANX_NODE_DIR": folder,
        "PHALANX_NODE_TOKEN": "t",
        "PHALANX_HEAD_URL": "http://127.0.0.1:1",
    }
    facts, accounts = node_facts(folder), JobAccountPolicy.from_environment(given, folder)

    def named(**more):
        found = app_node._settings({**given, **more}, facts, VirtualProbe("k", 2, 1), None, 0, accounts, virtual=True)
        assert found.supervisor_id == found.node.supervisor_id
        return found.supervisor_id

    assert named(PHALANX_NODE_LIFE="n0-1") == "n0-1"
    assert named() != named()


def test_a_life_that_was_taken_over_from_an_earlier_actor_is_named_too_unless_an_older_release_started_it(tmp_path):
    living = {"node": "n0", "pid": 1, "start_ticks": 1, "node_key": "k", "virtual_devices": 2}
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(living))
    assert records.read(str(tmp_path)).supervisor_id is None
    path.write_bytes(msgspec.json.encode({**living, "supervisor_id": "n0-1"}))
    found = records.read(str(tmp_path))
    assert found.supervisor_id == "n0-1"
    records.write(str(tmp_path), found)
    assert records.read(str(tmp_path)) == found


# ---- errors that pass -------------------------------------------------------------------------------------------------


def test_a_driver_that_could_not_be_started_is_started_later(tmp_path, monkeypatch, caplog):
    """Found by reading: one EAGAIN, and no Ray node was ever looked after again by this head."""
    tries = []

    def spawn(ray):
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise OSError(11, "Resource temporarily unavailable")
        return real(ray)

    real = RayEngine._spawn
    monkeypatch.setattr(RayEngine, "_spawn", spawn)
    plays(monkeypatch, "import sys; sys.stdin.read()")
    ray = made(tmp_path)
    with caplog.at_level(logging.ERROR):
        ray.open()
        until(lambda: ray._driver is not None, "the third one is started")
    ray.close(keep_nodes=True)
    assert tries[2] - tries[1] > tries[1] - tries[0], "the pause grows"
    assert caplog.text.count("Resource temporarily unavailable") == 2


def test_a_driver_whose_words_cannot_be_followed_is_ended_and_another_started(tmp_path, monkeypatch):
    plays(
        monkeypatch,
        f"print({bytes(msgspec.json.encode(DriverProblem(text='full', node_id=N0))).decode()!r}, flush=True); import time; time.sleep(60)",
    )
    begun = itertools.count()
    timers = []
    real = threading.Timer

    def timer(*words):
        if next(begun) == 0:
            raise RuntimeError("can't start new thread")
        timers.append(real(*words))
        return timers[-1]

    drivers = []
    spawn = RayEngine._spawn

    def spawned(ray):
        drivers.append(spawn(ray))
        return drivers[-1]

    monkeypatch.setattr(RayEngine, "_spawn", spawned)
    monkeypatch.setattr(engine.threading, "Timer", timer)
    ray = made(tmp_path)
    ray.open()
    until(lambda: len(timers) == 1, "another driver says the same, and is followed")
    timers[0].cancel()
    assert (len(drivers), drivers[0].poll()) == (2, -signal.SIGKILL)
    drivers[1].kill()
    ray.close(keep_nodes=True)


def plays(monkeypatch, program):
    """What the driver's process runs instead."""
    monkeypatch.setattr(engine, "driver_command", lambda address, cluster_id: [sys.executable, "-c", program])


def test_nodes_are_expected_once_a_driver_has_listed_them(tmp_path):
    ray = made(tmp_path)
    assert ray.expected_nodes() is None
    ray._on_message(NodesListed(nodes=[ray_node(), msgspec.structs.replace(ray_node("n1"), alive=False)]))
    assert ray.expected_nodes() == [N0]


# ---- released ---------------------------------------------------------------------------------------------------------


def test_down_waits_for_the_next_driver_where_one_has_just_ended(tmp_path, monkeypatch):
    """Found by reading: it knew of no node that was carried, released none, and detached actors went on to hold GPUs."""
    seen = msgspec.json.encode(NodesListed(nodes=[ray_node()])).decode()
    answer = msgspec.json.encode(NodeReleased(node_id=N0)).decode()
    log = tmp_path / "orders"
    plays(
        monkeypatch,
        f"""
import os, sys
first = not os.path.exists({str(log)!r})
log = open({str(log)!r}, "a")
print({seen!r}, flush=True)
for line in sys.stdin:
    print(line, end="", file=log, flush=True)
    if first:
        os._exit(1)
    if '"ReleaseNode"' in line:
        print({answer!r}, flush=True)
""",
    )
    monkeypatch.setattr(engine, "DRIVER_PAUSE_S", 300.0)  # nobody would wait for that
    monkeypatch.setattr(engine, "DRIVER_PAUSE_MAX_S", 300.0)
    ray = made(tmp_path)
    ray.open()
    until(lambda: log.exists() and ray._driver is None and ray.nodes() == [N0], "the first driver has ended")
    began_s = time.monotonic()
    ray.close(keep_nodes=False)
    assert time.monotonic() - began_s < WITHIN_S
    kinds = [msgspec.json.decode(line)["type"] for line in log.read_text().splitlines()]
    assert kinds == ["StartSupervisor", "StartSupervisor", "ReleaseNode"]


def test_down_releases_also_a_node_that_could_not_be_carried_a_moment_ago(tmp_path, monkeypatch):
    sent = []
    ray = made(tmp_path)
    ray._driver = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(engine, "RELEASE_S", 0.1)
    monkeypatch.setattr(RayEngine, "_send", lambda ray, order: sent.append(order))
    monkeypatch.setattr(engine, "START_RETRY_S", 60.0)
    ray._on_message(NodesListed(nodes=[ray_node()]))
    ray._on_message(DriverProblem(text="its actor did not answer within 60 s", node_id=N0))
    ray._release([N0])
    ray._driver.kill()
    ray._driver.wait()
    assert [type(order) for order in sent] == [StartSupervisor, ReleaseNode]


class PlayedRay:
    """Calls that are answered when their time has come; `answers_s` of a release, by node. Time is the driver's own."""

    def __init__(self, answers_s):
        self.answers_s, self.killed, self.asked = answers_s, [], {}

    def actor(self, name):
        return PlayedActor(self, name)

    def wait(self, references, *, num_returns=1, timeout):
        done = [name for name in references if self._due(name)]
        return done[:num_returns], []

    def get(self, reference, timeout=None):
        end_s = time.monotonic() + (1e9 if timeout is None else timeout)
        while not self._due(reference):
            if time.monotonic() >= end_s:
                raise TimeoutError(reference)
            time.sleep(0.01)

    def kill(self, actor):
        self.killed.append(actor.name)

    def _due(self, name):
        return time.monotonic() >= self.asked[name] + self.answers_s[name]


class PlayedActor:
    def __init__(self, ray, name):
        self.ray, self.name = ray, name
        self.release = self

    def remote(self):
        self.ray.asked[self.name] = time.monotonic()
        return self.name


class Held:
    """As `controller._ActorState`: a node without pending calls."""

    def __init__(self, actor):
        self.actor = actor


class Told(list):
    """The driver's way to the head."""

    def write(self, line):
        self.append(decode_event(line))

    def flush(self):
        pass


def released(ray, names, *, while_s):
    """What the driver tells, and when, while it is asked to release these nodes."""
    told, orders = Told(), queue.SimpleQueue()
    driver = RayDriver(ray, told, orders)
    for name in names:
        driver._actors[name] = Held(ray.actor(name))
        orders.put(ReleaseNode(node_id=name))
    while not orders.empty():
        driver._on_command(orders.get())
    end_s = time.monotonic() + while_s
    while time.monotonic() < end_s and driver._releases:
        driver._finish_releases(time.monotonic())
        time.sleep(0.01)
    return told


def test_the_driver_releases_all_nodes_side_by_side():
    """Found by reading: one after the other, so that of 50 nodes the head waited for, half were released when it ended the driver."""
    names = [NodeId(f"n{index}") for index in range(20)]
    ray = PlayedRay(dict.fromkeys(names, 0.3))
    began_s = time.monotonic()
    told = released(ray, names, while_s=60.0)
    assert time.monotonic() - began_s < 5.5, "one after the other takes 6 s"
    assert told == [NodeReleased(node_id=name) for name in names]
    assert ray.killed == names, "their GPUs are given back to Ray"


def test_one_that_does_not_answer_holds_up_no_other_and_is_given_back_too(monkeypatch):
    monkeypatch.setattr("phalanx.engines.ray.driver.ACTOR_ANSWER_S", 0.3)
    ray = PlayedRay({N0: 1e9, N1: 0.05})
    told = released(ray, [N0, N1], while_s=60.0)
    assert [(type(one), one.node_id) for one in told] == [(NodeReleased, N1), (DriverProblem, N0), (NodeReleased, N0)]
    assert ray.killed == [N1, N0]


def test_a_node_that_is_wanted_again_while_it_is_released_is_carried_after_that():
    ray = PlayedRay({N0: 0.1})
    told = Told()
    driver = RayDriver(ray, told, queue.SimpleQueue())
    driver._actors[N0] = Held(ray.actor(N0))
    again = []
    driver._start_supervisor = again.append
    order = StartSupervisor(node=ray_node(), spec=carried())
    driver._on_command(ReleaseNode(node_id=N0))
    driver._on_command(order)
    assert again == []
    while driver._releases:
        driver._finish_releases(time.monotonic())
    assert (told, again) == ([NodeReleased(node_id=N0)], [order])


def test_deaths_in_the_words_of_an_older_actor_have_no_name():
    from phalanx.engines.ray.driver import _died

    assert _died(N0, "it died") == SupervisorDied(node_id=N0, why="it died")
    assert _died(N0, {"supervisor_id": "n0-1", "why": "it died"}) == SupervisorDied(
        node_id=N0, why="it died", supervisor_id="n0-1"
    )


# ---- a Ray cluster of others ------------------------------------------------------------------------------------------


def test_gpus_that_others_released_are_taken_by_a_new_actor_once_the_node_is_idle(monkeypatch):
    monkeypatch.setattr("phalanx.engines.ray.driver.free_gpus", lambda ray_id: 1.0)
    monkeypatch.setattr("phalanx.engines.ray.driver.FREED_POLL_S", 0.0)
    ray, told, started = PlayedRay({N0: 0.0}), Told(), []
    driver = RayDriver(ray, told, queue.SimpleQueue())
    driver._start_supervisor = lambda order, gpus=None: started.append((order, gpus))
    actor = ray.actor(N0)
    actor.poll = actor.release_if_idle = actor
    order = StartSupervisor(node=ray_node(), spec=carried())
    answers = [{"carrying": True, "deaths": [], "gpus": 1}, False, {"carrying": True, "deaths": [], "gpus": 1}, True]
    ray.get = lambda reference, timeout=None: answers.pop(0)
    state = driver._actors[N0] = _ActorState(order, actor, -60.0)
    while answers:
        assert started == [], "while a task runs there, nothing is replaced"
        state.asked_s = -60.0
        driver._poll_actor(N0, state, time.monotonic())
    assert started == [(order, 2)], "what it held and what was released"
    assert (ray.killed, driver._actors, told) == ([N0], {}, [])


def test_an_actor_that_ray_gave_up_is_replaced_and_reported_once(monkeypatch):
    """Found in a campaign: Ray's scheduler did not yet know a node that had just come back, and the node stayed down for good."""
    monkeypatch.setattr("phalanx.engines.ray.driver.is_final", lambda error: str(error) == "unschedulable")
    ray, told = PlayedRay({N0: 0.0}), Told()
    driver = RayDriver(ray, told, queue.SimpleQueue())
    order, made_actors = StartSupervisor(node=ray_node(), spec=carried()), []

    def start(order, gpus=None):
        made_actors.append(gpus)
        state = driver._actors[N0] = _ActorState(order, ray.actor(N0), time.monotonic())
        ray.asked[N0] = time.monotonic()
        state.start_call = N0

    def answer(reference, timeout=None):
        if len(made_actors) < 3:
            raise RuntimeError("unschedulable")
        return ""

    driver._start_supervisor, ray.get = start, answer
    start(order)
    for _ in range(8):
        driver._poll_actor(N0, driver._actors[N0], time.monotonic())
        driver._actors[N0].asked_s = -60.0
        if len(made_actors) == 3 and driver._actors[N0].start_call is None:
            break
    assert made_actors == [None, None, None], "each with all GPUs that are free"
    assert [one.node_id for one in told] == [N0], told
    assert (ray.killed, driver._actors[N0].lost) == ([N0, N0], False)


def test_a_lost_ray_head_of_others_is_reported_and_named_by_the_nodes_that_end_with_it(tmp_path, monkeypatch, caplog):
    cluster = Harness("r: n0=4")
    ray = made(tmp_path)
    ray._on_message(NodesListed(nodes=[ray_node()]))
    answers = [True, False, False, False, True]
    monkeypatch.setattr(engine, "KEEP_EVERY_S", 0.0)
    monkeypatch.setattr(engine, "LOSS_REPORTS_S", (0.0, 0.0))
    monkeypatch.setattr(engine, "reachable", lambda address: answers.pop(0) if answers else not ray._ended.set())
    ray.address = "10.0.0.1:6379"
    ray._watch_others_cluster()
    first, again = ray.observe()
    assert (first, first.confirmed) == (again, False)
    assert caplog.text.count("The Ray head at 10.0.0.1:6379 does not answer") == 1
    cluster.turn([first])
    assert cluster.world.nodes[N0].state == "up", "its lease decides"
    cluster.kill_node("n0", silent=True)
    while cluster.world.nodes[N0].state == "up":
        cluster.run(1.0)
    cluster.turn([again])
    cluster.turn([again])
    assert cluster.world.nodes[N0].down_cause.count("its lease expired; the Ray head at 10.0.0.1:6379 does not") == 1
