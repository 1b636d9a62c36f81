"""The trials of a sweep as a table: live on a terminal, as lines of events elsewhere, and at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from phalanx.cli.cells import state_cell, step
from phalanx.cli.list_output import to_json
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal
from phalanx.sweep.definition import SweepDefinition
from phalanx.sweep.driver import SweepEvent, TrialJob, best_trial
from phalanx.sweep.study import TrialRecord

_MARK = "*"


class SweepScreen:
    """Shows a sweep while it runs. A context: on a terminal it redraws in place."""

    def __init__(self, definition: SweepDefinition, *, as_json: bool) -> None:
        self._definition = definition
        self._as_json = as_json
        self._screen = terminal()
        self._live: Any = None

    def __enter__(self) -> Self:
        """Begin to redraw, on a terminal."""
        if self._screen.interactive and not self._as_json:
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop to redraw."""
        if self._live is not None:
            self._live.stop()

    def update(self, events: Sequence[SweepEvent], trials: Sequence[TrialRecord], jobs: Mapping[str, TrialJob]) -> None:
        """Show one turn of the driver."""
        if self._live is not None:
            from rich.text import Text

            lines = self.table(trials, jobs)
            room = max(3, self._screen.height - 3)
            shown = [lines[0], *lines[1:][-room:]]
            self._live.update(Text.from_ansi("\n".join([*shown, _counts(self._definition, trials)])), refresh=True)
            return
        for event in events:
            print(to_json(event, indent=0) if self._as_json else strip_control(_event_text(event)), flush=True)

    def table(self, trials: Sequence[TrialRecord], jobs: Mapping[str, TrialJob]) -> list[str]:
        """Return the table of the trials."""
        return sweep_table(self._definition, trials, jobs, self._screen)


def sweep_table(
    definition: SweepDefinition, trials: Sequence[TrialRecord], jobs: Mapping[str, TrialJob], screen: Terminal
) -> list[str]:
    """Return a line for each trial; a star marks the best."""
    best = best_trial(trials, maximize=definition.maximize)
    names = [one.name for one in definition.parameters]
    columns = [
        Column(title="TRIAL", right=True),
        Column(title="JOB", right=True),
        Column(title="STATE"),
        *(Column(title=name, right=True, min_width=4, max_width=16) for name in names),
        Column(title="STEP", right=True),
        Column(title=definition.metric.upper(), right=True),
        Column(title="", min_width=10, drop_order=1, hide_empty=True),
    ]
    rows: list[list[Cell | str]] = []
    for one in trials:
        job = jobs.get(one.job_id)
        word = one.state if one.state != "running" else "pending" if job is None else job.state
        at = step(job.step, job.steps_total) if job is not None and job.step is not None else ""
        mark = _MARK if best is not None and one.number == best.number else ""
        rows.append(
            [
                f"{mark}{one.number}",
                one.job_id,
                Cell(word, "blue" if word == "complete" else "yellow" if word == "stopped" else state_cell(word).style),
                *(one.values.get(name, "") for name in names),
                at,
                "" if one.value is None else f"{one.value:.5g}",
                one.why or (job.why if job is not None and one.state == "running" else ""),
            ]
        )
    return table(columns, rows, screen)


def sweep_lines(
    definition: SweepDefinition, trials: Sequence[TrialRecord], jobs: Mapping[str, TrialJob], screen: Terminal
) -> list[str]:
    """Return the whole page of a sweep."""
    return [*sweep_table(definition, trials, jobs, screen), *best_lines(definition, trials)]


def best_lines(definition: SweepDefinition, trials: Sequence[TrialRecord]) -> list[str]:
    """Return the numbers of a sweep, the best trial and the next command."""
    best = best_trial(trials, maximize=definition.maximize)
    if best is None:
        failed = [one.job_id for one in trials if one.state == "failed" and one.job_id]
        return [
            _counts(definition, trials),
            "no trial is complete",
            *(f"next: phalanx logs {one}" for one in failed[:1]),
        ]
    values = " ".join(f"{name}={value}" for name, value in best.values.items())
    line = f"best: trial {best.number} (job {best.job_id}), {definition.metric} {best.value:.5g} with {values}"
    return [_counts(definition, trials), strip_control(line), f"next: phalanx show {best.job_id}"]


def sweep_value(
    definition: SweepDefinition, trials: Sequence[TrialRecord], jobs: Mapping[str, TrialJob]
) -> dict[str, object]:
    """Return a sweep as the value that `--json` prints."""
    best = best_trial(trials, maximize=definition.maximize)
    return {"sweep": definition, "trials": trials, "jobs": jobs, "best": None if best is None else best.number}


def _counts(definition: SweepDefinition, trials: Sequence[TrialRecord]) -> str:
    words = [one.state for one in trials]
    parts = [f"{words.count(word)} {word}" for word in ("running", "complete", "stopped", "failed") if word in words]
    return f"sweep {definition.name}: {len(trials)} of {definition.samples} trials: {', '.join(parts) or 'none begun'}"


def _event_text(event: SweepEvent) -> str:
    values = " ".join(f"{name}={value}" for name, value in event.values.items())
    value = "" if event.value is None else f" with {event.value:.5g}"
    at = "" if event.step is None else f" at step {event.step}"
    freed = "" if event.freed_s is None else f" its GPUs after {event.freed_s:.2f} s"
    why = f": {event.why}" if event.why else ""
    return f"trial {event.trial} (job {event.job_id}, {values}) {event.kind}{at}{value}{freed}{why}"
