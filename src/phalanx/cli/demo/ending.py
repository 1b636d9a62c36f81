"""What stays on the terminal when the demo is over: curve, redone steps, sample, receipt, verdict. Pure: lines for any width."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from phalanx.cli.demo.canvas import Series, Window, plot
from phalanx.cli.demo.curve import Redone
from phalanx.cli.demo.outcome import Outcome, attempt_line, rows
from phalanx.cli.demo.scene import Scene
from phalanx.cli.demo.screen import AGAIN_STYLE, LOST_STYLE, chart_of, plain_text
from phalanx.cli.demo.stopwatch import PEERS, SOURCES, shown

_CHART_ROWS: Final = 14
_ZOOM_ROWS: Final = 8
_SAMPLE_LINES: Final = 14


def ending(scene: Scene, outcome: Outcome, *, width: int, braille: bool = True) -> list[Text]:
    """All of it."""
    width = min(width, 120)
    return [
        *_titled("Loss", chart_of(scene, width, _CHART_ROWS, braille=braille)),
        *_again(scene, width, braille=braille),
        *_sample(outcome, width),
        *_watch(scene, width, braille=braille),
        *_receipt(outcome),
    ]


def verdict(outcome: Outcome) -> list[Text]:
    """One line for each fault, or one that says that all went well."""
    if outcome.faults:
        return [Text(f"demo failed: {plain_text(fault)}", "bold red") for fault in outcome.faults]
    text = f"The job ended after {outcome.wall_s:.0f} s"
    if outcome.killed_at_step is not None:
        source = f"the checkpoint of step {outcome.resumed_from_step}" if outcome.resumed_from_step else "the start"
        text += f", though a node died under it at step {outcome.killed_at_step}: it went on from {source}"
    return [Text(text + ".", "bold green")]


def _titled(title: str, lines: list[Text]) -> list[Text]:
    return [Text(title, "bold"), *lines, Text("")]


def _again(scene: Scene, width: int, *, braille: bool) -> list[Text]:
    """The redone steps alone, the second losses laid over the first, and how far apart they are."""
    redone = scene.curve.redone()
    if not redone:
        return []
    words = [Text(" " + told(redone))]
    if len(redone) > 1:
        values = [loss for each in redone for loss in (each.first, each.again)]
        window = Window(x_low=redone[0].step, x_high=redone[-1].step, y_low=min(values), y_high=max(values))
        series = [
            Series(points=[(each.step, each.first) for each in redone], style=LOST_STYLE),
            Series(points=[(each.step, each.again) for each in redone], style=AGAIN_STYLE, joined=False, glyph="•"),
        ]
        words += plot(series, window, width=width, height=_ZOOM_ROWS, braille=braille)
    return _titled("Steps made twice: the line is the first time, the dots are the second", words)


def told(redone: list[Redone]) -> str:
    """The comparison in one sentence."""
    largest = max(abs(each.again - each.first) for each in redone)
    same = (
        "every loss came out the same to the last digit"
        if largest == 0
        else f"the losses differ by {largest:.2g} at most"
    )
    return f"{len(redone)} steps, {redone[0].step} to {redone[-1].step}, were made again after the resume: {same}."


def _sample(outcome: Outcome, width: int) -> list[Text]:
    lines = [plain_text(line)[: width - 4] for line in outcome.sample.expandtabs(4).splitlines()[:_SAMPLE_LINES]]
    return _titled("What it writes now", [Text(f"  {line}", "cyan") for line in lines]) if lines else []


def _watch(scene: Scene, width: int, *, braille: bool) -> list[Text]:
    kill = shown(scene.kills)
    if kill is None or kill.open:
        return []
    columns = width - 26
    longest = max(peer.seconds for peer in PEERS)
    figures = [
        ("Phalanx", kill.seconds(scene.now_s), "green"),
        *((peer.name, peer.seconds, "magenta") for peer in PEERS),
    ]
    lines = []
    for name, seconds, style in figures:
        cells = max(1, round(columns * seconds / longest))
        line = Text().append(f"  {name:<11}{seconds:7.1f} s  ", "bold" if name == "Phalanx" else "")
        lines.append(line.append(("█" if braille else "#") * cells, style))
    if kill.to_running_s is not None:
        lines[0].append(f" all ranks ran again after {kill.to_running_s:.1f} s", "dim")
    return _titled("From the dead node to the next step", [*lines, Text("  " + SOURCES, "dim")])


def _receipt(outcome: Outcome) -> list[Text]:
    receipt = outcome.receipt
    lines = [Text(f"  {label:<36}", "").append(value, "bold") for label, value in rows(outcome)]
    lines += [Text("  " + attempt_line(attempt)) for attempt in receipt.attempts]
    return _titled(f"Receipt of job {receipt.job_id} ({plain_text(receipt.name)})", lines)
