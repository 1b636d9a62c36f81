"""Ten minutes without an API server, on a clock of the test: what the engine reports, and what it concludes afterwards. No server, no thread."""

# Ids are written as plain words here.
# mypy: disable-error-code="arg-type, var-annotated"

from dataclasses import replace

import pytest

from phalanx.core.state.reports import NodeListed, SeatLost
from phalanx.core.work.attempt import MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes import engine as engine_module
from phalanx.engines.kubernetes.attempt_pods import SUPERVISOR_REPORT_S
from phalanx.engines.kubernetes.engine import ClusterScope, KubernetesEngine
from phalanx.engines.kubernetes.errors import KubernetesUnreachable
from phalanx.engines.kubernetes.render import EPOCH_LABEL, HEAD_LABEL, JOB_LABEL, PodSettings
from tests.builders import job, placed

SETTINGS = PodSettings(tag="t", namespace="research", image="x", head_url="http://127.0.0.1:1")
AWAY_S = 600.0
AMOUNTS = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"}


class Clock:
    """Monotonic seconds that a test moves."""

    now_s = 1000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(engine_module, "time", made)
    return made


def node(name):
    ready = {"type": "Ready", "status": "True"}
    return {"metadata": {"name": name}, "spec": {}, "status": {"allocatable": AMOUNTS, "conditions": [ready]}}


def pod(rank, **status):
    labels = {HEAD_LABEL: "t", JOB_LABEL: "17", EPOCH_LABEL: "1"}
    about = {"name": f"phalanx-t-j17-e1-n{rank}", "namespace": "research", "uid": f"u{rank}", "labels": labels}
    return {
        "metadata": about,
        "spec": {"nodeName": f"n{rank}", "containers": []},
        "status": {"phase": "Running", **status},
    }


@pytest.fixture
def engine(clock):
    """An engine whose job 17 runs on two nodes."""
    case = placed(job("17"), on="n0:0 n1:0")
    members = tuple(replace(one, state=MemberState.STARTED) for one in case.attempt.members)
    running = replace(case.attempt, state=AttemptState.RUNNING, members=members)
    made = KubernetesEngine(api=None, settings=SETTINGS, scope=ClusterScope(lists_nodes=True), key_of=lambda *_: "")
    made.discover([], [(case.job, running)])
    made._nodes.replaced([node("n0"), node("n1")])
    made._pods.replaced([pod(0), pod(1)])
    assert {type(event) for event in look(made)} == {NodeListed}
    return made


def look(engine):
    engine._look()
    return engine.observe()


def silence(engine, clock):
    """The server is away for ten minutes; return what the engine reports."""
    found = []
    until_s = clock.now_s + AWAY_S
    while clock.now_s < until_s:
        engine._note_answer(KubernetesUnreachable("the API server does not answer"))
        found += look(engine)
        clock.now_s += 5.0
    return found


def test_no_job_notices_ten_minutes_without_an_api_server(engine, clock):
    events = silence(engine, clock)
    assert {type(event) for event in events} == {NodeListed}
    assert [event.node.cordon is not None for event in events] == [True, True], "each node is cordoned, once"
    engine._note_answer(None)
    events = look(engine)
    assert [(event.node.id, event.node.cordon) for event in events] == [("n0", None), ("n1", None)]
    clock.now_s += 60.0
    assert look(engine) == []


def test_an_end_that_the_silence_hid_is_reported_afterwards_with_its_own_time_outs(engine, clock):
    silence(engine, clock)
    ended = {"phase": "Failed", "containerStatuses": [{"name": "phalanx", "state": {"terminated": {"exitCode": 137}}}]}
    engine._pods.replaced([pod(0), pod(1, **ended)])
    engine._note_answer(None)
    assert {type(event) for event in look(engine)} == {NodeListed}
    clock.now_s += SUPERVISOR_REPORT_S
    [lost] = look(engine)
    assert isinstance(lost, SeatLost)
    assert (lost.job_id, lost.node_ids, "137" in lost.why) == ("17", ("n1",), True)


def test_pods_that_vanished_meanwhile_are_left_to_their_leases(engine, clock):
    silence(engine, clock)
    engine._pods.replaced([])
    engine._note_answer(None)
    look(engine)
    clock.now_s += AWAY_S
    assert look(engine) == []
