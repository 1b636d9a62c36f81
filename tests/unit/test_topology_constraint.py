"""Where a job may lie: the words of its keys, and whether the fleet has such a place at all."""

import pytest

from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.scheduling.shape import acceptable_shapes
from phalanx.core.scheduling.submission import check_topology, topology_notes
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.spec import TopologyConstraint
from phalanx.core.work.topology_constraint import constraint_texts
from tests.builders import make_fleet, spec


def asked(**keys):
    return spec_from_mapping({"run": "python train.py", **keys}, workdir="/work")


# ---- the keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({}, TopologyConstraint()),
        ({"within": "rack"}, TopologyConstraint(within="rack", required=True)),
        ({"within": " Rack "}, TopologyConstraint(within="rack", required=True)),
        ({"prefer": "leaf"}, TopologyConstraint(within="leaf")),
        (
            {"gpus": "8x8", "slice": 4, "slice_within": "nvlink"},
            TopologyConstraint(slice_nodes=4, slice_within="nvlink"),
        ),
        (
            {"gpus": "8x8", "slice": "4", "slice_within": "rack", "within": "leaf"},
            TopologyConstraint(within="leaf", required=True, slice_nodes=4, slice_within="rack"),
        ),
        ({"prefer": "node"}, TopologyConstraint()),
    ],
)
def test_keys_say_where_a_gang_may_lie(keys, want):
    assert asked(**keys).topology == want


@pytest.mark.parametrize(
    ("keys", "says", "hint"),
    [
        ({"within": "rak"}, "within: unknown level 'rak'", "did you mean rack?"),
        ({"prefer": "zone"}, "prefer: unknown level 'zone'", "the levels are spine, leaf, rack, nvlink, node"),
        (
            {"gpus": "8x8", "slice": 4, "slice_within": "blok"},
            "slice_within: unknown level 'blok'",
            "the levels are spine, leaf, rack, nvlink, node",
        ),
    ],
)
def test_unknown_level_is_refused_with_the_nearest(keys, says, hint):
    with pytest.raises(InvalidKey) as refused:
        asked(**keys)
    assert (refused.value.message, refused.value.hint) == (says, hint)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"within": "rack", "prefer": "leaf"}, "within rack and prefer leaf contradict"),
        ({"slice": 4}, "slice_within is missing"),
        ({"slice_within": "rack"}, "slice is missing"),
        ({"gpus": "6x8", "slice": 4, "slice_within": "rack"}, "6 nodes do not divide into slices of 4"),
        ({"gpus": "4..6x8", "slice": 4, "slice_within": "rack"}, "6 nodes do not divide into slices of 4"),
        ({"gpus": "2x8", "within": "node"}, "within: node needs all GPUs on one node, but gpus is 2x8"),
        ({"gpus": "1..2x8", "within": "node"}, "within: node needs all GPUs on one node, but gpus is 1..2x8"),
        ({"gpus": "2x8", "slice": 2, "slice_within": "node"}, "a slice of several nodes"),
    ],
)
def test_keys_that_contradict_are_refused(keys, says):
    with pytest.raises((BadRequest, InvalidKey), match=says):
        asked(**keys)


def test_within_node_fixes_the_shape():
    one = asked(gpus="h200:8", within="node")
    assert (str(one.role.gpus), one.topology) == ("1xh200:8", TopologyConstraint())


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"nodes": "2..8", "gpus_per_node": 8}, "2..8x8"),
        ({"nodes": "2..8", "gpus": "2..8xh200:8"}, "2..8xh200:8"),
        ({"nodes": "4..4", "gpus_per_node": 8}, "4x8"),
        ({"nodes": 4, "gpus_per_node": 8}, "4x8"),
    ],
)
def test_nodes_may_be_a_range(keys, want):
    assert str(asked(**keys).role.gpus) == want


def test_range_that_cannot_be_read_names_its_key():
    with pytest.raises(InvalidKey) as refused:
        asked(nodes="8..2", gpus_per_node=8)
    assert (refused.value.key, refused.value.hint) == ("nodes", "write 2..8")


def test_preemptible_and_reservation_go_with_the_job():
    assert (asked().preemptible, asked().reservation) == (True, "")
    one = asked(preemptible=False, reservation="deadline")
    assert (one.preemptible, one.reservation) == (False, "deadline")
    with pytest.raises(InvalidKey, match="neither true nor false"):
        asked(preemptible="never")


def test_terms_are_told_in_words():
    one = asked(gpus="4x8", within="leaf", slice=2, slice_within="rack", preemptible=False, reservation="deadline")
    assert constraint_texts(one) == [
        "within one leaf",
        "every 2 nodes within one rack",
        "not stopped for other jobs",
        "inside reservation deadline",
    ]
    assert constraint_texts(asked(prefer="rack")) == ["within one rack if possible"]
    assert constraint_texts(asked()) == []


# ---- the fleet ------------------------------------------------------------------------------------------------------

RACKS = "r0: n0=8 n1=8 n2=8 | r1: n3=8 n4=8 | r2: n5=4"


def refusal(gpus, fleet=RACKS, **keys):
    nodes = make_fleet(fleet).nodes.values()
    spread = TopologyConstraint(**keys)
    try:
        check_topology(spread, acceptable_shapes(spec(gpus=gpus).role, nodes), nodes)
    except NeverFits as error:
        return error.message, error.hint
    return None


@pytest.mark.parametrize(
    ("gpus", "keys"),
    [
        ("3x8", {"within": "rack", "required": True}),
        ("3x4", {"within": "rack", "required": True}),
        ("5x8", {"within": "rack"}),  # a wish
        ("5x8", {}),
        ("4x8", {"slice_nodes": 2, "slice_within": "rack"}),
        ("2x8", {"slice_nodes": 2, "slice_within": "rack", "within": "rack", "required": True}),
        ("2x8", {"within": "leaf"}),  # a wish for a level that is not here
    ],
)
def test_what_some_domain_holds_is_taken(gpus, keys):
    assert refusal(gpus, **keys) is None


def test_gang_larger_than_the_largest_domain_never_fits():
    assert refusal("4x8", within="rack", required=True) == (
        "4 nodes x 8 = 32 GPUs within one rack can never fit: no rack has 4 such nodes, the largest is r0 with 3",
        "prefer one rack to accept other placements",
    )


def test_small_nodes_do_not_count_for_large_parts():
    assert refusal("1x8", "r0: n0=4 n1=4 | r1: n2=8", within="rack", required=True) is None
    assert refusal("2x8", "r0: n0=8 n1=4 | r1: n2=8", within="rack", required=True)[0].endswith(
        "the largest is r0 with 1"
    )


def test_level_that_the_fleet_lacks_never_fits():
    assert refusal("1x8", within="leaf", required=True) == (
        "no node is labelled with its leaf, so no job can be kept within one",
        "this fleet has the levels rack",
    )
    assert refusal("1x8", "n0=8", within="leaf", required=True)[1].startswith("this fleet has no level but node")


def test_slices_fall_into_domains_whole():
    """Racks of 3 and 2 nodes have room for two slices of 2, not for the three that 6 nodes would make."""
    assert refusal("6x4", "r0: n0=8 n1=8 n2=8 | r1: n3=8 n4=8 n5=8", slice_nodes=2, slice_within="rack") == (
        "3 slices of 2 nodes, each within one rack, can never fit: the fleet can hold 2",
        "request smaller or fewer slices",
    )
    assert refusal("4x8", slice_nodes=2, slice_within="rack", within="rack", required=True) is not None


def test_nodes_of_unknown_place_are_not_believed_near():
    assert refusal("2x8", "n0=8 n1=8 | r1: n2=8", within="rack", required=True)[0].startswith(
        "2 nodes x 8 = 16 GPUs within one rack"
    )


def test_other_model_may_have_the_domain():
    """No rack holds two h200 nodes; one holds two of h100."""
    assert (
        refusal(
            "2xh200,h100:8", "r0: n0=h200:8 n1=h100:8 | r1: n2=h200:8 n3=h100:8 n4=h100:8", within="rack", required=True
        )
        is None
    )


def test_fleet_without_nodes_refuses_no_place():
    assert refusal("4x8", "", within="rack", required=True) is None


def test_wish_that_counts_for_nothing_is_noted():
    nodes = make_fleet(RACKS).nodes.values()
    assert topology_notes(TopologyConstraint(within="rack"), nodes) == []
    assert topology_notes(TopologyConstraint(within="leaf", required=True), nodes) == []
    assert topology_notes(TopologyConstraint(within="leaf"), nodes) == [
        "no node is labelled with its leaf, so preferring one has no effect (this fleet has the levels rack)"
    ]
