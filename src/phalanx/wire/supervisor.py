"""The protocol between supervisor and head: outbound HTTP from the supervisor, JSON bodies, routes under /v1/node/.

    POST hello      HelloRequest   -> HelloReply     registration: first, and again whenever a reply asks for it
    POST lease      LeaseRequest   -> LeaseReply     renewal; answered from memory
    GET  commands   ?after=N&wait_s=20 -> CommandsReply   long poll; `after` acknowledges everything up to N
    POST events     EventsRequest  -> EventsReply    answered once durable; resent until acknowledged
    POST streams    StreamsRequest -> StreamsReply   log and step bytes by offset; answered once durable
    POST samples    SamplesRequest -> 204            in memory only
    GET  blobs/{sha256}            -> bytes          an uploaded working directory
    POST data                      -> DataPeersReply nodes that have chunks of datasets: wire.data_peers
    storage, checkpoints, outputs                    for nodes that do not share the head's folders: wire.stored_files
    GET  secrets/{job}/{epoch}     -> SecretValues   to be asked once before each start; never stored
    GET  exec/{session}/input?after=N&signals=K&wait_s=20 -> ExecInput
    POST exec/{session}/output     ExecOutput        -> 204

Every request carries `Authorization: Bearer <node token>`. The head answers 409 with code "say_hello" if it does not know this
supervisor (it restarted, or declared the node dead); the supervisor then registers again and continues.
A core event or command is sent as `Envelope`: its class name and its fields.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, SupervisorId
from phalanx.core.state import commands, reports

WIRE_VERSION: Final = 1
RENEWAL_PROTOCOL: Final = "phalanx-renewal/1"  # of a TLS connection (ALPN) that carries renewals only, as HTTP/1.1
STREAM_CHUNK_BYTES_MAX: Final = 1 << 18  # keeps a request with chunks of several ranks under 1 MiB in base64
EXEC_CHUNK_BYTES_MAX: Final = 1 << 19  # a quarter of the window of a session


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A core event or command: `kind` is its class name, `seq` its sequence number at the sender."""

    seq: int
    kind: str
    body: msgspec.Raw


class HelloRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A registration. `members`: (job, epoch, generation) of the supervisor's members.

    `challenge`: from the reply to its last request, empty without one. None from an older supervisor, which is accepted without.
    """

    version: int
    supervisor_id: SupervisorId
    node: Node
    members: list[tuple[JobId, Epoch, Generation]]
    challenge: str | None = None


class HelloReply(msgspec.Struct, frozen=True, kw_only=True):
    """`head_id` is one incarnation of the head; its commands for this node start after `after`; `heads` as in LeaseReply.

    `challenge`: another supervisor is registered for the node; the request counts once it is repeated with this value.
    """

    version: int
    head_id: str
    lease_s: float
    renew_in_s: float
    after: int
    heads: list[str] = []
    challenge: str = ""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One renewal for all epochs of this supervisor. `held_s`: remaining time of its current lease (0: none).

    `reconnects`: its connection offers RENEWAL_PROTOCOL, so that the head may close it to have the next renewal answered by another process.
    """

    supervisor_id: SupervisorId
    node_id: NodeId
    epochs: list[tuple[JobId, Epoch]]
    held_s: float = 0.0
    reconnects: bool = False


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """The lease counts from when the request was *sent* and replaces the current one, even if shorter. `superseded` must be killed at once.

    `at_s`: the head's Unix time when it answered; 0 if unknown. `heads`: URLs of all heads that share its store, itself first; empty for a
    single head.
    """

    head_id: str
    lease_s: float
    renew_in_s: float
    superseded: list[tuple[JobId, Epoch]]
    at_s: float = 0.0
    heads: list[str] = []


class CommandsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Commands in order; ask next with `after=last`."""

    head_id: str
    commands: list[Envelope]
    last: int


class EventsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Events in order, numbered from 1 by this supervisor."""

    supervisor_id: SupervisorId
    events: list[Envelope]


class EventsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to `acked` is durable."""

    acked: int


class StreamChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one stream of one attempt. `stream`: "rank-3", "steps-0", "supervisor-0" (the number is rank or node rank)."""

    job_id: JobId
    epoch: Epoch
    stream: str
    offset: int
    data: bytes


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The durable end of a stream at the head, from which the supervisor continues."""

    job_id: JobId
    epoch: Epoch
    stream: str
    end: int


class StreamsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks of any number of streams."""

    supervisor_id: SupervisorId
    chunks: list[StreamChunk]


class StreamsReply(msgspec.Struct, frozen=True, kw_only=True):
    """One end for each stream named in the request."""

    ends: list[StreamEnd]


class SecretValues(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a job's secrets, by name. They stay in memory."""

    values: dict[str, str]

    def __repr__(self) -> str:
        """Show the names only."""
        return f"SecretValues({', '.join(self.values)})"


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a device. `utilization` 0..1 of the named counter; None if the device does not report it.

    `throttle`: why its clocks are held down, by name. `processes`: number of processes on it. None: the supervisor does not know.
    """

    index: int
    uuid: str
    counter: str
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None
    virtual: bool = False
    job_id: JobId | None = None
    processes: int | None = None


class JobSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of one member used since its generation began.

    `memory_peak_bytes`: the highest memory of all of them together; pages that they share may count for each.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    cpu_s: float
    memory_peak_bytes: int


class StagingSample(msgspec.Struct, frozen=True, kw_only=True):
    """How far a member is that stages the dataset `name` now. `from_*_bytes`: what came from there in this run."""

    job_id: JobId
    epoch: Epoch
    name: str
    done_bytes: int
    total_bytes: int
    rate_bytes_per_s: float
    from_source_bytes: int = 0
    from_peers_bytes: int = 0


class EnergyReading(msgspec.Struct, frozen=True, kw_only=True):
    """The energy that a meter has counted, in millijoules, at a moment of the node's boot clock.

    `meter`: names what counts; two readings can be subtracted only if it is the same. `integrated`: the supervisor adds up samples of the power,
    since the device has no counter. `throttle`: as in DeviceSample.
    """

    index: int
    meter: str
    millijoules: int
    at_ns: int
    integrated: bool = False
    throttle: tuple[str, ...] | None = None


class SamplesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a node and all its devices. `every_s`: usual time to the next request.

    CPU (0..1 of all its CPUs) and network are means since the request before; None if the node does not know.
    `energy`: readings since the last request that was answered, oldest first: of these samples, and of the begin and end of attempts. `sent_ns`:
    the node's boot clock as it was sent.
    """

    supervisor_id: SupervisorId
    node_id: NodeId
    at_s: float
    devices: list[DeviceSample]
    load_1m: float = 0.0
    cpu_utilization: float | None = None
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    network_received_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    disk_free_bytes: int = 0
    every_s: float = 1.0
    jobs: list[JobSample] = []
    staging: list[StagingSample] = []
    energy: list[EnergyReading] = []
    sent_ns: int = 0


class OpenExec(msgspec.Struct, frozen=True, kw_only=True):
    """Run a command beside a job's ranks, in their environment and containment. Sent as a `Envelope` of kind "OpenExec"."""

    session: str
    job_id: JobId
    epoch: Epoch
    argv: list[str]
    tty: bool
    rows: int = 24
    cols: int = 80


class ExecInput(msgspec.Struct, frozen=True, kw_only=True):
    """The user's input from byte `after` on, `closed` at its end, and the signals after the first K."""

    data: bytes
    closed: bool
    rows: int
    cols: int
    signals: list[int] = []


class ExecOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The command's output from `offset` on; `exit_code` with the last piece."""

    offset: int
    data: bytes
    exit_code: int | None = None
    error: str = ""


_EVENTS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        reports.MemberReady,
        reports.MemberRefused,
        reports.MemberStarted,
        reports.ReadinessChanged,
        reports.SleepHookEnded,
        reports.TaskExited,
        reports.MemberStopped,
        reports.MemberFrozen,
        reports.MemberHung,
        reports.CheckpointSaved,
        reports.ProgressReported,
        reports.NodeDied,
        reports.PowerLimited,
        reports.DatasetsHeld,
        reports.NodeHealthReported,
    )
}
_COMMANDS: Final[dict[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        commands.PrepareTasks,
        commands.StartTasks,
        commands.StopTasks,
        commands.CleanUpAttempt,
        commands.DeleteCheckpoints,
        commands.SaveNow,
        commands.RunSleepHook,
        commands.LimitPower,
        OpenExec,
    )
}

T = TypeVar("T")


class UnknownEnvelopeKind(ValueError):
    """The other side sent a kind that this release does not know; it has a later release."""


def encode_envelope(seq: int, value: object) -> Envelope:
    """Encode a core event or command for sending."""
    return Envelope(seq=seq, kind=type(value).__name__, body=msgspec.Raw(msgspec.json.encode(value)))


def decode_event(framed: Envelope) -> reports.Report:
    """Decode the event.

    Raises:
        UnknownEnvelopeKind: not an event that supervisors send.
        msgspec.ValidationError: its fields are invalid.
    """
    return _open(framed, _EVENTS)  # type: ignore[no-any-return]  # the table holds exactly the union's classes


def decode_command(framed: Envelope) -> commands.Command | OpenExec:
    """Decode the command.

    Raises:
        UnknownEnvelopeKind: this release has no such command.
        msgspec.ValidationError: its fields are invalid.
    """
    return _open(framed, _COMMANDS)  # type: ignore[no-any-return]  # as above


def encode(message: object) -> bytes:
    """Encode a message of this module as JSON."""
    return msgspec.json.encode(message)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a message of this module.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: the body is not such a message.
    """
    return msgspec.json.decode(body, type=kind)


def pack(message: ExecInput | ExecOutput) -> bytes:
    """Encode a message as MessagePack, which holds bytes as they are."""
    return msgspec.msgpack.encode(message)


def unpack(body: bytes, kind: type[T]) -> T:
    """Decode such a message. Raises as `decode` does."""
    return msgspec.msgpack.decode(body, type=kind)


def _open(framed: Envelope, table: dict[str, type[Any]]) -> Any:
    kind = table.get(framed.kind)
    if kind is None:
        raise UnknownEnvelopeKind(f"unknown kind {framed.kind!r}")
    return msgspec.json.decode(framed.body, type=kind)
