"""The head's side of the process that answers renewals (`app.renewal_process`): starts it, hands connections to it, and passes on what leases say."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from phalanx.controller.leases import DelegatedAnswer, DelegateLost
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.failpoints import around
from phalanx.wire.renewals import (
    LEADS_UNTIL,
    LENGTH_BYTES,
    NUMBER,
    AnswerFor,
    FetchRenewals,
    RenewalSettings,
    RenewalTable,
    SetCurrent,
    SetTerms,
    frame,
)

ANSWER_S: Final = 2.0  # for a fetch; a process that takes longer is killed, and its leases are presumed live
STARTS_MAX: Final = 3  # then renewals stay with the API's thread
_COMMAND: Final = (sys.executable, "-P", "-m", "phalanx.app.renewal_process")
_log = logging.getLogger("phalanx.head")


@dataclass(slots=True)
class RenewalProcess:
    """A running process. Every method that raises `DelegateLost` has killed it first, so that it answers nothing any more."""

    process: subprocess.Popen[bytes]
    commands: socket.socket
    handed: socket.socket
    answered: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _decoder: msgspec.msgpack.Decoder[RenewalTable] = field(
        default_factory=lambda: msgspec.msgpack.Decoder(RenewalTable)
    )

    def set_terms(self, lease_s: float, renew_in_s: float) -> None:
        """See `RenewalDelegate`."""
        self._send(SetTerms(lease_s=lease_s, renew_in_s=renew_in_s))

    def answer_for(
        self, connection: int, node_id: NodeId, supervisor_id: SupervisorId, ends_s: float, current: dict[JobId, Epoch]
    ) -> None:
        """See `RenewalDelegate`."""
        self._send(
            AnswerFor(connection=connection, name=node_id, supervisor_id=supervisor_id, ends_s=ends_s, current=current)
        )

    def set_current(self, node_id: NodeId, job_id: JobId, epoch: Epoch | None) -> None:
        """See `RenewalDelegate`."""
        self._send(SetCurrent(name=node_id, job_id=job_id, epoch=epoch))

    def fetch(self, revoked: Iterable[NodeId] | None) -> list[DelegatedAnswer]:
        """See `RenewalDelegate`."""
        with self._guard:
            try:
                self.commands.sendall(frame(FetchRenewals(revoked=None if revoked is None else list(revoked))))
                table = self._decoder.decode(self._receive(int.from_bytes(self._receive(LENGTH_BYTES), "big")))
            except (OSError, msgspec.MsgspecError) as error:
                raise self._lost(error) from error
        self.answered = table.answered
        return [
            DelegatedAnswer(
                node_id=one.name, supervisor_id=one.supervisor_id, renewed_s=one.renewed_s, ends_s=one.ends_s
            )
            for one in table.renewals
        ]

    def hand_over(self, connection: socket.socket, number: int) -> bool:
        """Give a connection to the process; whether it was given."""
        try:
            socket.send_fds(self.handed, [NUMBER.pack(number)], [connection.fileno()], socket.MSG_DONTWAIT)
        except OSError:  # it is gone, or its queue is full
            return False
        return True

    def leads_until(self, until_s: float) -> None:
        """Let the process answer until then, by CLOCK_BOOTTIME. It never waits; what is not delivered leaves the earlier time."""
        with contextlib.suppress(OSError):
            self.handed.send(LEADS_UNTIL.pack(until_s), socket.MSG_DONTWAIT)

    def kill(self) -> None:
        """End the process, and wait for its end."""
        self.process.kill()
        self.process.wait()
        for one in (self.commands, self.handed):
            one.close()

    def _send(self, message: msgspec.Struct) -> None:
        with self._guard:
            try:
                self.commands.sendall(frame(message))
            except OSError as error:
                raise self._lost(error) from error

    def _receive(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = self.commands.recv(count - len(found))
            if not piece:
                raise ConnectionResetError("it has ended")
            found += piece
        return bytes(found)

    def _lost(self, error: Exception) -> DelegateLost:
        _log.warning("the process that answers renewals is ended: %s", error)
        self.kill()
        return DelegateLost(str(error))


@dataclass(slots=True, kw_only=True)
class RenewalHandover:
    """Decides which connections go to the process, and starts it when the fleet needs it. Use it on the event loop only, except `leads_until`.

    Args:
        settings: of the process, without the secret.
        crowded: whether the fleet has more renewals than the API's thread should answer.
        attach: gives a started process to the leases.
        leads_until_s: CLOCK_BOOTTIME until which this head leads, if there are several heads.
    """

    settings: RenewalSettings
    crowded: Callable[[], bool]
    attach: Callable[[RenewalProcess], None]
    leads_until_s: float | None = None
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _running: RenewalProcess | None = None
    _starts: int = 0

    @property
    def wanted(self) -> bool:
        """Whether supervisors should reconnect, so that the process answers them."""
        return self.crowded() and self._process() is not None

    def take(self, connection: socket.socket) -> bool:
        """Hand a connection over that offers RENEWAL_PROTOCOL; whether it was, or must be served here."""
        process = self._process() if self.crowded() else None
        return process is not None and process.hand_over(connection, next(self._numbers))

    def connection_of(self, header: str | None) -> int | None:
        """Return the number of the connection for which the process passes on a request; None if it did not come from the process."""
        number, _, secret = (header or "").partition(" ")
        good = hmac.compare_digest(secret.encode(errors="replace"), self.settings.secret.encode())
        return int(number) if good and number.isdecimal() else None

    def leads_until(self, until_s: float) -> None:
        """Let the process answer until then: the term of this head, one of several, was renewed. For any thread."""
        self.leads_until_s = until_s
        if (running := self._running) is not None:
            running.leads_until(until_s)

    @property
    def answered(self) -> int:
        """How many renewals the running process has answered, as of the last fetch."""
        return 0 if self._running is None else self._running.answered

    def close(self) -> None:
        """End the process."""
        self._starts = STARTS_MAX
        if self._running is not None:
            self._running.kill()

    def _process(self) -> RenewalProcess | None:
        if self._running is not None and self._running.process.poll() is None:
            return self._running
        if self._starts >= STARTS_MAX:
            return None
        self._starts += 1
        try:
            self._running = start_process(msgspec.structs.replace(self.settings, leads_until_s=self.leads_until_s))
        except OSError as error:
            _log.warning("the process that answers renewals cannot be started: %s", error)
            self._running = None
            return None
        self.attach(self._running)
        return self._running


def start_process(settings: RenewalSettings) -> RenewalProcess:
    """Start the process; it serves a moment later."""
    ours, theirs = socket.socketpair()
    giving, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(ANSWER_S)
    words = [*_COMMAND, str(theirs.fileno()), str(taking.fileno())]
    with theirs, taking, around("renewals.process"):
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), taking.fileno()),
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(settings))
    _log.info("process %d answers renewals", process.pid)
    return RenewalProcess(process, ours, giving)


def new_secret() -> str:
    """Return a secret for `RenewalSettings`."""
    return secrets.token_hex(16)
