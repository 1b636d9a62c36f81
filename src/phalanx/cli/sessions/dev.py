"""`phalanx dev`: a session to work in: a job with a terminal or an editor, which stays when this command ends, and is found again by its name."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.request.job_options import job_options
from phalanx.cli.jobs.request.job_request import DoubleDashCommand, job_request, set_command, words_after_dashes
from phalanx.cli.jobs.submit import submit_job
from phalanx.cli.sessions.dev_programs import EDITORS, SHELL, await_editor
from phalanx.cli.sessions.terminal_session import attach_terminal, await_running, check_terminal
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobView

if TYPE_CHECKING:
    from phalanx.client import Client

LABEL: Final = "phalanx-dev"  # of the jobs of this command; its value is what they run
_NAME: Final = "dev"
_TERMINAL, _SSH = "terminal", "ssh"
_PORTS: Final = range(20_000, 32_000)  # below those that systems give to connections
_OF_RETURN: Final = frozenset({"name", "ide", "detach"})  # what a return to a session uses
_LIVE: Final = (JobState.PENDING, JobState.RUNNING)


@click.command(cls=DoubleDashCommand)
@job_options
@click.option(
    "--ide",
    type=click.Choice([*EDITORS, _SSH]),
    help="What to work in: Jupyter, code-server, or your own editor by SSH. Default: a terminal.",
)
@click.option("-d", "--detach", is_flag=True, help="Do not attach this terminal.")
@click.pass_context
def dev(context: click.Context, /, ide: str | None, detach: bool, **given: Any) -> int:
    """Start a session to work in, or return to the one of this name.

    It is a job: its shell, kernels and files stay when this command ends or the connection breaks. Leave it with Ctrl-] three times;
    `exit` ends it and frees its GPUs.

    \b
    phalanx dev --gpus 1/4 --idle 1h
    phalanx dev --ide jupyter --name notebook
    """  # noqa: D301 - click reads the backspace character itself
    attaches = ide is None and not detach
    if ide in EDITORS and words_after_dashes(context):
        raise BadRequest(f"--ide {ide} runs its own program", hint="leave out --ide, or the command after --")
    if attaches:
        check_terminal()
    head = connect()
    name = given.get("name") or _NAME
    job = _find(head, name)
    if job is None:
        job = _submit(head, context, {**given, "name": name}, ide)
    else:
        kind = job.labels.get(LABEL, _TERMINAL)
        if ide is not None and ide != kind:
            raise Conflict(
                f"session {name} is job {job.id} with {kind}", hint=f"add --name NAME, or: phalanx cancel {job.id}"
            )
        ide, attaches = (None, not detach) if kind == _TERMINAL else (kind, False)
        if attaches:
            check_terminal(job.id)
        print(f"session {name} is job {job.id}", file=sys.stderr, flush=True)
        _warn_ignored(context, job.id)
        if job.parked_s is not None:
            head.resume(job.id)
            print(f"job {job.id} is queued again", file=sys.stderr, flush=True)
    if attaches:
        return attach_terminal(head, job.id, idles=job.idle_s is not None)
    if ide in EDITORS and not detach:
        return _show_editor(head, job.id, ide)
    if ide == _SSH and not detach:
        await_running(job.id)
        print(f"next: phalanx ssh {job.id}    or, after phalanx config ssh: ssh {job.id}.phalanx")
        return 0
    print(f"next: phalanx dev{'' if name == _NAME else f' --name {name}'}", file=sys.stderr)
    return 0


def _find(head: Client, name: str) -> JobView | None:
    """Return the newest live session of this name of the user."""
    found = head.jobs(state=[state.value for state in _LIVE], user=head.me().user, name=name)
    return next((job for job in found.jobs if LABEL in job.labels), None)


def _warn_ignored(context: click.Context, job_id: str) -> None:
    """Name what was given for a new session, and does not change the one that is there."""
    given = [
        next((word for word in one.opts if word.startswith("--")), one.human_readable_name.strip("[]"))
        for one in context.command.params
        if context.get_parameter_source(one.name or "") is ParameterSource.COMMANDLINE and one.name not in _OF_RETURN
    ]
    if given or words_after_dashes(context):
        names = ", ".join([*given, *(["the command"] if words_after_dashes(context) else [])])
        warn(
            f"warning: it runs already, so that it ignores {names}; --name makes another, phalanx cancel {job_id} ends it"
        )


def _submit(head: Client, context: click.Context, given: Mapping[str, Any], ide: str | None) -> JobView:
    wanted: dict[str, Any] = {**given, "env": [*given["env"]]}
    if wanted.get("preemptible") is None:
        wanted["preemptible"] = False  # what it has in memory cannot be saved
    if wanted.get("tasks_per_node") is None:
        wanted["tasks_per_node"] = 1
    if ide in EDITORS:
        port = random.choice(_PORTS)
        editor = EDITORS[ide]
        set_command(context, editor.command(port))
        wanted["ports"] = [*given["ports"], f"{ide}={port}{':keep-path' if editor.keeps_path else ''}"]
    else:
        set_command(context, SHELL, unless_given=True)
        wanted["terminal"] = True
        if os.environ.get("TERM"):
            wanted["env"] = [("TERM", os.environ["TERM"]), *wanted["env"]]
    request = job_request(context, wanted)
    if request.spec.array or request.spec.service is not None or request.plan_request is not None:
        raise BadRequest("dev: a session is a single job, without array, service and plan")
    request.mapping["labels"] = {**dict(request.spec.labels), LABEL: ide or _TERMINAL}
    taken = submit_job(head, request)
    print(strip_control(f"job {taken.id} ({given['name']}): {'; '.join(taken.notes)}"), file=sys.stderr, flush=True)
    for line in taken.warnings:
        warn(f"warning: {line}")
    return taken.job


def _show_editor(head: Client, job_id: str, ide: str) -> int:
    """Print the address of an editor once it serves."""
    await_running(job_id)
    editor = EDITORS[ide]
    began_s = time.monotonic()
    port = next(one for one in head.job(job_id).job.web_ports if one.name == ide)
    token = await_editor(head, job_id, port.port)
    if token is None:
        state = head.job(job_id).job.state
        warn(f"{editor.program} does not serve in job {job_id} ({state}) after {time.monotonic() - began_s:.0f} s")
        print(f"next: phalanx logs {job_id}", file=sys.stderr)
        return 1
    query = editor.query.format(token=token)
    print(f"{head.transport.url()}{port.path}{query}")
    path = port.path if editor.keeps_path else "/"
    print(
        f"without the head's pages: phalanx port-forward {job_id} {port.port}, then http://127.0.0.1:{port.port}{path}{query}"
    )
    return 0
