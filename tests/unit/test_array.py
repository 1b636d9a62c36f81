"""Element numbers of arrays: Slurm's grammar, its bounds, and the shortest text back."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import BadRequest
from phalanx.core.work.array import (
    ELEMENTS_MAX,
    INDEX_MAX,
    format_indices,
    parse_array,
)


@pytest.mark.parametrize(
    ("text", "indices", "running_max"),
    [
        ("0-3", (0, 1, 2, 3), None),
        ("0-99%8", tuple(range(100)), 8),
        ("1,3,7-20:2%4", (1, 3, 7, 9, 11, 13, 15, 17, 19), 4),
        ("5", (5,), None),
        (5, (5,), None),
        ("3, 1, 2, 2", (1, 2, 3), None),
        ("0-10:20", (0,), None),
        (f"{INDEX_MAX}", (INDEX_MAX,), None),
    ],
)
def test_elements_as_written(text, indices, running_max):
    ask = parse_array(text)
    assert (ask.indices, ask.running_max) == (indices, running_max)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a number nor a range"),
        ("a", "neither a number nor a range"),
        ("1,,2", "neither"),
        ("-3", "neither"),
        ("3-1", "ends before it begins"),
        ("0-9:0", "step of 0"),
        ("0-9%0", "no element could run"),
        ("0-9%x", "after %"),
        ("0-9%", "after %"),
        ("0-9%2%3", "after %"),
        ("²", "neither"),
        (True, "not a list of elements"),
        (1.5, "not a list of elements"),
        (f"{INDEX_MAX + 1}", f"past {INDEX_MAX}"),
        (f"0-{ELEMENTS_MAX}", f"at most {ELEMENTS_MAX}"),
        (f"1-{ELEMENTS_MAX},20000", f"more than {ELEMENTS_MAX}"),
        ("1," * 100_000, "too many"),
    ],
)
def test_what_is_no_array_is_refused_with_the_reason(text, words):
    with pytest.raises(BadRequest) as refusal:
        parse_array(text)
    assert words in refusal.value.message


def test_a_hint_turns_a_range_round():
    with pytest.raises(BadRequest) as refusal:
        parse_array("9-3")
    assert refusal.value.hint == "write 3-9"


@given(st.sets(st.integers(0, 300), min_size=1, max_size=60))
def test_shortest_text_names_the_same_elements(indices):
    assert parse_array(format_indices(indices)).indices == tuple(sorted(indices))


def test_ten_thousand_are_the_most():
    assert len(parse_array(f"0-{ELEMENTS_MAX - 1}").indices) == ELEMENTS_MAX
    assert format_indices(range(ELEMENTS_MAX)) == f"0-{ELEMENTS_MAX - 1}"
