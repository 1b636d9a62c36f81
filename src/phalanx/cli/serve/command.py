"""`phalanx serve`: the verbs of services as one group of commands. `submit`, `update`, `scale`, `cancel` and `logs` make the same calls."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.completion import complete_services
from phalanx.cli.connection import connect
from phalanx.cli.errors import print_error
from phalanx.cli.jobs.logs import logs
from phalanx.cli.jobs.request.job_request import JobRequest, job_request_of_file
from phalanx.cli.jobs.request.sendable_job import sendable_mapping
from phalanx.cli.list_output import ListView, list_options, show_list, to_json
from phalanx.cli.serve.batch import batch
from phalanx.cli.serve.model import model
from phalanx.cli.serve.role_files import service_requests
from phalanx.cli.serve.rollout_options import (
    JSON_OPTION,
    apply_services,
    finish_rollout,
    rollout_options,
    rollout_text,
)
from phalanx.cli.serve.service_lookup import prompt_readers, require_service
from phalanx.cli.serve.service_page import service_lines, service_view
from phalanx.cli.serve.services import scale, sleep, wake
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadFile, Conflict, PhalanxError, Unreachable
from phalanx.core.work.services.service import NO_REVISION

if TYPE_CHECKING:
    from phalanx.client import Client

_POLL_S: Final = 0.2
_NAME: Final = click.argument("name", metavar="NAME", shell_complete=complete_services)
_FILE: Final = click.argument("file", metavar="FILE")
_COPY: Final = click.option("--copy", is_flag=True, help="Upload a copy of the working directory.")


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
@rollout_options
def up(file: str, copy: bool, **waiting: Any) -> int:
    """Start the service of a job file, or roll out the file if it has changed; wait until it serves. Repeating it changes nothing.

    A file with roles describes two services: one reads prompts, the other one answers.

    Exit codes: 0 it serves; 1 its replicas fail; 124 --timeout has passed; 130 Ctrl-C, which stops only the wait.
    """
    return apply_services(connect(), service_requests(file, copy=copy), **waiting)


@serve.command()
@_NAME
@_FILE
@_COPY
@rollout_options
def update(name: str, file: str, copy: bool, **waiting: Any) -> int:
    """Roll out another file as a new revision of a service; wait until it serves."""
    wanted = _service_request(file, copy=copy)
    head = connect()
    before = require_service(head, name).service
    changed = head.update_service(before.name, sendable_mapping(head, wanted))
    return finish_rollout(head, changed, rollout_text(changed, before), **waiting)


@serve.command()
@_NAME
@click.option("--to", "revision", type=click.IntRange(1), metavar="REVISION", help="This revision instead.")
@rollout_options
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
    return finish_rollout(head, changed, rollout_text(changed, before), **waiting)


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
    show_list(
        lambda: service_view(head.service(name.strip()), time.time(), prompt_readers(head, name.strip())),
        as_json=as_json,
        watch=watch,
    )


@serve.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_services)
@click.option("-d", "--detach", is_flag=True, help="Return at once; do not wait until the replicas have ended.")
@JSON_OPTION
def down(names: tuple[str, ...], detach: bool, as_json: bool) -> int:
    """Stop services and their replicas for good; wait until the replicas have ended. A stopped service is unchanged.

    Services that only read prompts for one of them are stopped too.
    """
    head, code, done = connect(), 0, []
    every = [one for named in names for one in (named, *prompt_readers(head, named.strip()))]
    for name in dict.fromkeys(every):
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


def _logs_of_services() -> click.Command:
    """The command `logs`, whose error is about services where nothing has the name."""
    found = copy.copy(logs)
    print_logs = logs.callback
    assert print_logs is not None

    def checked(**given: Any) -> Any:
        word = str(given["job"]).strip()
        if word[:1].isalpha():
            require_service(connect(), word)
        return print_logs(**given)

    found.callback = checked
    return found


for _shared in (model, batch, scale, sleep, wake, _logs_of_services()):
    serve.add_command(_shared)


def _service_request(path: str, *, copy: bool) -> JobRequest:
    """Return the service that a job file describes.

    Raises:
        BadFile: it describes a job.
    """
    wanted = job_request_of_file(path, copy=copy)
    if wanted.spec.service is None:
        raise BadFile(f"{path}: not a service", hint="write type: service; phalanx submit starts a job")
    return wanted


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
