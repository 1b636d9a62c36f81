"""Starts commands in running jobs: checks the attempt and its supervisor, opens the session, and posts the command. Callers have authorised it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from phalanx.api.live.exec_sessions import HeadExecSession
from phalanx.api.runtime import ApiRuntime
from phalanx.api.services import HeadServices
from phalanx.controller.leases import UnknownSupervisor
from phalanx.core.errors import BadRequest, Conflict, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import UserId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.states import AttemptState
from phalanx.wire.api.execs import ExecBody
from phalanx.wire.supervisor import OpenExec

_REPORTED_WITHIN_S: Final = 5.0  # a live node reports the end of a command before that of its attempt, or soon after


def running_attempt(services: HeadServices, job: Job, node_rank: int, *, needed_by: str) -> Attempt:
    """Return the running attempt of a job that has a node of that rank.

    Raises:
        Conflict: the job does not run.
        TryLater: it is starting.
        BadRequest: it has fewer nodes.
    """
    attempt = next(iter(services.store.attempts(job.id)[-1:]), None)
    if attempt is None or attempt.state is not AttemptState.RUNNING:
        if job.parked_s is not None:
            raise Conflict(
                f"job {job.id} is parked; {needed_by} needs a running job", hint=Hint(HintCode.RESUME_JOB, job=job.id)
            )
        if attempt is not None and attempt.state in (AttemptState.PLACED, AttemptState.STARTING):
            raise TryLater(
                f"job {job.id} is starting; {needed_by} needs its ranks to run", hint="try again in a few seconds"
            )
        now = job.state if attempt is None else f"{job.state}, its attempt {attempt.state}"
        raise Conflict(
            f"job {job.id} is {now}; {needed_by} needs a running job", hint=Hint(HintCode.SHOW_JOB, job=job.id)
        )
    nodes = len(attempt.allocation.grants)
    if not 0 <= node_rank < nodes:
        raise BadRequest(f"node rank {node_rank}: job {job.id} has {nodes} nodes", hint="node ranks start at 0")
    return attempt


def check_while_running(
    services: HeadServices,
    attempt: Attempt,
    check: Callable[[], None],
    is_reported: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Return a check to repeat while a session is open: `check`, and that the attempt has not ended.

    A node reports the end of each command by itself. One that died, or whose network is lost, does not: without this, the session hangs.
    Once the end `is_reported`, only the rest of the output is on its way to the user, which may take long.
    """
    ended_s: float | None = None

    def run() -> None:
        nonlocal ended_s
        check()
        if is_reported():
            return
        newest = services.store.attempts(attempt.job_id)[-1:]
        if newest and newest[0].epoch == attempt.epoch and newest[0].state is not AttemptState.ENDED:
            return
        now_s = services.clock.boottime_s()
        ended_s = now_s if ended_s is None else ended_s
        if now_s - ended_s >= _REPORTED_WITHIN_S:
            raise Conflict(
                f"the attempt of job {attempt.job_id} has ended, and its node did not report how this session did",
                hint=Hint(HintCode.SHOW_JOB, job=attempt.job_id),
            )

    return run


def start_exec(runtime: ApiRuntime, user: UserId, attempt: Attempt, body: ExecBody) -> HeadExecSession:
    """Open a session of a user and post its command to the supervisor. `runtime.sessions.remove` ends both.

    Raises:
        TryLater: too many sessions are open, or the supervisor has not registered since the head started: it would never get the command.
    """
    node_id = attempt.allocation.grants[body.node_rank].node_id
    supervisor = runtime.services.controller.supervisor_of(node_id, attempt.job_id, attempt.epoch)
    try:
        runtime.supervisors.require(supervisor)
    except UnknownSupervisor as error:
        raise TryLater(
            f"node {supervisor} has not registered since the head started", hint="try again in a few seconds"
        ) from error
    session = runtime.sessions.open(
        user=user, job_id=attempt.job_id, supervisor=supervisor, rows=body.rows, cols=body.cols
    )
    order = OpenExec(
        session=session.name,
        job_id=attempt.job_id,
        epoch=attempt.epoch,
        argv=body.argv,
        tty=body.tty,
        rows=body.rows,
        cols=body.cols,
    )
    runtime.services.client_active(attempt.job_id)
    runtime.services.mailboxes.post(supervisor, order)
    return session
