"""What Ray says becomes nodes of ours; `ray-nodes.json` is what `ray.nodes()` of Ray 2.60 gave in the lab, with our labels."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated"

import json
from pathlib import Path

import pytest

from phalanx.engines.ray.parse import error_line, parse_nodes
from phalanx.engines.ray.protocol import (
    DriverConnected,
    DriverProblem,
    NodesListed,
    ReleaseNode,
    StartSupervisor,
    SupervisorDied,
    decode_command,
    decode_event,
    encode_line,
)

ROWS = json.loads((Path(__file__).parents[1] / "golden" / "ray" / "ray-nodes.json").read_text(encoding="utf-8"))


def row(ray_id, *, host="h0", alive=True, gpus=0.0, **labels):
    named = {key.replace("_", "-"): value for key, value in labels.items()}
    return {
        "NodeID": ray_id,
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"GPU": gpus} if gpus else {},
        "Labels": named,
        "DeathReasonMessage": "health check failed due to missing too many heartbeats" if not alive else "",
    }


def drawn(nodes):
    return [f"{node.node_id} {'up' if node.alive else 'dead'} {node.gpus:g} {node.virtual_devices}" for node in nodes]


def test_rows_of_a_real_cluster():
    assert drawn(parse_nodes(ROWS)) == ["h0 up 2 2", "h1 up 2 2"]
    assert [node.address for node in parse_nodes(ROWS)] == ["10.77.0.1", "10.77.0.2"]


def test_a_node_of_somebody_elses_is_called_as_its_host():
    assert drawn(parse_nodes([row("a", host="gpu-7.example.org", gpus=8.0)])) == ["gpu-7 up 8 None"]


def test_a_node_without_gpus_has_none():
    assert drawn(parse_nodes([row("a")])) == ["h0 up 0 None"]


def test_two_living_nodes_of_one_host_are_told_apart_alike_whatever_their_order():
    rows = [row("bbbbbbbbbb"), row("aaaaaaaaaa")]
    assert [(node.node_id, node.ray_id) for node in parse_nodes(rows)] == [
        ("h0", "aaaaaaaaaa"),
        ("h0-bbbbbb", "bbbbbbbbbb"),
    ]
    assert parse_nodes(rows) == parse_nodes(rows[::-1])


def test_a_node_that_came_back_hides_its_former_life():
    (only,) = parse_nodes([row("a", alive=False), row("b")])
    assert (only.ray_id, only.alive) == ("b", True)


def test_of_two_that_ray_still_takes_for_live_the_last_that_we_started_is():
    """Ray notices a death after 3 to 5 s. Till then the node had a second name, and its actor all of its GPUs."""
    rows = [
        row(ray_id, phalanx_node="n1", phalanx_started=started, phalanx_virtual="2")
        for ray_id, started in (("b", "1000"), ("a", "900"), ("c", "950"))
    ]
    for given in (rows, rows[::-1]):
        (only,) = parse_nodes(given)
        assert (only.node_id, only.ray_id, only.alive) == ("n1", "b", True)


def test_a_dead_node_says_why():
    (dead,) = parse_nodes([row("a", alive=False)])
    assert dead.why == "health check failed due to missing too many heartbeats"


def test_no_rows_are_no_nodes():
    assert parse_nodes([]) == []


@pytest.mark.parametrize("name", ["", "...", "a b/c", "x" * 200])
def test_a_name_is_always_one_that_a_node_may_have(name):
    (node,) = parse_nodes([row("a", host=name)])
    assert node.node_id
    assert len(node.node_id) <= 63
    assert node.node_id.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize(
    "tiding",
    [
        DriverConnected(version="2.60.0"),
        NodesListed(nodes=parse_nodes(ROWS)),
        SupervisorDied(node_id="n0", why="it died"),
        DriverProblem(text="no"),
        DriverProblem(text="no", fatal=True),
    ],
)
def test_tidings_travel_whole(tiding):
    line = encode_line(tiding)
    assert line.count(b"\n") == 1
    assert decode_event(line) == tiding


def test_orders_travel_whole():
    from phalanx.engines.ray.protocol import SupervisorSpec

    what = SupervisorSpec(
        node_id="n0",
        token="t",
        environment={"A": "b\nc"},
        ca_pem="-----\n",
        virtual_devices=None,
        address="10.0.0.1",
        cluster="c",
    )
    for order in (StartSupervisor(node=parse_nodes(ROWS)[0], spec=what), ReleaseNode(node_id="n0")):
        assert encode_line(order).count(b"\n") == 1
        assert decode_command(encode_line(order)) == order


def test_an_error_of_ray_is_its_last_line_but_two_releases_are_told_both():
    assert error_line("Traceback\n  in x\nConnectionError: no\n") == "ConnectionError: no"
    assert error_line("") == ""
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.7\nThis process was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    said = error_line(text)
    assert said == (
        "Version mismatch: The cluster was started with Ray 2.59.0, Python 3.11.7 This process was started with Ray 2.60.0, Python 3.11.7"
    )
