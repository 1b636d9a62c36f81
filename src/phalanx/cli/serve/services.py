"""What commands do with services: submit, update, scale and stop them, let replicas sleep and wake, and print the output of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import click

from phalanx.cli.completion import complete_services
from phalanx.cli.connection import connect
from phalanx.cli.jobs.request.job_request import JobRequest, job_request_of_file
from phalanx.cli.jobs.request.sendable_job import sendable_mapping
from phalanx.cli.list_output import to_json
from phalanx.cli.option_types import GrammarType
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.services import ServiceDetail, ServiceView


_ALL: Final = 1_000_000  # more replicas than a service can have
_SERVICE: Final = click.argument("service", metavar="NAME", shell_complete=complete_services)


def find_service(head: Client, word: str) -> ServiceDetail | None:
    """Return the service of this name; None if no service has it. Numbers name jobs."""
    name = word.strip()
    if not name or name.replace("_", "", 1).isdigit():
        return None
    try:
        return head.service(name)
    except (NotFound, BadRequest):
        return None


def submit_service(head: Client, wanted: JobRequest, *, as_json: bool, quiet: bool) -> None:
    """Submit a service and print it."""
    service = head.submit_service(sendable_mapping(head, wanted))
    if as_json:
        print(to_json({"service": service}, indent=2))
    elif quiet:
        print(service.name)
    else:
        print(strip_control(f"service {service.name} submitted: revision {service.revision}, {_wanted(service)}"))
        print(f"next: phalanx show {service.name}")


def update_service(name: str, path: str | None, revision: int | None, *, copy: bool, as_json: bool) -> None:
    """Roll out the revision of a job file, or an existing one, and print the service."""
    head = connect()
    if (path is None) == (revision is None):
        raise BadRequest("give a job file, or --to and the number of a revision", hint=f"phalanx update {name} FILE")
    if path is not None:
        wanted = job_request_of_file(path, copy=copy)
        if wanted.spec.service is None:
            raise BadRequest(f"{path}: not a service", hint="write type: service")
        service = head.update_service(name, sendable_mapping(head, wanted))
    else:
        assert revision is not None  # checked above
        service = head.roll_back_service(name, revision)
    if as_json:
        print(to_json({"service": service}, indent=2))
    else:
        print(strip_control(f"service {service.name}: revision {service.revision}, {_wanted(service)}"))
        print(f"next: phalanx show {service.name} --watch")


def _replica_number(text: str) -> int | Literal["auto"]:
    """Return a number of replicas, or "auto".

    Raises:
        BadRequest: it is neither.
    """
    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise BadRequest(f"{text[:40]!r} is not a number of replicas", hint="write a number from 0, or auto")
    return int(text)


@click.command()
@_SERVICE
@click.argument("replicas", type=GrammarType("N|auto", _replica_number))
@click.option("--json", "as_json", is_flag=True, help="Print the service as JSON.")
def scale(service: str, replicas: str, as_json: bool) -> None:
    """Set the number of replicas of a service, within the range of its file; 0 ends all replicas.

    If the file has targets (scale: ...), the number is the least, load may ask for more, and auto takes the least back.
    """
    changed = connect().scale_service(service, _replica_number(replicas))
    number = f"at least {changed.least}" if changed.scale else replicas
    if replicas == "0" and changed.scale:
        number = "0 until the next request: 0"
    print(to_json({"service": changed}, indent=2) if as_json else f"service {changed.name}: {number} replicas wanted")


_REPLICAS_OPTION: Final = click.option(
    "--replicas", type=click.IntRange(0), metavar="N", help="How many in all; without it, all replicas."
)


@click.command("sleep")
@_SERVICE
@_REPLICAS_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print the service as JSON.")
def sleep(service: str, replicas: int | None, as_json: bool) -> None:
    """Let replicas of a service free their GPUs and keep their processes and memory."""
    _print_sleep(connect().sleep_service(service, asleep=_ALL if replicas is None else replicas), as_json)


@click.command("wake")
@_SERVICE
@_REPLICAS_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print the service as JSON.")
def wake(service: str, replicas: int | None, as_json: bool) -> None:
    """Let sleeping replicas of a service take their GPUs again and serve."""
    _print_sleep(connect().sleep_service(service, awake=_ALL if replicas is None else replicas), as_json)


def _print_sleep(service: ServiceView, as_json: bool) -> None:
    text = f"service {service.name}: {service.asleep_wanted} of {service.desired} replicas shall sleep"
    print(to_json({"service": service}, indent=2) if as_json else text)


def _wanted(service: ServiceView) -> str:
    return f"replicas {service.replicas}"
