"""The page What if: when a job would start, as things are and with other nodes or quotas, with a timeline of the next hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from phalanx.core.errors import PhalanxError
from phalanx.core.hints import parse_hint
from phalanx.core.units import format_duration
from phalanx.web.cells import moment, number
from phalanx.web.charts import ChartPart, key, strip
from phalanx.web.command_hints import render_hint
from phalanx.web.document import Viewer, document
from phalanx.web.fields import text_field
from phalanx.web.html import Child, Html, element, facts, join, link, table
from phalanx.wire.why import DryRunReply, StartView, SuggestedChangeView, WhatIfCurves, WhatIfReply

_ASSUMED: Final = (
    "Jobs are assumed to run for their time limit, or as long as similar jobs; a job that has neither keeps its GPUs."
)
_ROW_EVERY: Final = 4  # points of the curves: about 25 rows
_LEAST_S: Final = 60.0  # of a timeline
_UNKNOWN_SHARE: Final = 1.25  # of the known times: room for what has no known end
_FIELDS: Final = (
    ("GPUs", "gpus", "8, 2x4 or h100:8"),
    ("Time limit", "time", "2h"),
    ("Queue", "queue", "default"),
    ("Project", "project", "default"),
    ("Priority", "priority", "0"),
)
_CHANGES: Final = (
    ("More nodes", "add_nodes", "4"),
    ("like node", "like", "gpu-a"),
    ("Nodes without new jobs", "drain", "gpu[001-004]"),
    ("Quota of queue", "quota_queue", "default"),
    ("in GPUs", "quota_gpus", "64"),
)


def what_if_page(asked: Mapping[str, str], found: WhatIfReply | PhalanxError | None, viewer: Viewer) -> Html:
    """Return the form as it was filled in, and the answer."""
    content: list[Child] = [_form(asked)]
    if isinstance(found, PhalanxError):
        hint = f" ({found.hint})" if found.hint else ""
        content.append(element("p", join(found.message, hint), class_="problem", role="alert"))
    elif found is not None:
        content += _side("As things are", found.now)
        if found.then is not None:
            content += _side(f"With {'; '.join(found.changes)}", found.then)
        if found.curves is not None:
            content += _curves(found.curves)
        content.append(
            element(
                "p",
                "Starts are expected from the run times of similar jobs and from time limits. Later jobs, failures and jobs that "
                "the scheduler would stop for this one are not in them. To replay past jobs on another fleet: ",
                element("code", "phalanx whatif --add 4xh200:8 --since 30d"),
                class_="note",
            )
        )
    return document("what-if", "What if", *content, viewer=viewer)


def _form(asked: Mapping[str, str]) -> Html:
    def fields(rows: Sequence[tuple[str, str, str]]) -> list[Html]:
        return [
            text_field(title, name, value=asked.get(name, ""), placeholder=hint, maxlength="200")
            for title, name, hint in rows
        ]

    return element(
        "form",
        element("fieldset", element("legend", "A job with"), fields(_FIELDS)),
        element("fieldset", element("legend", "What if the fleet had"), fields(_CHANGES)),
        element("button", "When would it start?", type="submit", class_="primary"),
        method="get",
        action="/what-if",
        class_="filter",
        aria_label="What if",
    )


def _side(title: str, reply: DryRunReply) -> list[Child]:
    """Return one forecast: its facts, its timeline, the jobs in its way, and what would start it now."""
    content: list[Child] = [
        element("h2", title),
        facts(
            (
                ("Starts", element("strong", "now") if reply.starts else _expected(reply.start, reply.now_s)),
                ("On", [join(link(node, "nodes", node), " ") for node in reply.nodes]),
                ("Waits for", "" if reply.starts else reply.detail),
                ("Start now", [join("job ", link(one, "jobs", one), " ") for one in reply.starting]),
                ("GPUs", number(reply.gpus)),
                ("Run time", _run_time(reply)),
                ("Notes", "; ".join([*reply.notes, *reply.warnings])),
            )
        ),
        _timeline(reply),
    ]
    if reply.changes:
        lines = [
            element("li", one.text, _command(one), " (an operator)" if one.operator else "") for one in reply.changes
        ]
        content += [element("p", "It would start now with one of:"), element("ul", lines)]
    return content


def _command(change: SuggestedChangeView) -> Html | None:
    """Return the command that makes a change; None if no request makes it."""
    if not change.hint:
        return None
    command = render_hint(parse_hint(change.hint, change.hint_code, change.hint_args))
    return join(": ", element("code", command))


def _expected(start: StartView | None, now_s: float) -> Html | str:
    if start is None:
        return "unknown"
    if start.latest_s is None:
        after = join(" not before ", moment(start.earliest_s)) if start.earliest_s and start.earliest_s > now_s else ""
        return join("unknown", after, f": {start.unknown}" if start.unknown else "")
    latest = join(moment(start.latest_s), f" (in {format_duration(max(0.0, start.latest_s - now_s))})")
    if start.earliest_s is None or start.latest_s - start.earliest_s < 1.0:
        return latest
    return join("between ", moment(start.earliest_s), " and ", latest)


def _run_time(reply: DryRunReply) -> str:
    run = reply.run
    if run is None or run.high_s is None:
        return "unknown: no time limit, and too few similar jobs have ended"
    hours = "" if reply.gpu_hours_high is None else f", at most {reply.gpu_hours_high:,.1f} GPU-hours"
    if not run.ends:
        return f"at most {format_duration(run.high_s)}, its time limit{hours}"
    return (
        f"{format_duration(run.low_s)} to {format_duration(run.high_s)}, from {run.ends} ended jobs {run.likes}{hours}"
    )


# ---- the curves -------------------------------------------------------------------------------------------------------


def _curves(curves: WhatIfCurves) -> list[Child]:
    """Return the place of two charts, which the page's script draws, and their numbers as a table."""
    names = ("gpus_now", "waiting_now", "gpus_then", "waiting_then")
    titles = ["GPUs held", "Jobs waiting"]
    if curves.gpus_then:
        titles = ["GPUs held as things are", "Jobs waiting as things are", "GPUs held with the changes"]
        titles.append("Jobs waiting with the changes")
    columns = [getattr(curves, name) for name in names][: len(titles)]
    rows = [
        (
            moment(curves.begin_s + at * curves.step_s),
            *("unknown" if column[at] is None else number(column[at]) for column in columns),
        )
        for at in range(0, len(curves.gpus_now), _ROW_EVERY)
    ]
    whole_s = curves.step_s * (len(curves.gpus_now) - 1)
    fleet = f"{curves.fleet_now} working GPUs" + (f", with the changes {curves.fleet_then}" if curves.gpus_then else "")
    notes = [f"The fleet has {fleet}. ", _ASSUMED]
    if curves.left_out:
        notes.append(f" {curves.left_out} more waiting jobs, the last in line, are not in it.")
    if any(None in column for column in columns):
        notes.append(" The answer took too long: the rest of the time is unknown.")
    shown = msgspec.json.encode(curves).decode()
    numbers = table(("Time", *titles), rows, caption="GPUs held and jobs waiting", empty="")
    return [
        element("h2", f"The fleet with this job, from now to {format_duration(whole_s)} later"),
        element("div", class_="curves", id="what-if-curves", data_curves=shown),
        element("p", notes, class_="note"),
        element("details", element("summary", "The numbers"), numbers),
    ]


# ---- the timeline -----------------------------------------------------------------------------------------------------


def _timeline(reply: DryRunReply) -> Html:
    """Return a bar for each job in the way, and for the job itself, from now to the last known time."""
    now_s = reply.now_s
    start = StartView(earliest_s=now_s, latest_s=now_s) if reply.starts else reply.start or StartView()
    run_s = reply.run.high_s if reply.run is not None else None
    ends = [end for one in reply.blockers if one.end is not None for end in (one.end.earliest_s, one.end.latest_s)]
    own = [
        start.earliest_s,
        start.latest_s,
        None if start.latest_s is None or run_s is None else start.latest_s + run_s,
    ]
    known = [at_s - now_s for at_s in (*ends, *own) if at_s is not None]
    horizon_s = max([_LEAST_S, *known])
    whole_s = horizon_s * _UNKNOWN_SHARE
    rows = [
        (
            join(link(f"job {one.id}", "jobs", one.id), f" {one.name}"),
            f"{number(one.gpus)} GPUs, {one.state.value}",
            _bar(f"job {one.id}", one.end, now_s, whole_s),
        )
        for one in reply.blockers
    ]
    rows.append((join("this job"), f"{number(reply.gpus)} GPUs", _own_bar(start, run_s, now_s, whole_s)))
    shown = table(("Job", "GPUs", f"From now to {format_duration(whole_s)} later"), rows, caption="Timeline", empty="")
    kinds = (
        ("run", "another job runs"),
        ("own", "this job runs"),
        ("range", "ends or starts in this time"),
        ("open", "unknown how long"),
    )
    more = f"and {reply.blockers_more} more jobs are in its way" if reply.blockers_more else ""
    legend = element("ul", [element("li", key(kind, words)) for kind, words in kinds], class_="legend")
    return join(shown, element("p", more, class_="note") if more else None, legend)


def _bar(name: str, end: StartView | None, now_s: float, whole_s: float) -> Html:
    """Return a bar that lasts to between the two ends, or openly if the later one is unknown."""
    earliest_s = max(0.0, (end.earliest_s or now_s) - now_s) if end is not None else 0.0
    latest_s = None if end is None or end.latest_s is None else max(0.0, end.latest_s - now_s)
    parts = [ChartPart(start=0.0, size=earliest_s, kind="run", tip=f"{name} runs for {format_duration(earliest_s)}")]
    if latest_s is None:
        words = f"{name}: its end is unknown"
        parts.append(ChartPart(start=earliest_s, size=whole_s - earliest_s, kind="open", tip=words))
    else:
        words = f"{name} ends in {format_duration(earliest_s)} to {format_duration(latest_s)}"
        parts.append(ChartPart(start=earliest_s, size=latest_s - earliest_s, kind="range", tip=words))
    return join(strip(parts, whole_s, name=words), element("span", words, class_="note"))


def _own_bar(start: StartView, run_s: float | None, now_s: float, whole_s: float) -> Html:
    earliest_s = None if start.earliest_s is None else max(0.0, start.earliest_s - now_s)
    if start.latest_s is None:
        begin_s = earliest_s or 0.0
        words = "its start is unknown"
        parts = [ChartPart(start=begin_s, size=whole_s - begin_s, kind="open", tip=words)]
        return join(strip(parts, whole_s, name=words), element("span", words, class_="note"))
    latest_s = max(0.0, start.latest_s - now_s)
    begin_s = latest_s if earliest_s is None else earliest_s
    again = "starts now" if latest_s < 1.0 else f"starts in {format_duration(begin_s)} to {format_duration(latest_s)}"
    ends = "; unknown how long it runs" if run_s is None else f" and runs for at most {format_duration(run_s)}"
    parts = [
        ChartPart(start=begin_s, size=latest_s - begin_s, kind="range", tip=again),
        ChartPart(
            start=latest_s,
            size=whole_s - latest_s if run_s is None else run_s,
            kind="open" if run_s is None else "own",
            tip=again + ends,
        ),
    ]
    return join(strip(parts, whole_s, name=again + ends), element("span", again + ends, class_="note"))
