"""Records of services, their replicas and endpoints, and of requests that change them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from phalanx.core.ids import JobId, NodeId, ProjectId, QueueId, ServiceId, UserId
from phalanx.core.work.services.revision_changes import KeyChange
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.states import JobState
from phalanx.wire.api.history import Column
from phalanx.wire.api.jobs import JobView


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica is reached. `ready`: its port answers, and it may get requests."""

    job_id: JobId
    revision: int
    node_id: NodeId
    address: str
    port: int
    ready: bool


class CanaryShare(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions a revision gets during its rollout: those whose hash is below `share`, in thousandths. All others get the other replicas."""

    revision: int
    share: int


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """A service.

    Attributes:
        revision: that its replicas shall have; `served_revision`: the last one whose rollout was completed, 0 before the first.
        rollback_revision: that served before the current one, and to which one command returns; 0 if none did.
        replicas: the range, as in its file; `desired`: wanted now, sleeping ones included; `ready`: ready now.
        asleep_wanted: how many of them shall sleep; `asleep`: how many sleep now, without devices.
        can_sleep: its revision has hooks for it.
        detail: what it waits for.
        failure: why its last rollout was stopped; only for its owner and project.
        ready_check: how readiness is probed: a path or "tcp".
        endpoints: of replicas whose port is chosen.
        canary: for gateways, while sessions are divided; None if all replicas get all sessions.
        scale: the targets that the number of replicas follows, as in its file; empty if it does not follow load.
        prefill_for: the service whose prompts it reads, by `protocol`; empty if it answers requests of its own.
        least: replicas that are wanted without load; `load_why`: why the load asked for the number wanted, and `load_s`: since when (Unix time).
    """

    name: ServiceId
    state: ServiceState
    user: UserId
    project: ProjectId
    queue: QueueId
    created_s: float
    revision: int
    served_revision: int
    replicas: str
    desired: int
    ready: int
    rollback_revision: int = 0
    asleep_wanted: int = 0
    asleep: int = 0
    can_sleep: bool = False
    scale: dict[str, str] = {}
    least: int = 0
    load_why: str = ""
    load_s: float | None = None
    prefill_for: str = ""
    protocol: str = ""
    port: int = 0
    ready_check: str = ""
    detail: str = ""
    failure: str = ""
    command: str = ""
    gpus: str = "0"
    stopped_by: str = ""
    stopped_s: float | None = None
    endpoints: list[EndpointView] = []
    canary: CanaryShare | None = None

    @property
    def first_replicas(self) -> int:
        """The number to ask for where none is wanted: the lower bound of the range, or one."""
        return max(1, int(self.replicas.partition("..")[0]))


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A revision.

    Attributes:
        command: only for the owner and project of the service.
        labels: those of its file, only for the same callers. Those of a model that a job wrote name the job, its step and a digest.
        changes: against the next older revision that is kept; only for the same callers.
    """

    number: int
    by: UserId
    created_s: float
    replicas: str
    gpus: str = "0"
    command: str = ""
    changes: list[KeyChange] = []
    labels: dict[str, str] = {}


class ServiceReply(msgspec.Struct, frozen=True, kw_only=True):
    """One service."""

    service: ServiceView


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a service now, by all gateways.

    Attributes:
        in_flight: requests that replicas have; `waiting`: those that wait for one; `oldest_wait_s`: the longest.
        ttft_s: time to the first token of 9 of 10 streams, 0 without any; `kv`: share of the KV caches in use.
        gateways: that report. `needed`: replicas, without regard to the range.
    """

    in_flight: int
    waiting: int
    oldest_wait_s: float
    ttft_s: float
    kv: float
    gateways: int
    needed: int


class LoadHistoryReply(msgspec.Struct, frozen=True, kw_only=True):
    """How the load of a service was, by columns: a value for each point, None where no gateway reported. The head keeps it in memory.

    Attributes:
        begin_s: Unix time of the first point; each covers `step_s` seconds.
        requests_per_s, tokens_per_s: requests that came, and tokens of answers that ended.
        ttft_s: time to the first token of 9 of 10 streams; None without any.
        in_flight, waiting: the most requests at one time that replicas had, and that waited for one.
        ready, wanted: replicas, those that sleep not counted.
    """

    service: ServiceId
    begin_s: int
    step_s: int
    requests_per_s: Column
    tokens_per_s: Column
    ttft_s: Column
    in_flight: Column
    waiting: Column
    ready: Column
    wanted: Column


class CanaryView(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout by shares of the sessions.

    Attributes:
        revision: the new one; `stable`: the one that it replaces.
        share: of the sessions that the new one gets now, in thousandths; `planned`: for which its replicas start.
        step_s: since when (Unix time); None before the first step.
        completing: the last step has passed, and the other replicas are replaced.
        blue_green: all sessions go over at once, and nothing is compared.
        answered, errors: requests of the new revision; `stable_answered`, `stable_errors`: of the other one meanwhile.
        against: for "errors", "first_tokens" and "speeds", how much speaks against the new revision: at 1 it goes back.
    """

    revision: int
    stable: int
    share: int
    planned: int
    step_s: float | None
    completing: bool
    blue_green: bool
    answered: int
    errors: int
    stable_answered: int
    stable_errors: int
    against: dict[str, float] = {}


class ServiceDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One service with its revisions, newest first, and its live replicas, in submit order. `load`: None if no gateway reports it. `canary`: None without one."""

    service: ServiceView
    revisions: list[RevisionView]
    replicas: list[JobView]
    load: LoadView | None = None
    canary: CanaryView | None = None


class ProjectTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms under which a project uses services.

    Attributes:
        open: all users belong to it.
        requests_per_minute, tokens_per_minute: limits of its requests; 0 for none.
        weight: its part of a service whose replicas are busy, relative to other projects.
    """

    project: ProjectId
    open: bool = False
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    weight: float = 1.0


class ServiceList(msgspec.Struct, frozen=True, kw_only=True):
    """Services by name. `projects`: those with terms other than the usual ones, on the first page."""

    services: list[ServiceView]
    projects: list[ProjectTerms] = []
    next: str = ""


class ServiceChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of a service; exactly one field is given.

    Attributes:
        spec: the keys of a job file, which become a new revision.
        revision: number of an existing revision.
        replicas: the number wanted, within the range; 0 ends all replicas. If the number follows load, this is the least; "auto" for none.
        asleep: how many of the replicas shall sleep; `awake`: how many shall be awake. Larger numbers mean all.
    """

    spec: dict[str, Any] | None = None
    revision: int | None = None
    replicas: int | Literal["auto"] | None = None
    asleep: Annotated[int, msgspec.Meta(ge=0)] | None = None
    awake: Annotated[int, msgspec.Meta(ge=0)] | None = None


def replica_state(job: JobView) -> str:
    """Return what a replica does, in a word: `ready` once its port answers."""
    if job.state is not JobState.RUNNING:
        return job.state.value
    if job.cancelled_by:
        return "stopping"
    if job.sleep:
        return job.sleep
    return (
        "ready" if job.ready else "starting" if job.attempt_state == "running" else str(job.attempt_state or "starting")
    )
