"""`phalanx clean`, `retention` and `archives`: the files and records of jobs that ended long ago."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, to_json
from phalanx.cli.option_types import GrammarType
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal
from phalanx.cli.transfers.store_removal import StoredFolder, measure_folders, remove_folder, stored_folders
from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.units import format_bytes, format_duration, parse_duration_s
from phalanx.core.work.retention import RetainedFiles, check_age
from phalanx.core.work.share import gpus_text

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.retention import ArchivedJobRow, RetentionRun, RetentionView

_KINDS: Final = [kind.value for kind in RetainedFiles]
_POLL_S: Final = 0.3
_SHOWN_MAX: Final = 20  # folders in object stores
_KEPT_FOREVER: Final = ("never", "forever")
_MEANING: Final = {
    "logs": "output of the ranks",
    "outputs": "files in PHALANX_OUTPUT_DIR",
    "checkpoints": "all but the newest valid one of a job",
    "uploads": "working directories that no job needs",
    "records": "of jobs without files, month by month into archives",
}


def _age(text: str) -> float:
    return check_age(parse_duration_s(text, what="--older-than"), what="--older-than")


def _period(text: str) -> float | None:
    """Seconds; None for never."""
    if text in _KEPT_FOREVER:
        return None
    return check_age(parse_duration_s(text, what="period"), what="period")


_PERIOD: Final = GrammarType("TIME", _period)


@click.command()
@click.option(
    "--older-than",
    type=GrammarType("TIME", _age),
    required=True,
    help="Time since the end of the job, such as 30d.",
)
@click.option(
    "--only",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="Only this kind; may be repeated. `records` only if named.",
)
@click.option("--stores", is_flag=True, help="Also in object stores, with the credentials of this shell.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; removes nothing without --yes.")
def clean(older_than: str, kinds: tuple[str, ...], stores: bool, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Remove logs, outputs, checkpoints and uploads of jobs that ended long ago; shows them first, and asks.

    The newest valid checkpoint of a job always stays. `--only records` moves the records of jobs without files into archives.
    The head cannot reach object stores: what jobs left there is listed, and goes with --stores.
    """
    head, age_s = connect(), _age(older_than)
    left = stored_folders(head, age_s, kinds, time.time())
    if stores:
        left = [one for one in measure_folders(left) if one.objects or one.stays]
    removes = yes and not dry_run
    found = _run(head, age_s, kinds, dry_run=not removes)
    if as_json:
        print(to_json(_with_stores(found, left), indent=2))
    else:
        print("\n".join([*_run_lines(found, terminal()), *store_lines(left, terminal(), measured=stores)]))
    removable = [one for one in left if one.objects]
    if not removes and not dry_run and not as_json and (found.removed or removable):
        words = "".join([*(f" --only {kind}" for kind in kinds), " --stores" if stores else ""])
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            print(f"next: phalanx clean --older-than {older_than}{words} --yes")
        elif click.confirm("Remove them?"):
            removes = True
            if found.removed:
                print("\n".join(_run_lines(_run(head, age_s, kinds, dry_run=False), terminal())))
    elif left and not stores and not as_json:
        print(f"next: phalanx clean --older-than {older_than}{''.join(f' --only {kind}' for kind in kinds)} --stores")
    if removes and removable:
        for one in removable:
            remove_folder(one)
        freed = format_bytes(sum(one.size_bytes for one in removable))
        print(f"removed {cells.count(len(removable), 'folder')} from object stores: {freed}", file=sys.stderr)


@list_group("Show and set how long files of ended jobs are kept.", subcommand="show")
def retention(head: Client, now_s: float) -> ListView:
    """Show how long each kind of files is kept, and the newest run that removed some."""
    found = head.retention()
    return ListView(
        value=found,
        lines=lambda screen: _policy_lines(found, screen, now_s),
        next_command="phalanx retention set --logs 90d" if not found.periods_s else "",
    )


@retention.command("set")
@click.option("--logs", type=_PERIOD, help="Such as 90d, or never.")
@click.option("--outputs", type=_PERIOD, help="The same for output files.")
@click.option(
    "--checkpoints", type=_PERIOD, help="The same for checkpoints; the newest valid one of a job always stays."
)
@click.option("--uploads", type=_PERIOD, help="The same for uploaded working directories that no job needs.")
@click.option(
    "--records", type=_PERIOD, help="After this the records of whole months go into archives; not before the files."
)
def set_(**given: str | None) -> None:
    """Set after which time files of ended jobs are removed, every hour; `never` keeps them. Kinds that you do not name keep their period."""
    changes = {kind: text for kind, text in given.items() if text is not None}
    if not changes:
        raise BadRequest("nothing to set", hint="phalanx retention set --logs 90d --outputs never")
    head = connect()
    periods: dict[str, float] = dict(head.retention().periods_s)
    for kind, text in changes.items():
        period_s = _period(text)
        periods.pop(kind, None)
        if period_s is not None:
            periods[kind] = period_s
    print("\n".join(_policy_lines(head.put_retention(periods), terminal(), time.time())))


@list_group("Jobs whose records are in archives.")
def archives(head: Client, _now_s: float) -> ListView:
    """List the months that have archives."""
    found = head.archives()

    def lines(screen: Terminal) -> list[str]:
        if not found.months:
            return ["no archives: all jobs are in the database"]
        columns = (Column(title="MONTH"), Column(title="JOBS", right=True), Column(title="SIZE", right=True))
        rows = [[one.month, f"{one.jobs:,}", format_bytes(one.bytes)] for one in found.months]
        return [*table(columns, rows, screen), strip_control(f"the files are in {found.folder} on the head")]

    next_command = f"phalanx archives jobs {found.months[-1].month}" if found.months else "phalanx retention"
    return ListView(value=found, lines=lines, next_command=next_command)


@archives.command("jobs")
@click.argument("month")
@click.option("--user", metavar="USER", default="", help="Only jobs of this user.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def archived_jobs(month: str, user: str, as_json: bool) -> None:
    """List the archived jobs that ended in MONTH (UTC), such as 2026-08. `phalanx show JOB` shows one."""
    head, after = connect(), 0
    jobs: list[ArchivedJobRow] = []
    while True:
        page = head.archived_jobs(month, user=user, after=after)
        jobs += page.jobs
        if page.next is None:
            break
        after = page.next
    if as_json:
        print(to_json(jobs, indent=2))
        return
    columns = (
        Column(title="JOB"),
        Column(title="NAME", min_width=8, max_width=24),
        Column(title="USER", min_width=6),
        Column(title="PROJECT", drop_order=2),
        Column(title="STATE"),
        Column(title="GPUS", right=True),
        Column(title="TRIES", right=True, drop_order=1),
        Column(title="TOOK", right=True),
        Column(title="ENDED"),
    )
    rows = [
        [
            one.id,
            one.name,
            one.user,
            one.project,
            one.state,
            gpus_text(one.gpu_milli),
            str(one.attempts),
            format_duration(max(0.0, one.ended_s - one.submit_s)),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.ended_s)),
        ]
        for one in jobs
    ]
    print("\n".join(table(columns, rows, terminal()) if jobs else [f"no job of {user} ended in {month}"]))


def _run(head: Client, age_s: float, kinds: tuple[str, ...], *, dry_run: bool) -> RetentionRun:
    """Start a run, and wait for its end with a progress line on a terminal.

    Raises:
        PhalanxError: the run did not remove all files.
    """
    run = head.start_retention_run(age_s, kinds=kinds, dry_run=dry_run)
    shown = sys.stderr.isatty()
    while run.ended_s is None:
        if shown:
            print(f"\r\x1b[K{run.folders_done} of {run.folders} folders", end="", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
        newest = head.retention().run
        if newest is None or newest.number != run.number:
            raise PhalanxError("the head was restarted during the run", hint="run the same command again")
        run = newest
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if run.error:
        raise PhalanxError(
            f"not all files were removed: {run.error}", hint="phalanx doctor; then run the same command again"
        )
    return run


def _run_lines(run: RetentionRun, screen: Terminal) -> list[str]:
    kept = (
        [f"{cells.count(run.kept_records, 'job')} stay: with files, among the newest, or needed by another job"]
        if run.kept_records
        else []
    )
    if not run.removed:
        ages = " or ".join(sorted({format_duration(age_s) for age_s in run.ages_s.values()}))
        return [f"nothing to remove of jobs that ended more than {ages} ago", *kept]
    columns = (
        Column(title="FILES"),
        Column(title="JOBS", right=True),
        Column(title="SIZE", right=True),
        Column(title="WHAT", drop_order=1),
    )
    rows = [[kind, str(found.count), format_bytes(found.bytes), _MEANING[kind]] for kind, found in run.removed.items()]
    total = format_bytes(sum(found.bytes for found in run.removed.values()))
    words = "would free" if run.dry_run else "freed"
    lines = table(columns, rows, screen)
    if run.dry_run and len(run.largest) > 1:
        titles = (
            Column(title="LARGEST"),
            Column(title="JOB"),
            Column(title="NAME", min_width=8, max_width=24, drop_order=1),
            Column(title="USER"),
            Column(title="SIZE", right=True),
        )
        rows = [[one.kind, one.name, one.job_name, one.user, format_bytes(one.bytes)] for one in run.largest]
        lines += ["", *table(titles, rows, screen)]
    return [*lines, *kept, f"{words} {total}"]


def _with_stores(run: RetentionRun, left: list[StoredFolder]) -> dict[str, object]:
    """The run as it is printed in JSON, with what is in object stores; `bytes` is null where the store was not read."""
    import msgspec

    shown = [
        {
            "kind": one.kind,
            "job": one.job,
            "user": one.user,
            "ended_s": one.ended_s,
            "archived": one.archived,
            "url": one.url,
            "objects": None if one.objects is None else len(one.objects),
            "bytes": None if one.objects is None else one.size_bytes,
            "stays": one.stays,
        }
        for one in left
    ]
    return {**msgspec.to_builtins(run), "stores": shown}


def store_lines(left: list[StoredFolder], screen: Terminal, *, measured: bool) -> list[str]:
    """Return what jobs left in object stores, the oldest first; at most `_SHOWN_MAX` folders."""
    if not left:
        return []
    columns = (
        Column(title="IN STORES"),
        Column(title="JOB"),
        Column(title="USER", drop_order=1),
        *((Column(title="OBJECTS", right=True), Column(title="SIZE", right=True)) if measured else ()),
        Column(title="ADDRESS", min_width=20),
    )
    rows = [
        [
            one.kind,
            one.job,
            one.user,
            *([f"{len(one.objects or ()):,}", format_bytes(one.size_bytes)] if measured else []),
            strip_control(one.url),
        ]
        for one in left[:_SHOWN_MAX]
    ]
    more = [f"and {len(left) - _SHOWN_MAX:,} more; --json lists all"] if len(left) > _SHOWN_MAX else []
    stays = [strip_control(f"{one.url} stays: {one.stays}") for one in left[:_SHOWN_MAX] if one.stays]
    return ["", *table(columns, rows, screen), *more, *stays]


def _policy_lines(found: RetentionView, screen: Terminal, now_s: float) -> list[str]:
    columns = (Column(title="FILES"), Column(title="KEPT AFTER THE JOB"), Column(title="WHAT", drop_order=1))
    kept = found.periods_s
    rows = [[kind, format_duration(kept[kind]) if kind in kept else "forever", _MEANING[kind]] for kind in _KINDS]
    lines = table(columns, rows, screen)
    if found.at_s is not None:
        lines.append(strip_control(f"set by {found.by} {format_duration(max(0.0, now_s - found.at_s))} ago"))
    run = found.run
    if run is not None and run.ended_s is None:
        lines.append(f"a run is under way: {run.folders_done} of {cells.count(run.folders, 'folder')}")
    elif run is not None and not run.dry_run and run.ended_s is not None:
        freed = format_bytes(sum(one.bytes for one in run.removed.values()))
        lines.append(f"last run {format_duration(max(0.0, now_s - run.ended_s))} ago: freed {freed}")
        lines += [strip_control(f"not all files were removed: {run.error}")] if run.error else []
    return lines
