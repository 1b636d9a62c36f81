"""`phalanx show`: everything about one job on one page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from phalanx.cli import cells
from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.jobs.array_page import array_view
from phalanx.cli.jobs.grants_note import grants_note
from phalanx.cli.jobs.job_curves import PLOTS, check_output, plot_lines, write_plot
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.jobs.ps import waiting_reason, waste_text
from phalanx.cli.jobs.usage import SHORT_ADVICE, advice_lines
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.serve.service_page import service_view
from phalanx.cli.serve.services import find_service
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, truncate
from phalanx.core.accounting.advice.evidence import Advice
from phalanx.core.accounting.usage_summary import GpuSeconds, UsageSummary
from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.resources import amount_time_text
from phalanx.core.state.history import HistoryLine
from phalanx.core.units import format_bytes, format_duration
from phalanx.core.work.extras import extras_text
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import AttemptView, JobView, RoleView, staging_text

if TYPE_CHECKING:
    from phalanx.client import Client

_HISTORY_MAX: Final = 12  # newest lines; --story prints all
_HISTORY_PAGE: Final = 1000
_ATTEMPTS_MAX: Final = 6  # newest ones


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`: the content of the page, complete."""

    job: JobView
    attempts: list[AttemptView]
    history: list[HistoryLine] = msgspec.field(name="story")
    usage: UsageSummary | None = msgspec.field(name="receipt")


@click.command(name="show")
@JOB_ARGUMENT
@click.option("--story", "whole_history", is_flag=True, help="Print the whole history, not only the newest lines.")
@click.option("--plot", type=click.Choice(PLOTS), default=None, help="Draw a curve of its steps instead.")
@click.option("--output", metavar="FILE", default=None, help="Write the curve as .svg or .png.")
@click.option("--file", "as_file", is_flag=True, help="Print the job file that would submit it again.")
@list_options
def show_(
    job: str, whole_history: bool, plot: str | None, output: str | None, as_file: bool, as_json: bool, watch: bool
) -> None:
    """Show one job or service: history, attempts, nodes of the ranks, checkpoints, usage; or a curve of its steps."""
    if output is not None and plot is None:
        raise BadRequest("--output needs --plot", hint="--plot loss --output loss.svg")
    if output is not None:
        check_output(output)
    head = connect()
    if as_file:
        if watch or plot is not None:
            raise BadRequest("--file prints a job file alone", hint="leave out --watch and --plot")
        from phalanx.cli.jobs.job_keys import show_job_file

        show_job_file(head, job, as_json=as_json)
        return
    if plot is not None:
        _show_curve(head, resolve_job(head, job), plot, output, as_json=as_json, watch=watch)
        return
    if find_service(head, job) is not None:
        show_list(lambda: service_view(head.service(job.strip()), time.time()), as_json=as_json, watch=watch)
        return
    job_id = resolve_job(head, job)
    show_list(lambda: _shown(head, job_id, whole_history=whole_history), as_json=as_json, watch=watch)


def _show_curve(head: Client, job_id: str, plot: str, output: str | None, *, as_json: bool, watch: bool) -> None:
    if output is not None:
        print(write_plot(head.job_curves(job_id), plot, output))
        return

    def fetch() -> ListView:
        found = head.job_curves(job_id)
        return ListView(
            value=found,
            lines=lambda screen: plot_lines(found, plot, screen),
            next_command=f"phalanx show {job_id}",
        )

    show_list(fetch, as_json=as_json, watch=watch)


def _shown(head: Client, job_id: str, *, whole_history: bool) -> ListView:
    detail = head.job(job_id)
    if detail.job.states:
        return array_view(detail.job)
    usage = head.job_usage(job_id) if detail.attempts and not detail.archived else None
    value = _Job(
        job=_with_urls(head, detail.job),
        attempts=detail.attempts,
        history=_read_job_history(head, job_id),
        usage=None if usage is None else usage.summary,
    )
    now_s = time.time()
    return ListView(
        value=value,
        lines=lambda screen: job_page(
            value, screen, now_s, whole_history=whole_history, advice=() if usage is None else usage.advice
        ),
        notes=(f"archived with the jobs of {detail.archived}; its files are gone",) if detail.archived else (),
        next_command="phalanx archives"
        if detail.archived
        else _next(detail.job, has_files=_has_files(head, detail.job)),
    )


def _with_urls(head: Client, job: JobView) -> JobView:
    """Fill in the addresses of the job's pages, below the URL by which the caller reaches the head."""
    url = head.transport.url()
    ports = [msgspec.structs.replace(one, url=url + one.path) for one in job.web_ports]
    return msgspec.structs.replace(job, web_ports=ports) if ports else job


def _read_job_history(head: Client, job_id: str) -> list[HistoryLine]:
    lines: list[HistoryLine] = []
    after = 0
    while True:
        reply = head.history(job_id, after=after, limit=_HISTORY_PAGE)
        lines += reply.history
        if not reply.history or reply.last <= after:
            return lines
        after = reply.last


def job_page(
    value: _Job, screen: Terminal, now_s: float, *, whole_history: bool, advice: Sequence[Advice] = ()
) -> list[str]:
    """Return the lines of the page. Of the advice, the most valuable lines."""
    job = value.job
    lines = [_headline(job, screen), *_facts(job, value.attempts, screen, now_s)]
    if value.attempts:
        lines += _section("attempts", _attempts(value.attempts, screen, now_s), screen)
        lines += _section("ranks", _ranks(value.attempts[-1], screen), screen)
    if job.checkpoints:
        lines += _section("checkpoints", _checkpoints(job, screen, now_s), screen)
    lines += _section("history", _history(value.history, screen, whole=whole_history), screen)
    if value.usage is not None:
        lines += _section("usage", _usage_lines(value.usage, replica=bool(job.service)), screen)
    if advice:
        lines += _section(f"advice (phalanx usage {job.id})", advice_lines(advice, most=SHORT_ADVICE), screen)
    return lines


def _headline(job: JobView, screen: Terminal) -> str:
    state = cells.state_cell(cells.job_state(job))
    code = f" with exit code {job.exit_code}" if job.exit_code else ""  # `why` is on a line of its own
    return f"{screen.paint(f'job {job.id}', 'bold')} {strip_control(job.name)}: {screen.paint(state.text, state.style)}{code}"


def _facts(job: JobView, attempts: Sequence[AttemptView], screen: Terminal, now_s: float) -> list[str]:
    begun = job.started_s
    ran = "" if begun is None else f", ran {format_duration((job.ended_s or now_s) - begun)}"
    limit = "" if job.time_limit_s is None else f" of at most {format_duration(job.time_limit_s)}"
    waited = f", waited {format_duration((begun or job.ended_s or now_s) - job.submit_s)}"
    shape = (
        grants_note(attempts[-1].grants)
        if attempts and attempts[-1].grants
        else f"{job.gpus} {'GPU' if job.gpus == '1' else 'GPUs'} requested"
    )
    progress = job.progress
    facts = {
        "command": job.command,
        "why": waiting_reason(job, now_s) if job.state is not JobState.RUNNING else "",
        "service": "" if not job.service else f"replica of {job.service}, revision {job.revision}",
        "array": "" if not job.array_id else f"element {job.array_index} of {job.array_size} of array {job.array_id}",
        "after": ", ".join(job.unmet),
        "who": f"{job.user}, project {job.project}, queue {job.queue}, priority {job.priority}",
        "when": f"{_clock(job.submit_s)}{waited}{ran}{limit}",
        "idle": "" if job.idle_s is None else f"parked after {format_duration(job.idle_s)} without work and input",
        "data": staging_text(job.staging),
        "shape": shape + (" (virtual devices)" if job.virtual else ""),
        "roles": "; ".join(_role(number, role) for number, role in enumerate(job.roles)),
        "resources": _resources(job),
        "waste": _waste(job, now_s),
        "layout": _layout(job),
        "terms": ", ".join(job.terms),
        "spent": ", ".join(job.budgets),
        "progress": "" if progress is None else _progress(job, screen),
        "pace": "; ".join(job.paces) if len(job.paces) > 1 or progress is None else "",
        "speeds": ", ".join(job.speeds),
        "folder": job.workdir,
        "outputs": job.output_dir,
        "ports": "  ".join(f"{one.name} {one.url}".strip() for one in job.web_ports),
        "links": "  ".join(f"{one.name} {one.url}" for one in job.links),
        "notify": job.notify,
        "on_end": job.on_end,
        "labels": " ".join(f"{name}={value}" for name, value in job.labels.items()),
    }
    return [
        truncate(f"  {fact_label(name)}{strip_control(text)}", screen.width) for name, text in facts.items() if text
    ]


def _role(number: int, role: RoleView) -> str:
    """Format what one role of a gang asks for, and its nodes."""
    gpus = "no GPUs" if role.gpus.endswith("x0") else f"{role.gpus} GPUs"
    host = [f"{role.cpus} CPUs"] * bool(role.cpus) + [format_bytes(role.memory_bytes)] * bool(role.memory_bytes)
    each = f", {' and '.join(host)} a node" if host else ""
    return f"{number}: {gpus}{each}" + (f" on {', '.join(role.nodes)}" if role.nodes else "")


def _waste(job: JobView, now_s: float) -> str:
    """Format the alarm of a job that wastes GPUs, with the list that says what mends it."""
    if job.waste is None:
        return ""
    hours = cells.hours(job.waste.gpu_hours) or "0"
    return f"{waste_text(job, now_s)}, {hours} GPU-hours so far; what mends it: phalanx waste"


def _resources(job: JobView) -> str:
    """Format the extras of each node and the licences of the job."""
    parts = [f"{extras_text(tuple(job.resources.items()))} on each node"] * bool(job.resources)
    return ", ".join([*parts, *(f"{seats} of licence {name}" for name, seats in job.licences.items())])


def _layout(job: JobView) -> str:
    """Format the layout: `tp=2,fsdp=4 (8 ranks)`."""
    if job.plan in {"", "auto"}:
        return job.plan and "auto: chosen by the ranks when the script defines its model"
    from phalanx.core.work.layouts.layout import parse_layout

    return f"{job.plan} ({parse_layout(job.plan).ranks} ranks)"


def fact_label(name: str) -> str:
    """Pad the name of a fact to its column."""
    return f"{name:<10}"


def _progress(job: JobView, screen: Terminal) -> str:
    progress = job.progress
    assert progress is not None  # called only with progress
    parts = [f"step {cells.step(progress.step, progress.steps_total)}"]
    if progress.steps_total:
        parts.insert(0, cells.bar(progress.step / progress.steps_total, 10, screen))
    parts += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    parts += (
        [f"{cells.rate(progress.tokens_per_s)} tokens"]
        if progress.tokens_per_s is not None and job.state is JobState.RUNNING
        else []
    )
    parts += (
        [f"{cells.percent(job.utilization)} used"]
        if job.utilization is not None and job.state is JobState.RUNNING
        else []
    )
    return "  ".join([*parts, *(["saving"] if progress.saving else [])])


def _attempts(attempts: Sequence[AttemptView], screen: Terminal, now_s: float) -> list[str]:
    columns = (
        Column(title="TRY", right=True),
        Column(title="STATE"),
        Column(title="CAUSE", hide_empty=True),
        Column(title="FROM STEP", right=True, hide_empty=True),
        Column(title="RESTARTS", right=True, hide_empty=True),
        Column(title="TIME", right=True),
        Column(title="NODES", min_width=6),
        Column(title="WHY", min_width=16, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            str(attempt.epoch),
            cells.state_cell(str(attempt.state)),
            "" if attempt.cause is None else str(attempt.cause),
            "" if attempt.resume_step is None else str(attempt.resume_step),
            str(attempt.generation) if attempt.generation else "",
            format_duration((attempt.ended_s or now_s) - attempt.placed_s),
            ", ".join(grant.node_id for grant in attempt.grants),
            attempt.why,
        ]
        for attempt in attempts[-_ATTEMPTS_MAX:]
    ]
    older = len(attempts) - _ATTEMPTS_MAX
    return [*table(columns, rows, screen), *([f"and {older} earlier ones"] if older > 0 else [])]


def _ranks(attempt: AttemptView, screen: Terminal) -> list[str]:
    """Return the table of nodes with their ranks, and how tasks of this attempt ended."""
    columns = (
        Column(title="NODE"),
        Column(title="NODE RANK", right=True),
        Column(title="RANKS"),
        Column(title="DEVICES", min_width=8),
        Column(title="ENDED", min_width=16, hide_empty=True),
    )
    rows: list[list[Cell | str]] = []
    for grant in attempt.grants:
        last = grant.first_rank + grant.tasks - 1
        ends = [
            f"rank {end.rank}: "
            + (f"signal {end.signal}" if end.signal else f"code {end.code}")
            + (" (requested)" if end.by_us else "")
            for end in attempt.exits
            if end.node_id == grant.node_id
        ]
        rows.append(
            [
                grant.node_id,
                str(grant.node_rank),
                str(last) if grant.tasks == 1 else f"{grant.first_rank}-{last}",
                " ".join(map(str, grant.devices)) or "none",
                "; ".join(ends),
            ]
        )
    return table(columns, rows, screen)


def _checkpoints(job: JobView, screen: Terminal, now_s: float) -> list[str]:
    columns = (
        Column(title="STEP", right=True),
        Column(title="TRY", right=True),
        Column(title="SIZE", right=True),
        Column(title="SAVED"),
        Column(title="WHERE", min_width=16),
    )
    rows = [
        [str(kept.step), str(kept.epoch), format_bytes(kept.bytes), f"{cells.age(kept.saved_s, now_s)} ago", kept.path]
        for kept in job.checkpoints
    ]
    return table(columns, rows, screen)


def _history(history: Sequence[HistoryLine], screen: Terminal, *, whole: bool) -> list[str]:
    shown = history if whole else history[-_HISTORY_MAX:]
    lines = [] if len(shown) == len(history) else [f"... {len(history) - len(shown)} earlier lines; --story prints all"]
    for line in shown:
        by = f" (by {line.by})" if line.by else ""
        lines.append(
            truncate(f"{_clock(line.at_s)}  {strip_control(line.text)}{by}{_details_hint(line)}", screen.width - 2)
        )
    return lines


def _details_hint(line: HistoryLine) -> str:
    """Return the command that prints the details, for a line that has some elsewhere."""
    if line.kind == "hung" and line.node_id is None:  # the earlier lines of its nodes have no stacks
        return f"; stacks: phalanx logs {line.job_id} --stacks"
    if line.kind == "checkpoint_rejected":
        return f"; details: phalanx logs {line.job_id} --rank supervisor"
    return ""


def _usage_lines(usage: UsageSummary, *, replica: bool = False) -> list[str]:
    """Return the lines of the section. `replica`: of a service, which makes no steps."""
    spent: GpuSeconds = usage.gpu_seconds
    lines = []
    if spent.total:
        parts = {
            "productive": spent.productive,
            "lost": spent.lost,
            "saving": spent.saving,
            "restarting": spent.restarting,
            "idle": spent.idle,
        }
        without_steps = usage.measured_by != "steps"
        goodput = "unknown: no steps reported" if without_steps else cells.percent(usage.goodput)
        lines.append(f"{spent.total:.1f} GPU-seconds" + ("" if replica else f", goodput {goodput}"))
        if not without_steps or spent.lost:
            lines.append("  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()))
    if usage.other_seconds:
        lines.append(", ".join(amount_time_text(name, each) for name, each in usage.other_seconds.items()))
    lines.append(f"{format_duration(usage.wall_s)} in total, {format_duration(usage.queued_s)} of it waiting")
    if usage.steps_kept or usage.steps_lost:
        lines.append(
            f"{cells.count(usage.steps_kept, 'step')} kept, {usage.steps_lost} lost, {usage.steps_redone} redone,"
            f" {usage.overlapping_steps} computed by two attempts"
        )
    if usage.loss_first is not None and usage.loss_last is not None:
        lines.append(f"loss {usage.loss_first:.4f} first, {usage.loss_last:.4f} last")
    if usage.unread_bytes:
        lines.append(f"the last {format_bytes(usage.unread_bytes)} of reports are not included: too many to read")
    return lines


def _section(title: str, lines: Sequence[str], screen: Terminal) -> list[str]:
    return [
        "",
        screen.paint(title, "bold"),
        *(truncate("  " + line, screen.width) if "\x1b" not in line else "  " + line for line in lines),
    ]


def _clock(at_s: float) -> str:
    """Format local time, with the date unless it is today."""
    then, now = time.localtime(at_s), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)


def _has_files(head: Client, job: JobView) -> bool:
    """Whether the job succeeded and wrote outputs that the caller may see."""
    try:
        return job.state is JobState.SUCCEEDED and bool(head.files(job.id).entries)
    except PhalanxError:
        return False


def _next(job: JobView, *, has_files: bool) -> str:
    if not job.command:  # another user's: neither its output nor its state is the caller's
        return f"phalanx {'why' if job.state is JobState.PENDING else 'usage'} {job.id}"
    match job.state:
        case JobState.PENDING:
            verb = {"held": "release", "parked": "resume"}.get(job.pending_word, "why")
            return f"phalanx {verb} {job.id}"
        case JobState.RUNNING:
            return f"phalanx logs -f {job.id}"
        case JobState.FAILED | JobState.TIMEOUT:
            return f"phalanx logs {job.id}"
        case _:
            return f"phalanx {'get' if has_files else 'logs'} {job.id}"
