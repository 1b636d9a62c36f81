"""Tables fit; strangers' text steers nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli import cells
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import (
    Terminal,
    display_width,
    strip_control,
    truncate,
)


def screen(width=80, *, colour=False, blocks=True):
    return Terminal(width=width, height=24, interactive=colour, colour=colour, blocks=blocks)


COLUMNS = (
    Column(title="ID", right=True),
    Column(title="NAME", min_width=4),
    Column(title="X", drop_order=1),
    Column(title="WHY", min_width=6),
)


def test_wide_enough_cuts_nothing():
    rows = [["1", "training", "abc", "waits for four more"], ["12", "b", "", ""]]
    assert table(COLUMNS, rows, screen()) == [
        "ID  NAME      X    WHY",
        " 1  training  abc  waits for four more",
        "12  b",
    ]


def test_a_long_text_ends_at_its_columns_limit_even_in_a_pipe():
    columns = (Column(title="ID"), Column(title="TEXT", max_width=10), Column(title="R"))
    assert table(columns, [["1", "a" * 400, "done"]], screen(10_000)) == ["ID  TEXT        R", "1   aaaaaaaaa…  done"]


def test_narrow_cuts_the_widest_first_then_drops_columns():
    rows = [["1", "training", "abc", "waits for four more"]]
    assert table(COLUMNS, rows, screen(30)) == ["ID  NAME      X    WHY", " 1  training  abc  waits for …"]
    assert table(COLUMNS, rows, screen(18)) == ["ID  NAME    WHY", " 1  train…  waits…"]
    assert table(COLUMNS, rows, screen(10)) == ["ID  NAME", " 1  tra…"]


def test_columns_with_nothing_in_them_are_left_out():
    columns = (Column(title="A"), Column(title="B", hide_empty=True))
    assert table(columns, [["x", ""]], screen()) == ["A", "x"]


def test_colour_never_changes_the_layout():
    rows: list[list[Cell | str]] = [[Cell("1", "bold"), Cell("running", "green"), "", Cell("x", "red")]]
    plain = table(COLUMNS, rows, screen())
    painted = table(COLUMNS, rows, screen(colour=True))
    assert [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in painted] == plain
    assert "\x1b[32mrunning\x1b[0m" in painted[1]


@given(st.lists(st.lists(st.text(max_size=40), min_size=4, max_size=4), max_size=5), st.integers(10, 120))
def test_no_line_is_wider_than_the_terminal(rows, width):
    for line in table(COLUMNS, rows, screen(width)):
        assert display_width(line) <= width
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in line)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\tb\nc", "a b c"),
        ("\x1b[31mred", "\ufffd[31mred"),
        ("bell\a", "bell\ufffd"),
        ("right\u202eleft", "right\ufffdleft"),
        ("\x9b2J", "\ufffd2J"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(text, shown):
    assert strip_control(text) == shown


def test_wide_characters_count_twice():
    assert display_width("模型") == 4
    assert truncate("模型模型", 5) == "模型…"
    assert truncate("abc", 3) == "abc"
    assert truncate("abcd", 3) == "ab…"


def test_bars():
    assert cells.bar(0.5, 4, screen()) == "██░░"
    assert cells.bar(None, 4, screen()) == "····"
    assert cells.bar(1.5, 4, screen()) == "████"
    assert cells.bar(0.5, 4, screen(blocks=False)) == "##.."
    assert [cells.utilisation_mark(share, screen()) for share in (0.0, 0.5, 1.0, None)] == ["▁", "▅", "█", "?"]
    assert cells.percent(0.876) == "88%"
    assert [cells.rate(value) for value in (None, 5, 16_100, 2.5e6)] == ["", "5/s", "16.1k/s", "2.5M/s"]
