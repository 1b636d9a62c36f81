"""Workload traces: CSV with the columns of public traces, and SWF (Standard Workload Format 2.2). Errors name the line.

It parses lines; the caller reads the file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.gpus import GPU_KINDS_MAX
from phalanx.core.work.pace import PACE_STEPS_MIN, StepPace
from phalanx.core.work.share import MILLI_PER_DEVICE

COLUMNS: Final = ("job_id", "submit_s", "duration_s", "num_gpus")
_SWF_FIELDS: Final = 18
_RUN_TIME_COLUMN: Final = re.compile(r"duration_(?P<model>[a-z0-9_.-]+)_s")
REPORTED_STEPS: Final = 1_000_000  # of a job that reports its progress: a step of the longest job stays under a day
_SHOWN_MAX: Final = 5  # bad rows listed in one error


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of a trace.

    Attributes:
        models: acceptable GPU models, best first, as `normalize_model` formats them; empty for any.
        virtual_cluster: its virtual cluster; "" for none.
        limit_s: its time limit, or None when none was published.
        stated_s: run time that its reports of progress state, true or not; None if it reports none.
        line: its line in the file.
        share_milli: thousandths of one device instead of whole ones; 0 for none.
        cpu_milli: thousandths of CPUs; 0 when none were published.
        memory_mib: MiB of memory; 0 when none was published.
        run_time_by_model: seconds on GPUs of other models than `duration_s` is for.
    """

    id: str
    submit_s: float
    duration_s: float
    gpus: int
    models: tuple[str, ...] = ()
    virtual_cluster: str = ""
    limit_s: float | None = None
    stated_s: float | None = None
    line: int = 0
    share_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0
    run_time_by_model: tuple[tuple[str, float], ...] = ()

    def run_time_on(self, model: str) -> float:
        """Seconds that it runs on GPUs of this model, as `normalize_model` formats it."""
        return dict(self.run_time_by_model).get(model, self.duration_s)

    @property
    def reported_pace(self) -> StepPace | None:
        """What it reports of its progress as soon as it has started; None if it reports none."""
        if self.stated_s is None:
            return None
        step_s = max(self.stated_s, 1e-3) / REPORTED_STEPS
        return StepPace(steps=PACE_STEPS_MIN, step_s=step_s, steps_left=REPORTED_STEPS)

    @property
    def run_time_min_s(self) -> float:
        """Seconds that it runs on the fastest model that it accepts."""
        return min((self.run_time_on(model) for model in self.models), default=self.duration_s)

    @property
    def speeds(self) -> tuple[tuple[str, float], ...]:
        """Its speed on each accepted model as a share of the fastest; empty if the trace has one run time for all."""
        if not self.run_time_by_model or not self.run_time_min_s:
            return ()
        return tuple((model, self.run_time_min_s / self.run_time_on(model)) for model in self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidTraceRow:
    """An invalid row, with the reason."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs by submit time, ties in file order; and the skipped rows."""

    jobs: tuple[TraceJob, ...]
    invalid_rows: tuple[InvalidTraceRow, ...] = ()


def read_trace(lines: Iterable[str], *, name: str = "trace", skip_bad: bool = False, with_parts: bool = False) -> Trace:
    """Parse a trace: SWF if `name` ends in .swf or the first line is an SWF comment, else CSV.

    With `with_parts`, jobs may also ask for a part of one GPU (0.25) or for none, and their durations may be blank.

    Raises:
        BadFile: empty, not CSV, a column is missing, no jobs, or bad rows without `skip_bad`.
    """
    rows = list(lines)
    first = next((row for row in rows if row.strip()), None)
    if first is None:
        raise BadFile(f"{name} is empty", hint=f"a CSV with the columns {', '.join(COLUMNS)}, or an SWF file")
    swf = name.lower().removesuffix(".gz").endswith(".swf") or first.lstrip().startswith(";")
    try:
        jobs, bad = _swf(rows) if swf else _csv(rows, name, with_parts=with_parts)
    except csv.Error as error:
        raise BadFile(f"{name} is not CSV: {error}") from None
    if bad and not skip_bad:
        shown = "; ".join(f"line {row.line}: {row.reason}" for row in bad[:_SHOWN_MAX])
        more = f"; and {len(bad) - _SHOWN_MAX} more" if len(bad) > _SHOWN_MAX else ""
        raise BadFile(
            f"{name}: {len(bad)} bad row{'s' if len(bad) > 1 else ''}: {shown}{more}", hint="skip them with --skip-bad"
        )
    if not jobs:
        raise BadFile(f"{name}: contains no jobs", hint=f"a CSV with the columns {', '.join(COLUMNS)}, or an SWF file")
    jobs.sort(key=lambda job: (job.submit_s, job.line))
    return Trace(jobs=tuple(jobs), invalid_rows=tuple(bad))


def _csv(rows: list[str], name: str, *, with_parts: bool) -> tuple[list[TraceJob], list[InvalidTraceRow]]:
    reader = csv.reader(rows)
    header = [cell.strip() for cell in next(reader, [])]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise BadFile(
            f"{name}: line 1 lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            hint=f"the header must contain {','.join(COLUMNS)}",
        )
    at = {column: header.index(column) for column in header}
    jobs: list[TraceJob] = []
    bad: list[InvalidTraceRow] = []
    seen: set[str] = set()
    for cells in reader:
        if not cells:
            continue
        line = reader.line_num
        try:
            job = _job(cells, at, line, with_parts=with_parts)
            if job.id in seen:
                raise ValueError(f"duplicate job_id {job.id}")
            seen.add(job.id)
            jobs.append(job)
        except (ValueError, IndexError) as error:
            bad.append(
                InvalidTraceRow(line=line, reason="has too few cells" if isinstance(error, IndexError) else str(error))
            )
    return jobs, bad


def _job(cells: list[str], at: dict[str, int], line: int, *, with_parts: bool) -> TraceJob:
    def cell(column: str) -> str:
        place = at.get(column)
        return cells[place].strip() if place is not None and place < len(cells) else ""

    name = cells[at["job_id"]].strip()
    if not name:
        raise ValueError("job_id is blank")
    limit, stated = cell("limit_s"), cell("stated_s")
    by_model, unable = _run_times(cell, at)
    gpus, share_milli = _amount(cells[at["num_gpus"]]) if with_parts else (_count(cells[at["num_gpus"]]), 0)
    return TraceJob(
        id=name,
        submit_s=_number(cells[at["submit_s"]], "submit_s", low=0.0),
        duration_s=0.0
        if with_parts and not cell("duration_s")
        else _number(cells[at["duration_s"]], "duration_s", low=0.0),
        gpus=gpus,
        share_milli=share_milli,
        cpu_milli=_whole(cell("cpu_milli"), "cpu_milli"),
        memory_mib=_whole(cell("memory_mib"), "memory_mib"),
        models=tuple(model for model in _models(cell("gpu_type")) if model not in unable),
        run_time_by_model=by_model,
        virtual_cluster=cell("vc"),
        limit_s=_number(limit, "limit_s", low=0.0) if limit else None,
        stated_s=_number(stated, "stated_s", low=0.0) if stated else None,
        line=line,
    )


def _run_times(cell: Callable[[str], str], columns: Iterable[str]) -> tuple[tuple[tuple[str, float], ...], set[str]]:
    """Run times of the columns `duration_MODEL_s`; and the models whose cell is blank: the job cannot run there."""
    found: dict[str, float] = {}
    unable: set[str] = set()
    for column in columns:
        match = _RUN_TIME_COLUMN.fullmatch(column)
        if match is None:
            continue
        model = normalize_model(match["model"])
        if not cell(column):
            unable.add(model)
            continue
        found[model] = _number(cell(column), column, low=0.0)
        if not found[model]:
            raise ValueError(f"{column} must be above 0; leave it blank if the job cannot run there")
    return tuple(found.items()), unable


def normalize_model(text: str) -> str:
    """Convert a GPU model to one lower-case word of the request grammar: "Tesla V100-SXM2" to tesla_v100_sxm2; "" for none.

    It applies to jobs and nodes alike, so that "v100" matches as in production.
    """
    words = re.findall(r"[a-z0-9.]+", text.lower())
    word = "_".join(words)
    return f"gpu_{word}" if word[:1].isdigit() else word


def _models(text: str) -> tuple[str, ...]:
    """Split `v100|p100` into acceptable models in this order."""
    return tuple(dict.fromkeys(filter(None, map(normalize_model, text.split("|")))))[:GPU_KINDS_MAX]


def _number(text: str, column: str, *, low: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} {text.strip()!r} is not a number") from None
    if not low <= value < 1e12:  # also refuses NaN
        raise ValueError(f"{column} {text.strip()} is not between {low:g} and 1e12")
    return value


def _whole(text: str, column: str) -> int:
    """The integer in an optional column; 0 if it is blank."""
    return int(_number(text, column, low=0.0)) if text else 0


def _amount(text: str) -> tuple[int, int]:
    """Whole devices, or thousandths of one: `8` or `0.25`."""
    value = _number(text, "num_gpus", low=0.0)
    if value == int(value):
        return int(value), 0
    if value > 1:
        raise ValueError(f"num_gpus {text.strip()} is more than one GPU and not a whole number")
    milli = round(value * MILLI_PER_DEVICE)
    if not milli:
        raise ValueError(f"num_gpus {text.strip()} is less than a thousandth")
    return 0, milli


def _count(text: str) -> int:
    value = _number(text, "num_gpus", low=0.0)
    if value != int(value):
        parts = "; only --inflate places parts of one GPU" if value < 1 else ""
        raise ValueError(f"num_gpus {text.strip()} is not an integer{parts}")
    if value < 1:
        raise ValueError("num_gpus must be at least 1")
    return int(value)


def _swf(rows: list[str]) -> tuple[list[TraceJob], list[InvalidTraceRow]]:
    """SWF fields: 1 id, 2 submit, 4 run time, 5 processors used, 8 processors asked, 9 time asked, 15 queue. -1 is "unknown"."""
    jobs: list[TraceJob] = []
    bad: list[InvalidTraceRow] = []
    for line, row in enumerate(rows, start=1):
        text = row.split(";", 1)[0].split()
        if not text:
            continue
        try:
            if len(text) < 5 or len(text) > _SWF_FIELDS:
                raise ValueError(f"has {len(text)} fields, SWF has {_SWF_FIELDS}")
            text += ["-1"] * (_SWF_FIELDS - len(text))
            asked, used = float(text[7]), float(text[4])
            limit = float(text[8])
            if float(text[3]) < 0:
                raise ValueError("its run time is unknown")
            jobs.append(
                TraceJob(
                    id=text[0],
                    submit_s=_number(text[1], "submit time", low=0.0),
                    duration_s=_number(text[3], "run time", low=0.0),
                    gpus=_count(str(asked if asked > 0 else used)),
                    virtual_cluster="" if text[14] == "-1" else text[14],
                    limit_s=limit if limit > 0 else None,
                    line=line,
                )
            )
        except ValueError as error:
            bad.append(InvalidTraceRow(line=line, reason=str(error)))
    return jobs, bad
