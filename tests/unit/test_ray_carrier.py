"""The actor that keeps a supervisor on a Ray node, without Ray: what it answers where the supervisor cannot be started."""

import msgspec

from phalanx.core.ids import NodeId
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.ray import carrier
from phalanx.engines.ray.protocol import Carried


def test_a_node_that_could_not_be_carried_is_tried_again_when_asked_again(tmp_path, monkeypatch):
    opened = iter([PermissionError(13, "Permission denied"), None])

    def open_engine(engine):
        error = next(opened)
        if error is not None:
            raise error

    monkeypatch.setattr(LocalEngine, "open", open_engine)
    monkeypatch.setattr(carrier, "_devices_held", list)
    monkeypatch.setenv(carrier.FOLDER_VARIABLE, str(tmp_path))
    order = Carried(
        node_id=NodeId("n0"), token="t", environment={}, ca_pem="", virtual=2, address="127.0.0.2", cluster="c"
    )
    carried = carrier.Carrier()
    assert "Permission denied" in carried.carry(msgspec.to_builtins(order))
    assert carried.pulse() == {"carrying": False, "deaths": []}
    assert carried.carry(msgspec.to_builtins(order)) == ""
    assert carried.pulse() == {"carrying": True, "deaths": []}
    assert next(opened, "no third") == "no third"
