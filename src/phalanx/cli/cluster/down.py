"""`phalanx down`: stops the head of this machine. With running jobs it needs --keep-jobs or --cancel-jobs, else it exits with 75."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Final

import click

from phalanx.cli import cells
from phalanx.cli.cluster.state_folder import (
    RecordedHead,
    find_local_head,
    home_folder,
    is_alive,
)
from phalanx.cli.cluster.systemd_unit import unit_of_process, unit_state
from phalanx.cli.connection import connect
from phalanx.core.errors import BadRequest, Conflict, TryLater, Unreachable
from phalanx.wire.api.head import StopReply

_STOP_S: Final = 30.0  # to grant leases or end ranks
_CANCEL_S: Final = 120.0  # four times the default grace
_POLL_S: Final = 0.05


@click.command()
@click.option(
    "--keep-jobs",
    is_flag=True,
    help="Jobs continue without a head for up to 10 minutes; `phalanx up` reconnects to them.",
)
@click.option("--cancel-jobs", is_flag=True, help="Cancel every job first.")
def down(keep_jobs: bool, cancel_jobs: bool) -> None:
    """Stop the head. While jobs run, exits with 75 unless --keep-jobs or --cancel-jobs is given."""
    if keep_jobs and cancel_jobs:
        raise BadRequest("--keep-jobs and --cancel-jobs contradict each other", hint="give one of the two")
    record = find_local_head(home_folder())
    if record is None and not os.environ.get("PHALANX_URL") and _leave_cluster(keep=keep_jobs, cancel=cancel_jobs):
        return
    if record is None and not os.environ.get("PHALANX_URL"):
        print("no head runs here; next: phalanx up")
        return
    if record is not None and record.role == "standby" and not os.environ.get("PHALANX_URL"):
        _stop_standby(record)
        return
    try:
        head = connect()
        url = head.transport.url()
        reply = _stop_head(lambda: head.stop(keep_jobs=keep_jobs, cancel_jobs=cancel_jobs))
    except Conflict as error:
        raise TryLater(error.message, hint=error.hint or "give --keep-jobs or --cancel-jobs") from None
    except Unreachable:
        if record is not None and not is_alive(record.pid):
            print("no head runs here (the last one died); next: phalanx up")
            return
        raise
    unit = unit_of_process(record.pid) if record is not None else ""
    if record is not None and record.url.rstrip("/") == url.rstrip("/"):
        _wait_for_exit(record.pid)
    if reply.relieved:
        print("this head is down; another head leads, and jobs continue; next: phalanx heads")
        return
    again = f"systemctl start {unit}" if unit else "phalanx up"
    kept = f"; running jobs continue, run {again} within 10 minutes to reconnect to them"
    print("Phalanx is down" + (kept if keep_jobs else ""))
    if unit and unit_state(unit)[1] == "enabled":
        print(f"{unit} starts it again at the next boot; systemctl disable {unit} prevents that")


def _stop_standby(record: RecordedHead) -> None:
    """Stop a standby head by a signal: it has nothing to hand over."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    _wait_for_exit(record.pid)
    print("this standby head is down; the leader continues")


def _leave_cluster(*, keep: bool, cancel: bool) -> bool:
    """Leave the head that this server joined; return whether it had joined one.

    Raises:
        TryLater: jobs run on this server.
    """
    from phalanx.node import membership as records

    folder = records.membership_folder(home_folder())
    joined = records.read(folder)
    if joined is None:
        return False
    works = records.running_attempts(folder)
    if works and not cancel:
        raise TryLater(
            f"{cells.count(len(works), 'attempt')} of a job {'run' if len(works) > 1 else 'runs'} on this server"
            + ("; --keep-jobs is not possible on a server that leaves" if keep else ""),
            hint=f"move them with phalanx nodes drain {joined.node_id} on the head, "
            "or give --cancel-jobs: the head then places them on other nodes",
        )
    from phalanx.cli.cluster.join import leave

    leave(folder)
    print(f"{joined.node_id} has left {joined.url}")
    return True


def _stop_head(stop: Callable[[], StopReply]) -> StopReply:
    """Repeat the request until the head stops, and return its last reply. Prints how many cancelled jobs have not ended yet.

    Raises:
        TryLater: the jobs have not ended in time.
    """
    until, printed = time.monotonic() + _CANCEL_S, -1
    while True:
        reply = stop()
        if reply.stopping:
            return reply
        if reply.running != printed:
            print(f"waiting for {cells.count(reply.running, 'job')} to end", flush=True)
            printed = reply.running
        if time.monotonic() > until:
            raise TryLater(
                f"{cells.count(reply.running, 'job')} did not end in {_CANCEL_S:.0f} s",
                hint="list them with phalanx ps",
            )
        time.sleep(_POLL_S * 4)


def _wait_for_exit(pid: int) -> None:
    until = time.monotonic() + _STOP_S
    while is_alive(pid):
        if time.monotonic() > until:
            raise TryLater(
                f"the head (pid {pid}) has not stopped within {_STOP_S:.0f} s",
                hint="run phalanx down again in a moment",
            )
        time.sleep(_POLL_S)
