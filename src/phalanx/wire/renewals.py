"""Between a head and its own process that answers renewals (`app.renewal_process`): frames of MessagePack on a pair of sockets.

A frame is its length in 4 bytes, big-endian, and a message. Messages from the head are commands, read in the order in which they were sent;
only `FetchRenewals` is answered, by one `RenewalTable`.

A second pair carries packets: a connection with its number, or the time until which a head of several leads. The head sends them without waiting;
a time that is not delivered leaves the earlier one, which the process keeps to.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId

CONNECTION_HEADER: Final = "phalanx-renewal-connection"
LENGTH_BYTES: Final = 4
NUMBER: Final = struct.Struct(">Q")  # the packet of a connection, whose descriptor goes with it
LEADS_UNTIL: Final = struct.Struct(">8xd")  # the packet of a term's end; longer, so that the two cannot be confused


class RenewalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the process starts with.

    Attributes:
        api: host and port of the API on loopback.
        secret: proves to the API that a request comes from this process.
        leads_until_s: CLOCK_BOOTTIME until which the head leads, if there are several heads. From then on the process answers nothing itself.
    """

    certificate: str
    key: str
    api: tuple[str, int]
    secret: str
    head_id: str
    leads_until_s: float | None = None


class SetTerms(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Lease and renewal interval of all answers from now on, in seconds."""

    lease_s: float
    renew_in_s: float


class AnswerFor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer renewals of the lease `name` on a connection. `ends_s`: its end by CLOCK_BOOTTIME; `current`: the current epochs there."""

    connection: int
    name: NodeId
    supervisor_id: SupervisorId
    ends_s: float
    current: dict[JobId, Epoch]


class SetCurrent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The current epoch of a job; None: none is."""

    name: NodeId
    job_id: JobId
    epoch: Epoch | None


class FetchRenewals(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Return what was renewed since the last fetch. The leases in `revoked` are not answered from now on; None: none of them all is."""

    revoked: list[NodeId] | None


RenewalCommand = SetTerms | AnswerFor | SetCurrent | FetchRenewals


class AnsweredRenewal(msgspec.Struct, frozen=True, array_like=True):
    """The newest answer for a lease: when it was given, and when the head may take the lease for over, by CLOCK_BOOTTIME in seconds."""

    name: NodeId
    supervisor_id: SupervisorId
    renewed_s: float
    ends_s: float


class RenewalTable(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `FetchRenewals`. `answered`: renewals since the process started."""

    renewals: list[AnsweredRenewal]
    answered: int


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
