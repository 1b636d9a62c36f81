"""The process that answers renewals of leases in a large fleet: `python -m phalanx.app.renewal_process`, started by the head.

It takes over connections on which supervisors offer RENEWAL_PROTOCOL, with their TLS handshake still to come, and answers by itself only what
needs no decision: a renewal of a lease that the head has given to it on that connection (`AnswerFor`), with the same token, all of whose epochs are
current. It passes every other request to the API on loopback, and its answer back. So it does with all requests once the term of its head, one of
several, has ended by its own clock.

Before it answers a renewal, it acts on all commands that the head has sent. It ends when the head does, and without the head's word it answers nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import math
import os
import queue
import select
import socket
import ssl
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from phalanx.controller.leases import MARGIN_S
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.node.processes.file_limits import raise_file_limit
from phalanx.wire.renewals import (
    CONNECTION_HEADER,
    LEADS_UNTIL,
    LENGTH_BYTES,
    NUMBER,
    AnsweredRenewal,
    AnswerFor,
    FetchRenewals,
    RenewalCommand,
    RenewalSettings,
    RenewalTable,
    SetCurrent,
    SetTerms,
    frame,
)
from phalanx.wire.supervisor import RENEWAL_PROTOCOL, LeaseReply, LeaseRequest

PATH: Final = "/v1/node/lease"
_LINE: Final = f"POST {PATH} HTTP/1.1\r\n".encode()
_REQUEST_MAX: Final = 1 << 20  # as the API's limit for a body, with its headers
_PIECE: Final = 1 << 16
_IDLE_S: Final = 600.0  # a connection without a request for so long is closed
_STRANGER_S: Final = 10.0  # the same before the API has accepted a request of it
_STRANGERS_MAX: Final = 2000  # such connections at once
_SWEEP_S: Final = 5.0
_FORWARDERS: Final = 8
_FORWARD_S: Final = 10.0
_HEADS: Final = 64  # connections taken over in one turn
_UNAVAILABLE: Final = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
_BODY_UNAVAILABLE: Final = b'{"error":{"code":"try_later","message":"the head did not answer","hint":""}}'


@dataclass(slots=True)
class LeaseEntry:
    """A lease that this process answers for. Times are seconds of CLOCK_BOOTTIME."""

    name: NodeId
    supervisor_id: SupervisorId
    connection: int
    ends_s: float
    current: dict[JobId, Epoch]


@dataclass(slots=True)
class RenewalTables:
    """What the head has sent to this process, and what it has answered. Pure: times are passed in."""

    leads_until_s: float = math.inf
    lease_s: float = 0.0
    renew_in_s: float = 0.0
    answered: int = 0
    entries: dict[NodeId, LeaseEntry] = field(default_factory=dict)
    by_connection: dict[int, LeaseEntry] = field(default_factory=dict)
    fresh: dict[NodeId, AnsweredRenewal] = field(default_factory=dict)

    def apply(self, command: RenewalCommand) -> RenewalTable | None:
        """Act on a command; return the answer of a fetch."""
        match command:
            case SetTerms(lease_s=lease_s, renew_in_s=renew_in_s):
                self.lease_s, self.renew_in_s = lease_s, renew_in_s
            case AnswerFor():
                self._drop(command.name)
                entry = LeaseEntry(
                    command.name, command.supervisor_id, command.connection, command.ends_s, dict(command.current)
                )
                self.entries[command.name] = self.by_connection[command.connection] = entry
            case SetCurrent(name=name, job_id=job_id, epoch=epoch):
                known = self.entries.get(name)
                if known is not None and epoch is None:
                    known.current.pop(job_id, None)
                elif known is not None and epoch is not None:
                    known.current[job_id] = epoch
            case FetchRenewals(revoked=revoked):
                for name in list(self.entries) if revoked is None else revoked:
                    self._drop(name)
                found, self.fresh = list(self.fresh.values()), {}
                return RenewalTable(renewals=found, answered=self.answered)
        return None

    def renew(self, connection: int, request: LeaseRequest, now_s: float) -> bool:
        """Renew the lease of a connection; whether it was renewed. If not, the head decides."""
        entry = self.by_connection.get(connection)
        if entry is None or entry.supervisor_id != request.supervisor_id or not self.lease_s:
            return False
        if now_s >= min(entry.ends_s, self.leads_until_s) or any(
            entry.current.get(job) != epoch for job, epoch in request.epochs
        ):
            return False
        left_s = min(request.held_s, entry.ends_s - now_s - MARGIN_S)
        entry.ends_s = now_s + max(self.lease_s, left_s) + MARGIN_S
        self.fresh[entry.name] = AnsweredRenewal(entry.name, entry.supervisor_id, now_s, entry.ends_s)
        self.answered += 1
        return True

    def close(self, connection: int) -> None:
        """A connection has ended. What was answered on it stays to be fetched."""
        entry = self.by_connection.pop(connection, None)
        if entry is not None:
            self.entries.pop(entry.name, None)

    def _drop(self, name: NodeId) -> None:
        entry = self.entries.pop(name, None)
        if entry is not None:
            self.by_connection.pop(entry.connection, None)


@dataclass(slots=True)
class PeerConnection:
    """A connection of a supervisor. `trusted`: the headers of the last request that the API accepted on it, which hold its token."""

    number: int
    tls: ssl.SSLSocket
    used_s: float
    ready: bool = False
    received: bytearray = field(default_factory=bytearray)
    asked: tuple[bytes, bytes] | None = None  # headers and body that wait for the API
    trusted: bytes = b""


class RenewalServer:
    """One process. `commands`: frames from and to the head; `handed`: connections from the head, each with its number."""

    def __init__(self, settings: RenewalSettings, commands: socket.socket, handed: socket.socket) -> None:
        self.tables = RenewalTables()
        if settings.leads_until_s is not None:
            self.tables.leads_until_s = settings.leads_until_s
        self._settings, self._commands, self._handed = settings, commands, handed
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context.load_cert_chain(settings.certificate, settings.key)
        self._context.set_alpn_protocols([RENEWAL_PROTOCOL])
        self._peers: dict[int, PeerConnection] = {}
        self._strangers = 0
        self._inbox = bytearray()
        self._decoder = msgspec.msgpack.Decoder(RenewalCommand)
        self._requests = msgspec.json.Decoder(LeaseRequest)
        self._answers: queue.SimpleQueue[tuple[int, int, bytes, bool]] = queue.SimpleQueue()
        self._answered = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._workers = concurrent.futures.ThreadPoolExecutor(_FORWARDERS, "forward")
        self._kept = threading.local()
        self._epoll = select.epoll()
        for file in (commands.fileno(), handed.fileno(), self._answered):
            self._epoll.register(file, select.EPOLLIN)
        handed.setblocking(False)

    def run(self) -> None:
        """Serve until the head ends."""
        swept_s = time.monotonic()
        while True:
            requests: list[tuple[PeerConnection, bytes, bytes]] = []
            for file, _ in self._epoll.poll(_SWEEP_S):
                if file == self._handed.fileno():
                    self._take_over()
                elif file == self._answered:
                    self._send_answers()
                elif (peer := self._peers.get(file)) is not None:
                    requests += self._read(peer)
            self._obey()  # before any answer: what the head said before the request was sent counts
            for peer, headers, body in requests:
                self._answer(peer, headers, body)
            if time.monotonic() - swept_s > _SWEEP_S:
                swept_s = time.monotonic()
                for peer in [one for one in self._peers.values() if _is_idle(one, swept_s)]:
                    self._close(peer)

    def _obey(self) -> None:
        """Act on all commands that the head has sent; end if it is gone."""
        while True:
            try:
                piece = self._commands.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                os._exit(0)
            self._inbox += piece
            while len(self._inbox) >= LENGTH_BYTES:
                end = LENGTH_BYTES + int.from_bytes(self._inbox[:LENGTH_BYTES], "big")
                if len(self._inbox) < end:
                    break
                answer = self.tables.apply(self._decoder.decode(bytes(self._inbox[LENGTH_BYTES:end])))
                del self._inbox[:end]
                if answer is not None:
                    self._commands.sendall(frame(answer))

    def _take_over(self) -> None:
        for _ in range(_HEADS):
            try:
                packet, files, _, _ = socket.recv_fds(self._handed, LEADS_UNTIL.size, 1)
            except BlockingIOError:
                return
            if not packet:
                os._exit(0)
            if len(packet) == LEADS_UNTIL.size:
                (self.tables.leads_until_s,) = LEADS_UNTIL.unpack(packet)
                continue
            if not files:  # too many open files: the supervisor connects again
                continue
            plain = socket.socket(fileno=files[0])
            if self._strangers >= _STRANGERS_MAX:
                plain.close()
                continue
            plain.setblocking(False)
            try:
                tls = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            except (OSError, ValueError):
                plain.close()
                continue
            peer = PeerConnection(NUMBER.unpack(packet)[0], tls, time.monotonic())
            self._peers[tls.fileno()] = peer
            self._strangers += 1
            self._epoll.register(tls.fileno(), select.EPOLLIN)

    def _read(self, peer: PeerConnection) -> list[tuple[PeerConnection, bytes, bytes]]:
        """Return the request that has come on a connection, if it is complete."""
        try:
            if not peer.ready:
                peer.tls.do_handshake()
                peer.ready = True
            while piece := peer.tls.recv(_PIECE):
                peer.received += piece
                if not peer.tls.pending():
                    break
            else:
                self._close(peer)
                return []
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return []
        except (OSError, ValueError):
            self._close(peer)
            return []
        end = peer.received.find(b"\r\n\r\n")
        length = _content_length(peer.received[: end + 2]) if end >= 0 else 0
        if len(peer.received) > _REQUEST_MAX or length > _REQUEST_MAX:
            self._close(peer)
            return []
        if end < 0 or len(peer.received) < end + 4 + length:
            return []
        headers, body = bytes(peer.received[: end + 2]), bytes(peer.received[end + 4 : end + 4 + length])
        del peer.received[: end + 4 + length]
        peer.used_s = time.monotonic()
        return [(peer, headers, body)]

    def _answer(self, peer: PeerConnection, headers: bytes, body: bytes) -> None:
        try:
            same = _without_length(headers) == peer.trusted != b""
            renewed = same and self.tables.renew(
                peer.number, self._requests.decode(body), time.clock_gettime(time.CLOCK_BOOTTIME)
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            renewed = False
        if not renewed:
            peer.asked = (headers, body)
            self._workers.submit(self._forward, peer.tls.fileno(), peer.number, headers, body)
            return
        reply = msgspec.json.encode(
            LeaseReply(
                head_id=self._settings.head_id,
                lease_s=self.tables.lease_s,
                renew_in_s=self.tables.renew_in_s,
                superseded=[],
                at_s=time.time(),
            )
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(reply)
        self._send(peer, head + reply)

    def _send(self, peer: PeerConnection, data: bytes) -> None:
        """Send an answer, which fits into the socket's buffer unless the supervisor has stopped reading."""
        try:
            if peer.tls.send(data) != len(data):
                self._close(peer)
        except (OSError, ValueError):
            self._close(peer)

    def _close(self, peer: PeerConnection) -> None:
        file = peer.tls.fileno()
        self.tables.close(peer.number)
        if self._peers.get(file) is peer:
            del self._peers[file]
            self._strangers -= not peer.trusted
            with contextlib.suppress(OSError):
                self._epoll.unregister(file)
        peer.tls.close()

    def _forward(self, file: int, number: int, headers: bytes, body: bytes) -> None:
        """Pass a request to the API, on a worker's thread."""
        try:
            answer, accepted = self._ask(headers, body, number)
        except (OSError, http.client.HTTPException, ValueError):
            answer, accepted = _UNAVAILABLE % (len(_BODY_UNAVAILABLE), _BODY_UNAVAILABLE), False
            self._kept.api = None
        self._answers.put((file, number, answer, accepted))
        os.eventfd_write(self._answered, 1)

    def _ask(self, headers: bytes, body: bytes, number: int) -> tuple[bytes, bool]:
        """Return the answer of the API as it goes to the supervisor, and whether the API accepted the request."""
        first, _, rest = headers.decode("latin-1").partition("\r\n")
        method, path, _ = first.split(" ", 2)
        passed = http.client.parse_headers(_Lines(rest.encode("latin-1") + b"\r\n"))
        kept: http.client.HTTPConnection | None = getattr(self._kept, "api", None)
        api = kept or http.client.HTTPConnection(*self._settings.api, timeout=_FORWARD_S)
        self._kept.api = api
        sent = {
            name: value for name, value in passed.items() if name.lower() in ("authorization", "content-type", "accept")
        }
        sent[CONNECTION_HEADER] = f"{number} {self._settings.secret}"
        try:
            api.request(method, path, body, sent)
            reply = api.getresponse()
        except (OSError, http.client.HTTPException):
            if kept is None:
                raise
            api.close()  # closed by the API while it was idle
            api.request(method, path, body, sent)
            reply = api.getresponse()
        data = reply.read()
        lines = [f"HTTP/1.1 {reply.status} {reply.reason}"]
        skipped = ("connection", "transfer-encoding", "content-length", "keep-alive")
        lines += [f"{name}: {value}" for name, value in reply.getheaders() if name.lower() not in skipped]
        head = "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode("latin-1")
        return head + data, reply.status == 200 and path == PATH and method == "POST"

    def _send_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._answered)
        while True:
            try:
                file, number, answer, accepted = self._answers.get_nowait()
            except queue.Empty:
                return
            peer = self._peers.get(file)
            if peer is None or peer.number != number:
                continue
            if accepted and peer.asked is not None:
                self._strangers -= not peer.trusted
                peer.trusted = _without_length(peer.asked[0])
            peer.asked = None
            self._send(peer, answer)


class _Lines:
    """The lines of headers, as `http.client.parse_headers` reads them."""

    def __init__(self, data: bytes) -> None:
        self._lines = iter(data.splitlines(keepends=True))

    def readline(self, limit: int = -1) -> bytes:
        """Return the next line, empty after the last."""
        del limit
        return next(self._lines, b"")


def _is_idle(peer: PeerConnection, now_s: float) -> bool:
    return now_s - peer.used_s > (_IDLE_S if peer.trusted else _STRANGER_S)


def _content_length(headers: bytes | bytearray) -> int:
    """Return the length of the body; 0 without one."""
    place = headers.lower().find(b"\r\ncontent-length:")
    if place < 0:
        return 0
    text = bytes(headers[place + 17 : headers.find(b"\r\n", place + 2)]).strip()
    return int(text) if text.isdigit() else _REQUEST_MAX + 1


def _without_length(headers: bytes) -> bytes:
    """Return a request's first line and headers without the length of its body, which differs with the epochs and the time left."""
    lines = headers.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"content-length:"))


def main() -> None:
    """Serve with the settings on standard input; the sockets are the descriptors in the arguments."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RenewalSettings)
    raise_file_limit()
    commands, handed = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    RenewalServer(settings, commands, handed).run()


if __name__ == "__main__":
    main()
