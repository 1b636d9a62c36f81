"""A TLS session that two threads share: never both in it at once, all bytes whole, and no call that outlasts a close."""

import contextlib
import hashlib
import random
import socket
import ssl
import threading

import pytest

from phalanx.app.certificates import CertificateAuthority
from phalanx.app.join_service import ListenAddress, with_tls
from phalanx.app.state_folder import StateFolder
from phalanx.client.connection.shared_tls import SharedTlsSocket
from phalanx.wire.head_http import context_for_ca

SIZE = 4 << 20
GUARD_S = 100.0


class Watched(ssl.SSLSocket):
    """Counts the threads that are in the session together."""

    inside, met = 0, 0

    def _entered(self, call, *arguments):
        type(self).inside += 1
        type(self).met = max(type(self).met, type(self).inside)
        try:
            return call(*arguments)
        finally:
            type(self).inside -= 1

    def recv(self, *arguments):
        return self._entered(super().recv, *arguments)

    def send(self, *arguments):
        return self._entered(super().send, *arguments)


@pytest.fixture
def ends(tmp_path):
    """Both ends of one TLS connection: the client's shared socket, the server's plain TLS socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    authority = CertificateAuthority(StateFolder.open(str(tmp_path)))
    served = with_tls(listener, authority, ListenAddress(host="127.0.0.1", port=port))
    context = context_for_ca(authority.ca_pem)
    context.sslsocket_class = Watched
    Watched.met = 0
    accepted = []

    def accept():
        accepted.append(served.context.wrap_socket(listener.accept()[0], server_side=True))

    thread = threading.Thread(target=accept)
    thread.start()
    wire = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
    thread.join(GUARD_S)
    shared, other = SharedTlsSocket(wire), accepted[0]
    yield shared, other
    shared.close()
    other.close()
    listener.close()


def test_both_directions_at_once_are_whole_and_never_meet_in_the_session(ends):
    shared, other = ends
    there, back = random.Random(1).randbytes(SIZE), random.Random(2).randbytes(SIZE)

    def echo():  # of the other end, in one thread: read a piece, write a piece
        got, sent = hashlib.sha256(), 0
        for _ in range(SIZE // 65536):
            left = 65536
            other.sendall(back[sent : sent + 65536])
            sent += 65536
            while left:
                piece = other.recv(left)
                got.update(piece)
                left -= len(piece)
        found.append(got.hexdigest())

    found: list[str] = []
    threads = [threading.Thread(target=echo), threading.Thread(target=shared.sendall, args=[there])]
    for thread in threads:
        thread.start()
    received = b""
    while len(received) < SIZE:
        received += shared.recv(65536)
    for thread in threads:
        thread.join(GUARD_S)
    assert received == back
    assert found == [hashlib.sha256(there).hexdigest()]
    assert Watched.met == 1


def test_a_reader_that_waits_holds_nobody_up(ends):
    shared, other = ends
    got = []
    reader = threading.Thread(target=lambda: got.append(shared.recv(100)))
    reader.start()  # it reads the session tickets, and waits
    shared.sendall(b"question")
    assert other.recv(100) == b"question"
    other.sendall(b"answer")
    reader.join(GUARD_S)
    assert got == [b"answer"]


def test_a_close_wakes_the_reader(ends):
    shared, _ = ends
    ended = threading.Event()

    def read():
        with contextlib.suppress(OSError):
            shared.recv(100)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    shared.close()
    assert ended.wait(GUARD_S)


def test_a_timeout_is_kept_and_the_end_is_empty(ends):
    shared, other = ends
    shared.settimeout(0.01)
    with pytest.raises(TimeoutError):
        shared.recv(100)
    shared.settimeout(None)
    other.sendall(b"last")
    other.shutdown(socket.SHUT_WR)
    assert shared.recv(100) == b"last"
    with contextlib.suppress(ssl.SSLEOFError):
        assert shared.recv(100) == b""
