"""The answer of `phalanx plan` as lines for a terminal: the sentence first, then the layouts, then what one of them is made of. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from phalanx.cli import cells
from phalanx.cli.plan.amounts import gb_shown, round_shown, seconds_shown, span_shown, tokens_shown, usd_shown
from phalanx.cli.plan.figures import Figures, Formula, Named, Range, Told
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, clean
from phalanx.core.work.planned import layout_text

_WIDTH_MAX: Final = 120  # of sentences: longer lines are hard to read
_BAR: Final = 24
Shown = Callable[[float], str]
_LOSERS_MAX: Final = 8  # told one by one; --json has all


def plan_page(told: Told, screen: Terminal, *, explain: bool = False) -> list[str]:
    """The lines."""
    lines = _wrapped(told.asked, screen)
    lines += [_painted(line, told, screen) for line in _wrapped(headline(told), screen)]
    if not told.fits and told.smallest:
        lines += _titled("what would fit", _listed(told.smallest, screen), screen)
    shown = told.layouts or told.losers
    if told.layouts and not told.judged_alone:
        lines += _titled("layouts", _layouts(told, screen), screen)
    if shown:
        lines += _parts(told, shown[0], screen)
    if len(told.layouts) > 1 or (told.losers and told.layouts):
        lines += _titled("why the others lost", _lost(told, screen), screen)
    if explain:
        lines += _titled("formulas", _formulas(told.formulas, screen), screen)
    if told.notes:
        lines += _titled("notes", _listed(told.notes, screen), screen)
    return [*lines, "", screen.paint(f"next: {told.next}", "dim")]


def headline(told: Told) -> str:
    """The answer in one sentence."""
    if not told.fits:
        return told.reason if "not fit" in told.reason else f"does not fit: {told.reason}"
    best = told.layouts[0]
    text = layout_text(best.layout)
    parts = [
        f"{text} {'fits' if best.room_bytes >= 0 else 'may fit'}" if told.judged_alone else f"fits; best is {text}",
        f"{seconds_shown(best.step_s.mid)} a step ({_ends(best.step_s, seconds_shown)})",
        f"{best.mfu:.0%} MFU",
        f"{round_shown(best.tokens_per_s)} tokens/s",
    ]
    if told.tokens is not None and best.train_s is not None:
        mid_s = best.train_s.mid
        ends = _ends(best.train_s, lambda seconds: span_shown(seconds, mid_s))
        parts.append(f"{tokens_shown(told.tokens)} tokens in {span_shown(mid_s)} ({ends})")
    if best.gpu_hours is not None:
        parts.append(f"{round_shown(best.gpu_hours.mid)} GPU-hours ({_ends(best.gpu_hours, round_shown)})")
    if best.usd is not None:
        parts.append(f"{usd_shown(best.usd.mid)} ({_ends(best.usd, usd_shown)}) at {told.price}")
    return f"{parts[0]}: {', '.join(parts[1:])}"


def _layouts(told: Told, screen: Terminal) -> list[str]:
    columns = (
        Column(title="", right=True),
        Column(title="LAYOUT"),
        Column(title="STEP", right=True),
        Column(title="80 %", right=True, drop=5),
        Column(title="TOKENS/S", right=True, drop=6),
        Column(title="MFU", right=True),
        Column(title="MEMORY", right=True, drop=2),
        Column(title="ROOM", right=True, drop=7),
        Column(title="TRAINS", right=True, drop=1, hide_empty=True),
        Column(title="COST", right=True, drop=3, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            f"{number}",
            Cell(layout_text(one.layout), "bold" if number == 1 else ""),
            seconds_shown(one.step_s.mid),
            _ends(one.step_s, seconds_shown),
            round_shown(one.tokens_per_s),
            f"{one.mfu:.0%}",
            gb_shown(one.used_bytes),
            gb_shown(one.room_bytes),
            "" if one.train_s is None else span_shown(one.train_s.mid),
            "" if one.usd is None else usd_shown(one.usd.mid),
        ]
        for number, one in enumerate(told.layouts, 1)
    ]
    return table(columns, rows, _narrower(screen))


def _parts(told: Told, one: Figures, screen: Terminal) -> list[str]:
    """What the memory and the step of one layout are made of, and its checkpoints."""
    room = f"{gb_shown(one.room_bytes)} left" if one.room_bytes >= 0 else f"{gb_shown(-one.room_bytes)} too much"
    style = "bold" if one.room_bytes >= 0 else "red"
    under = "" if told.fits else f" under {layout_text(one.layout)}"
    title = f"memory of the fullest GPU{under}: {gb_shown(one.used_bytes)} of {gb_shown(one.usable_bytes)}, {room}"
    lines = ["", *(screen.paint(line, style) for line in _wrapped(title, screen))]
    lines += _bars(one.memory_bytes, max(one.usable_bytes, one.used_bytes), gb_shown, screen)
    if told.fits and one.room_bytes < 0:
        lines += _wrapped(one.why, screen)
    if told.fits:
        title = f"step: {seconds_shown(one.step_s.mid)} for {tokens_shown(told.seq * told.global_batch)} tokens"
        lines += ["", screen.paint(title, "bold")]
        lines += _bars(one.step_items_s, one.step_s.mid, seconds_shown, screen)
    if one.saving is not None and told.fits:
        saving = one.saving
        written = f"checkpoint: {gb_shown(saving.bytes)}, written in {seconds_shown(saving.write_s)}"
        kept = f"one every {span_shown(saving.interval_s)} loses least: {saving.goodput:.2%} of the time is kept"
        lines += ["", *_wrapped(f"{written}; {kept}", screen)]
    return lines


def _bars(items: Named, whole: float, shown: Shown, screen: Terminal) -> list[str]:
    counts = [(name, value) for name, value in items if value > 0.0005 * whole]
    wide = max((len(name) for name, _ in counts), default=0)
    return [
        f"  {name:<{wide}}  {shown(value):>9}  {value / whole:>4.0%}  {cells.bar(value / whole, _BAR, screen)}"
        for name, value in counts
    ]


def _lost(told: Told, screen: Terminal) -> list[str]:
    others = [*told.layouts[1:], *told.losers]
    lines = _listed([f"{layout_text(one.layout)}: {one.why}" for one in others[:_LOSERS_MAX]], screen)
    more = len(others) - _LOSERS_MAX
    return [*lines, f"and {more} more; --json has them"] if more > 0 else lines


def _formulas(formulas: Sequence[Formula], screen: Terminal) -> list[str]:
    lines: list[str] = []
    for one in formulas:
        lines.append(screen.paint(one.name, "bold"))
        lines += [f"  {line}" for text in (one.symbols, one.numbers, one.source) for line in _wrapped(text, screen, 4)]
    return lines


def _listed(texts: Sequence[str], screen: Terminal) -> list[str]:
    return [line for text in texts for line in _wrapped(clean(text), screen, 2)]


def _wrapped(text: str, screen: Terminal, indent: int = 0) -> list[str]:
    width = max(20, min(screen.width, _WIDTH_MAX) - indent)
    return textwrap.wrap(text, width, subsequent_indent="  " if indent else "", break_on_hyphens=False) or [""]


def _painted(line: str, told: Told, screen: Terminal) -> str:
    return screen.paint(line, "bold" if told.fits else "red")


def _titled(title: str, lines: Sequence[str], screen: Terminal) -> list[str]:
    return ["", screen.paint(title, "bold"), *(f"  {line}" for line in lines)]


def _narrower(screen: Terminal) -> Terminal:
    """The screen less what titled lines stand in."""
    return replace(screen, width=screen.width - 2)


def _ends(one: Range, shown: Shown) -> str:
    """`1.7 to 2.2 s`: the unit once where both ends have it."""
    low, high = shown(one.low), shown(one.high)
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if number and high.endswith(f" {unit}") else f"{low} to {high}"
