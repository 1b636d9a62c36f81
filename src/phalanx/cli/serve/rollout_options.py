"""What the commands share that roll a service out: their options, and what they print before and after the wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from phalanx.cli.jobs.request.job_request import JobRequest
from phalanx.cli.jobs.request.sendable_job import sendable_mapping
from phalanx.cli.list_output import to_json
from phalanx.cli.option_types import DURATION
from phalanx.cli.serve.rollout_wait import INTERRUPTED, wait_for_revision
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import NotFound
from phalanx.core.units import parse_duration_s

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.services import ServiceView

F = TypeVar("F", bound=Callable[..., Any])
JSON_OPTION: Final = click.option("--json", "as_json", is_flag=True, help="Print the service as JSON.")


def rollout_options(command: F) -> F:
    """Add the options of commands that wait until the service serves."""
    options = (
        click.option("-d", "--detach", is_flag=True, help="Return at once; do not wait until it serves."),
        click.option("--timeout", type=DURATION, metavar="TIME", help="Exit with 124 after this time; it starts on."),
        JSON_OPTION,
    )
    for option in reversed(options):
        command = option(command)
    return command


def apply_service(head: Client, wanted: JobRequest, *, detach: bool, timeout: str | None, as_json: bool) -> int:
    """Submit a service, or roll it out if a service of this name runs with another spec; print it and wait. Return the exit code.

    Raises:
        PhalanxError: the head rejects it, or the service is another user's.
    """
    service, text = _put_service(head, wanted)
    return finish_rollout(head, service, text, detach=detach, timeout=timeout, as_json=as_json)


def apply_services(
    head: Client, wanted: Sequence[JobRequest], *, detach: bool, timeout: str | None, as_json: bool
) -> int:
    """Do so for all roles of a service, wait for all of them, and print the last one, which answers requests. Return the exit code."""
    *others, (service, text) = [_put_service(head, one) for one in wanted]
    begun_s, code = time.monotonic(), 0
    timeout_s = None if timeout is None else parse_duration_s(timeout)
    for other, other_text in others:
        if not as_json:
            print(strip_control(other_text), flush=True)
        if not detach:
            code = code or wait_for_revision(head, other, timeout_s, with_output=not as_json)
    left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begun_s))
    left = None if left_s is None else f"{left_s:.3f}s"
    return finish_rollout(head, service, text, detach=detach or bool(code), timeout=left, as_json=as_json) or code


def _put_service(head: Client, wanted: JobRequest) -> tuple[ServiceView, str]:
    """Submit a service or roll it out; return it, and what was done."""
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
        text = rollout_text(service, known)
    return service, text


def rollout_text(service: ServiceView, before: ServiceView) -> str:
    """Return what a change did: from which revision to which, or that nothing changed."""
    if service.revision == before.revision:
        return f"service {service.name} is unchanged: revision {service.revision}, replicas {service.replicas}"
    return f"service {service.name}: revision {before.revision} -> {service.revision}, replicas {service.replicas}"


def finish_rollout(
    head: Client, service: ServiceView, text: str, *, detach: bool, timeout: str | None, as_json: bool
) -> int:
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
