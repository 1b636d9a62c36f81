"""The tree in the terminal, and the file that describes it."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import pytest

from phalanx.cli.terminal import Terminal
from phalanx.cli.topology.topology import topology_lines, topology_of
from phalanx.cli.topology.topology_file import read_topology_file
from phalanx.core.errors import BadFile, TooLarge
from phalanx.core.fleet.node import NodeState
from phalanx.wire.api.nodes import CordonView, DeviceView, NodeView

PLAIN = Terminal(width=160, height=40, interactive=False, colour=False, blocks=False)


def node(name, place="", *, used=0, gpus=4, **fields):
    """`node("n0", "s0/l0/r0", used=2)`."""
    devices = [
        DeviceView(
            index=index, uuid=f"{name}-{index}", model="h100", memory_bytes=1, job_id="7" if index < used else None
        )
        for index in range(gpus)
    ]
    labels = dict(zip(("spine", "leaf", "rack"), place.split("/"), strict=False)) if place else {}
    return NodeView(
        id=name,
        state=fields.pop("state", NodeState.UP),
        engine="local",
        devices=devices,
        cpus=8,
        memory_bytes=1,
        labels=labels,
        **fields,
    )


def drawn(*nodes):
    return [line.rstrip() for line in topology_lines(topology_of(nodes), nodes, PLAIN)]


def test_tree_shows_what_is_free_in_each_domain():
    lines = drawn(
        node("n3", "s0/l1/r0"), node("n0", "s0/l0/r0", used=4), node("n1", "s0/l0/r0", used=1), node("n2", "s0/l0/r1")
    )
    assert lines == [
        "DOMAIN       NODES  GPUS  USED              FREE  WHOLE NODES FREE  HOSTS",
        "spine s0         4    16     5  ###.......    11                 2",
        "  leaf l0        3    12     5  ####......     7                 1",
        "    rack r0      2     8     5  ######....     3                 0  n[0-1]",
        "    rack r1      1     4     0  ..........     4                 1  n2",
        "  leaf l1        1     4     0  ..........     4                 1",
        "    rack r0      1     4     0  ..........     4                 1  n3",
    ]


def test_nodes_of_unknown_place_stand_together():
    found = topology_of([node("n0", "s0"), node("n1"), node("n2")])
    assert [(one.level, one.name, one.nodes) for one in found.domains] == [
        ("spine", "s0", ["n0"]),
        ("", "no spine", ["n1", "n2"]),
    ]


def test_what_takes_no_work_is_away_and_not_free():
    cordon = CordonView(by="op", why="disk", since_s=0.0)
    lines = drawn(node("n0", "s0", state=NodeState.DOWN), node("n1", "s0", used=1, cordon=cordon), node("n2", "s0"))
    assert lines[1].split() == ["spine", "s0", "3", "12", "1", "#.........", "4", "1", "7", "n[0-2]"]


def test_fleet_without_labels_says_so():
    assert drawn(node("n0"), node("n1")) == [
        "no node has a topology label (spine, leaf, rack, nvlink): all count as equally near",
        "2 nodes: n[0-1]",
    ]


def test_domains_of_one_name_in_two_places_are_two():
    found = topology_of([node("n0", "s0/l0/r0"), node("n1", "s1/l0/r0")])
    assert [one.path for one in found.domains if one.level == "rack"] == [["s0", "l0", "r0"], ["s1", "l0", "r0"]]


# ---- the file -------------------------------------------------------------------------------------------------------

TREE = """\
spine s0:
  leaf l0:
    rack r0: gpu[001-002]
    rack r1: [gpu003, "gpu[005-006]"]
  leaf l1: gpu004
"""


def placed(tmp_path, text):
    path = tmp_path / "tree.yaml"
    path.write_text(text)
    return read_topology_file(str(path))


def test_tree_of_host_lists_becomes_labels(tmp_path):
    found = placed(tmp_path, TREE)
    assert list(found) == ["gpu001", "gpu002", "gpu003", "gpu005", "gpu006", "gpu004"]
    assert found["gpu006"] == {"spine": "s0", "leaf": "l0", "rack": "r1", "nvlink": ""}
    assert found["gpu004"] == {"spine": "s0", "leaf": "l1", "rack": "", "nvlink": ""}  # it is in no rack any more


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ":1: empty file"),
        ("- n0", ":1: a topology file has keys and values"),
        ("rak r0: n0", "unknown level 'rak'"),
        ("rack: n0", "a rack needs a name"),
        ("rack r0: {leaf l0: n0}", "rack r0: a leaf cannot be inside a rack"),
        ("rack r0: {rack r1: n0}", "rack r0: a rack cannot be inside a rack"),
        ("rack r0: n0\nrack r1: n[0-1]", ":2: n0 is both under rack r0 and under rack r1"),
        ("rack r0:", "rack r0: None is not a host list"),
        ("rack r0: 7", "rack r0: 7 is not a host list"),
        ("rack r0: [7]", "rack r0: 7 is not a host list"),
        ("rack r0: n[3-1]", "rack r0: host list entry"),
        ("rack r0: n0\nrack r0: n1", ":2: rack r0 is defined twice, here and on line 1"),
        ("rack r0: [", r":\d+: not YAML"),
        ("rack r0: n0\nrack r1: &a [n1]", ":2: anchors and aliases are not allowed in a topology file"),
    ],
)
def test_other_files_are_refused_by_place(tmp_path, text, says):
    with pytest.raises(BadFile, match=says) as refused:
        placed(tmp_path, text)
    assert refused.value.message.startswith(str(tmp_path))


def test_file_that_is_missing_or_huge_is_refused(tmp_path):
    with pytest.raises(BadFile, match="no such file"):
        read_topology_file(str(tmp_path / "none.yaml"))
    with pytest.raises(TooLarge):
        placed(tmp_path, "#" * ((1 << 20) + 1))


def test_mistyped_level_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(BadFile) as refused:
        placed(tmp_path, "rak r0: n0")
    assert refused.value.hint == "did you mean rack?"
