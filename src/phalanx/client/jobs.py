"""Verbs of jobs. What `submit` needs loads no msgspec."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from phalanx.client.verbs import Records, Verbs, encode, query, record, segment
from phalanx.core.errors import BadRequest, TooLarge

if TYPE_CHECKING:
    from phalanx.wire.api import jobs as api
    from phalanx.wire.why import DryRunReply, WhyReply
else:
    api = Records("phalanx.wire.api.jobs")

BODY_BYTES_MAX: Final = 1 << 20  # the head takes no larger job; told here before it is sent
WHY_S: Final = 60.0  # for one answer to `why`: eight may be before it, each of some seconds on the largest fleet


class Submission:
    """A job that was taken, or an array: `id` names the whole. `notes` is what the user is told: shape and number of tasks."""

    __slots__ = ("_payload", "id", "notes")

    def __init__(self, payload: bytes) -> None:
        said = json.loads(payload)
        self._payload = payload
        self.id: str = said.get("array_id") or said["job"]["id"]
        self.notes: list[str] = said["notes"]

    @property
    def job(self) -> api.JobView:
        """The job as it was taken; of an array its first element."""
        return record(self._payload, api.Submitted).job


class JobVerbs(Verbs):
    """Submit jobs, look at them and change them."""

    def submit(self, job: Mapping[str, object], *, key: str | None = None) -> Submission:
        """Submit a job: the keys of a job file. Durable when this returns; sent again under one key if the head restarts.

        Raises:
            BadFile, BadRequest, NeverFits, TooLarge: the head does not take it.
        """
        try:
            body = json.dumps(job, separators=(",", ":"), ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise BadRequest(f"the job cannot be written as JSON: {error}") from error
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(
                f"the job is {len(body)} bytes of JSON; a head takes {BODY_BYTES_MAX}", hint="put the data into files"
            )
        headers = {"Idempotency-Key": key or os.urandom(16).hex(), "Content-Type": "application/json"}
        return Submission(self.transport.send("POST", "/v1/jobs", body, again=True, headers=headers))

    def jobs(
        self,
        *,
        state: Iterable[str] = (),
        user: str | None = None,
        project: str | None = None,
        queue: str | None = None,
        name: str | None = None,
        before_seq: int | None = None,
        limit: int = 100,
        fold: bool = False,
    ) -> api.JobList:
        """One page of jobs, newest first; `next` of the reply goes into `before_seq`. `fold`: an array's waiting elements are one."""
        asked = [("state", str(word)) for word in state]
        rest = {
            "user": user,
            "project": project,
            "queue": queue,
            "name": name,
            "before_seq": before_seq,
            "limit": limit,
            "fold": 1 if fold else None,
        }
        return self._get("/v1/jobs" + query(rest, asked), api.JobList)

    def job(self, job_id: str) -> api.JobDetail:
        """One job with its attempts; of an array all elements as one job, with how many are in each state."""
        return self._get(f"/v1/jobs/{segment(job_id)}", api.JobDetail)

    def update(self, job_id: str, **changes: str | float | None) -> api.JobView:
        """Change name, priority, time ("2h"), queue or begin ("2h" from now, or Unix seconds)."""
        given = {name: value for name, value in changes.items() if value is not None}
        payload = self.transport.json("PATCH", f"/v1/jobs/{segment(job_id)}", encode(given))
        return record(payload, api.JobReply).job

    def cancel(self, job_id: str, why: str = "") -> api.JobView:
        """End a job for good."""
        return self._change(job_id, "cancel", {"why": why})

    def hold(self, job_id: str) -> api.JobView:
        """Keep a pending job from starting."""
        return self._change(job_id, "hold")

    def release(self, job_id: str) -> api.JobView:
        """Let a held job start."""
        return self._change(job_id, "release")

    def requeue(self, job_id: str) -> api.JobView:
        """Save, stop and wait again."""
        return self._change(job_id, "requeue")

    def why(self, job_id: str) -> WhyReply:
        """Why a job waits, who is in the way, when it is expected to start, and what would start it now."""
        from phalanx.wire.why import WhyReply

        payload = self.transport.json("GET", f"/v1/jobs/{segment(job_id)}/why", timeout_s=WHY_S)
        return record(payload, WhyReply)

    def dry_run(self, job: Mapping[str, object]) -> DryRunReply:
        """What a job would meet if it were submitted now; nothing is written.

        Raises:
            BadFile, BadRequest, NeverFits, TooLarge: the head would not take it.
        """
        from phalanx.wire.why import DryRunReply

        payload = self.transport.json("POST", "/v1/jobs/dry-run", encode(job), again=True, timeout_s=WHY_S)
        return record(payload, DryRunReply)

    def receipt(self, job_id: str) -> dict[str, Any]:
        """What a job used and lost: the fields of core.accounting.receipt.Receipt."""
        receipt: dict[str, Any] = json.loads(self.transport.json("GET", f"/v1/jobs/{segment(job_id)}/receipt"))
        return receipt

    def _change(self, job_id: str, verb: str, body: Mapping[str, object] | None = None) -> api.JobView:
        # Cancel, hold, release and requeue are idempotent while the same attempt lives: sent again they change nothing more.
        payload = self._post(f"/v1/jobs/{segment(job_id)}/{verb}", body, again=verb != "requeue")
        return record(payload, api.JobReply).job
