"""What `topology --measure` shows, draws and labels, from rates alone."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import pytest

from phalanx.cli.figure_files import WIDTH
from phalanx.cli.root import main
from phalanx.cli.terminal import Terminal
from phalanx.cli.topology import topology_measurement
from phalanx.cli.topology.measured_tree_drawing import tree_diagram
from phalanx.cli.topology.measured_tree_table import measure_lines
from phalanx.core.fleet.node import NodeState
from phalanx.planner.calibration.network_levels import infer_topology
from phalanx.wire.api.nodes import NodeView
from tests.unit.test_levels import DEEP, FLAT, LEAFS, rates

PLAIN = Terminal(width=120, height=40, interactive=False, colour=False, blocks=False)


def lines(tree, **slow):
    return [line.rstrip() for line in measure_lines(infer_topology(rates(tree, slow=slow.get("slow"))), PLAIN)]


def test_the_table_shows_each_domain_with_what_a_sound_link_in_it_gives():
    assert lines(DEEP) == [
        "DOMAIN       NODES         LINK  HOSTS",
        "all              8   8.0 Gbit/s",
        "  leaf m0        4  32.0 Gbit/s",
        "    rack m0      2  96.0 Gbit/s  n[0-1]",
        "    rack m1      2  96.0 Gbit/s  n[2-3]",
        "  leaf m1        4  32.0 Gbit/s",
        "    rack m2      2  96.0 Gbit/s  n[4-5]",
        "    rack m3      2  96.0 Gbit/s  n[6-7]",
    ]


def test_a_slow_link_is_named_with_what_its_level_has():
    assert lines(LEAFS, slow={"n0-n2": 0.14})[-1] == "slow: n0 - n2: 1.1 Gbit/s, its level has 80.0"
    assert lines(FLAT, slow={"n3": 0.14})[-1] == "slow: all links of n3: 1.1 Gbit/s, its level has 80.0"


def test_a_flat_fleet_is_said_to_be_flat():
    assert lines(FLAT)[1].startswith("no levels: all nodes are equally near")


@pytest.mark.parametrize("tree", [FLAT, LEAFS, DEEP], ids=["flat", "leafs", "two"])
def test_every_node_and_domain_is_drawn_inside_the_diagram(tree):
    found = infer_topology(rates(tree, slow={"n0-n1": 0.1}))
    diagram = tree_diagram(found)
    words = [label.text for label in diagram.labels]
    assert [words.count(node) for node in found.nodes] == [1] * len(found.nodes)
    for level in found.levels:
        assert sum(word.startswith(f"{level.name} m") for word in words) == len(level.domains)
    assert any(word.startswith("slow: n0 - n1") for word in words)
    assert all(box.x >= 0 and box.x + box.width <= WIDTH for box in diagram.boxes)
    assert all(box.y >= 0 and box.y + box.height <= diagram.height for box in diagram.boxes)


def test_nodes_that_a_person_placed_stay_where_they_are(monkeypatch):
    put = []
    monkeypatch.setattr(topology_measurement, "put_labels", lambda _, labels: put.append(labels))
    nodes = [
        NodeView(id=f"n{number}", state=NodeState.UP, engine="local", devices=[], cpus=1, memory_bytes=1, labels=labels)
        for number, labels in enumerate(
            [{}, {"rack": "r7"}, {"leaf": "m4", "topology": "measured"}, {"fan": "loud"}, {}, {}]
        )
    ]
    applied, by_hand = topology_measurement._apply(None, nodes, infer_topology(rates(LEAFS)))
    assert (applied, by_hand) == (["n0", "n2", "n3", "n4", "n5"], ["n1"])
    assert put[0]["n2"] == {"spine": "", "leaf": "m0", "rack": "", "nvlink": "", "topology": "measured"}


@pytest.mark.parametrize("words", [["--apply"], ["--plot", "x.svg"], ["--measure", "--watch"], ["--measure", "show"]])
def test_options_of_a_measurement_without_one_are_refused_in_one_line(words, capsys):
    assert main(["topology", *words]) == 64
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--measure" in said
