"""The services and limits that the composition root passes to the API, as protocols and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from phalanx.api.auth.secret_seal import SecretKeys
from phalanx.controller.leases import Renewal
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.read_snapshot import ReadSnapshot
from phalanx.controller.services.canary_judge import CanaryNow
from phalanx.controller.services.load_history import LoadPoint
from phalanx.controller.services.load_scaler import LoadNow
from phalanx.controller.step_result import Answer
from phalanx.controller.telemetry import Telemetry
from phalanx.controller.usage.waste_monitor import WasteNow
from phalanx.core.access.audit import AuditCall, ChainTip
from phalanx.core.accounting.state_ledger import UsageSpan
from phalanx.core.accounting.usage_states import PartState, UsageState
from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import NodeTemplate
from phalanx.core.ids import Epoch, JobId, NodeId, ServiceId, SupervisorId
from phalanx.core.resources import Resources
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.state.events import Request, SubmitJob
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.reports import Report
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.usage.attempt_use import AttemptUse
from phalanx.core.work.usage.usage_hour import UsageHour
from phalanx.ports.blobs import Blobs
from phalanx.ports.clock import Clock
from phalanx.ports.election import HeadRecord, Leader
from phalanx.ports.identity import IdentityProvider
from phalanx.ports.logs import Logs
from phalanx.ports.notifier import Notifier
from phalanx.ports.provider import CloudRights, PoolTerms
from phalanx.ports.span_exporter import JobSpanExporter
from phalanx.ports.store import Store
from phalanx.store.history.recorder import HistoryRecorder
from phalanx.wire.join import JoinArguments, JoinReply, JoinRequest
from phalanx.wire.manifest import MANIFEST_BYTES_MAX
from phalanx.wire.stored_files import PIECE_BYTES_MAX

MIB = 1 << 20

A = TypeVar("A")


class RenewalHandoverService(Protocol):
    """The API's view of `app.renewal_delegate.RenewalHandover`."""

    @property
    def wanted(self) -> bool:
        """Whether supervisors should reconnect, so that another process answers their renewals."""
        ...

    def connection_of(self, header: str | None) -> int | None:
        """Return the number of the connection for which the process passes on a request; None if it did not come from the process."""
        ...


class LeaseService(Protocol):
    """The API's view of controller.leases.LeaseBook. Times are seconds of CLOCK_BOOTTIME."""

    @property
    def terms(self) -> tuple[float, float]:
        """Lease and renewal interval, in seconds, for the current size of the fleet."""
        ...

    def renew(
        self,
        node_id: NodeId,
        supervisor_id: SupervisorId,
        epochs: list[tuple[JobId, Epoch]],
        now_s: float,
        *,
        held_s: float = 0.0,
    ) -> Renewal:
        """Renew one supervisor's lease; `held_s` is the time left of its current lease.

        Raises:
            UnknownSupervisor: it has no lease.
        """
        ...

    def delegate_renewals(self, node_id: NodeId, supervisor_id: SupervisorId, connection: int, now_s: float) -> None:
        """Let the process that answers renewals answer this lease's on that connection."""
        ...

    def renewed_recently(self, node_id: NodeId, supervisor_id: SupervisorId, now_s: float) -> bool:
        """Whether this supervisor can still renew, and did less than an ordinary lease ago."""
        ...

    def belongs_to_other(self, node_id: NodeId, supervisor_id: SupervisorId) -> bool:
        """Whether another supervisor has registered for this node, even if it was not answered yet."""
        ...

    def all_long(self) -> bool:
        """Whether every supervisor has a long lease."""
        ...


class ControllerClient(Protocol):
    """The API's view of controller.driver.Driver."""

    @property
    def head_id(self) -> str:
        """The id of this process of the head."""
        ...

    @property
    def leases(self) -> LeaseService:
        """The leases of supervisors."""
        ...

    @property
    def wait_reasons(self) -> Mapping[JobId, WaitReason]:
        """Why each pending job waits, according to the newest scheduling cycle."""
        ...

    def load_of(self, service_id: ServiceId) -> LoadNow | None:
        """Return the load of a service now; None if no gateway has reported it for a while."""

    def load_history(self, service_id: ServiceId, span_s: float) -> tuple[int, list[LoadPoint]]:
        """Return how the load of a service was: the seconds of a point, and the points, the oldest first."""
        ...

    def canary_of(self, service_id: ServiceId) -> CanaryNow | None:
        """Return the newest figures of a service's rollout; None if none goes by shares of the sessions."""

    @property
    def feasibility(self) -> FeasibilityChecker | None:
        """Judges whether jobs can ever start, by a recent state; None before the first submit."""
        ...

    def speeds_of(self, job: Job) -> list[str]:
        """How fast the job runs on the models of the fleet, for users."""

    def pending_jobs(self) -> list[Job]:
        """Return all pending jobs, in submit order."""
        ...

    def live_attempts(self) -> list[tuple[Job, Attempt]]:
        """Return all live attempts with their jobs."""
        ...

    def fleet_nodes(self) -> list[Node]:
        """Return all known nodes, up or down."""
        ...

    def held_jobs(self) -> frozenset[JobId]:
        """Return the jobs in the controller's memory: all that have not ended, and those that ended last."""
        ...

    def fleet_capacity(self) -> Resources:
        """Return what all known nodes have, and the seats of licences."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """Counters of the controller's loop."""
        ...

    def committed_attempt(self, job_id: JobId, epoch: Epoch) -> Attempt | None:
        """Return a live attempt that was placed lately, as it was committed last; None: ask the store."""
        ...

    def supervisor_of(self, node_id: NodeId, job_id: JobId, epoch: Epoch) -> NodeId:
        """Return the name of the supervisor that runs a node's part of an attempt."""
        ...

    def request(self, event: Request[A], call: AuditCall | None = None) -> Future[A]:
        """Send a request; the future has the answer once it is durable, or the error. `call` is recorded in the audit trail."""
        ...

    def request_all(
        self, events: Sequence[Request[Any]], calls: Sequence[AuditCall] = ()
    ) -> Future[list[Answer | PhalanxError]]:
        """Send several requests that are handled in one step."""
        ...

    def record_call(self, call: AuditCall) -> Future[list[Answer | PhalanxError]]:
        """Record a line of the audit trail; the future completes once it is durable."""
        ...

    @property
    def audit_tip(self) -> ChainTip:
        """The newest durable line of the audit trail."""
        ...

    def read_snapshot(
        self, *, job_id: JobId | None = None, submission: SubmitJob | None = None
    ) -> Future[ReadSnapshot]:
        """Return a snapshot of the state between two steps, to compute answers from."""
        ...

    def report(self, reports: Sequence[Report]) -> Future[list[Answer | PhalanxError]]:
        """Pass on reports of supervisors; the future completes once they are durable."""
        ...

    def listen(self, listener: Callable[[frozenset[JobId]], None]) -> None:
        """Call the listener, on the controller's thread, with the jobs that each commit touched."""
        ...


class JoinSalt(Protocol):
    """The salt of join tokens; renewing it revokes all earlier join tokens."""

    @property
    def value(self) -> str:
        """The current salt; empty until the first renewal."""
        ...

    def renew(self) -> None:
        """Replace the salt, durably."""
        ...


class AuditCheckpoints(Protocol):
    """Stores tips of the audit trail outside the store, so that a truncated trail is detected."""

    def record(self, tip: ChainTip) -> None:
        """Store a tip. Do not call it on the event loop."""
        ...

    def read_all(self) -> list[ChainTip]:
        """Return all stored tips."""
        ...


class JoinService(Protocol):
    """The service by which other servers join; a head that listens only on loopback has none."""

    @property
    def salt(self) -> JoinSalt:
        """The salt of the join tokens."""
        ...

    @property
    def ca_pem(self) -> str:
        """The certificate of the head's CA."""
        ...

    def join_line(self, now_s: float) -> JoinArguments:
        """Return what the next server needs to join."""
        ...

    def files_for_machines(self) -> str:
        """Return the path of the program of rented machines, a compressed tar. Do not call it on the event loop: it may make it.

        Raises:
            NotFound: this head has none.
            OSError: it cannot be made.
        """
        ...

    def accept(self, submission: JoinRequest) -> JoinReply:
        """Accept a server as a node. Do not call it on the event loop: it may generate a key."""
        ...


class LeaderStatus(Protocol):
    """The status of this head among the heads that share its store. Thread-safe; answers from memory."""

    @property
    def term(self) -> int:
        """The term that this head holds."""
        ...

    @property
    def own_record(self) -> HeadRecord:
        """This head's own record."""
        ...

    def leads(self) -> bool:
        """Whether this head leads now, so that it may answer requests and send commands."""
        ...

    def leader(self) -> Leader:
        """Return the leader, as last read."""
        ...

    def heads(self) -> list[HeadRecord]:
        """Return all heads by name, as last read."""
        ...

    def urls(self) -> list[str]:
        """Return the URLs of the heads, its own first."""
        ...

    def has_standby(self) -> bool:
        """Whether a standby can take over at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """Limits on what callers may send or keep open, in bytes unless the name has another unit.

    Attributes:
        body_bytes: size of a JSON body; a job file has a few kilobytes.
        answer_bytes: size of a list in an answer; longer lists come in pages (http/paging.py).
        body_s: time in which a body must arrive; blobs have a limit on each pause instead.
        streams_bytes: size of one request with stream chunks: 32 chunks of the largest size.
        profile_bytes: size of a calibration profile; about 800 bytes per node.
        blob_bytes: size of one uploaded working directory (DESIGN 2: over 100 MB is refused).
        piece_bytes, manifest_bytes: sizes of the uploads of nodes that do not share the head's folders (wire.stored_files).
        wait_s: longest time that a poll may wait; proxies disconnect after 60 s.
        heartbeat_s: time between comments on an idle event stream.
        recheck_s: how late a change that no API route made (a plan, a report of an engine) reaches a follower.
        streams_open: open event streams of all callers together; one user gets `per_user_share` of them.
        exec_sessions: open sessions, likewise.
        program_connections: open connections to web programs of jobs, likewise. Each may hold 1 MiB that its browser does not read, or parts of two messages of a WebSocket (16 MiB each).
        exec_buffer_bytes: bytes of one session on their way in one direction.
        plan_stop_lease_s: lease that a planned stop grants; it waits `plan_stop_wait_s` for renewals, three intervals of a small fleet.
    """

    body_bytes: int = MIB
    answer_bytes: int = 900_000
    body_s: float = 30.0
    streams_bytes: int = 8 * MIB
    profile_bytes: int = 8 * MIB
    blob_bytes: int = 100 * MIB
    piece_bytes: int = PIECE_BYTES_MAX
    manifest_bytes: int = MANIFEST_BYTES_MAX
    wait_s: float = 30.0
    heartbeat_s: float = 10.0
    recheck_s: float = 0.25
    streams_open: int = 1000
    exec_sessions: int = 200
    program_connections: int = 256
    exec_buffer_bytes: int = 2 * MIB
    plan_stop_lease_s: float = 600.0
    plan_stop_wait_s: float = 5.0


def per_user_share(places: int) -> int:
    """Return how many of a number of slots one user may hold: a quarter, so that one user cannot block all others."""
    return max(1, places // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTracing:
    """Where traces of ended jobs go, and the stored position in the history up to which they were sent; None before the first."""

    exporter: JobSpanExporter
    read_position: Callable[[], int | None]
    write_position: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramListener:
    """Where pages of web programs of jobs lie: never at the origin of the dashboard.

    Attributes:
        port: on which the head serves them, on each of its addresses.
        names: each program has a host name of its own directly below this one; "" if all are at the head's own name.
        head_ports: the ports of the API, by scheme. `head_url`: one of its addresses.
    """

    port: int
    names: str = ""
    head_ports: Mapping[str, int]
    head_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadServices:
    """The services and settings that `build_app` needs.

    Attributes:
        history: of devices, nodes and jobs; None if nothing is recorded.
        node_secret: the tokens of supervisors are derived from it (core.access.node_tokens).
        hosts_allowed: names (without port) that a Host header may carry.
        output_root, checkpoint_root: each has one folder per job; archive_root: one per month, of records of jobs.
        on_stop: called once after a planned stop was answered; it must return at once.
        join_service: lets other servers join; None if the head listens only on loopback.
        token_lifetime_max_s: longest lifetime of a new token; None for no limit.
        audit_key: key of the audit trail's hash chain (core.access.audit).
        audit_checkpoints: of the audit trail; None if nothing is stored outside the store.
        before_long_leases: called with the length in seconds before the first long lease is granted.
        renewals: hands renewals to another process; None where none may.
        leader_status: of a head that shares its store with others; a head that no longer leads sends no answers.
        output_elsewhere: the other heads that have output which this head lacks; empty if it has all output.
        usage_hours: the hours of the ledger of states since a Unix time, and up to another if one is given; each is read as it is needed. The time
            of services' replicas is shared out to the projects that used them; `unshared_usage_hours`: it is at the services' owners.
        usage_spans: the newest states of a node's devices, each with its device.
        attempt_use: what an attempt used of its devices and nodes; None if nothing was measured.
        part_states: the states of the parts of nodes' devices now: device, job or "", and the state.
        state_totals: the thousandths of devices in each state now.
        waste: what is wasted now.
        client_active: notes that a client has sent something to a job, by a session or a forwarded port.
        url: of this head, for links in messages.
        notifier: sends messages to services outside; None if this head sends none.
        tracing: exports traces of ended jobs; None if this head exports none.
        identity: signs people in at the provider of the settings; None if this head cannot.
        secret_keys: encrypt the secrets of jobs.
        programs: where pages of web programs lie; None if this head serves none.
        check_provider: returns what the head's credentials may do, given the name of a provider and settings; raises BadRequest.
        offer: returns what a node of a pool has, given the name of a provider and the terms; raises BadRequest. None without providers.
    """

    controller: ControllerClient
    store: Store
    logs: Logs
    blobs: Blobs
    mailboxes: Mailboxes
    telemetry: Telemetry
    history: HistoryRecorder | None = None
    clock: Clock
    node_secret: bytes
    version: str
    output_root: str
    checkpoint_root: str
    archive_root: str
    on_stop: Callable[[], None]
    before_long_leases: Callable[[float], None] = lambda _: None
    join_service: JoinService | None = None
    token_lifetime_max_s: float | None = None
    audit_key: bytes = b""
    audit_checkpoints: AuditCheckpoints | None = None
    leader_status: LeaderStatus | None = None
    renewals: RenewalHandoverService | None = None
    output_elsewhere: str = ""
    check_provider: Callable[[str, Mapping[str, str]], CloudRights] | None = None
    offer: Callable[[str, PoolTerms], NodeTemplate] | None = None
    usage_hours: Callable[..., Iterable[UsageHour]] = lambda *_: ()
    unshared_usage_hours: Callable[..., Iterable[UsageHour]] = lambda *_: ()
    usage_spans: Callable[[NodeId], list[tuple[int, UsageSpan]]] = lambda _: []
    attempt_use: Callable[[JobId, Epoch], AttemptUse | None] = lambda *_: None
    part_states: Callable[[Iterable[NodeId]], dict[NodeId, list[tuple[int, str, PartState]]]] = lambda _: {}
    state_totals: Callable[[], dict[UsageState, int]] = dict
    waste: Callable[[], WasteNow] = WasteNow
    client_active: Callable[[JobId], None] = lambda _: None
    url: str = ""
    notifier: Notifier | None = None
    tracing: JobTracing | None = None
    identity: IdentityProvider | None = None
    secret_keys: SecretKeys
    programs: ProgramListener | None = None
    hosts_allowed: frozenset[str] = frozenset({"127.0.0.1", "localhost", "[::1]"})
    limits: ApiLimits = field(default_factory=ApiLimits)
