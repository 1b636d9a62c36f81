"""MIG slices in the request for GPUs: what users write, what it means, and the profile that a part of a GPU becomes."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import parse_gpus, with_share_kind
from phalanx.core.work.share import ShareKind
from phalanx.planner.facts.mig import find_mig_gpu


def share_of(gpus):
    assert gpus.share is not None
    return gpus.share


@pytest.mark.parametrize(
    ("text", "nodes", "count", "profile", "kinds"),
    [
        ("h100.1g.10gb", 1, 1, "1g.10gb", (("h100", None),)),
        ("4xH100.1g.10gb:2", 4, 2, "1g.10gb", (("h100", None),)),
        ("1g.10gb", 1, 1, "1g.10gb", ((None, None),)),
        ("a100-80gb.1g.10gb+me", 1, 1, "1g.10gb+me", (("a100", 80),)),
        ("h100.3g.40gb,a100-80gb.3g.40gb:2", 1, 2, "3g.40gb", (("h100", None), ("a100", 80))),
    ],
)
def test_mig_slices_are_counted_on_each_node(text, nodes, count, profile, kinds):
    asked = parse_gpus(text)
    assert (asked.nodes, share_of(asked).count, share_of(asked).profile, asked.kinds) == (nodes, count, profile, kinds)
    assert share_of(asked).kind is ShareKind.MIG
    assert str(asked) == text.lower()
    assert parse_gpus(str(asked)) == asked


def test_an_alternative_may_be_a_slice():
    asked = parse_gpus("h100:1|h100.7g.80gb")
    assert [one.is_mig for one in asked.choices] == [False, True]
    assert str(asked) == "h100:1|h100.7g.80gb"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100.1g.10gb:1/2", "is not a number of MIG slices"),
        ("2..4xh100.1g.10gb", "is not a number of MIG slices"),
        ("h100.1g.10", "is not a number of MIG slices"),
        ("h100.1g.10gb,a100.2g.10gb", "names two profiles"),
        ("h100.1g.10gb,1g.10gb", "with and without a model"),
        ("h100.1g.10gb,h100.1g.10gb", "given twice"),
        ("h100.1g.10gb:0", "requests no GPU"),
        ("0xh100.1g.10gb", "requests no GPU"),
        ("h100.1g.10gb:99999", "more slices than a node has"),
        ("any.1g.10gb", "any without a memory"),
        ("9999999xh100.1g.10gb", "more than any fleet has"),
    ],
)
def test_slices_outside_the_grammar_are_refused(text, said):
    with pytest.raises(BadRequest, match=said):
        parse_gpus(text)


def test_a_slice_is_not_shared_in_another_way_and_time_slices_only_by_name():
    with pytest.raises(BadRequest, match="is a MIG slice, which is not shared by mps"):
        with_share_kind(parse_gpus("h100.1g.10gb"), "mps")
    assert share_of(with_share_kind(parse_gpus("h100.1g.10gb"), "mig")).kind is ShareKind.MIG
    assert share_of(parse_gpus("1/4")).kind is ShareKind.MPS
    assert share_of(with_share_kind(parse_gpus("1/4"), "time")).kind is ShareKind.TIME


@pytest.mark.parametrize(
    ("gpu", "asked", "profile"),
    [
        ("h100", "1/2", "3g.40gb"),
        ("h100", "1/4", "1g.20gb"),
        ("h100", "1/8", "1g.10gb"),
        ("h100", "0.51", "7g.80gb"),
        ("h100", "20GiB", "1g.20gb"),
        ("h100", "21GiB", "3g.40gb"),
        ("h100", "80GiB", "7g.80gb"),
        ("h100", "81GiB", None),
        ("a100-40gb", "20GiB", "3g.20gb"),
        ("a30", "1/4", "1g.6gb"),
    ],
)
def test_a_part_is_the_smallest_profile_that_holds_it(gpu, asked, profile):
    entry = find_mig_gpu(gpu)
    assert entry is not None
    found = share_of(with_share_kind(parse_gpus(asked), "mig")).mig_profile(entry.profiles)
    assert (found and found.name) == profile
