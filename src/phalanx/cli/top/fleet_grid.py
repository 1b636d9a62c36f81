"""The fleet of `top`: one letter for each GPU, as in the dashboard (wire.api.cell_states), on as few lines as the screen needs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from phalanx.cli.terminal import strip_control, truncate
from phalanx.wire.api.cell_states import HELD_STATES, CellState
from phalanx.wire.api.fleet import FleetFrame

Run = tuple[str, str]  # text and its style
OUT_OF_SEARCH: Final = "·"
# Colours repeat what the letters say.
STYLES: Final = {
    **dict.fromkeys("A", "green"),
    **dict.fromkeys("LW", "yellow"),
    **dict.fromkeys("KSP", "cyan"),
    **dict.fromkeys("IUH", "bright_yellow"),
    **dict.fromkeys("GTB", "bold red"),
    **dict.fromkeys("X", "red"),
    **dict.fromkeys("CDRO", "magenta"),
    **dict.fromkeys("F", "dim"),
}
_NAME_MAX: Final = 24
_BETWEEN: Final = 2  # columns between two named nodes


def count_letters(frame: FleetFrame) -> Counter[str]:
    """Return the number of GPUs in each state, by letter."""
    return Counter("".join(frame.cells))


def held_gpus(counts: Counter[str]) -> int:
    """Return how many GPUs jobs hold."""
    return sum(counts[state.letter] for state in HELD_STATES)


def legend_lines(counts: Counter[str], width: int) -> list[list[Run]]:
    """Return the letters that are shown now with their words and numbers, on as many lines as they need."""
    lines: list[list[Run]] = [[]]
    used = 0
    for state in CellState:
        if not counts[state.letter]:
            continue
        text = f" {state.words} {counts[state.letter]}"
        if used and used + 1 + len(text) + 2 > width:
            lines.append([])
            used = 0
        if used:
            lines[-1].append(("  ", ""))
            used += 2
        lines[-1] += [(state.letter, STYLES[state.letter]), (text, "")]
        used += 1 + len(text)
    return lines


def grid_lines(frame: FleetFrame, width: int, height: int, wanted: str = "") -> list[list[Run]]:
    """Return every GPU of the fleet in lines of styled runs.

    With names if that fits into `height`, otherwise with a gap between nodes, otherwise packed. `wanted`: only nodes whose name, place or jobs
    contain it keep their letters.
    """
    shown = [_letters(frame, at, wanted) for at in range(len(frame.nodes))]
    longest = max((len(letters) for letters in shown), default=0)
    names = [truncate(strip_control(name), _NAME_MAX) for name in frame.nodes]
    label = max(map(len, names), default=0) + 1
    per_line = max(1, (width + _BETWEEN) // (label + longest + _BETWEEN))
    if label + longest <= width and -(-len(names) // per_line) <= height:
        return [
            list(_named(names[at : at + per_line], shown[at : at + per_line], label, longest))
            for at in range(0, len(names), per_line)
        ]
    lines = _wrapped(" ".join(shown), width)
    if len(lines) > height:
        lines = _wrapped("".join(shown), width)
    if len(lines) > height:
        more = sum(len(line.replace(" ", "")) for line in lines[max(0, height - 1) :])
        return [
            *map(_runs, lines[: max(0, height - 1)]),
            [(truncate(f"and {more} more GPUs; phalanx top --once lists all", width), "dim")],
        ]
    return [_runs(line) for line in lines]


def _letters(frame: FleetFrame, at: int, wanted: str) -> str:
    letters = frame.cells[at]
    if not wanted or wanted in frame.nodes[at] or wanted in frame.places[at] or wanted in frame.jobs[at]:
        return letters
    return OUT_OF_SEARCH * len(letters)


def _named(names: Sequence[str], shown: Sequence[str], label: int, longest: int) -> Iterator[Run]:
    for at, (name, letters) in enumerate(zip(names, shown, strict=True)):
        if at:
            yield " " * _BETWEEN, ""
        yield f"{name:<{label}}", ""
        yield from _runs(letters)
        if at + 1 < len(names):
            yield " " * (longest - len(letters)), ""


def _wrapped(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def _runs(text: str) -> list[Run]:
    return [("".join(run), STYLES.get(letter, "")) for letter, run in groupby(text)]
