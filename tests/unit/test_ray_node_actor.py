"""The actor that keeps a supervisor on a Ray node, without Ray: what it answers where the supervisor cannot be started."""

import msgspec

from phalanx.core.ids import NodeId
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.ray import node_actor
from phalanx.engines.ray.protocol import SupervisorSpec


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
    order = SupervisorSpec(
        node_id=NodeId("n0"), token="t", environment={}, ca_pem="", virtual_devices=2, address="127.0.0.2", cluster="c"
    )
    carried = node_actor.NodeActor()
    assert "Permission denied" in carried.start_supervisor(msgspec.to_builtins(order))
    assert carried.poll() == {"carrying": False, "deaths": []}
    assert closed == [False], "what failed went on beside what is asked for again"
    assert carried.start_supervisor(msgspec.to_builtins(order)) == ""
    assert carried.poll() == {"carrying": True, "deaths": []}
    assert started == ["n0", "n0"]
