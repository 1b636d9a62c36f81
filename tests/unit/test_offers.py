"""`--offers` of `phalanx up`: given to each node of this machine, remembered, and refused where nodes come from elsewhere."""

import pytest

from phalanx.app.options import parse_arguments, resolve_options
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import BadRequest, Conflict
from phalanx.engines.local.engine_type import LocalEngineType
from phalanx.engines.registry import engine_type


def resolved(folder, *words):
    return resolve_options(parse_arguments(["--virtual", "2x4", *words]), StateFolder.open(str(folder)), 0)


def test_each_virtual_node_offers_it_and_it_is_remembered(tmp_path):
    options = resolved(tmp_path, "--offers", "scratch=2TiB, nic=8")
    assert [node.offers for node in options.nodes] == ["nic=8,scratch=2097152M"] * 2
    assert options.to_store["offers"] == "nic=8,scratch=2097152M"
    assert resolved(tmp_path, "--offers", "off").to_store["offers"] == ""


def test_a_wrong_offer_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="offers: nic: 'many' is not an amount"):
        resolved(tmp_path, "--offers", "nic=many")


def test_nodes_that_another_system_brings_offer_nothing(tmp_path, monkeypatch):
    assert [name for name in ("local", "joined", "ray", "slurm") if engine_type(name).nodes_offer_extras] == [
        "local",
        "joined",
    ]
    monkeypatch.setattr(LocalEngineType, "nodes_offer_extras", False)
    with pytest.raises(Conflict, match="--offers cannot be used with the nodes of engine local"):
        resolved(tmp_path, "--offers", "nic=1")
    assert resolved(tmp_path).nodes[0].offers == ""
