"""The output of `phalanx plan` for a terminal: headline, layouts, and the parts of the best one. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Final

from phalanx.cli import cells
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.plans.amounts import (
    format_decimal_bytes,
    format_rounded,
    format_seconds,
    format_span,
    format_tokens,
    format_usd,
)
from phalanx.plans.headline import effect_text, headline, host_text, interval_text, samples_text
from phalanx.plans.records import (
    Estimate,
    Formula,
    LayoutFigures,
    NamedAmounts,
    PlanAnswer,
)

_WIDTH_MAX: Final = 120  # of sentences
_BAR: Final = 24
Formatter = Callable[[float], str]
_LOSERS_MAX: Final = 8  # listed individually; --json has all


def plan_page(answer: PlanAnswer, screen: Terminal, *, explain: bool = False) -> list[str]:
    """Return the output lines."""
    lines = _wrapped(answer.request, screen)
    lines += [_painted(line, answer, screen) for line in _wrapped(headline(answer), screen)]
    if not answer.fits and answer.alternatives:
        lines += _titled("alternatives that fit", _listed(answer.alternatives, screen), screen)
    formatted = answer.layouts or answer.losers
    if answer.layouts and not answer.single_layout:
        lines += _titled("layouts", _layouts(answer, screen), screen)
    if answer.simple is not None:
        lines += ["", *_wrapped(_simple(answer, answer.simple), screen)]
    if answer.samples is not None:
        lines += ["", *_wrapped(samples_text(answer.samples), screen, 2)]
    if answer.effects:
        lines += ["", *(line for one in answer.effects for line in _wrapped(effect_text(one), screen, 2))]
    if formatted:
        lines += _parts(answer, formatted[0], screen)
    if len(answer.layouts) > 1 or (answer.losers and answer.layouts):
        lines += _titled("why the others are worse", _lost(answer, screen), screen)
    if explain:
        lines += _titled("formulas", _formulas(answer.formulas, screen), screen)
    if answer.notes:
        lines += _titled("notes", _listed(answer.notes, screen), screen)
    return [*lines, "", screen.paint(f"next: {answer.next_command}", "dim")]


def _layouts(answer: PlanAnswer, screen: Terminal) -> list[str]:
    columns = (
        Column(title="", right=True),
        Column(title="LAYOUT"),
        Column(title="STEP", right=True),
        Column(title="80 %", right=True, drop_order=5),
        Column(title="TOKENS/S", right=True, drop_order=6),
        Column(title="MFU", right=True),
        Column(title="MEMORY", right=True, drop_order=2),
        Column(title="ROOM", right=True, drop_order=7),
        Column(title="TRAINS", right=True, drop_order=1, hide_empty=True),
        Column(title="COST", right=True, drop_order=3, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            f"{number}",
            Cell(layout_text(one.layout), "bold" if number == 1 else ""),
            format_seconds(one.step_s.mid),
            interval_text(one.step_s, format_seconds),
            format_rounded(one.tokens_per_s),
            f"{one.mfu:.0%}",
            format_decimal_bytes(one.used_bytes),
            format_decimal_bytes(one.free_bytes),
            "" if one.train_s is None else format_span(one.train_s.mid),
            "" if one.usd is None else format_usd(one.usd.mid),
        ]
        for number, one in enumerate(answer.layouts, 1)
    ]
    return table(columns, rows, _narrower(screen))


def _simple(answer: PlanAnswer, one: LayoutFigures) -> str:
    """Return a sentence about the layout that everyone knows."""
    text = layout_text(one.layout)
    if not answer.simple_fits:
        return f"simple layout {text}: does not fit: {one.why}"
    if answer.layouts and one.layout == answer.layouts[0].layout:
        return f"the best is the simple layout {text}"
    figures = f"{format_seconds(one.step_s.mid)} per step, {format_decimal_bytes(one.used_bytes)}"
    return f"simple layout {text}: {figures}" + (f"; {one.why}" if one.why else "")


def _parts(answer: PlanAnswer, one: LayoutFigures, screen: Terminal) -> list[str]:
    """Show the parts of memory and step of one layout, and its checkpoints."""
    room = (
        f"{format_decimal_bytes(one.free_bytes)} left"
        if one.free_bytes >= 0
        else f"{format_decimal_bytes(-one.free_bytes)} too much"
    )
    if one.is_tight:
        room += f"; tight: {interval_text(Estimate(low=one.used_low_bytes, mid=one.used_bytes, high=one.used_high_bytes), format_decimal_bytes)}"
    style = "bold" if one.free_bytes >= 0 else "red"
    under = "" if answer.fits else f" under {layout_text(one.layout)}"
    title = f"memory of the fullest GPU{under}: {format_decimal_bytes(one.used_bytes)} of {format_decimal_bytes(one.usable_bytes)}, {room}"
    lines = ["", *(screen.paint(line, style) for line in _wrapped(title, screen))]
    lines += _bars(one.memory_bytes, max(one.usable_bytes, one.used_bytes), format_decimal_bytes, screen)
    if host := host_text(answer, one):
        lines += _wrapped(host, screen)
    if answer.fits and one.free_bytes < 0:
        lines += _wrapped(one.why, screen)
    if answer.fits:
        title = f"step: {format_seconds(one.step_s.mid)} for {format_tokens(answer.step_tokens)} tokens"
        lines += ["", screen.paint(title, "bold")]
        lines += _bars(one.step_items_s, one.step_s.mid, format_seconds, screen)
    if one.checkpoint_cost is not None and answer.fits:
        saving = one.checkpoint_cost
        written = f"checkpoint: {format_decimal_bytes(saving.bytes)}, written in {format_seconds(saving.write_s)}"
        kept = f"optimal interval {format_span(saving.interval_s)}, which keeps {saving.goodput:.2%} of the time"
        lines += ["", *_wrapped(f"{written}; {kept}", screen)]
    return lines


def _bars(items: NamedAmounts, whole: float, formatted: Formatter, screen: Terminal) -> list[str]:
    counts = [(name, value) for name, value in items if value > 0.0005 * whole]
    wide = max((len(name) for name, _ in counts), default=0)
    return [
        f"  {name:<{wide}}  {formatted(value):>9}  {value / whole:>4.0%}  {cells.bar(value / whole, _BAR, screen)}"
        for name, value in counts
    ]


def _lost(answer: PlanAnswer, screen: Terminal) -> list[str]:
    others = [*answer.layouts[1:], *answer.losers]
    lines = _listed([f"{layout_text(one.layout)}: {one.why}" for one in others[:_LOSERS_MAX]], screen)
    more = len(others) - _LOSERS_MAX
    return [*lines, f"and {more} more; see --json"] if more > 0 else lines


def _formulas(formulas: Sequence[Formula], screen: Terminal) -> list[str]:
    lines: list[str] = []
    for one in formulas:
        lines.append(screen.paint(one.name, "bold"))
        lines += [f"  {line}" for text in (one.symbols, one.numbers, one.source) for line in _wrapped(text, screen, 4)]
    return lines


def _listed(texts: Sequence[str], screen: Terminal) -> list[str]:
    return [line for text in texts for line in _wrapped(strip_control(text), screen, 2)]


def _wrapped(text: str, screen: Terminal, indent: int = 0) -> list[str]:
    width = max(20, min(screen.width, _WIDTH_MAX) - indent)
    return textwrap.wrap(text, width, subsequent_indent="  " if indent else "", break_on_hyphens=False) or [""]


def _painted(line: str, answer: PlanAnswer, screen: Terminal) -> str:
    return screen.paint(line, "bold" if answer.fits else "red")


def _titled(title: str, lines: Sequence[str], screen: Terminal) -> list[str]:
    return ["", screen.paint(title, "bold"), *(f"  {line}" for line in lines)]


def _narrower(screen: Terminal) -> Terminal:
    """Return the screen less the indentation of titled sections."""
    return screen._replace(width=screen.width - 2)
