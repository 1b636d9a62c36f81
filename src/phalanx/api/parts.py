"""What the composition root hands to the API: everything it speaks to, as protocols and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.controller.leases import Renewal
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.outbox import Answer
from phalanx.controller.peek import Peek
from phalanx.controller.telemetry import Telemetry
from phalanx.core.access.audit import Call, Tip
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.state.events import Report, Request, Submit
from phalanx.core.state.plan import Waiting
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.ports.blobs import Blobs
from phalanx.ports.clock import Clock
from phalanx.ports.election import HeadRecord, Leader
from phalanx.ports.logs import Logs
from phalanx.ports.store import Store
from phalanx.wire.join import JoinLine, JoinReply, JoinRequest
from phalanx.wire.kept import PIECE_BYTES_MAX
from phalanx.wire.manifest import MANIFEST_BYTES_MAX

MIB = 1 << 20


class Leases(Protocol):
    """The API's side of controller.leases.LeaseBook. Times are seconds of CLOCK_BOOTTIME."""

    @property
    def terms(self) -> tuple[float, float]:
        """Lease and renewal interval, in seconds, for the fleet's present size."""
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
        """Renew one supervisor's lease; `held_s` is how long the one it holds still lasts.

        Raises:
            SayHello: it holds none.
        """
        ...

    def is_anothers(self, node_id: NodeId, supervisor_id: SupervisorId) -> bool:
        """Whether another supervisor's hello was heard for this node, which may not have been answered yet."""
        ...

    def lengthen(self, lease_s: float) -> None:
        """Grant every renewal from now on `lease_s`."""
        ...

    def all_lengthened(self) -> bool:
        """Whether every supervisor holds a long lease."""
        ...


class Driver(Protocol):
    """The API's side of controller.driver.Driver."""

    @property
    def head_id(self) -> str:
        """This life of the head."""
        ...

    @property
    def leases(self) -> Leases:
        """Leases of supervisors."""
        ...

    @property
    def waits(self) -> Mapping[JobId, Waiting]:
        """Why each pending job waits, as of the newest cycle."""
        ...

    def waiting(self) -> list[Job]:
        """All jobs that wait, in submit order."""
        ...

    def holding(self) -> list[tuple[Job, Attempt]]:
        """All live attempts with their jobs."""
        ...

    def fleet_gpus(self) -> int:
        """Devices of all known nodes."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """Counters of the loop."""
        ...

    def supervisor_of(self, node_id: NodeId, job_id: JobId, epoch: Epoch) -> NodeId:
        """By which name the supervisor goes that carries a node's part of an attempt."""
        ...

    def request(self, event: Request, call: Call | None = None) -> Future[Answer]:
        """Ask; the future holds the answer once it is durable, or the refusal. `call` goes into the audit trail with it."""
        ...

    def request_all(self, events: Sequence[Request], calls: Sequence[Call] = ()) -> Future[list[Answer | PhalanxError]]:
        """The same for several, in one step."""
        ...

    def note(self, call: Call) -> Future[list[Answer | PhalanxError]]:
        """Write a line of the audit trail; the future ends once it is durable."""
        ...

    @property
    def audit_tip(self) -> Tip:
        """Where the audit trail stands."""
        ...

    def peek(self, *, job_id: JobId | None = None, wish: Submit | None = None) -> Future[Peek]:
        """The state between two steps, for questions worked out here."""
        ...

    def report(self, reports: Sequence[Report]) -> Future[list[Answer | PhalanxError]]:
        """Hand over what supervisors said; the future ends once it is durable."""
        ...

    def listen(self, listener: Callable[[frozenset[JobId]], None]) -> None:
        """Call the listener, on the controller's thread, with the jobs that each commit touched."""
        ...


class JoinSalt(Protocol):
    """What join tokens are made with beside the head's secret; another one ends all that were made before."""

    @property
    def value(self) -> str:
        """The present one; empty until the first renewal."""
        ...

    def renew(self) -> None:
        """Have another, durably."""
        ...


class Anchors(Protocol):
    """Where tips of the audit trail are noted outside the store, so that lines cut off its end are missed."""

    def say(self, tip: Tip) -> None:
        """Note one. Off the event loop."""
        ...

    def all(self) -> list[Tip]:
        """All that were noted."""
        ...


class Welcome(Protocol):
    """How servers come in from elsewhere; a head on loopback has none."""

    @property
    def salt(self) -> JoinSalt:
        """Of its join tokens."""
        ...

    @property
    def ca_pem(self) -> str:
        """The certificate of the head's CA."""
        ...

    def line(self, now_s: float) -> JoinLine:
        """What the next server is told."""
        ...

    def take_in(self, wish: JoinRequest) -> JoinReply:
        """Make the server a node. Off the event loop: it may make a key."""
        ...


class Among(Protocol):
    """A head's place among those that share its store. Asked from any thread, answered from memory."""

    @property
    def term(self) -> int:
        """The term that it holds."""
        ...

    @property
    def mine(self) -> HeadRecord:
        """Its own row."""
        ...

    def leads(self) -> bool:
        """Whether it may answer and command at this moment."""
        ...

    def leader(self) -> Leader:
        """Who leads, as last read."""
        ...

    def heads(self) -> list[HeadRecord]:
        """All heads, as last read, by name."""
        ...

    def urls(self) -> list[str]:
        """Where heads are, its own first."""
        ...

    def relieved(self) -> bool:
        """Whether another head stands by that would take over at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what a caller may send or keep open. Bytes unless the name says otherwise.

    Attributes:
        body_bytes: of a JSON body; a job file is some kilobytes.
        body_s: within which a body must be here, blobs' apart: those have a limit on each pause.
        streams_bytes: of one shipment of a supervisor: 32 chunks of the wire's largest size.
        profile_bytes: of what a calibration found; some 800 bytes per node.
        blob_bytes: of one uploaded working directory (DESIGN 2: over 100 MB is refused).
        piece_bytes, manifest_bytes: of what the head keeps for nodes that do not share its folders (wire.kept).
        wait_s: longest that a poll may hang; proxies cut at 60 s.
        heartbeat_s: between comments on an idle event stream.
        recheck_s: how late a change that passed no route of ours (a plan, an engine's word) reaches a follower.
        streams_open: event streams at once, over all callers; a user has `users_share` of them.
        exec_sessions: open at once, likewise; `exec_idle_s` ends one that nobody polls.
        plan_stop_lease_s: of a lease that a planned stop grants; `plan_stop_wait_s`: for its supervisors to renew, three intervals of a small fleet.
    """

    body_bytes: int = MIB
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
    exec_idle_s: float = 60.0
    exec_buffer_bytes: int = MIB
    plan_stop_lease_s: float = 600.0
    plan_stop_wait_s: float = 5.0


def users_share(places: int) -> int:
    """How many of so many places one user may hold: a quarter, so that nobody alone shuts all others out."""
    return max(1, places // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """All that `build_app` needs.

    Attributes:
        node_secret: supervisors' tokens are derived from it (core.access.node_keys).
        hosts_allowed: names (without port) that a Host or Origin header may carry.
        output_root, checkpoint_root: one folder per job lies under each.
        on_stop: called once when a planned stop has been answered; it must return at once.
        welcome: how servers come in from elsewhere; None on loopback alone.
        token_life_max_s: longest life of a token that is made; None for no bound.
        audit_key: of the audit trail's chain (core.access.audit).
        anchors: of the audit trail; None where nothing is kept beside the store.
        on_long_leases: called with their length, in seconds, before the first long lease is granted.
        among: of a head that shares its store with others; nothing is answered once it no longer leads.
        earlier_output: where the output of jobs lies that this head does not have; empty where it has all there ever was.
    """

    driver: Driver
    store: Store
    logs: Logs
    blobs: Blobs
    mailboxes: Mailboxes
    telemetry: Telemetry
    clock: Clock
    node_secret: bytes
    version: str
    output_root: str
    checkpoint_root: str
    on_stop: Callable[[], None]
    on_long_leases: Callable[[float], None] = lambda _: None
    welcome: Welcome | None = None
    token_life_max_s: float | None = None
    audit_key: bytes = b""
    anchors: Anchors | None = None
    among: Among | None = None
    earlier_output: str = ""
    hosts_allowed: frozenset[str] = frozenset({"127.0.0.1", "localhost", "[::1]"})
    limits: Limits = field(default_factory=Limits)
