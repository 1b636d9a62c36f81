"""The head's API as methods that return the records of wire.api. `submit` does not load msgspec.

client = Client()
job = client.submit({"run": ["python", "train.py"], "gpus": 8, "workdir": "/home/ada/project"})
for event in client.follow_logs(job.id): ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, Self

from phalanx.client.api_calls import LazyModule, decode_record
from phalanx.client.audit import AuditApi
from phalanx.client.channels import ChannelsApi
from phalanx.client.connection.transport import ANSWER_S, PATIENCE_S, Outage, Transport
from phalanx.client.cost import CostApi
from phalanx.client.energy import EnergyApi
from phalanx.client.exec_sessions import ExecApi
from phalanx.client.history import HistoryApi
from phalanx.client.jobs import JobsApi
from phalanx.client.licences import LicencesApi
from phalanx.client.login import LoginApi
from phalanx.client.nodes import NodesApi
from phalanx.client.output import OutputsApi
from phalanx.client.people import AccountsApi
from phalanx.client.pools import NodePoolsApi
from phalanx.client.queues import QueuesApi
from phalanx.client.retention import RetentionApi
from phalanx.client.rules import FailureRulesApi
from phalanx.client.secrets import SecretsApi
from phalanx.client.services import ServicesApi
from phalanx.client.sign_in import SignInApi
from phalanx.client.usage import UsageApi
from phalanx.core.errors import WaitTimedOut
from phalanx.core.hints import Hint, HintCode

if TYPE_CHECKING:
    from phalanx.wire.api import head as api
    from phalanx.wire.api.jobs import JobView
else:
    api = LazyModule("phalanx.wire.api.head")

_ARRAY_POLL_S: Final = 0.5  # between two polls while waiting for an array


class Client(
    JobsApi,
    ServicesApi,
    OutputsApi,
    ExecApi,
    NodesApi,
    NodePoolsApi,
    LicencesApi,
    AccountsApi,
    SecretsApi,
    SignInApi,
    LoginApi,
    QueuesApi,
    FailureRulesApi,
    RetentionApi,
    ChannelsApi,
    AuditApi,
    UsageApi,
    EnergyApi,
    CostApi,
    HistoryApi,
):
    """Client of one cluster. Thread-safe.

    Without arguments it uses the saved cluster that PHALANX_CLUSTER names, or PHALANX_URL and PHALANX_TOKEN, or the current cluster
    (`phalanx config use`), or the head of this user's PHALANX_HOME.

    Args:
        url: URL of the head, or several separated by commas.
        token: API token of the caller.
        home: state folder to use instead of PHALANX_HOME.
        retry_limit_s: how long to retry a head that was reached before.
        answer_timeout_s: timeout of a short call, in seconds.
        ca: the only CA to trust at `url`, in PEM format; "" for those of the environment or the system.
        on_outage: called once when a head that was reached before has been retried for some seconds, and with None when it answers again.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | None = None,
        retry_limit_s: float = PATIENCE_S,
        answer_timeout_s: float = ANSWER_S,
        ca: str = "",
        on_outage: Callable[[Outage | None], None] = lambda _: None,
    ) -> None:
        self.transport = Transport(
            url,
            token,
            home=home,
            retry_limit_s=retry_limit_s,
            answer_timeout_s=answer_timeout_s,
            ca=ca,
            on_outage=on_outage,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this thread's connection."""
        self.transport.close_connection()

    def health(self) -> api.Health:
        """Return the id, version and status of the head that answers."""
        return self._get("/v1/health", api.Health)

    def heads(self) -> api.HeadList:
        """Return the heads that share a store, with their roles."""
        return self._get("/v1/heads", api.HeadList)

    def me(self) -> api.CurrentUser:
        """Return the user of the token, with role and permissions."""
        return self._get("/v1/me", api.CurrentUser)

    def overview(self) -> api.Overview:
        """Return nodes, running and pending jobs of one snapshot."""
        return self._get("/v1/overview", api.Overview)

    def dashboard_link(self) -> str:
        """Return a link that signs one browser in, once, within a minute, with the rights of this client's token."""
        made = decode_record(self._post("/v1/dashboard/link", None), api.DashboardLink)
        return self.transport.url() + made.path

    def metrics(self) -> str:
        """Return the metrics in Prometheus text format."""
        return self.transport.json("GET", "/metrics").decode()

    def stop(self, *, keep_jobs: bool = False, cancel_jobs: bool = False) -> api.StopReply:
        """Stop the head. With `cancel_jobs`, repeat the call until the reply has `stopping`."""
        body = {"keep_jobs": keep_jobs, "cancel_jobs": cancel_jobs}
        return decode_record(self._post("/v1/stop", body, idempotent=True), api.StopReply)

    def wait(self, job_id: str, timeout_s: float | None = None) -> JobView:
        """Wait until the job has ended, and return it.

        Raises:
            WaitTimedOut: the job has not ended within `timeout_s`; it continues.
        """
        until_s = inf if timeout_s is None else self.transport.now() + timeout_s
        job = self.job(job_id).job
        if job.states:  # an array has no event stream of its own
            while not job.state.terminal and self.transport.now() < until_s:
                time.sleep(min(_ARRAY_POLL_S, max(0.0, until_s - self.transport.now())))
                job = self.job(job_id).job
        else:
            for _ in self.follow_events(job_id, until_s=until_s):
                pass
            job = self.job(job_id).job
        if timeout_s is not None and not job.state.terminal:
            hint = Hint(HintCode.SHOW_JOB if job.states else HintCode.FOLLOW_JOB, job=job_id)
            raise WaitTimedOut(f"job {job_id} has not ended after {timeout_s:g} s: it is {job.state}", hint=hint)
        return job
