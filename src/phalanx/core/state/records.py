"""The declaration of each kind of record. World, stores, tables of the databases and backups follow from it (docs/add-a-record.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from phalanx.core.fleet.custom_failure_rules import FailureRules
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_console import NodeConsole
from phalanx.core.fleet.node_pool import NodePool, PoolNode
from phalanx.core.fleet.node_tests import NodeTestHistory
from phalanx.core.ids import (
    Epoch,
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
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.channel import Channel, ChannelMark
from phalanx.core.work.extras import Licence
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Project, Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.retention import RetentionPolicy
from phalanx.core.work.secret import Secret
from phalanx.core.work.services.service import Revision, Service
from phalanx.core.work.services.service_use import GatewayMark, ServiceUseHour
from phalanx.core.work.sign_in import SignInSettings
from phalanx.core.work.usage.attempt_use import AttemptUse
from phalanx.core.work.usage.price_list import PriceList
from phalanx.core.work.usage.usage_hour import UsageHour, UsageMark
from phalanx.core.work.users import Token, User

K = TypeVar("K")
R = TypeVar("R")
ColumnValue = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """A caller's idempotency key, the SHA-256 of its request body, and the job that it created."""

    user: UserId
    key: str
    body_sha256: str
    job_id: JobId
    at_s: float


@dataclass(frozen=True, slots=True)
class RecordColumn:
    """A column beside the document: an attribute of the record that the databases search or constrain."""

    name: str
    type: type[str] | type[int] | type[float] = str


@dataclass(frozen=True, eq=False)
class RecordKind(Generic[K, R]):
    """Declaration of a kind of record. A plain one needs only its name, class, table and migration.

    Attributes:
        name: in backups and error messages.
        record: its class; a database stores it as one JSON document.
        table: name of its table in the world and in the databases.
        migration: number of the database migration that creates the table; 0 if that migration's SQL file creates it itself.
        key: attributes that identify a record; also columns.
        columns: columns of the databases, in the order of the table.
        order: attributes by which lists are sorted; the key by default.
        pages: columns by which a long table is read in pages, each with a value before its first one.
        append_only: records are never replaced; writing an existing one is an error.
        in_world: the world holds its records; False for those that are only written, and read from the store when a question needs them.
        key_of: the key of a record; a tuple if it has several attributes.
        order_of: the sort key of a record.
    """

    name: str
    record: type[R]
    table: str
    migration: int = 0
    key: tuple[str, ...] = ("id",)
    columns: tuple[RecordColumn, ...] = (RecordColumn("id"),)
    order: tuple[str, ...] = ()
    pages: tuple[tuple[str, str | int], ...] = ()
    append_only: bool = False
    in_world: bool = True
    key_of: Callable[[R], K] = field(init=False, repr=False)
    order_of: Callable[[R], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_of", attrgetter(*self.key))
        object.__setattr__(self, "order_of", attrgetter(*(self.order or self.key)))


USERS: Final = RecordKind[UserId, User](
    "user", User, "users", 1, columns=(RecordColumn("id"), RecordColumn("role"), RecordColumn("disabled", int))
)
PROJECTS: Final = RecordKind[ProjectId, Project]("project", Project, "projects", 1)
TOKENS: Final = RecordKind[TokenId, Token](
    "token",
    Token,
    "tokens",
    1,
    columns=(RecordColumn("id"), RecordColumn("user"), RecordColumn("sha256"), RecordColumn("created_s", float)),
    order=("created_s", "id"),
)
QUEUES: Final = RecordKind[QueueId, Queue]("queue", Queue, "queues", 1)
QUEUE_USAGE: Final = RecordKind[QueueId, QueueUsage](
    "queue usage", QueueUsage, "queue_usage", 1, key=("queue",), columns=(RecordColumn("queue"),)
)
RESERVATIONS: Final = RecordKind[ReservationId, Reservation](
    "reservation", Reservation, "reservations", 1, columns=(RecordColumn("id"), RecordColumn("ended", int))
)
CALIBRATIONS: Final = RecordKind[str, FleetDocument]("calibration", FleetDocument, "calibrations", 1)
FAILURE_RULES: Final = RecordKind[str, FailureRules]("failure rules", FailureRules, "failure_rules", 1)
NODES: Final = RecordKind[NodeId, Node]("node", Node, "nodes", 1, columns=(RecordColumn("id"), RecordColumn("state")))
NODE_POOLS: Final = RecordKind[PoolId, NodePool]("node pool", NodePool, "node_pools", 1)
NODE_CONSOLES: Final = RecordKind[NodeId, NodeConsole]("console of a node", NodeConsole, "node_consoles", 12)
NODE_TESTS: Final = RecordKind[NodeId, NodeTestHistory]("tests of a node", NodeTestHistory, "node_tests", 8)
POOL_NODES: Final = RecordKind[NodeId, PoolNode]("pooled node", PoolNode, "pool_nodes", 1)
USAGE_HOURS: Final = RecordKind[str, UsageHour]("usage of an hour", UsageHour, "usage_hours", 4, in_world=False)
USAGE_MARKS: Final = RecordKind[str, UsageMark]("end of the counted usage", UsageMark, "usage_marks", 4)
ATTEMPT_USES: Final = RecordKind[tuple[JobId, Epoch], AttemptUse](
    "use of an attempt",
    AttemptUse,
    "attempt_uses",
    5,
    key=("job_id", "epoch"),
    columns=(RecordColumn("job_id"), RecordColumn("epoch", int)),
    pages=(("job_id", ""), ("epoch", -1)),
    in_world=False,
)
SERVICE_USE_HOURS: Final = RecordKind[str, ServiceUseHour](
    "use of services in an hour", ServiceUseHour, "service_use_hours", 11, in_world=False
)
GATEWAY_MARKS: Final = RecordKind[str, GatewayMark]("counted reports of a gateway", GatewayMark, "gateway_marks", 11)
PRICE_LISTS: Final = RecordKind[str, PriceList]("price list", PriceList, "price_lists", 5)
LICENCES: Final = RecordKind[str, Licence]("licence", Licence, "licences", 3)
CHANNELS: Final = RecordKind[str, Channel]("notification channel", Channel, "channels", 5)
CHANNEL_MARKS: Final = RecordKind[str, ChannelMark](
    "position of a notification channel", ChannelMark, "channel_marks", 5
)
RETENTION: Final = RecordKind[str, RetentionPolicy]("retention policy", RetentionPolicy, "retention", 5)
SIGN_IN: Final = RecordKind[str, SignInSettings]("sign-in settings", SignInSettings, "sign_in", 7)
SECRETS: Final = RecordKind[str, Secret]("secret", Secret, "secrets", 9)
JOBS: Final = RecordKind[JobId, Job](
    "job",
    Job,
    "jobs",
    columns=(
        RecordColumn("seq", int),
        RecordColumn("id"),
        RecordColumn("state"),
        RecordColumn("user"),
        RecordColumn("project"),
        RecordColumn("queue"),
        RecordColumn("name"),
        RecordColumn("submit_s", float),
        RecordColumn("ended_s", float),
        RecordColumn("epoch", int),
        RecordColumn("gpu_milli", int),
    ),
    order=("seq",),
    pages=(("seq", -1),),
)
ATTEMPTS: Final = RecordKind[tuple[JobId, Epoch], Attempt](
    "attempt",
    Attempt,
    "attempts",
    key=("job_id", "epoch"),
    columns=(RecordColumn("job_id"), RecordColumn("epoch", int), RecordColumn("state")),
    pages=(("job_id", ""), ("epoch", -1)),
)
SERVICES: Final = RecordKind[ServiceId, Service](
    "service", Service, "services", 2, columns=(RecordColumn("id"), RecordColumn("state"))
)
REVISIONS: Final = RecordKind[tuple[ServiceId, int], Revision](
    "revision",
    Revision,
    "revisions",
    2,
    key=("service", "number"),
    columns=(RecordColumn("service"), RecordColumn("number", int)),
)
IDEMPOTENCY: Final = RecordKind[tuple[UserId, str], Idempotency](
    "idempotency key",
    Idempotency,
    "idempotency",
    key=("user", "key"),
    columns=(RecordColumn("user"), RecordColumn("key"), RecordColumn("job_id")),
    pages=(("number", -1),),  # assigned by the database, in the order of insertion
)

Record = (
    User
    | Project
    | Token
    | Queue
    | QueueUsage
    | Reservation
    | FleetDocument
    | FailureRules
    | Node
    | NodePool
    | PoolNode
    | NodeConsole
    | NodeTestHistory
    | Licence
    | RetentionPolicy
    | SignInSettings
    | Secret
    | Channel
    | ChannelMark
    | PriceList
    | UsageHour
    | UsageMark
    | AttemptUse
    | ServiceUseHour
    | GatewayMark
    | Job
    | Attempt
    | Service
    | Revision
    | Idempotency
)
# Each kind comes after those that it refers to: databases are written and loaded in this order.
RECORDS: Final[tuple[RecordKind[Any, Any], ...]] = (
    USERS,
    PROJECTS,
    TOKENS,
    QUEUES,
    QUEUE_USAGE,
    RESERVATIONS,
    CALIBRATIONS,
    FAILURE_RULES,
    NODES,
    NODE_POOLS,
    POOL_NODES,
    NODE_CONSOLES,
    NODE_TESTS,
    LICENCES,
    RETENTION,
    SECRETS,
    SIGN_IN,
    CHANNELS,
    CHANNEL_MARKS,
    PRICE_LISTS,
    USAGE_HOURS,
    USAGE_MARKS,
    ATTEMPT_USES,
    SERVICE_USE_HOURS,
    GATEWAY_MARKS,
    JOBS,
    ATTEMPTS,
    SERVICES,
    REVISIONS,
    IDEMPOTENCY,
)
KIND_OF: Final[Mapping[type, RecordKind[Any, Any]]] = {kind.record: kind for kind in RECORDS}
