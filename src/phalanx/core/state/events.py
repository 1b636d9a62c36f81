"""Events that the controller receives, as values: requests, which come from users through the API and are answered, and reports (reports.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from phalanx.core.fleet.custom_failure_rules import FailureRules
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import NodePool
from phalanx.core.fleet.node_tests import NodeTest
from phalanx.core.ids import (
    JobId,
    NodeId,
    PoolId,
    ProjectId,
    QueueId,
    ReservationId,
    ServiceId,
    TokenId,
    UserId,
)
from phalanx.core.state.reports import Report
from phalanx.core.work.burst_rule import BurstRule
from phalanx.core.work.channel import Channel, ChannelMark
from phalanx.core.work.extras import Licence
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.retention import RetainedFiles, RetentionPolicy
from phalanx.core.work.secret import Secret, SecretScope, secret_id
from phalanx.core.work.services.service import Service
from phalanx.core.work.services.service_use import ServiceUseHour
from phalanx.core.work.sign_in import SignInSettings
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.states import JobState
from phalanx.core.work.usage.monthly_budget import MonthlyBudget
from phalanx.core.work.usage.price_list import PriceList
from phalanx.core.work.users import Identity, Token, User, UserRole

A_co = TypeVar("A_co", covariant=True)


class Request(Generic[A_co]):
    """A request that is answered with an `A_co` once it is durable. Its handler is declared in the controller."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitJob(Request[Job | list[Job]]):
    """Create a job or an array. `key` is the caller's idempotency key: the same key and body return the same job.

    Attributes:
        parents: states, from the store, of the jobs that this one depends on, by the id used; of an array, of every element. The
            controller drops ended jobs from memory, so it needs them to distinguish jobs that ended long ago from unknown ids.
    """

    spec: JobSpec
    user: UserId
    project: ProjectId
    queue: QueueId
    key: str = ""
    body_sha256: str = ""
    parents: Mapping[JobId, Mapping[JobId, JobState]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob(Request[Job | list[Job]]):
    """Cancel the job. Idempotent."""

    job_id: JobId
    by: UserId
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldJob(Request[Job | list[Job]]):
    """Hold a pending job back; `held=False` releases it."""

    job_id: JobId
    held: bool
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkJob(Request[Job | list[Job]]):
    """Stop the job after a save, and keep it parked; `parked=False` resumes it."""

    job_id: JobId
    parked: bool
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueJob(Request[Job | list[Job]]):
    """Stop the running attempt after a save; the job waits again."""

    job_id: JobId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateJob(Request[Job | list[Job]]):
    """Change fields of a job; None leaves a field as it is."""

    job_id: JobId
    by: UserId
    name: str | None = None
    priority: int | None = None
    time_limit_s: float | None = None
    queue: QueueId | None = None
    begin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitService(Request[Service]):
    """Create a service, named by its spec, or start a stopped one again. Repeating it for the same spec changes nothing."""

    spec: JobSpec
    user: UserId
    project: ProjectId
    queue: QueueId


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateService(Request[Service]):
    """Roll out a new revision with this spec, or the existing one of this number; exactly one is given."""

    service_id: ServiceId
    by: UserId
    spec: JobSpec | None = None
    revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleService(Request[Service]):
    """Set the number of replicas, within the range of the service; 0 ends all.

    If the load decides, this is the least number; None for the lower bound of the range.
    """

    service_id: ServiceId
    replicas: int | None
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepReplicas(Request[Service]):
    """Set how many replicas of a service sleep: `asleep`, or all but `awake`. Exactly one is given; both are limited to the number of replicas."""

    service_id: ServiceId
    by: UserId
    asleep: int | None = None
    awake: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopService(Request[Service]):
    """End a service and its replicas. Idempotent."""

    service_id: ServiceId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonNode(Request[Node]):
    """Cordon a node; with `drain`, its running jobs are requeued after a save."""

    node_id: NodeId
    by: UserId
    why: str
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UncordonNode(Request[Node]):
    """Undo a cordon or drain, and end the maintenance of the node; with `planned` also cancel later windows. Idempotent."""

    node_id: NodeId
    by: UserId
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CapPower(Request[Node]):
    """Cap the power of each GPU of a node. `until_s`: Unix seconds; None for no end."""

    node_id: NodeId
    by: UserId
    milliwatts: int
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePower(Request[Node]):
    """Restore the power limits of before the cap. Idempotent."""

    node_id: NodeId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelNodes(Request[None]):
    """Set labels of nodes. An empty value removes a label; other labels stay."""

    labels: Mapping[NodeId, Mapping[str, str]]
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpossibleJob:
    """A waiting job that a change of the queues or nodes made impossible, and why."""

    job_id: JobId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNode(Request[tuple[ImpossibleJob, ...]]):
    """Remove a node that is down and runs no job."""

    node_id: NodeId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutUser(Request[User]):
    """Add or replace a user."""

    user: User


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeUser(Request[User]):
    """Add a user with role `user`, or change one; None leaves a field.

    Attributes:
        linked: the user signs in at the provider: the first person of that name there becomes this user. False: no longer.
        by: the calling admin; None for the head itself.
    """

    user_id: UserId
    role: UserRole | None = None
    disabled: bool | None = None
    linked: bool | None = None
    by: UserId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeProject(Request[Project]):
    """Add or change a project; None leaves a field.

    Attributes:
        as_admin: the caller is an admin of the head, not only of this project.
        without_budget: the project has no budget any more.
        outputs_bytes: the limit on its outputs; 0 for none.
        requests_per_minute, tokens_per_minute, request_weight: of its requests to services; 0 for no limit.
        without_burst: the project has no burst rule any more.
    """

    project_id: ProjectId
    by: UserId
    as_admin: bool
    members: frozenset[UserId] | None = None
    admins: frozenset[UserId] | None = None
    budget: MonthlyBudget | None = None
    without_budget: bool = False
    outputs_bytes: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    request_weight: float | None = None
    burst: BurstRule | None = None
    without_burst: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PutProject(Request[Project]):
    """Add or replace a project."""

    project: Project


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordServiceUse(Request[int]):
    """Record the use of services that a gateway reports: `hours` replace those that are stored. Idempotent by `sequence`."""

    gateway_id: str
    sequence: int
    hours: tuple[ServiceUseHour, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatchUse(Request[None]):
    """Record what batches have answered: `hours` replace those that are stored. Sent by the head itself."""

    hours: tuple[ServiceUseHour, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutQueue(Request[Queue]):
    """Add or replace a queue."""

    queue: Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeQueue(Request[Queue]):
    """Add or change a queue; None leaves a field."""

    queue_id: QueueId
    priority: int | None = None
    open: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutQueues(Request[tuple[ImpossibleJob, ...]]):
    """Add or replace some queues and remove others, all or nothing. Queues in `keep_open_state` keep their present open or closed state."""

    queues: tuple[Queue, ...] = ()
    remove: tuple[QueueId, ...] = ()
    keep_open_state: frozenset[QueueId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReservation(Request[Reservation]):
    """Create a reservation. Idempotent."""

    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReservation(Request[Reservation]):
    """End a reservation, also before it begins."""

    reservation_id: ReservationId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutNodePool(Request[NodePool]):
    """Add a node pool, or change one. Idempotent. Its provider and template cannot change."""

    pool: NodePool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveNodePool(Request[tuple[ImpossibleJob, ...]]):
    """Release all nodes of a pool, whose jobs are saved and moved, and then remove it. Idempotent until it is removed."""

    pool_id: PoolId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPrices(Request[None]):
    """Replace the prices of GPUs and the rates of electricity; with `keep_electricity` the stored rates stay. Idempotent."""

    prices: PriceList
    keep_electricity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PutLicence(Request[tuple[ImpossibleJob, ...]]):
    """Add a licence, or change its number of seats. Idempotent. The answer: the waiting jobs that it makes impossible."""

    licence: Licence
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveLicence(Request[tuple[ImpossibleJob, ...]]):
    """Remove a licence that no job holds. The answer: the waiting jobs that can never start without it."""

    name: str
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSecret(Request[Secret]):
    """Set a secret, whose value is encrypted. Its version is counted by the controller."""

    secret: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOwnSecret(PutSecret):
    """Set a secret of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSecret(Request[int]):
    """Remove a secret. The answer: the number of jobs that have not ended and use it."""

    scope: SecretScope
    owner: str
    name: str

    @property
    def secret_id(self) -> str:
        """The id of the record."""
        return secret_id(self.scope, self.owner, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOwnSecret(RemoveSecret):
    """Remove a secret of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSecrets(Request[int]):
    """Store secrets encrypted with another key. One that was set or removed meanwhile is left as it is. The answer: the number of replaced ones."""

    secrets: tuple[Secret, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutCalibration(Request[None]):
    """Replace the fleet's profile."""

    calibration: FleetDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class PutNodeTests(Request[None]):
    """Store tests by node, and cordon each node that failed; with `drain` False only store them. Idempotent by job."""

    tests: dict[NodeId, NodeTest]
    drain: bool
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFailureRules(Request[None]):
    """Replace the operators' failure rules; an empty list removes them."""

    rules: FailureRules


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRetention(Request[None]):
    """Replace the policy by which files of ended jobs are removed."""

    policy: RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRemovedFiles(Request[None]):
    """Note in the history of ended jobs that files of theirs are removed, and why. Sent before the files go."""

    jobs: Sequence[tuple[JobId, RetainedFiles]]
    why: str
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveArchivedJobs(Request[None]):
    """Remove the records of jobs that ended long ago. Sent when an archive has them.

    Attributes:
        newest_seq: the greatest submit number among them.
        archive: its name.
    """

    jobs: Sequence[JobId]
    newest_seq: int
    archive: str
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutChannel(Request[None]):
    """Add a notification channel, or replace one of that name."""

    channel: Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveChannel(Request[None]):
    """Remove a notification channel."""

    name: str
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkChannels(Request[None]):
    """Record what was delivered to channels. Sent by the head after a service accepted a message.

    Attributes:
        removed: ids of marks that are no longer needed.
        lines: for the history: jobs, and what was not delivered.
    """

    marks: Sequence[ChannelMark]
    removed: Sequence[str] = ()
    lines: Sequence[tuple[JobId, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PutToken(Request[Token]):
    """Add a token (by its hash)."""

    token: Token


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeToken(Request[Token]):
    """Revoke a token; with `with_derived` also all tokens created with it. Idempotent."""

    token_id: TokenId
    with_derived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSignIn(Request[None]):
    """Replace the settings of the sign-in at a provider."""

    settings: SignInSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveSignIn(Request[None]):
    """Remove the provider: who signed in there loses access."""

    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInUser(Request[User]):
    """A person has signed in at the provider: add or update the user.

    The answer may have another name, if the provider renamed the person. `settings_at_s`: of the settings by which role and projects follow.
    """

    user_id: UserId
    role: UserRole
    identity: Identity
    settings_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateIdentity(Request[None]):
    """The provider was asked again about a user. Sent by the head itself. `role` is None if access has ended; `settings_at_s` as above."""

    user_id: UserId
    role: UserRole | None
    identity: Identity
    settings_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTokenUse(Request[None]):
    """When tokens were last used, in Unix seconds. Sent by the head itself, rarely."""

    used_s: Mapping[TokenId, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlannedStop(Request[None]):
    """Prepare a planned stop of the head: grant every supervisor a lease of `lease_s`.

    Only until `grants_until_s` (CLOCK_BOOTTIME): the end of the longest such lease is recorded before, for the next head. If the stop does not
    follow, leases are normal again from then on.
    """

    lease_s: float
    grants_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAllJobs(Request[list[Job]]):
    """Cancel all live jobs (`phalanx down --cancel-jobs`)."""

    by: UserId


Event = Request[Any] | Report
