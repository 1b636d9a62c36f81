"""The output of `phalanx plan --serve` for a terminal: headline, layouts, and formulas. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.plans.amounts import format_decimal_bytes, format_rounded, format_seconds
from phalanx.plans.headline import interval_text
from phalanx.plans.records import Formula
from phalanx.plans.serving.records import ServedLayout, ServingAnswer

_WIDTH_MAX: Final = 120  # of sentences
_REJECTED_MAX: Final = 8  # listed individually; --json has all


def serving_page(answer: ServingAnswer, screen: Terminal, *, explain: bool = False) -> list[str]:
    """Return the output lines."""
    style = "bold" if answer.fits else "red"
    lines = [screen.paint(line, style) for line in _wrapped(answer.reason, screen)]
    lines += ["", *_wrapped(answer.request, screen)]
    shown = [*answer.layouts, *([answer.split] if answer.split is not None else [])]
    if shown:
        lines += _titled("layouts", _layouts(shown, screen), screen)
        lines += _titled("one replica of the best", _listed(_replica(shown[0]), screen), screen)
    if answer.other_precisions:
        lines += _titled("other precisions", _listed(answer.other_precisions, screen), screen)
    if answer.rejected:
        lines += _titled("why not others", _rejected(answer.rejected, screen), screen)
    if explain and answer.formulas:
        lines += _titled("formulas", _formulas(answer.formulas, screen), screen)
    if answer.notes:
        lines += _titled("notes", _listed(answer.notes, screen), screen)
    return [*lines, "", screen.paint(f"next: {answer.next_command}", "dim")]


def _layouts(several: Sequence[ServedLayout], screen: Terminal) -> list[str]:
    columns = (
        Column(title="GPU"),
        Column(title="REPLICAS"),
        Column(title="GPUS", right=True),
        Column(title="80 %", right=True, drop_order=4),
        Column(title="TTFT 50 %", right=True, drop_order=3),
        Column(title="95 %", right=True),
        Column(title="PER TOKEN", right=True),
        Column(title="TOKENS/S", right=True, drop_order=2),
        Column(title="BATCH", right=True, drop_order=5),
        Column(title="$/M OUT", right=True, drop_order=1, hide_empty=True),
    )
    rows = [_row(one, "bold" if number == 0 else "") for number, one in enumerate(several)]
    return table(columns, rows, screen._replace(width=screen.width - 2))


def _row(one: ServedLayout, style: str) -> list[Cell | str]:
    found = one.estimates
    assert found is not None  # of a layout that meets the target
    readers = f" + {one.readers} prefill" if one.readers else ""
    high = "?" if one.gpus_high is None else str(one.gpus_high)
    return [
        one.gpu,
        Cell(f"{one.replicas} x {one.replica_text}{readers}", style),
        f"{one.gpus}",
        "" if one.readers else f"{one.gpus_low} to {high}",
        format_seconds(found.ttft_p50_s.mid),
        format_seconds(found.ttft_p95_s.mid),
        format_seconds(found.tpot_p50_s.mid),
        format_rounded(found.tokens_per_s.mid),
        f"{one.batch_max}",
        "" if one.usd_per_million_output is None else f"{one.usd_per_million_output:.2f}",
    ]


def _replica(one: ServedLayout) -> list[str]:
    found = one.estimates
    assert found is not None  # as above
    held = (
        f"weights {format_decimal_bytes(one.weight_bytes)} ({one.weights}), KV cache {one.cache_bytes_per_token / 1e3:,.1f} kB a token "
        f"({one.cache}); room for {one.batch_max} requests of full length, {one.running:.0f} run on average"
    )
    intervals = (
        f"80 % intervals: first token (95 %) {interval_text(found.ttft_p95_s, format_seconds)}, "
        f"per token {interval_text(found.tpot_p50_s, format_seconds)}, all replicas {interval_text(found.tokens_per_s, format_rounded)} tokens/s"
    )
    usd = one.usd_per_million_tokens
    return [held, intervals, *([] if usd is None else [f"${usd:.2f} per million tokens, read or written"])]


def _rejected(several: Sequence[ServedLayout], screen: Terminal) -> list[str]:
    if len({one.gpu for one in several}) > _REJECTED_MAX // 2:
        several = list({one.gpu: one for one in several}.values())  # the largest replica of each kind
    lines = [f"{one.gpu}, {one.weights}, {one.replica_text}: {one.why_not}" for one in several[:_REJECTED_MAX]]
    more = len(several) - _REJECTED_MAX
    return [*_listed(lines, screen), *([f"and {more} more; see --json"] if more > 0 else [])]


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


def _titled(title: str, lines: Sequence[str], screen: Terminal) -> list[str]:
    return ["", screen.paint(title, "bold"), *(f"  {line}" for line in lines)]
