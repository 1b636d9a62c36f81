"""`phalanx down`: stop the head of this machine. With jobs running it refuses (75) until told what becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Final

import click

from phalanx.cli import cells
from phalanx.cli.cluster.home import Recorded, alive, home_folder, running
from phalanx.cli.connect import connect
from phalanx.core.errors import BadRequest, Conflict, TryLater, Unreachable
from phalanx.wire.api.head import StopReply

_STOP_S: Final = 30.0  # leases are granted, nodes end their ranks
_CANCEL_S: Final = 120.0  # four times the default grace
_POLL_S: Final = 0.05


@click.command()
@click.option(
    "--keep-jobs", is_flag=True, help="Jobs go on without a head for up to 10 minutes; `phalanx up` finds them again."
)
@click.option("--cancel-jobs", is_flag=True, help="Cancel every job first.")
def down(keep_jobs: bool, cancel_jobs: bool) -> None:
    """Stop the head. Refuses with code 75 while jobs run, unless told --keep-jobs or --cancel-jobs."""
    if keep_jobs and cancel_jobs:
        raise BadRequest("--keep-jobs and --cancel-jobs at once", hint="give one of the two")
    record = running(home_folder())
    if record is None and not os.environ.get("PHALANX_URL") and _leave_cluster(keep=keep_jobs, cancel=cancel_jobs):
        return
    if record is None and not os.environ.get("PHALANX_URL"):
        print("no head runs here; next: phalanx up")
        return
    if record is not None and record.role == "standby" and not os.environ.get("PHALANX_URL"):
        _end_standby(record)
        return
    try:
        head = connect()
        url = head.transport.url()
        reply = _ask(lambda: head.stop(keep_jobs=keep_jobs, cancel_jobs=cancel_jobs))
    except Conflict as error:
        raise TryLater(
            error.message, hint=error.hint or "--keep-jobs or --cancel-jobs says what becomes of them"
        ) from None
    except Unreachable:
        if record is not None and not alive(record.pid):
            print("no head runs here (the last one died); next: phalanx up")
            return
        raise
    if record is not None and record.url.rstrip("/") == url.rstrip("/"):
        _await_end(record.pid)
    if reply.relieved:
        print("this head is down; another one leads, and jobs run on: phalanx heads")
        return
    print(
        "Phalanx is down" + ("; running jobs go on, phalanx up within 10 minutes finds them again" if keep_jobs else "")
    )


def _end_standby(record: Recorded) -> None:
    """A head that stands by has nothing to hand over."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    _await_end(record.pid)
    print("this head is down; it stood by, and the one that leads goes on")


def _leave_cluster(*, keep: bool, cancel: bool) -> bool:
    """Whether this server was a node of a head elsewhere, and is none any more.

    Raises:
        TryLater: jobs run here.
    """
    from phalanx.engines.joined import records

    folder = records.folder_of(home_folder())
    joined = records.read(folder)
    if joined is None:
        return False
    works = records.works(folder)
    if works and not cancel:
        raise TryLater(
            f"{cells.count(len(works), 'attempt')} of a job {'run' if len(works) > 1 else 'runs'} on this server"
            + ("; jobs cannot be kept on a server that leaves" if keep else ""),
            hint=f"phalanx nodes drain {joined.node_id} on the head moves them; --cancel-jobs stops them here, and the head places them anew",
        )
    from phalanx.cli.cluster.join import leave

    leave(folder)
    print(f"{joined.node_id} has left {joined.url}")
    return True


def _ask(stop: Callable[[], StopReply]) -> StopReply:
    """Ask until the head stops, and what it says then: while jobs are being cancelled it says how many are left.

    Raises:
        TryLater: they do not end.
    """
    until, told = time.monotonic() + _CANCEL_S, -1
    while True:
        reply = stop()
        if reply.stopping:
            return reply
        if reply.running != told:
            print(f"{cells.count(reply.running, 'job')} still to end", flush=True)
            told = reply.running
        if time.monotonic() > until:
            raise TryLater(
                f"{cells.count(reply.running, 'job')} did not end in {_CANCEL_S:.0f} s", hint="phalanx ps shows them"
            )
        time.sleep(_POLL_S * 4)


def _await_end(pid: int) -> None:
    until = time.monotonic() + _STOP_S
    while alive(pid):
        if time.monotonic() > until:
            raise TryLater(
                f"the head (pid {pid}) is stopping, but has not ended in {_STOP_S:.0f} s", hint="ask again in a moment"
            )
        time.sleep(_POLL_S)
