"""`squeue`, `sacct` and `sinfo` as views."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from phalanx.cli.connection import connect
from phalanx.cli.slurm_views.arguments import parse_words
from phalanx.cli.slurm_views.formats import parse_columns, parse_letters, parse_past_s, render_columns, render_letters
from phalanx.cli.slurm_views.own_job import job_id
from phalanx.cli.slurm_views.rows import (
    NODE_STATE_CODES,
    SACCT_WIDTHS,
    SINFO_TITLES,
    SQUEUE_TITLES,
    job_states,
    node_state,
    sacct_row,
    sinfo_rows,
    squeue_row,
)
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import NotFound
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobView

_SQUEUE: Final = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_SQUEUE_LONG: Final = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
_SINFO: Final = "%9P %.5a %.10l %.6D %.6t %N"
_SINFO_NODES: Final = "%N %.6D %.9P %6t"
_SACCT: Final = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
_PAGES_MAX: Final = 200  # of 100 jobs


def squeue(words: list[str]) -> int:
    """Waiting and running jobs."""
    flags = {"noheader": "h", "long": "l", "me": "", "array": "r", "all": "a"}
    values = {
        "jobs": "j",
        "job": "",
        "user": "u",
        "name": "n",
        "states": "t",
        "partition": "p",
        "format": "o",
        "account": "A",
    }
    options, _ = parse_words(words, flags, values, "phalanx ps")
    now_s = time.time()
    states = job_states(options["states"]) if options.get("states") else (JobState.PENDING, JobState.RUNNING)
    jobs = find_jobs(connect(), options, states)
    text = options.get("format") or (_SQUEUE_LONG if "long" in options else _SQUEUE)
    fields, rest = parse_letters(text, SQUEUE_TITLES)
    titles = None if "noheader" in options else SQUEUE_TITLES
    print_lines(render_letters(fields, rest, [squeue_row(job, now_s) for job in jobs], titles))
    return 0


def sacct(words: list[str]) -> int:
    """Jobs of any state; if none are named, those of this user that ran today."""
    flags = {"noheader": "n", "parsable": "p", "parsable2": "P", "allocations": "X", "allusers": "a", "long": "l"}
    values = {
        "jobs": "j",
        "user": "u",
        "name": "",
        "state": "s",
        "partition": "r",
        "format": "o",
        "starttime": "S",
        "endtime": "E",
        "account": "A",
        "delimiter": "",
    }
    options, _ = parse_words(words, flags, values, "phalanx ps -a")
    now_s = time.time()
    states = job_states(options["state"]) if options.get("state") else tuple(JobState)
    if not any(name in options for name in ("jobs", "user", "allusers", "name")):
        options["me"] = ""
    since_s = parse_past_s(options.get("starttime") or ("now-9999weeks" if "jobs" in options else "today"), now_s)
    until_s = parse_past_s(options.get("endtime") or "now", now_s)
    jobs = [
        job
        for job in find_jobs(connect(), options, states)
        if job.submit_s <= until_s and (job.ended_s is None or job.ended_s >= since_s)
    ]
    separator = options.get("delimiter", "|") if "parsable" in options or "parsable2" in options else ""
    columns = parse_columns(options.get("format") or _SACCT, SACCT_WIDTHS)
    lines = render_columns(
        columns, [sacct_row(job, now_s) for job in jobs], titles="noheader" not in options, separator=separator
    )
    print_lines([line + separator for line in lines] if "parsable" in options else lines)
    return 0


def sinfo(words: list[str]) -> int:
    """Nodes by queue and state: all nodes are in each queue."""
    flags = {"noheader": "h", "Node": "N", "long": "l", "summarize": "s", "responding": "r"}
    values = {"partition": "p", "format": "o", "nodes": "n", "states": "t"}
    options, _ = parse_words(words, flags, values, "phalanx nodes")
    head = connect()
    wanted = _words(options, "partition")
    queues = [queue.id for queue in head.queues() if not wanted or queue.id in wanted]
    named = set(expand_hostlist(options["nodes"])) if options.get("nodes") else set()
    nodes = [node for node in head.nodes() if not named or node.id in named]
    each = "Node" in options
    fields, rest = parse_letters(options.get("format") or (_SINFO_NODES if each else _SINFO), SINFO_TITLES)
    states = {state.lower() for state in _words(options, "states")}
    if states:
        nodes = [node for node in nodes if states & {node_state(node), NODE_STATE_CODES[node_state(node)]}]
    rows = sinfo_rows(nodes, queues, [field.name for field in fields], each=each)
    print_lines(render_letters(fields, rest, rows, None if "noheader" in options else SINFO_TITLES))
    return 0


def find_jobs(head: Client, options: dict[str, str], states: tuple[JobState, ...]) -> list[JobView]:
    """The jobs that the options name, oldest first.

    Raises:
        NotFound: a job that is named by number does not exist.
    """
    numbers = [one for one in (options.get("jobs") or options.get("job") or "").split(",") if one]
    if numbers:
        found = [job for one in numbers for job in jobs_of(head, one)]
        return [job for job in found if job.state in states]
    users, names = _words(options, "user"), _words(options, "name")
    queues, accounts = _words(options, "partition"), _words(options, "account")
    if "me" in options:
        users.add(head.me().user)

    def wanted(job: JobView) -> bool:
        return (
            (not users or job.user in users)
            and (not names or job.name in names)
            and (not queues or job.queue in queues)
            and (not accounts or job.project in accounts)
        )

    return _pages(head, states, wanted, user=next(iter(users)) if len(users) == 1 else None)


def _words(options: dict[str, str], name: str) -> set[str]:
    return {word for word in options.get(name, "").split(",") if word}


def _pages(
    head: Client, states: tuple[JobState, ...], wanted: Callable[[JobView], bool], user: str | None = None
) -> list[JobView]:
    found: list[JobView] = []
    before: int | None = None
    for _ in range(_PAGES_MAX):
        page = head.jobs(state=[str(state) for state in states], user=user, before_seq=before)
        found += [job for job in page.jobs if wanted(job)]
        before = page.next
        if before is None:
            break
    return found[::-1]


def jobs_of(head: Client, number: str) -> list[JobView]:
    """The job of a number, or the elements of an array.

    Raises:
        NotFound: there is no such job.
    """
    number = job_id(number)
    job = head.job(number).job
    if not job.array_id or "_" in number:
        return [job]
    elements = _pages(head, tuple(JobState), lambda one: one.array_id == job.array_id)
    if not elements:
        raise NotFound(f"no job {number}")
    return elements


def print_lines(lines: Iterable[str]) -> None:
    """Print lines that hold names of other users' jobs, which must not control the terminal."""
    for line in lines:
        print(strip_control(line))
