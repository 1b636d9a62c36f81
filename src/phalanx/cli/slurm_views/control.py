"""`scancel` and `scontrol` as views."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Callable
from typing import Final

from phalanx.cli.connection import connect
from phalanx.cli.slurm_views.arguments import parse_words
from phalanx.cli.slurm_views.own_job import job_id
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.work.states import JobState

_CHANGES: Final = ("hold", "release", "requeue", "uhold")


def scancel(words: list[str]) -> int:
    """Cancel jobs by number, or all that the options name.

    Raises:
        BadRequest: nothing is named, or a signal is.
    """
    flags = {"me": "", "quiet": "Q", "verbose": "v", "full": "f", "batch": "b"}
    values = {"user": "u", "name": "n", "jobname": "", "state": "t", "partition": "p", "signal": "s", "account": "A"}
    options, numbers = parse_words(words, flags, values, "phalanx cancel")
    if options.get("signal", "TERM").upper().removeprefix("SIG") not in {"TERM", "KILL", "9", "15"}:
        raise BadRequest("--signal: this view only cancels", hint="phalanx exec JOB -- kill -USR1 PID sends a signal")
    head = connect()
    found = [number for word in numbers for number in word.split(",") if number]
    if not found:
        if not any(name in options for name in ("me", "user", "name", "jobname", "partition", "state", "account")):
            raise BadRequest("no job given", hint="scancel JOB, scancel --me")
        from phalanx.cli.slurm_views.lists import find_jobs
        from phalanx.cli.slurm_views.rows import job_states

        options.setdefault("name", options.get("jobname", ""))
        states = job_states(options["state"]) if options.get("state") else (JobState.PENDING, JobState.RUNNING)
        found = [job.id for job in find_jobs(head, options, states)]
    _each("scancel", found, lambda number: head.cancel(number, f"scancel by {getpass.getuser()}"))
    return 0  # also for jobs that do not exist, as Slurm's


def scontrol(words: list[str]) -> int:
    """Show jobs, nodes and host names; hold, release and requeue jobs.

    Raises:
        BadRequest: another subcommand.
    """
    plain = [word for word in words if not word.startswith("-")]
    verb, what = [*plain, "", ""][:2]
    if verb == "show" and what.lower() in {"hostnames", "hostname"}:
        return _show_hostnames(plain[2:])
    if verb == "show" and what.lower() in {"job", "jobs", "jobid"}:
        return _show_jobs(plain[2:], one_line="-o" in words or "--oneliner" in words)
    if verb == "show" and what.lower() in {"node", "nodes"}:
        return _show_nodes(plain[2:])
    if verb in _CHANGES:
        head = connect()
        change = {"hold": head.hold, "uhold": head.hold, "release": head.release, "requeue": head.requeue}[verb]
        return _each("scontrol", [one for word in plain[1:] for one in word.split(",") if one], change)
    raise BadRequest(
        f"scontrol {' '.join(plain[:2])} is not in this view",
        hint="it has show job, show node, show hostnames, hold, release, requeue; phalanx update changes a job",
    )


def _each(verb: str, numbers: list[str], change: Callable[[str], object]) -> int:
    """Change each job; one that cannot be changed is reported, and the others are changed all the same."""
    code = 0
    for number in numbers:
        try:
            change(job_id(number))
        except (NotFound, Conflict) as error:
            sys.stderr.write(f"{verb}: error: {number}: {error}\n")
            code = 1
    return code


def _show_hostnames(words: list[str]) -> int:
    from phalanx.node.gang.job_link import NotInJob
    from phalanx.node.slurm_compat.batch_main import show_hostnames

    try:
        names = show_hostnames(words)
    except NotInJob:  # at a prompt, there is only the list to expand
        if not words:
            raise BadRequest("no list of names given", hint="scontrol show hostnames n[0-3]") from None
        names = list(expand_hostlist(words[0]))
    sys.stdout.write("".join(f"{name}\n" for name in names))
    return 0


def _show_jobs(numbers: list[str], *, one_line: bool) -> int:
    from phalanx.cli.slurm_views.lists import find_jobs, jobs_of, print_lines
    from phalanx.cli.slurm_views.rows import job_lines

    head, now_s = connect(), time.time()
    jobs = [job for word in numbers for number in word.split(",") for job in jobs_of(head, number)]
    if not numbers:
        jobs = find_jobs(head, {}, tuple(JobState))
    for job in jobs:
        lines = job_lines(job, now_s)
        print_lines([" ".join(line.strip() for line in lines)] if one_line else [*lines, ""])
    return 0


def _show_nodes(names: list[str]) -> int:
    from phalanx.cli.slurm_views.lists import print_lines
    from phalanx.cli.slurm_views.rows import node_lines

    head = connect()
    wanted = [head.node(name) for name in names] if names else head.nodes()
    for node in wanted:
        print_lines([*node_lines(node), ""])
    return 0
