"""Waits until a revision of a service serves, and says meanwhile how far it is and why it waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from phalanx.cli.cells import bar, count
from phalanx.cli.jobs.job_follower import StatusLine
from phalanx.cli.jobs.logs import print_tail
from phalanx.cli.terminal import terminal
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import Conflict, PhalanxError, Unreachable, WaitTimedOut
from phalanx.core.lifecycle.service import ROLLOUT_RESTARTS_MAX
from phalanx.core.units import format_duration
from phalanx.core.work.services.service import NO_REVISION, ServiceState
from phalanx.core.work.states import JobState
from phalanx.wire.api.canary_text import comparison_of, progress_of
from phalanx.wire.api.jobs import JobView, staging_text
from phalanx.wire.api.services import ServiceDetail, ServiceView, replica_state

if TYPE_CHECKING:
    from phalanx.client import Client

_POLL_FIRST_S: Final = 0.1
_POLL_LAST_S: Final = 1.0
_REPLICAS_MAX: Final = 2  # replicas in the status line
_HINT_AFTER_S: Final = 15.0  # a replica that waits or does not answer for so long is worth a command to type
_HEAD_AWAY_MAX_S: Final = 60.0  # a restart takes seconds; longer is for the user to see
_LOG_LINES: Final = 10
INTERRUPTED: Final = 130  # 128 + SIGINT


def wait_for_revision(head: Client, service: ServiceView, timeout_s: float | None, *, with_output: bool) -> int:
    """Wait until the revision of a service serves with all replicas wanted; print the progress on standard error, and return the exit code.

    With `with_output` the last lines of a failing replica go to standard output.
    The code is 0 if the revision serves, or no replica is wanted; 1 if its replicas fail. After Ctrl-C, which stops only the wait, it is 130.

    Raises:
        WaitTimedOut: it does not serve within `timeout_s`.
        Conflict: another revision or a stop came between.
    """
    status = StatusLine()
    try:
        return _wait(head, service.name, service.revision, timeout_s, status, with_output=with_output)
    except KeyboardInterrupt:
        status.clear()
        print(f"\nservice {service.name} continues to start; next: phalanx serve ps {service.name}", file=sys.stderr)
        return INTERRUPTED
    finally:
        status.clear()


def _wait(
    head: Client, name: str, revision: int, timeout_s: float | None, status: StatusLine, *, with_output: bool
) -> int:
    begun_s, pause_s, hinted = time.monotonic(), _POLL_FIRST_S, False
    failed: JobView | None = None  # the replica that failed last: a rollout that is stopped removes it
    answered_s = begun_s
    while True:
        try:
            detail = head.service(name)
        except Unreachable as error:  # a head that restarts; replicas start on without it
            if time.monotonic() - answered_s >= _HEAD_AWAY_MAX_S:
                raise
            status.show(f"no answer: {error.message}")
            time.sleep(_POLL_LAST_S)
            continue
        answered_s = time.monotonic()
        failed = next((one for one in detail.replicas if one.revision == revision and one.restarts), failed)
        passed_s = time.monotonic() - begun_s
        end = end_of_wait(detail, revision)
        if end is not None:
            code, text = end
            status.say(f"{text}, after {format_duration(passed_s)}" if code == 0 and passed_s >= 1 else text)
            if code and with_output and failed is not None:
                _print_last_output(head, failed)
            return code
        line = progress_text(detail, revision)
        screen = terminal(sys.stderr)
        if screen.interactive and detail.service.desired:
            line = f"{bar(_ready(detail, revision) / detail.service.desired, 10, screen)} {line} {format_duration(passed_s)}"
        status.show(line)
        if not hinted and passed_s >= _HINT_AFTER_S and (hint := waiting_hint(detail, revision)):
            status.say(f"hint: {hint}")
            hinted = True
        left_s = None if timeout_s is None else timeout_s - passed_s
        if left_s is not None and left_s <= 0:
            raise WaitTimedOut(
                f"service {name} does not serve revision {revision} after {format_duration(timeout_s or 0)}: {progress_text(detail, revision)}",
                hint=waiting_hint(detail, revision) or f"phalanx serve ps {name}",
            )
        time.sleep(pause_s if left_s is None else min(pause_s, left_s))
        pause_s = min(_POLL_LAST_S, pause_s * 1.5)


def end_of_wait(detail: ServiceDetail, revision: int) -> tuple[int, str] | None:
    """Return the exit code and the last line of the wait; None if it goes on.

    Raises:
        Conflict: the service was stopped, or another revision replaced this one.
    """
    service = detail.service
    if service.stopped_by:
        raise Conflict(f"service {service.name} was stopped by {service.stopped_by}", hint="phalanx serve up FILE")
    if service.revision != revision:
        if service.failure:
            return 1, f"{service.failure}; service {service.name} is back at revision {service.revision}"
        raise Conflict(
            f"revision {service.revision} replaced revision {revision} of service {service.name}",
            hint=f"phalanx serve ps {service.name}",
        )
    if service.state is ServiceState.SLEEPING:
        if service.asleep_wanted:
            return 0, f"service {service.name} sleeps: revision {revision}; phalanx wake {service.name} wakes it"
        return 0, (
            f"service {service.name} has no replica, as wanted: revision {revision}; "
            f"a request through the gateway or phalanx serve scale {service.name} {service.first_replicas} starts one"
        )
    if service.state is ServiceState.READY and service.served_revision == revision:
        awake = service.desired - service.asleep_wanted
        return 0, f"service {service.name} serves revision {revision}: {service.ready} of {awake} replicas ready"
    failing = failing_replicas(detail, revision)
    if failing and service.served_revision == NO_REVISION:
        worst = failing[0]
        return 1, (
            f"replica {worst.id} failed {worst.restarts} times{f': {worst.detail}' if worst.detail else ''}; "
            f"it is restarted until phalanx serve update {service.name} FILE or phalanx serve down {service.name}"
        )
    return None


def failing_replicas(detail: ServiceDetail, revision: int) -> list[JobView]:
    """Return the replicas of a revision that have failed as often as stops a rollout, the most failures first."""
    found = [
        one
        for one in detail.replicas
        if one.revision == revision and not one.ready and one.restarts >= ROLLOUT_RESTARTS_MAX
    ]
    return sorted(found, key=lambda one: -one.restarts)


def progress_text(detail: ServiceDetail, revision: int) -> str:
    """Return how many replicas are ready, and what the others do."""
    service, canary = detail.service, detail.canary
    others = _waiting(detail, revision)
    if canary is not None and canary.revision == revision and canary.share and not others:
        return "; ".join(filter(None, (progress_of(canary, time.time()), comparison_of(canary))))
    texts = [_replica_text(one) for one in others[:_REPLICAS_MAX]]
    if len(others) > _REPLICAS_MAX:
        texts.append(f"{count(len(others) - _REPLICAS_MAX, 'more replica')} not ready")
    if service.detail and not any(one.state is JobState.PENDING and one.detail for one in others):
        texts.append(service.detail)
    return "; ".join([f"revision {revision}: {_ready(detail, revision)} of {service.desired} ready", *texts])


def waiting_hint(detail: ServiceDetail, revision: int) -> str:
    """Return the command that explains why a replica is not ready; "" if no command does."""
    for one in _waiting(detail, revision):
        if one.restarts:
            return f"phalanx logs {one.id} prints why replica {one.id} ended"
        if one.state is JobState.PENDING:
            return f"phalanx why {one.id} says what would start replica {one.id}"
        if one.state is JobState.RUNNING and one.attempt_state == "running":
            check = detail.service.ready_check
            port = f"port {one.port}"
            asks = f"accept connections on {port}" if check == "tcp" else f"answer GET {check} on {port}"
            return f"replica {one.id} runs and does not {asks} yet: phalanx logs {one.id}"
    return ""


def _waiting(detail: ServiceDetail, revision: int) -> Sequence[JobView]:
    return [one for one in detail.replicas if one.revision == revision and not one.ready and not one.cancelled_by]


def _ready(detail: ServiceDetail, revision: int) -> int:
    return sum(end.ready and end.revision == revision for end in detail.service.endpoints)


def _replica_text(job: JobView) -> str:
    if job.state is JobState.PENDING:
        return f"replica {job.id} pending: {wait_text(job.reason, job.detail) or 'not scheduled yet'}"
    times = f" (restarted {count(job.restarts, 'time')})" if job.restarts else ""
    copies = f": {text}" if (text := staging_text(job.staging)) else ""
    where = f" on {', '.join(job.nodes)}" if job.nodes else ""  # between two attempts it has none
    return f"replica {job.id} {replica_state(job)}{where}{times}{copies}"


def _print_last_output(head: Client, job: JobView) -> None:
    """Print the last lines of a replica; why not, if the head has none."""
    print(f"last lines of replica {job.id}:", file=sys.stderr, flush=True)
    try:
        print_tail(head, job.id, rank=None, tail=_LOG_LINES, tasks=1)
    except PhalanxError as error:
        print(error.message, file=sys.stderr)
