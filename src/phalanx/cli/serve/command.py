"""`phalanx serve`: the verbs of services as one group of commands. `submit`, `update`, `scale`, `cancel` and `logs` make the same calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.completion import complete_services
from phalanx.cli.connection import connect
from phalanx.cli.errors import print_error
from phalanx.cli.jobs.job_request import JobRequest, job_request_of_file
from phalanx.cli.jobs.logs import logs
from phalanx.cli.jobs.sendable_job import sendable_mapping
from phalanx.cli.jobs.service_page import service_lines, service_view
from phalanx.cli.jobs.services import scale, sleep, wake
from phalanx.cli.list_output import ListView, list_options, show_list, to_json
from phalanx.cli.option_types import DURATION
from phalanx.cli.serve.rollout_wait import INTERRUPTED, wait_for_revision
from phalanx.cli.serve.service_lookup import require_service
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadFile, Conflict, NotFound, PhalanxError, Unreachable
from phalanx.core.units import parse_duration_s
from phalanx.core.work.service import NO_REVISION

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.services import ServiceView

F = TypeVar("F", bound=Callable[..., Any])
_POLL_S: Final = 0.2
_NAME: Final = click.argument("name", metavar="NAME", shell_complete=complete_services)
_FILE: Final = click.argument("file", metavar="FILE")
_COPY: Final = click.option("--copy", is_flag=True, help="Upload a copy of the working directory.")
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print the service as JSON.")


def wait_options(command: F) -> F:
    """Add the options of commands that wait until the service serves."""
    options = (
        click.option("-d", "--detach", is_flag=True, help="Return at once; do not wait until it serves."),
        click.option("--timeout", type=DURATION, metavar="TIME", help="Exit with 124 after this time; it starts on."),
        _JSON,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group("serve", cls=CommandGroup, invoke_without_command=True)
@list_options
@click.pass_context
def serve(context: click.Context, as_json: bool, watch: bool) -> None:
    """Services: replicas of a server that keep running, with revisions and rollouts."""
    if context.invoked_subcommand is None:
        head = connect()
        show_list(lambda: _services(head, stopped=False), as_json=as_json, watch=watch)


@serve.command()
@_FILE
@_COPY
@wait_options
def up(file: str, copy: bool, **waiting: Any) -> int:
    """Start the service of a job file, or roll out the file if it has changed; wait until it serves. Repeating it changes nothing.

    Exit codes: 0 it serves; 1 its replicas fail; 124 --timeout has passed; 130 Ctrl-C, which stops only the wait.
    """
    return apply_service(connect(), _service_request(file, copy=copy), **waiting)


@serve.command()
@_NAME
@_FILE
@_COPY
@wait_options
def update(name: str, file: str, copy: bool, **waiting: Any) -> int:
    """Roll out another file as a new revision of a service; wait until it serves."""
    wanted = _service_request(file, copy=copy)
    head = connect()
    before = require_service(head, name).service
    changed = head.update_service(before.name, sendable_mapping(head, wanted))
    return _finish(head, changed, _rollout_text(changed, before), **waiting)


@serve.command()
@_NAME
@click.option("--to", "revision", type=click.IntRange(1), metavar="REVISION", help="This revision instead.")
@wait_options
def rollback(name: str, revision: int | None, **waiting: Any) -> int:
    """Return to the revision that served before; wait until it serves. Once it does, the next rollback goes one further back."""
    head = connect()
    before = require_service(head, name).service
    wanted = before.rollback_revision if revision is None else revision
    if wanted == NO_REVISION:
        raise Conflict(
            f"no revision of service {before.name} served before revision {before.revision}",
            hint=f"phalanx serve ps {before.name} lists its revisions; --to N rolls out one of them",
        )
    if before.failure and revision is None:
        hint = f"--to N goes to another revision; phalanx serve ps {before.name} lists them"
        raise Conflict(f"{before.failure}; service {before.name} is back at revision {before.revision}", hint=hint)
    changed = head.roll_back_service(before.name, wanted)
    return _finish(head, changed, _rollout_text(changed, before), **waiting)


@serve.command("ps")
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_services)
@click.option("--stopped", is_flag=True, help="Include services that were stopped.")
@list_options
def ps(name: str | None, stopped: bool, as_json: bool, watch: bool) -> None:
    """List services; of one, show replicas, endpoints and revisions: who made which when, and what it changed."""
    head = connect()
    if name is None:
        show_list(lambda: _services(head, stopped=stopped), as_json=as_json, watch=watch)
        return
    require_service(head, name)
    show_list(lambda: service_view(head.service(name.strip()), time.time()), as_json=as_json, watch=watch)


@serve.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_services)
@click.option("-d", "--detach", is_flag=True, help="Return at once; do not wait until the replicas have ended.")
@_JSON
def down(names: tuple[str, ...], detach: bool, as_json: bool) -> int:
    """Stop services and their replicas for good; wait until the replicas have ended. A stopped service is unchanged."""
    head, code, done = connect(), 0, []
    for name in dict.fromkeys(names):
        try:
            before = require_service(head, name).service
            stopped = head.stop_service(before.name)
            if not detach:
                _wait_for_end(head, stopped.name)
                stopped = head.service(stopped.name).service
        except Unreachable:
            raise
        except PhalanxError as error:
            code = code or print_error(error.message, error.hint, error.exit_code)
            continue
        done.append(stopped)
        if not as_json:
            text = "had been stopped" if before.stopped_by else "is being stopped" if detach else "is stopped"
            print(strip_control(f"service {stopped.name} {text}"), flush=True)
    if as_json:
        print(to_json({"services": done}, indent=2))
    return code


for _shared in (scale, sleep, wake, logs):
    serve.add_command(_shared)


def apply_service(head: Client, wanted: JobRequest, *, detach: bool, timeout: str | None, as_json: bool) -> int:
    """Submit a service, or roll it out if a service of this name runs with another spec; print it and wait. Return the exit code.

    Raises:
        PhalanxError: the head rejects it, or the service is another user's.
    """
    mapping = sendable_mapping(head, wanted)
    name = wanted.spec.name
    try:
        known = head.service(name).service
    except NotFound:
        known = None
    if known is None or known.stopped_by:
        service = head.submit_service(mapping)
        text = f"service {service.name} submitted: revision {service.revision}, replicas {service.replicas}"
    else:
        service = head.update_service(name, mapping)
        text = _rollout_text(service, known)
    return _finish(head, service, text, detach=detach, timeout=timeout, as_json=as_json)


def _service_request(path: str, *, copy: bool) -> JobRequest:
    """Return the service that a job file describes.

    Raises:
        BadFile: it describes a job.
    """
    wanted = job_request_of_file(path, copy=copy)
    if wanted.spec.service is None:
        raise BadFile(f"{path}: not a service", hint="write type: service; phalanx submit starts a job")
    return wanted


def _rollout_text(service: ServiceView, before: ServiceView) -> str:
    if service.revision == before.revision:
        return f"service {service.name} is unchanged: revision {service.revision}, replicas {service.replicas}"
    return f"service {service.name}: revision {before.revision} -> {service.revision}, replicas {service.replicas}"


def _finish(head: Client, service: ServiceView, text: str, *, detach: bool, timeout: str | None, as_json: bool) -> int:
    """Print what was done, wait until the service serves, and print it."""
    if not as_json:
        print(strip_control(text), flush=True)
    code = 0
    if not detach:
        timeout_s = None if timeout is None else parse_duration_s(timeout)
        code = wait_for_revision(head, service, timeout_s, with_output=not as_json)
    if as_json:
        print(to_json({"service": service if detach else head.service(service.name).service}, indent=2))
    elif code != INTERRUPTED:
        print(f"next: phalanx serve ps {service.name}")
    return code


def _wait_for_end(head: Client, name: str) -> None:
    """Wait until a stopped service has no replica. Its replicas end within their grace."""
    while head.service(name).replicas:
        time.sleep(_POLL_S)


def _services(head: Client, *, stopped: bool) -> ListView:
    found = head.services(stopped=stopped)
    return ListView(
        value=found,
        lines=lambda screen: service_lines(found, screen) if found else ["no services"],
        next_command=f"phalanx serve ps {found[0].name}" if found else "phalanx serve up FILE",
    )
