"""The fleet of `top`: every GPU a letter, on screens of any size, and as plain text."""

import pytest

from phalanx.cli.terminal import Terminal
from phalanx.cli.top.fleet_grid import OUT_OF_SEARCH, count_letters, grid_lines, held_gpus, legend_lines
from phalanx.cli.top.rendering import is_found, once_lines
from phalanx.core.ids import JobId, NodeId
from phalanx.wire.api.cell_states import CellState
from phalanx.wire.api.fleet import FleetFrame
from tests.golden.cli.views import NOW_S, jobs, overview

LETTERS = "".join(state.letter for state in CellState)
PIPE = Terminal(width=10_000, height=24, interactive=False, colour=False, blocks=True)


def frame(nodes, gpus=8):
    return FleetFrame(
        now_s=NOW_S,
        nodes=[NodeId(f"gpu-{at:04}") for at in range(nodes)],
        places=[f"rack r{at // 32}" for at in range(nodes)],
        states=["up"] * nodes,
        cells=["".join(LETTERS[(at + gpu) % len(LETTERS)] for gpu in range(gpus)) for at in range(nodes)],
        jobs=[[JobId(str(at))] for at in range(nodes)],
        counts={"running": nodes},
    )


def text(lines):
    return ["".join(part for part, _ in line) for line in lines]


@pytest.mark.parametrize(
    ("nodes", "width", "height"), [(6, 80, 10), (60, 80, 20), (1000, 200, 41), (1000, 200, 46), (1, 8, 1)]
)
def test_every_gpu_is_on_the_screen_as_its_letter(nodes, width, height):
    lines = text(grid_lines(frame(nodes), width, height))
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    shown = "".join(lines)
    if nodes <= 60:
        assert f"gpu-{nodes - 1:04}"[:width] in shown or nodes == 1
    letters = shown if nodes > 60 else "".join(word for line in lines for word in line.split() if "gpu" not in word)
    assert letters.replace(" ", "") == "".join(frame(nodes).cells)


def test_a_screen_that_is_too_small_says_how_many_gpus_it_leaves_out():
    lines = text(grid_lines(frame(1000), 80, 10))
    assert len(lines) == 10
    assert lines[-1].startswith(f"and {8000 - 9 * 80} more GPUs")


def test_a_search_leaves_letters_only_to_what_it_finds():
    found = text(grid_lines(frame(40), 80, 4, wanted="gpu-0007"))
    assert "".join(found).replace(OUT_OF_SEARCH, "").strip() == frame(40).cells[7]
    every = text(grid_lines(frame(40), 80, 4, wanted="rack r0"))
    assert "".join(every).count(OUT_OF_SEARCH) == 8 * 8


def test_legend_has_each_state_that_is_shown_with_its_number():
    counts = count_letters(frame(1, gpus=len(LETTERS)))
    lines = text(legend_lines(counts, 60))
    assert max(map(len, lines)) <= 60
    for state in CellState:
        assert any(f"{state.letter} {state.words} 1" in line for line in lines)
    assert held_gpus(counts) == 11


def test_once_is_plain_text_with_a_line_for_each_node_and_ends():
    lines = once_lines(overview(), frame(3), PIPE)
    assert [line.split() for line in lines if line.startswith("gpu-")] == [
        [f"gpu-{at:04}", "up", frame(3).cells[at], str(at)] for at in range(3)
    ]
    assert not any("\x1b" in line for line in lines)
    assert any(line.startswith("JOB") for line in lines)


def test_jobs_are_found_by_a_part_of_what_is_shown_of_them():
    (first, *_) = jobs()
    assert is_found(first, first.name[1:4])
    assert is_found(first, "")
    assert not is_found(first, "no such text")
