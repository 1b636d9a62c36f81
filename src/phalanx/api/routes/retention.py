"""Retention: how long files of ended jobs are kept, runs that remove old ones, and archives of their records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, read_record
from phalanx.api.http.routing import NonNegative, RouteTable
from phalanx.api.nodes.file_cleaner import CleanRequest
from phalanx.api.runtime import ApiRuntime, caller_of, run_in_thread, runtime_of
from phalanx.api.views.archives import archive_list, archived_jobs
from phalanx.core.errors import BadRequest
from phalanx.core.ids import UserId
from phalanx.core.state.events import PutRetention
from phalanx.core.state.records import RETENTION
from phalanx.core.units import format_duration
from phalanx.core.work.nearest_match import suggestion
from phalanx.core.work.retention import (
    FILE_KINDS,
    POLICY,
    RetainedFiles,
    RetentionPolicy,
    check_age,
    retention_periods,
)
from phalanx.core.work.users import Action
from phalanx.wire.api.retention import ArchivedJobs, ArchiveList, CleanBody, RetentionBody, RetentionRun, RetentionView

routes = RouteTable()


@routes.get("/v1/retention", Action.OPERATE, reply=RetentionView)
async def show_retention(request: Request) -> Response:
    """Show how long files of ended jobs are kept, and the newest run that removes them."""
    return json_response(await run_in_thread(_view, runtime_of(request)))


@routes.put("/v1/retention", Action.ADMINISTER, body=RetentionBody, reply=RetentionView)
async def put_retention(request: Request) -> Response:
    """Replace the periods. Files past them are removed within the next hour, and every hour from then on."""
    runtime = runtime_of(request)
    body = await read_record(request, RetentionBody, runtime.services.limits.body_bytes)
    kinds = _kinds(body.periods_s)
    policy = RetentionPolicy(
        periods=retention_periods(dict(zip(kinds, body.periods_s.values(), strict=True))),
        by=caller_of(request).user,
        at_s=runtime.services.clock.now_s(),
    )
    await runtime.request(PutRetention(policy=policy))
    return json_response(await run_in_thread(_view, runtime))


@routes.post("/v1/retention/runs", Action.ADMINISTER, body=CleanBody, reply=RetentionRun)
async def start_retention_run(request: Request) -> Response:
    """Start to remove the files of jobs that ended long ago; with `dry_run` only count them. `GET /v1/retention` has the progress."""
    runtime = runtime_of(request)
    body = await read_record(request, CleanBody, runtime.services.limits.body_bytes)
    age_s = check_age(body.older_than_s, what="older_than_s")
    kinds = _kinds(body.kinds) or list(FILE_KINDS)
    words = "count" if body.dry_run else "remove"
    await runtime.record_call(f"{words} {', '.join(kinds)} older than {format_duration(age_s)}")
    wanted = CleanRequest(ages=dict.fromkeys(kinds, age_s), by=caller_of(request).user, dry_run=body.dry_run)
    return json_response(runtime.file_cleaner.start(wanted))


@routes.get("/v1/archives", Action.OPERATE, reply=ArchiveList)
async def list_archives(request: Request) -> Response:
    """List the months that have archives of jobs."""
    runtime = runtime_of(request)
    return json_response(await run_in_thread(archive_list, runtime.archives, runtime.services.archive_root))


@routes.get("/v1/archives/{month}", Action.OPERATE, reply=ArchivedJobs)
async def list_archived_jobs(
    request: Request,
    month: str,
    user: UserId | None = None,
    after: NonNegative = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    stored: bool = False,
) -> Response:
    """List the archived jobs that ended in a month (UTC), such as 2026-08, by number. For the next page send `next` of the reply as `after`.

    With `stored` only those with outputs or checkpoints in object stores, and their addresses, at most 200 in one reply.
    """
    archives = runtime_of(request).archives
    found = run_in_thread(archived_jobs, archives, month, user=user or "", after=after, limit=limit, stored=stored)
    return json_response(await found)


def _kinds(names: Iterable[str]) -> list[RetainedFiles]:
    found = []
    for name in names:
        try:
            found.append(RetainedFiles(name))
        except ValueError:
            known = [kind.value for kind in RetainedFiles]
            raise BadRequest(
                f"{name[:60]!r} is not a kind of files", hint=suggestion(name, known, ", ".join(known))
            ) from None
    return found


def _view(runtime: ApiRuntime) -> RetentionView:
    policy = runtime.services.store.record(RETENTION, POLICY)
    run = runtime.file_cleaner.newest_run()
    if policy is None:
        return RetentionView(periods_s={}, run=run)
    periods_s = {kind.value: period_s for kind, period_s in policy.periods}
    return RetentionView(periods_s=periods_s, by=policy.by, at_s=policy.at_s, run=run)
