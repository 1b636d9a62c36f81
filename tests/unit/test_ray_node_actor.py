"""The actor that keeps a supervisor on a Ray node, without Ray: what it answers where the supervisor cannot be started."""

import os
import subprocess
from types import SimpleNamespace

import msgspec
import pytest

from phalanx.app import node
from phalanx.core.fleet.node import NO_FOREIGN_USAGE
from phalanx.core.ids import NodeId
from phalanx.engines.local import records
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.ray import node_actor
from phalanx.engines.ray.protocol import SupervisorSpec
from phalanx.node.processes.sweeps import TASK_KEY_VARIABLE

ORDER = SupervisorSpec(
    node_id=NodeId("n0"), token="t", environment={}, ca_pem="", virtual_devices=2, address="127.0.0.2", cluster="c"
)


def test_a_node_that_could_not_be_carried_is_tried_again_when_asked_again(tmp_path, monkeypatch):
    errors = [PermissionError(13, "Permission denied")]
    closed, started = [], []

    def start(_engine, node_id):
        started.append(node_id)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(LocalEngine, "watch", lambda engine: None)
    monkeypatch.setattr(LocalEngine, "start", start)
    monkeypatch.setattr(LocalEngine, "close", lambda engine, *, keep_nodes: closed.append(keep_nodes))
    monkeypatch.setattr(node_actor, "_assigned_devices", list)
    monkeypatch.setenv(node_actor.FOLDER_VARIABLE, str(tmp_path))
    carried = node_actor.NodeActor()
    assert "Permission denied" in carried.start_supervisor(msgspec.to_builtins(ORDER))
    assert carried.poll() == {"carrying": False, "deaths": []}
    assert closed == [False], "what failed went on beside what is asked for again"
    assert carried.start_supervisor(msgspec.to_builtins(ORDER)) == ""
    assert carried.poll() == {"carrying": True, "deaths": [], "gpus": 0}
    assert started == ["n0", "n0"]


@pytest.mark.parametrize(
    ("held", "visible", "devices"),
    [
        ([0, 1, 2], None, [0, 1, 2]),
        ([0], None, [0, 1, 2]),
        ([], None, [0, 1, 2]),
        ([5], b"4,5,6,7", [4, 5, 6]),  # the daemon may see four GPUs, and offers three
        (
            [6],
            b"GPU-1f2e,GPU-99aa,GPU-03bc",
            [6],
        ),  # no indices, and ours is none of the first three: the others are unknown
    ],
)
def test_the_devices_of_a_node_include_those_that_others_hold(held, visible, devices):
    raylet = {} if visible is None else {b"CUDA_VISIBLE_DEVICES": visible}
    assert node_actor.node_devices(held, 3, raylet) == devices


def test_gpus_that_other_users_hold_are_in_use_outside():
    usage = node._foreign_usage({"PHALANX_NODE_OUTSIDE": "1,2", "PHALANX_NODE_OUTSIDE_BY": "others"})
    assert (usage.devices, usage.owners) == ((1, 2), ("others",))
    assert node._foreign_usage({"PHALANX_NODE_OUTSIDE": ""}) == NO_FOREIGN_USAGE


def test_an_actor_stops_its_supervisor_for_more_gpus_only_while_no_task_runs(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(LocalEngine, "watch", lambda engine: None)
    monkeypatch.setattr(LocalEngine, "start", lambda engine, node_id: None)
    monkeypatch.setattr(LocalEngine, "close", lambda engine, *, keep_nodes: closed.append(keep_nodes))
    monkeypatch.setattr(node_actor, "_assigned_devices", list)
    monkeypatch.setenv(node_actor.FOLDER_VARIABLE, str(tmp_path))
    actor = node_actor.NodeActor()
    assert actor.start_supervisor(msgspec.to_builtins(ORDER)) == ""
    living = SimpleNamespace(node_key="n0-key")
    monkeypatch.setattr(records, "read", lambda folder: living)
    task = subprocess.Popen(["sleep", "60"], env={**os.environ, TASK_KEY_VARIABLE: f"1.1.1.{living.node_key}"})
    try:
        assert not actor.release_if_idle()
        assert closed == []
    finally:
        task.kill()
        task.wait()
    assert actor.release_if_idle()
    assert closed == [False]
    assert actor.poll() == {"carrying": False, "deaths": []}
