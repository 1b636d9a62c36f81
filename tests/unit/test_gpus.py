"""The grammar of GPUs: one wherever they are named."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import (
    GPUS_MAX,
    GpuRequest,
    combine_gpu_options,
    parse_gpus,
    parse_nodes,
)


@pytest.mark.parametrize(
    ("text", "total", "nodes", "per_node", "model", "memory_gib"),
    [
        ("8", 8, None, None, None, None),
        (8, 8, None, None, None, None),
        ("0", 0, None, None, None, None),
        ("2x8", 16, 2, 8, None, None),
        ("2X8", 16, 2, 8, None, None),
        ("h200:8", 8, None, None, "h200", None),
        ("a100-80gb:8", 8, None, None, "a100", 80),
        ("H100:80GB:8", 8, None, None, "h100", 80),
        ("h100:80g:8", 8, None, None, "h100", 80),
        ("H100-80GiB:8", 8, None, None, "h100", 80),
        ("4xh200:8", 32, 4, 8, "h200", None),
        ("2xa100-sxm4-80gb:4", 8, 2, 4, "a100-sxm4", 80),
        ("rtx-a6000:2", 2, None, None, "rtx-a6000", None),
        (" 2x8 ", 16, 2, 8, None, None),
    ],
)
def test_every_example_of_the_design_is_read(text, total, nodes, per_node, model, memory_gib):
    assert parse_gpus(text) == GpuRequest(
        total=total, nodes=nodes, per_node=per_node, model=model, memory_gib=memory_gib
    )


@pytest.mark.parametrize(
    ("text", "shown", "kinds"),
    [
        ("h200,h100:8", "h200,h100:8", (("h200", None), ("h100", None))),
        ("4xH200, h100:8", "4xh200,h100:8", (("h200", None), ("h100", None))),
        ("a100-80gb,h100:8", "a100-80gb,h100:8", (("a100", 80), ("h100", None))),  # the memory is that of its own kind
        ("h100,a100:80GB:8", "h100,a100-80gb:8", (("h100", None), ("a100", 80))),
        ("a100-80gb,a100:8", "a100-80gb,a100:8", (("a100", 80), ("a100", None))),
        ("2..8xh200:8", "2..8xh200:8", (("h200", None),)),
        ("2..8x8", "2..8x8", ((None, None),)),
        ("2..2x8", "2x8", ((None, None),)),
    ],
)
def test_several_kinds_and_a_range_of_nodes_read_back_as_shown(text, shown, kinds):
    asked = parse_gpus(text)
    assert (str(asked), asked.kinds) == (shown, kinds)
    assert parse_gpus(shown) == asked


def test_elastic_request_counts_its_fewest():
    asked = parse_gpus("2..8xh200:4")
    assert (asked.total, asked.nodes, asked.nodes_max, asked.per_node) == (8, 2, 8, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8..2x8", "8..2 ends before it begins"),
        ("h100,h100:8", "h100 is given twice"),
        ("h100-80gb,h100:80g:8", "h100-80gb is given twice"),
        (",".join(f"m{at}" for at in range(9)) + ":8", "9 models are more than 8"),
        ("0..2x8", "requests no GPU"),
        ("2..1000000x8", "more than any fleet"),
    ],
)
def test_refusal_of_kinds_and_ranges_says_which(text, says):
    with pytest.raises(BadRequest, match=says):
        parse_gpus(text)


@pytest.mark.parametrize(("text", "want"), [(4, (4, None)), ("4", (4, None)), ("2..8", (2, 8)), ("3..3", (3, None))])
def test_nodes_are_a_number_or_a_range(text, want):
    assert parse_nodes(text) == want


@pytest.mark.parametrize(
    "text",
    [
        0,
        -1,
        True,
        1.5,
        "",
        "2..",
        "..8",
        "8..2",
        "2-8",
        "0..4",
        "2...8",
        str(GPUS_MAX + 1),
        "1.." + str(GPUS_MAX + 1),
        "٣",
    ],
)
def test_other_numbers_of_nodes_are_refused(text):
    with pytest.raises(BadRequest):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("gpus", "nodes", "most", "each", "want"),
    [
        (None, 2, 8, 8, "2..8x8"),
        ("2..8xh200:8", 2, 8, None, "2..8xh200:8"),
        ("2..8xh200:8", 2, 8, 8, "2..8xh200:8"),
        ("h200,h100:16", 2, None, None, "2xh200,h100:8"),
        ("2..8x8", None, None, None, "2..8x8"),
    ],
)
def test_options_make_one_elastic_request(gpus, nodes, most, each, want):
    assert str(combine_gpu_options(None if gpus is None else parse_gpus(gpus), nodes, each, most)) == want


@pytest.mark.parametrize(
    ("gpus", "nodes", "most", "each", "hint"),
    [
        ("h200:16", 2, 8, None, "give gpus 2..8xh200:8"),
        (None, 2, 8, None, "give gpus_per_node"),
        ("2x8", 2, 8, None, "give one of the two"),
        ("2..8x8", 2, 4, None, "give one of the two"),
        ("2..8x8", 2, None, None, "give one of the two"),
        ("2..8x8", 2, 8, 4, "give one of the two"),
    ],
)
def test_elastic_contradictions_say_what_to_write(gpus, nodes, most, each, hint):
    with pytest.raises(BadRequest) as refused:
        combine_gpu_options(None if gpus is None else parse_gpus(gpus), nodes, each, most)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x8",
        "2x",
        "8x",
        "0x8",
        "2x0",
        "h200",
        "h200:",
        ":8",
        "80gb:8",
        "2x3x4",
        "-1",
        -1,
        1.5,
        True,
        None,
        [8],
        "eight",
        "8 8",
        "2 x 8",
        str(GPUS_MAX + 1),
        GPUS_MAX + 1,
        "9" * 5000,
        "9" * 5000 + "x1",
        "h200:" + "9" * 5000,
        "a-" * 5000,
        "h200,:8",
        ",h200:8",
        "h200,8",
        "h200,,h100:8",
        "2..x8",
        "..2x8",
        "2..8",
        "a-" * 180 + ":8",
        "a-1g" * 90 + "!",
        "٣",
        "1000000x2",
        10**9,
    ],
    ids=lambda text: repr(text)[:24],
)
def test_everything_else_is_refused_with_an_example(text):
    with pytest.raises(BadRequest) as refused:
        parse_gpus(text)
    assert len(refused.value.message) < 200
    assert refused.value.exit_code == 64


def test_number_of_thousands_of_digits_is_refused():
    with pytest.raises(BadRequest):
        parse_gpus(10**5000)


@given(st.integers(0, 999), st.integers(1, 99), st.sampled_from(("", "h200", "a100-80gb", "rtx-a6000")), st.booleans())
def test_what_is_shown_reads_back(count, nodes, kind, fixed):
    asked = parse_gpus(f"{f'{nodes}x' if fixed else ''}{kind + ':' if kind else ''}{max(1, count)}")
    assert parse_gpus(str(asked)) == asked


@pytest.mark.parametrize(
    ("gpus", "nodes", "each", "want"),
    [
        (None, None, None, "0"),
        (None, 2, 8, "2x8"),
        (None, None, 4, "1x4"),
        (None, 3, None, "3x0"),
        ("16", None, None, "16"),
        ("16", 2, None, "2x8"),
        ("16", None, 8, "2x8"),
        ("16", 2, 8, "2x8"),
        ("2x8", 2, 8, "2x8"),
        ("2x8", None, None, "2x8"),
        ("h200:16", 2, None, "2xh200:8"),
        ("0", 2, None, "2x0"),
    ],
)
def test_three_options_make_one_request(gpus, nodes, each, want):
    assert str(combine_gpu_options(None if gpus is None else parse_gpus(gpus), nodes, each)) == want


@pytest.mark.parametrize(
    ("gpus", "nodes", "each"),
    [
        ("2x8", 3, None),
        ("2x8", None, 4),
        ("16", 3, None),
        ("16", None, 5),
        ("16", 2, 4),
        ("8", 16, None),
        ("8", None, 16),
        ("8", 0, None),
        ("8", -1, None),
        ("8", None, -1),
        ("8", None, 0),
        (None, 0, 8),
    ],
)
def test_contradictions_are_error_64(gpus, nodes, each):
    with pytest.raises(BadRequest) as refused:
        combine_gpu_options(None if gpus is None else parse_gpus(gpus), nodes, each)
    assert refused.value.exit_code == 64


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("h100:8|a100:16", "8 or 16"),
        (" H100:8 | A100:16 ", "8 or 16"),
        ("2xh100:8|4xa100,v100:8", "16 or 32"),
        ("2..4xh100:8|4..8xa100:8", "16 or 32"),
        ("h100:16|h100:8", "16 or 8"),  # the larger number if it is free
        ("h100:8|8", "8"),
        ("h100:1/4|a100:1/2", "0.25 or 0.5"),
        ("h100:1/2|a100:1", "0.5 or 1"),
    ],
)
def test_alternatives_with_a_number_each_are_read_back_as_they_were_written(text, amounts):
    asked = parse_gpus(text)
    assert parse_gpus(str(asked)) == asked
    assert str(asked).replace("0.25", "1/4").replace("0.5", "1/2") == text.strip().lower().replace(" ", "")
    assert asked.amount_text == amounts
    assert all(not one.alternatives for one in asked.choices)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("h100:8|", "an alternative is empty"),
        ("|", "an alternative is empty"),
        ("h100:8||a100:8", "an alternative is empty"),
        ("h100:8|a100", "a100 has no number of GPUs"),
        ("h100|a100:8", "h100 has no number of GPUs"),
        ("h100:8|a100:x", "'a100:x' is not a number of GPUs"),
        ("h100:8|h100:8", "h100:8 is given twice"),
        ("h100:8|a100:0", "an alternative without GPUs"),
        ("h100:8|0", "an alternative without GPUs"),
        ("h100:8|a100:1.5", "more than one GPU and not a whole number"),
        ("|".join(f"m{number}x:8" for number in range(9)), "9 alternatives are more than 8"),
    ],
)
def test_contradictory_alternatives_are_error_64(text, why):
    with pytest.raises(BadRequest, match=re.escape(why)) as refused:
        parse_gpus(text)
    assert refused.value.exit_code == 64


@pytest.mark.parametrize(
    ("text", "nodes", "each", "want"),
    [
        ("h100:8|a100:16", None, 8, "1xh100:8|2xa100:8"),
        ("h100:8|a100:16", 2, None, "2xh100:4|2xa100:8"),
        ("1xh100:8|a100:16", None, 8, "1xh100:8|2xa100:8"),
        ("2..4xh100:8|2..4xa100:4", "2..4", None, "2..4xh100:8|2..4xa100:4"),
    ],
)
def test_numbers_of_nodes_and_gpus_per_node_hold_for_each_alternative(text, nodes, each, want):
    fewest, most = (nodes, None) if not isinstance(nodes, str) else (2, 4)
    assert str(combine_gpu_options(parse_gpus(text), fewest, each, most)) == want


@pytest.mark.parametrize(("nodes", "each"), [(3, None), (None, 16), (2, 8)])
def test_an_alternative_that_contradicts_another_option_is_error_64(nodes, each):
    with pytest.raises(BadRequest) as refused:
        combine_gpu_options(parse_gpus("h100:8|a100:16"), nodes, each)
    assert refused.value.exit_code == 64


@pytest.mark.parametrize("text", ["any-60gb:8", "2xany-60gb:4", "h100,any-80gb:8", "any-60gb,a100:8", "any-60gb:1"])
def test_any_model_with_a_memory_reads_as_it_is_written(text):
    asked = parse_gpus(text)
    assert str(asked) == text
    assert (None, int(text.split("any-")[1].split("gb")[0])) in asked.kinds


def test_any_model_needs_a_memory():
    with pytest.raises(BadRequest, match="any without a memory"):
        parse_gpus("any:8")
