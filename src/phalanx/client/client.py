"""The head's verbs as methods. Records of wire.api come back; what `submit` and `run` need on their way loads no msgspec.

client = Client()
done = client.submit({"run": ["python", "train.py"], "gpus": 8, "workdir": "/home/ada/project"})
for event in client.follow_logs(done.id): ...
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Final, Self

from phalanx.client.audit import AuditVerbs
from phalanx.client.execs import ExecVerbs
from phalanx.client.jobs import JobVerbs
from phalanx.client.nodes import NodeVerbs
from phalanx.client.output import OutputVerbs
from phalanx.client.people import PeopleVerbs
from phalanx.client.queues import QueueVerbs
from phalanx.client.rules import RuleVerbs
from phalanx.client.transport import ANSWER_S, PATIENCE_S, Transport
from phalanx.client.verbs import Records, record
from phalanx.core.errors import WaitTimedOut

if TYPE_CHECKING:
    from phalanx.wire.api import head as api
    from phalanx.wire.api.jobs import JobView
else:
    api = Records("phalanx.wire.api.head")

_ARRAY_POLL_S: Final = 0.5  # between looks at an array that is waited for


class Client(JobVerbs, OutputVerbs, ExecVerbs, NodeVerbs, PeopleVerbs, QueueVerbs, RuleVerbs, AuditVerbs):
    """One head. Without arguments the one of this user's PHALANX_HOME, or PHALANX_URL and PHALANX_TOKEN. Threads may share it.

    Args:
        url: of the head.
        token: of the caller.
        home: state folder to look in instead of PHALANX_HOME.
        patience_s: how long a head that was reached before is waited for.
        answer_s: how long a short call may take.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | None = None,
        patience_s: float = PATIENCE_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.transport = Transport(url, token, home=home, patience_s=patience_s, answer_s=answer_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this thread's connection."""
        self.transport.drop()

    def health(self) -> api.Health:
        """Which head answers."""
        return self._get("/v1/health", api.Health)

    def heads(self) -> api.HeadList:
        """Who leads and who stands by, of heads that share a store."""
        return self._get("/v1/heads", api.HeadList)

    def me(self) -> api.Me:
        """Whose token this is."""
        return self._get("/v1/me", api.Me)

    def overview(self) -> api.Overview:
        """Nodes, running and pending jobs at one moment."""
        return self._get("/v1/overview", api.Overview)

    def metrics(self) -> str:
        """The text that Prometheus reads."""
        return self.transport.json("GET", "/metrics").decode()

    def stop(self, *, keep_jobs: bool = False, cancel_jobs: bool = False) -> api.StopReply:
        """Stop the head; with `cancel_jobs` call again until `stopping`."""
        body = {"keep_jobs": keep_jobs, "cancel_jobs": cancel_jobs}
        return record(self._post("/v1/stop", body, again=True), api.StopReply)

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobView:
        """The job once it is over.

        Raises:
            WaitTimedOut: it was not within `timeout_s`; the job goes on.
        """
        until_s = inf if timeout_s is None else self.transport.now() + timeout_s
        job = self.job(job_id).job
        if job.states:  # an array has no story of its own to follow
            while not job.state.terminal and self.transport.now() < until_s:
                time.sleep(min(_ARRAY_POLL_S, max(0.0, until_s - self.transport.now())))
                job = self.job(job_id).job
        else:
            for _ in self.follow_events(job_id, until_s=until_s):
                pass
            job = self.job(job_id).job
        if timeout_s is not None and not job.state.terminal:
            hint = f"phalanx show {job_id}" if job.states else f"phalanx attach {job_id}"
            raise WaitTimedOut(f"job {job_id} is not over after {timeout_s:g} s: it is {job.state}", hint=hint)
        return job
