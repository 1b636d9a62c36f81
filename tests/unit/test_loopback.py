"""Plain HTTP is spoken to root, to ourselves and to the account of the head alone, whoever holds the head's port."""

import os
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.app.node import _head_uids
from phalanx.node.head_link import peer_account
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess, HeadConnection, HeadUnavailable
from phalanx.node.head_link.peer_account import (
    HEAD_UID_VARIABLE,
    UntrustedPeer,
    check_peer_account,
    peer_uids,
)
from phalanx.node.head_link.socket_lookup import find_socket

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs another account to listen under")


@pytest.fixture
def without_lookup(monkeypatch):
    """A kernel that does not answer questions about one socket."""

    def refuse(*_):
        raise OSError("no sock_diag here")

    monkeypatch.setattr(peer_account, "find_socket", refuse)


@pytest.fixture(params=["lookup", "tables"])
def means(request):
    """How the owner of the other end is found: by a question about one socket, or in the tables of all."""
    if request.param == "tables":
        request.getfixturevalue("without_lookup")
    return request.param


@contextmanager
def listening(uid=None, *, family=socket.AF_INET, host="127.0.0.1", takes=True):
    """A process of this account that listens: its port, and what it was told, once it is asked. `takes`: it takes one connection at once."""
    told_in, told_out = os.pipe()
    go_in, go_out = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        os.close(told_in)
        os.close(go_out)
        try:
            if uid is not None:
                os.setgid(uid)
                os.setuid(uid)
            with socket.socket(family) as server:
                server.bind((host, 0))
                server.listen()
                os.write(told_out, str(server.getsockname()[1]).encode().ljust(8))
                if not takes:
                    os.read(go_in, 1)
                taken, _ = server.accept()
                if takes:
                    os.write(told_out, b"taken".ljust(8))
                    os.read(go_in, 1)
                taken.settimeout(0.2)
                try:
                    got = taken.recv(1 << 16)
                except TimeoutError:
                    got = b""
                os.write(told_out, got)
                code = 0
        finally:
            os._exit(code)
    os.close(told_out)
    os.close(go_in)

    def heard():
        os.write(go_out, b"!")
        return os.read(told_in, 1 << 16)

    try:
        yield int(os.read(told_in, 8)), (lambda: os.read(told_in, 8)) if takes else (lambda: None), heard
    finally:
        os.close(go_out)
        os.close(told_in)
        os.waitpid(child, 0)


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize(
    ("family", "host", "asked"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
    ],
)
@AS_ROOT
def test_owner_of_the_other_end_is_found_before_and_after_it_is_taken(family, host, asked, takes, means):
    with (
        listening(NOBODY, family=family, host=host, takes=takes) as (port, taken, _),
        socket.create_connection((asked, port)) as wire,
    ):
        taken()
        assert peer_uids(wire) == {NOBODY}
        with pytest.raises(UntrustedPeer, match=f"uid {NOBODY}"):
            check_peer_account(wire, frozenset())
        check_peer_account(wire, frozenset({NOBODY}))


def test_we_ourselves_are_spoken_to(means):
    with listening() as (port, taken, _), socket.create_connection(("127.0.0.1", port)) as wire:
        taken()
        assert peer_uids(wire) == {os.geteuid()}
        check_peer_account(wire, frozenset())


@pytest.mark.usefixtures("without_lookup")
def test_row_without_an_inode_is_the_listeners(tmp_path, monkeypatch):
    """Linux before 6.16 gives an account of 0 to a connection that nobody took."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as wire:
        ours = peer_account._words(*wire.getsockname())[0]
        theirs = peer_account._words(*wire.getpeername())[0]
        table = tmp_path / "tcp"
        head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        row = "   0: {} {} {} 00000000:00000000 00:00000000 00000000 {:5} 0 {} 1 0\n"
        lines = [row.format(theirs, "00000000:0000", "0A", 1234, 77), row.format(theirs, ours, "01", 0, 0)]
        table.write_text(head + "".join(lines))
        monkeypatch.setattr(peer_account, "TCP_TABLES", (str(table), str(tmp_path / "none")))
        assert peer_uids(wire) == {1234}


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize(
    ("elsewhere", "counts"),
    [("127.0.0.2", False), ("10.0.0.5", False), ("::1", False), ("127.0.0.1", True), ("0.0.0.0", True), ("::", True)],
)
def test_only_who_listens_at_that_address_may_hold_it(tmp_path, monkeypatch, elsewhere, counts):
    """Found by reading: whoever listened at any address with that number had the true head refused, while it was slow to take connections."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as wire:
        port = wire.getpeername()[1]
        row = "   0: {} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {:5} 0 77 1 0\n"
        lines = [
            row.format(peer_account._words("127.0.0.1", port)[0], 0),
            row.format(peer_account._words(elsewhere, port)[0], 1234),
        ]
        table = tmp_path / "tcp"
        table.write_text("head\n" + "".join(lines))
        monkeypatch.setattr(peer_account, "TCP_TABLES", (str(table),))
        assert peer_uids(wire) == ({0, 1234} if counts else {0})


@pytest.mark.usefixtures("without_lookup")
def test_system_that_tells_nothing_is_no_reason_to_be_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_account, "TCP_TABLES", (str(tmp_path / "none"),))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as wire:
        assert peer_uids(wire) == set()
        check_peer_account(wire, frozenset())


def test_one_socket_is_asked_for_and_not_all_tables_are_read(tmp_path, monkeypatch):
    """The tables of a busy machine have thousands of rows, and each connection to a head needs an answer."""
    monkeypatch.setattr(peer_account, "TCP_TABLES", (str(tmp_path / "none"),))
    with listening() as (port, taken, _), socket.create_connection(("127.0.0.1", port)) as wire:
        taken()
        assert peer_uids(wire) == {os.geteuid()}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    assert find_socket(nobody, None) is None


class Elsewhere:
    """A socket to another machine, as far as it is asked."""

    def getpeername(self):
        return ("10.0.0.9", 80)


def test_another_machine_is_not_spoken_to_in_the_clear():
    with pytest.raises(UntrustedPeer, match="TLS"):
        check_peer_account(Elsewhere(), frozenset())  # type: ignore[arg-type]


@AS_ROOT
def test_token_is_not_shown_to_whoever_took_the_heads_port():
    """Found by reading: the token went out with the first request, and orders for root came back."""
    with listening(NOBODY, takes=False) as (port, _, heard):
        access = HeadAccess(address=HeadAddress(f"http://127.0.0.1:{port}", None), token="secret-token")
        with pytest.raises(HeadUnavailable, match=f"uid {NOBODY}"):
            HeadConnection(access).call("POST", "/v1/node/hello", b"{}", timeout_s=5.0)
        assert heard() == b""


def test_head_of_our_own_is_asked():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            wire, _ = server.accept()
            with wire:
                wire.recv(1 << 16)
                wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        access = HeadAccess(address=HeadAddress(f"http://127.0.0.1:{server.getsockname()[1]}", None), token="t")
        assert HeadConnection(access).call("GET", "/v1/node/commands", timeout_s=5.0) == b"{}"
        thread.join()
    assert Path(peer_account.TCP_TABLES[0]).exists(), "nothing is seen here of who answers"


def test_accounts_of_other_heads_are_told_too(monkeypatch):
    monkeypatch.delenv(HEAD_UID_VARIABLE, raising=False)
    assert peer_account.head_uid_environment() == {HEAD_UID_VARIABLE: str(os.geteuid())}
    monkeypatch.setenv(HEAD_UID_VARIABLE, "1001,1002")
    assert _head_uids(peer_account.head_uid_environment()) == {1001, 1002, os.geteuid()}
    assert _head_uids({}) == frozenset()
    assert _head_uids({HEAD_UID_VARIABLE: "nobody, 7"}) == frozenset({7})
