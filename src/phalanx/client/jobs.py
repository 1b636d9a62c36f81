"""API calls for jobs. `submit` does not load msgspec."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    decode_record,
    encode_body,
    path_segment,
    query_string,
)
from phalanx.core.errors import BadRequest, TooLarge

if TYPE_CHECKING:
    from phalanx.wire.api import jobs as api
    from phalanx.wire.why import DryRunReply, WhyReply
else:
    api = LazyModule("phalanx.wire.api.jobs")

BODY_BYTES_MAX: Final = 1 << 20  # limit of the head, checked here before sending
# Timeout of `why`: up to eight requests may be queued before it, each some seconds on the largest fleet
WHY_S: Final = 60.0


class Submission:
    """An accepted job or array; `id` is that of the whole array.

    `notes` and `warnings` are for the user: shape and tasks; why it cannot run now. `tasks`: how many it has, None if its placement decides.
    """

    __slots__ = ("_payload", "id", "name", "notes", "tasks", "warnings")

    def __init__(self, payload: bytes) -> None:
        reply = json.loads(payload)
        self._payload = payload
        self.id: str = reply.get("array_id") or reply["job"]["id"]
        self.name: str = reply["job"]["name"]
        self.tasks: int | None = reply.get("tasks")
        self.notes: list[str] = reply["notes"]
        self.warnings: list[str] = reply.get("warnings", [])

    @property
    def job(self) -> api.JobView:
        """The job as accepted; of an array its first element."""
        return decode_record(self._payload, api.SubmitReply).job


class JobsApi(ApiCalls):
    """Submit, read and change jobs."""

    def submit(self, job: Mapping[str, object], *, key: str | None = None) -> Submission:
        """Submit a job, given as the keys of a job file.

        The job is durable when this returns. If the head restarts meanwhile, the request is repeated with the same idempotency key.

        Raises:
            BadFile, BadRequest, NeverFits, TooLarge: the head rejects the job.
        """
        try:
            body = json.dumps(job, separators=(",", ":"), ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise BadRequest(f"the job cannot be written as JSON: {error}") from error
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(
                f"the job is {len(body)} bytes of JSON; a head takes at most {BODY_BYTES_MAX}",
                hint="put the data into files",
            )
        headers = {"Idempotency-Key": key or os.urandom(16).hex(), "Content-Type": "application/json"}
        return Submission(self.transport.send("POST", "/v1/jobs", body, idempotent=True, headers=headers))

    def jobs(
        self,
        *,
        state: Iterable[str] = (),
        user: str | None = None,
        project: str | None = None,
        queue: str | None = None,
        name: str | None = None,
        label: Iterable[str] = (),
        before_seq: int | None = None,
        sort: str | None = None,
        ascending: bool = False,
        after: str | None = None,
        ended_since_s: float | None = None,
        limit: int = 100,
        fold: bool = False,
    ) -> api.JobList:
        """Return one page of jobs, newest first. For the next page, pass `next` of the reply as `before_seq`.

        With `sort` the list is in another order; then pass `after` of the reply as `after`.

        `label` are names, or `exp=7` for a value; a job has all of them. `ended_since_s` leaves out jobs that ended earlier, and those that have not ended. `fold` combines the waiting elements of an array into
        one entry, and its ended ones into one for each state.
        """
        several = [*(("state", str(word)) for word in state), *(("label", text) for text in label)]
        filters = {
            "user": user,
            "project": project,
            "queue": queue,
            "name": name,
            "before_seq": before_seq,
            "sort": sort,
            "ascending": 1 if ascending else None,
            "after": after,
            "ended_since_s": ended_since_s,
            "limit": limit,
            "fold": 1 if fold else None,
        }
        return self._get("/v1/jobs" + query_string(filters, several), api.JobList)

    def job(self, job_id: str) -> api.JobDetail:
        """Return one job with its attempts; of an array one job for all elements, with the number in each state."""
        return self._get(f"/v1/jobs/{path_segment(job_id)}", api.JobDetail)

    def job_fields(self, job_id: str) -> dict[str, Any]:
        """Return the fields of one job's JobView as they were sent; loads no records."""
        fields: dict[str, Any] = json.loads(self.transport.json("GET", f"/v1/jobs/{path_segment(job_id)}"))["job"]
        return fields

    def job_keys(self, job_id: str) -> api.JobKeysReply:
        """Return the keys of a job file that would submit the job or array again."""
        return self._get(f"/v1/jobs/{path_segment(job_id)}/request", api.JobKeysReply)

    def update(self, job_id: str, **changes: str | float | None) -> api.JobView:
        """Change name, priority, time ("2h"), queue or begin ("2h" from now, or Unix seconds)."""
        body = {name: value for name, value in changes.items() if value is not None}
        payload = self.transport.json("PATCH", f"/v1/jobs/{path_segment(job_id)}", encode_body(body))
        return decode_record(payload, api.JobReply).job

    def cancel(self, job_id: str, why: str = "") -> api.JobView:
        """Cancel a job."""
        return self._change(job_id, "cancel", {"why": why})

    def hold(self, job_id: str) -> api.JobView:
        """Hold a pending job, so that it does not start."""
        return self._change(job_id, "hold")

    def release(self, job_id: str) -> api.JobView:
        """Release a held job."""
        return self._change(job_id, "release")

    def park(self, job_id: str) -> api.JobView:
        """Stop a job after it saved a checkpoint, and keep it parked, without GPUs, until `resume`."""
        return self._change(job_id, "park")

    def resume(self, job_id: str) -> api.JobView:
        """Queue a parked job again."""
        return self._change(job_id, "resume")

    def requeue(self, job_id: str) -> api.JobView:
        """Stop a running job after it saved a checkpoint, and queue it again."""
        return self._change(job_id, "requeue")

    def why(self, job_id: str) -> WhyReply:
        """Return why a job waits, which jobs block it, its expected start, and the changes that would start it now."""
        from phalanx.wire.why import WhyReply

        payload = self.transport.json("GET", f"/v1/jobs/{path_segment(job_id)}/why", timeout_s=WHY_S)
        return decode_record(payload, WhyReply)

    def dry_run(self, job: Mapping[str, object]) -> DryRunReply:
        """Return what would happen to a job if it were submitted now; nothing is written.

        Raises:
            BadFile, BadRequest, NeverFits, TooLarge: the head would reject the job.
        """
        from phalanx.wire.why import DryRunReply

        payload = self.transport.json("POST", "/v1/jobs/dry-run", encode_body(job), idempotent=True, timeout_s=WHY_S)
        return decode_record(payload, DryRunReply)

    def usage(self, job_id: str) -> dict[str, Any]:
        """Return the resources that a job used and lost: the fields of core.accounting.usage_summary.UsageSummary."""
        usage: dict[str, Any] = json.loads(self.transport.json("GET", f"/v1/jobs/{path_segment(job_id)}/receipt"))
        return usage

    def _change(self, job_id: str, verb: str, body: Mapping[str, object] | None = None) -> api.JobView:
        # All are idempotent, except requeue once the next attempt has started.
        payload = self._post(f"/v1/jobs/{path_segment(job_id)}/{verb}", body, idempotent=verb != "requeue")
        return decode_record(payload, api.JobReply).job
