"""What a user types and reads about MIG: `nodes mig`, the page of a node, and virtual devices that stand in for GPUs."""

import json

import pytest

from phalanx.api.views.node_records import _mig_view
from phalanx.app.machine_nodes import virtual_nodes
from phalanx.app.options import parse_arguments, resolve_options
from phalanx.app.state_folder import StateFolder
from phalanx.cli.cluster.mig import mig_lines
from phalanx.cli.root import main
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.fleet.mig import DeviceMig, MigSlice, PlacementSource
from phalanx.core.fleet.virtual_devices import parse_virtual_devices
from phalanx.engines.ray import joined_node
from phalanx.planner.facts.mig import read_mig_gpus
from phalanx.wire.api.nodes import DeviceView


@pytest.fixture
def typed(capsys):
    def run(*words):
        code = main(["nodes", "mig", *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_models_profiles_and_sources_are_listed_without_a_head(typed):
    assert "h100-80gb  " in typed()[1]
    shown = typed("h100")[1]
    assert "2g.20gb     14  19.6 GiB   2 of 7  2 of 8  0, 2, 4" in shown
    assert "source: " in shown
    listed = json.loads(typed("a30", "--json")[1])
    assert listed["profiles"]["2g.12gb"]["profile"]["starts"] == [0, 2]
    assert listed["profiles"]["2g.12gb"]["starts_source"].endswith("2026-11")


def test_slices_are_placed_in_the_order_asked(typed):
    placed = json.loads(typed("h100", "--place", "3g.40gb,4g.40gb,1g.10gb", "--json")[1])
    assert [one["start"] for one in placed["placed"]] == [4, 0, None]
    assert set(placed["room"].values()) == {0}
    assert "1g.10gb  does not fit" in typed("h100", "--place", "3g.40gb,4g.40gb,1g.10gb")[1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["rtx4090"], 64, "no MIG profiles of 'rtx4090' are known (known: a30-24gb"),
        (["h100", "--place", "1g.5gb"], 64, "h100-80gb has no profile '1g.5gb'"),
        (["--place", "1g.5gb"], 64, "--place needs a GPU"),
    ],
)
def test_what_cannot_be_listed_is_said(typed, words, code, said):
    ended, _, error = typed(*words)
    assert said in error
    assert ended == code


def device(index, mig):
    return DeviceView(index=index, uuid=f"GPU-{index}", model="h100", memory_bytes=1, mig=_mig_view(mig))


def test_a_nodes_page_shows_what_mig_can_do_there():
    profiles = next(one.profiles for one in read_mig_gpus() if one.name == "h100-80gb")
    free = DeviceMig(on=True, profiles=profiles, source=PlacementSource.TABLE)
    half = DeviceMig(on=True, profiles=profiles, slices=(MigSlice(profile="3g.40gb", start=4, memory_slices=4),))
    off = DeviceMig(on=False, closed_reason="MIG mode is off; it is set to be on after the next reset")
    lines = mig_lines([device(0, free), device(1, free), device(2, half), device(3, off), device(4, None)])
    assert lines[0].startswith("MIG of GPUs 0-1: on; room for 7 x 1g.10gb or 1 x 1g.10gb+me or ")
    assert lines[0].endswith("; starts from the shipped table")
    assert lines[1].startswith("MIG of GPU 2: on; slices of others: 3g.40gb on 4-7; room for 4 x 1g.10gb or ")
    assert lines[2:] == ["MIG of GPU 3: MIG mode is off; it is set to be on after the next reset"]


@pytest.mark.parametrize("text", ["4", "h100-80gb:4", "a30:4+mig"])
def test_virtual_devices_read_back_as_written(text):
    assert str(parse_virtual_devices(text)) == text


def test_virtual_nodes_stand_in_for_known_gpus():
    (node,) = virtual_nodes("1xH100:4+mig")
    assert (node.virtual_devices, node.virtual_model, node.virtual_mig) == (4, "h100-80gb", True)
    assert [node.virtual_model for node in virtual_nodes("2x4")] == ["", ""]
    for text, said in {"1x4+mig": "is not NODESx", "1xfoo:4": "foo", "1xrtx-4090:4+mig": "are not known"}.items():
        with pytest.raises(BadRequest, match=said):
            virtual_nodes(text)


def test_virtual_nodes_of_several_models_are_numbered_on():
    nodes = virtual_nodes("2xfast:2, 1xh100:4")
    assert [(node.id, node.virtual_model, node.virtual_devices) for node in nodes] == [
        ("n0", "fast", 2),
        ("n1", "fast", 2),
        ("n2", "h100-80gb", 4),
    ]
    for text, said in {"200x1,200x1": "out of range", "2x1,": "is not NODESx", "0x1": "out of range"}.items():
        with pytest.raises(BadRequest, match=said):
            virtual_nodes(text)


def test_an_engine_that_cannot_stand_in_for_a_model_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(joined_node, "ray_version", lambda: "2.60.0")  # it need not be installed
    given = parse_arguments(["--virtual", "1xh100:2", "--engine", "ray"])
    with pytest.raises(Conflict, match="names a GPU model, which engine ray cannot stand in for"):
        resolve_options(given, StateFolder.open(str(tmp_path)), 0)
