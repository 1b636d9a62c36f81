"""The relay and the head's agent on loopback: who may attach, what is forwarded, what is bounded, what ends."""

import asyncio
import contextlib
import os
import secrets
import socket
import stat

import pytest

from phalanx.api.http import relay_agent
from phalanx.api.http.relay_agent import IDLE_CONNECTIONS, RelayAgent, RelaySettings
from phalanx.app.join_service import parse_relay
from phalanx.app.options import parse_arguments, resolve_options
from phalanx.app.relay import server as relay_server
from phalanx.app.relay.key_file import read_relay_key
from phalanx.app.relay.server import RelayLimits, RelayServer, read_or_create_relay_key
from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import BadFile, BadRequest, Conflict
from phalanx.wire import head_relay
from phalanx.wire.keepalive import receive_exactly

KEY = bytes(range(32))
TLS = b"\x16\x03\x01"
HANG_S = 20.0

pytestmark = pytest.mark.timeout(60)


class Rig:
    """A relay and a head on one loop. The head keeps what it takes in `taken`."""

    def __init__(self, *, key=KEY, head_key=KEY, limits=None, heads=1):
        self.key, self.head_key, self.limits, self.heads = key, head_key, limits or RelayLimits(), heads
        self.taken: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.opened = []

    async def __aenter__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start_relay()
        self.agents = [self.agent(self.head_key) for _ in range(self.heads)]
        return self

    def agent(self, key=KEY):
        return RelayAgent(RelaySettings(host="127.0.0.1", port=self.port, key=key), self.taken.put_nowait)

    def start_relay(self):
        self.relay = RelayServer(key=self.key, limits=self.limits)
        self.serving = asyncio.create_task(self.relay.serve(self.listener))

    async def stop_relay(self):
        """As a killed process: all its sockets close."""
        everything = [self.serving, *self.relay._tasks, *(one.task for one in self.relay._ready if one.task)]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
        for idle in list(self.relay._attached):
            idle.socket.close()

    async def client(self, first=TLS):
        connection = socket.socket()
        self.opened.append(connection)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", self.port))
        if first:
            await loop.sock_sendall(connection, first)
        return connection

    async def pair(self):
        """A client and the head's end of its connection."""
        client = await self.client()
        head = await self.taken.get()
        self.opened.append(head)
        assert await receive_exactly(head, len(TLS)) == TLS
        return client, head

    async def attached(self, number=IDLE_CONNECTIONS):
        await until(lambda: len(self.relay._ready) >= number)

    async def __aexit__(self, *_):
        for agent in self.agents:
            agent.close()
        await self.stop_relay()
        for one in [self.listener, *self.opened]:
            one.close()


def run(scene):
    async def bounded():
        async with asyncio.timeout(HANG_S):
            await scene()

    asyncio.run(bounded())


async def until(condition):
    for _ in range(int(HANG_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def ended(connection):
    """Whether the other end disconnected."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    return True


def test_bytes_of_both_directions_arrive_unchanged_and_an_end_follows_the_last():
    async def scene():
        async with Rig() as rig:
            loop = asyncio.get_running_loop()
            client, head = await rig.pair()
            sent = secrets.token_bytes(1 << 20)

            async def send(connection):
                await loop.sock_sendall(connection, sent)
                connection.shutdown(socket.SHUT_WR)

            for source, target in ((client, head), (head, client)):
                sending = asyncio.create_task(send(source))
                assert await receive_exactly(target, len(sent)) == sent
                await sending
                assert await ended(target)
            await until(lambda: not rig.relay.carried)

    run(scene)


def test_more_clients_at_once_than_idle_connections_are_all_served():
    async def scene():
        async with Rig() as rig:
            pairs = await asyncio.gather(*(rig.pair() for _ in range(4 * IDLE_CONNECTIONS)))
            loop = asyncio.get_running_loop()
            # Which client has which end is seen by the bytes.
            for number, (client, _) in enumerate(pairs):
                await loop.sock_sendall(client, number.to_bytes(4))
            numbers = [int.from_bytes(await receive_exactly(head, 4)) for _, head in pairs]
            assert sorted(numbers) == list(range(len(pairs)))

    run(scene)


def test_a_slow_reader_slows_its_writer_and_the_relay_holds_little():
    async def scene():
        async with Rig() as rig:
            client, head = await rig.pair()
            head.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            loop, sent = asyncio.get_running_loop(), 0
            with contextlib.suppress(TimeoutError):
                while sent < 64 << 20:  # until the kernel's buffers and the relay's chunk are full
                    async with asyncio.timeout(0.5):
                        await loop.sock_sendall(client, bytes(1 << 16))
                        sent += 1 << 16
            assert sent < 64 << 20

    run(scene)


def test_a_stranger_without_the_key_is_no_head(caplog):
    async def scene():
        async with Rig(head_key=bytes(32)) as rig:
            await until(lambda: "does not have the key" in caplog.text)
            assert not rig.relay._attached
            assert "does not have the key" in rig.agents[0].status.problem

    run(scene)


def test_a_false_proof_is_refused_by_the_relay_and_a_returned_one_too():
    async def scene():
        async with Rig(heads=0) as rig:
            loop = asyncio.get_running_loop()
            for reflects in (False, True):
                stranger = await rig.client(head_relay.GREETING + bytes(16) + bytes(32))
                answer = await receive_exactly(stranger, 64)
                await loop.sock_sendall(stranger, answer[32:] if reflects else bytes(32))
                assert await ended(stranger)
            assert not rig.relay._attached

    run(scene)


def test_the_first_head_keeps_the_relay_until_it_has_gone(caplog, monkeypatch):
    monkeypatch.setattr(relay_agent, "_RETRY_MAX_S", 0.05)  # the second tries several times meanwhile

    async def scene():
        async with Rig() as rig:
            await rig.attached()
            second = rig.agent()
            rig.agents.append(second)
            await until(lambda: "another head is attached" in caplog.text)
            assert len({one.instance for one in rig.relay._attached}) == 1
            client, head = await rig.pair()
            rig.agents[0].close()  # its idle connections end, and one still carries
            await until(lambda: not rig.relay._attached)
            await asyncio.sleep(0.5)
            assert not rig.relay._attached
            client.close()
            head.close()
            await until(lambda: {one.instance for one in rig.relay._attached} == {second._instance})
            await rig.pair()

    run(scene)


def test_only_tls_is_forwarded_and_plain_http_gets_one_clear_answer():
    async def scene():
        async with Rig() as rig:
            await rig.attached()
            client = await rig.client(b"GET http://elsewhere.example/ HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
            answer = b""
            while part := await asyncio.get_running_loop().sock_recv(client, 4096):
                answer += part
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"write https://" in answer
            assert rig.taken.empty()

    run(scene)


def test_without_a_head_a_client_waits_and_is_disconnected(monkeypatch):
    monkeypatch.setattr(relay_server, "WAIT_S", 0.1)

    async def scene():
        async with Rig(heads=0) as rig:
            assert await ended(await rig.client())
            assert not rig.relay._clients
            assert not rig.relay._sources

    run(scene)


def test_connections_are_bounded_by_source_and_in_all():
    async def scene(limits):
        async with Rig(heads=0, limits=limits) as rig:
            for _ in range(3):
                await rig.client(b"")
            assert await ended(await rig.client(b""))
            rig.opened[0].close()
            await until(lambda: rig.relay._sources.total() < 3)
            await rig.client(b"")
            await until(lambda: rig.relay._sources.total() == 3)

    run(lambda: scene(RelayLimits(connections=3)))
    run(lambda: scene(RelayLimits(per_source=3)))


def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(relay_server, "OPENING_S", 0.1)

    async def scene():
        async with Rig(heads=0) as rig:
            for first in (b"", head_relay.GREETING, head_relay.GREETING + bytes(48)):
                silent = await rig.client(first)
                with contextlib.suppress(ConnectionError):
                    while await asyncio.get_running_loop().sock_recv(silent, 4096):
                        pass
            assert not rig.relay._attached

    run(scene)


def test_an_idle_connection_whose_head_is_silent_is_passed_over(monkeypatch):
    monkeypatch.setattr(relay_server, "CONFIRM_S", 0.05)

    async def scene():
        async with Rig(heads=0) as rig:
            # A head that attaches by hand and then no longer answers, as behind a NAT that forgot the connection.
            dead = await rig.client(head_relay.GREETING + bytes(16) + bytes(32))
            answer = await receive_exactly(dead, 64)
            proof = head_relay.head_proof(KEY, bytes(16), bytes(32), answer[:32])
            await asyncio.get_running_loop().sock_sendall(dead, proof)
            assert await receive_exactly(dead, 1) == head_relay.ATTACHED
            client = asyncio.create_task(rig.pair())
            assert await receive_exactly(dead, 1) == head_relay.CARRY
            assert await ended(dead)
            rig.agents.append(rig.agent())
            await client

    run(scene)


def test_idle_connections_are_pinged_and_stay(monkeypatch):
    monkeypatch.setattr(relay_server, "PING_EVERY_S", 0.02)
    pings = []

    async def scene():
        async with Rig() as rig:
            await rig.attached()
            before = {id(one) for one in rig.relay._attached}
            watch = rig.relay._watch

            def counting(_, idle):
                pings.append(idle)
                watch(idle)

            monkeypatch.setattr(RelayServer, "_watch", counting)
            await until(lambda: len(pings) >= 5 * IDLE_CONNECTIONS)
            assert {id(one) for one in rig.relay._attached} == before
            await rig.pair()

    run(scene)


def test_the_head_attaches_again_after_the_relay_was_away():
    async def scene():
        async with Rig() as rig:
            await rig.attached()
            status = rig.agents[0].status
            assert status.problem == ""
            await rig.stop_relay()
            await until(lambda: status.problem)
            rig.start_relay()
            await rig.pair()
            await rig.attached()
            assert status.problem == ""

    run(scene)


def test_the_key_file_is_private_and_checked(tmp_path):
    path = str(tmp_path / "new" / "relay.key")
    key = read_or_create_relay_key(path)
    assert len(key) == 32
    assert read_or_create_relay_key(path) == key == read_relay_key(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(BadFile, match="other accounts"):
        read_relay_key(path)
    os.chmod(path, 0o600)
    (tmp_path / "new" / "relay.key").write_text("phxr.12")
    with pytest.raises(BadRequest, match="does not have the key"):
        read_relay_key(path)
    with pytest.raises(BadFile, match="No such file"):
        read_relay_key(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_one_machine_is_one_source(address, source):
    assert relay_server._source(address) == source


@pytest.mark.parametrize(
    "text", ["", "relay.example.org", "0.0.0.0:7600", "[::]:7600", "h:0", "h:65536", "h:x", "h:\u0661"]
)
def test_a_relay_is_a_host_and_a_port(text):
    with pytest.raises(BadRequest, match="not a host and port"):
        parse_relay(text)


def test_a_relay_goes_with_its_key_and_without_a_listener(tmp_path):
    home = StateFolder(path=str(tmp_path))
    relay = ["--relay", "relay.example.org:443", "--virtual", "1x2"]

    def resolved(*words):
        return resolve_options(parse_arguments([*relay, *words]), home, 0)

    with pytest.raises(BadFile, match=r"relay\.key"):
        resolved()
    key = read_or_create_relay_key(str(tmp_path / "relay.key"))
    found = resolved()
    assert (found.relay_key, found.listen.url, found.listen.own_host) == (key, "https://relay.example.org:443", "")
    with pytest.raises(Conflict, match="--listen"):
        resolved("--listen", "10.0.0.5")
    assert resolved("--relay", "off").listen is None
