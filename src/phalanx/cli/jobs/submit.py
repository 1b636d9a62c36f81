"""`phalanx submit`: submits a job. Imports only what the request needs; the whole command takes about 0.1 s."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.cells import count
from phalanx.cli.connection import connect, shares_file_system
from phalanx.cli.errors import warn
from phalanx.cli.jobs.job_request import (
    DoubleDashCommand,
    JobRequest,
    check_local_files,
    job_options,
    job_request,
)
from phalanx.cli.option_types import DURATION
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadFile
from phalanx.core.units import format_bytes, parse_duration_s
from phalanx.core.work.requirements import NO_REQUIREMENTS

if TYPE_CHECKING:
    from phalanx.client import Client, Submission
    from phalanx.core.work.spec import JobSpec


@click.command(cls=DoubleDashCommand)
@job_options
@click.option("--wait", is_flag=True, help="Wait until the job ends, and exit with its exit code.")
@click.option(
    "--timeout",
    type=DURATION,
    metavar="TIME",
    help="With --wait: exit with 124 after this time; the job continues.",
)
@click.option("--dry-run", is_flag=True, help="Submit nothing; print expected nodes, start and GPU-hours.")
@click.option("--json", "as_json", is_flag=True, help="Print the job as JSON.")
@click.option("--quiet", is_flag=True, help="Print only the id of the job.")
@click.pass_context
def submit(
    context: click.Context, /, wait: bool, timeout: str | None, dry_run: bool, as_json: bool, quiet: bool, **given: Any
) -> int:
    """Submit a command or a job file, and return.

    \b
    phalanx submit --gpus 2x8 -- python train.py --lr 3e-4
    phalanx submit --array 0-99%8 --depends-on 17 -- python eval.py
    phalanx submit job.yaml
    """  # noqa: D301 - click reads the backspace character itself
    wanted = job_request(context, given)
    head = connect()
    if wanted.plan_request is not None:
        from phalanx.cli.plan.job_plan import resolve_plan

        wanted = resolve_plan(head, wanted)
    if dry_run:
        from phalanx.cli.jobs.dry_run import show_dry_run

        show_dry_run(head, wanted, as_json=as_json)
        return 0
    taken = submit_job(head, wanted)
    for line in taken.warnings:
        warn(f"warning: {line}")
    if as_json:
        from phalanx.cli.list_output import to_json

        print(to_json({"job": taken.job, "notes": taken.notes, "warnings": taken.warnings}, indent=2))
    elif quiet:
        print(taken.id)
    else:
        print(strip_control(f"job {taken.id} submitted: {wanted.spec.name}"))
        for note in taken.notes:
            print(f"  {note}")
        if not wait:
            print(f"next: phalanx {'show' if wanted.spec.array else 'attach'} {taken.id}")
    sys.stdout.flush()
    if not wait:
        return 0
    from phalanx.cli.jobs.job_end import wait_for_end

    return wait_for_end(head, taken.id, None if timeout is None else parse_duration_s(timeout))


def submit_job(head: Client, wanted: JobRequest) -> Submission:
    """Submit a job, with a copy of its working directory if needed.

    All retries use one idempotency key, so that there is only one job.

    Raises:
        PhalanxError: the head rejects the job, or does not answer.
    """
    mapping = wanted.mapping
    if wanted.slurm_names is not None:
        from phalanx.cli.jobs.sbatch_script import resolve_slurm_names

        mapping = resolve_slurm_names(head, mapping, wanted.slurm_names)
    if wanted.copy or not shares_file_system(head):
        mapping = {**mapping, **_send_copy(head, wanted.spec)}
    else:
        check_local_files(wanted.spec)
    return head.submit(mapping)


def _send_copy(head: Client, spec: JobSpec) -> dict[str, object]:
    """Upload a copy of the working directory; return the job keys for the copy and its requirements."""
    from phalanx.client.workdir_archive import archive_workdir, read_archive_member
    from phalanx.node.logic.requirements import default_requirements_file

    packed = archive_workdir(spec.workdir)
    try:
        for name in packed.skipped:
            warn(f"left out of the copy: {name}")
        if spec.requirements not in {"", NO_REQUIREMENTS} and read_archive_member(packed, spec.requirements) is None:
            raise BadFile(
                f"{spec.requirements}: not in the copy of {spec.workdir}", hint="check whether a .gitignore excludes it"
            )
        if not head.has_blob(packed.sha256):
            head.upload(packed.file, packed.sha256, packed.bytes)
            warn(f"uploaded a copy of {spec.workdir}: {count(packed.files, 'file')}, {format_bytes(packed.bytes)}")
        found = spec.requirements or (
            "" if spec.image else default_requirements_file(lambda name: read_archive_member(packed, name))
        )
        return {"upload": packed.sha256, **({"requirements": found} if found else {})}
    finally:
        packed.close()
