"""A node whose supervisor is played by the test, and runs the relays of ports that the head asks for, in threads of the test."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import contextlib
import socket
import threading

import httpx

from phalanx.wire.stream_relay import GREETING, StreamRelay
from phalanx.wire.supervisor import (
    CommandsReply,
    ExecInput,
    ExecOutput,
    OpenExec,
    decode,
    decode_command,
    pack,
    unpack,
)
from tests.contract.api_head import Supervisor, bearer


class RelayNode(Supervisor):
    """Use it as a context manager. `opened`: the sessions that it was asked for."""

    def __init__(self, call, node_id="n0"):
        super().__init__(call, node_id)
        self.over, self.opened, self.threads = threading.Event(), [], []

    def __enter__(self):
        self.hello()
        self._start(self._follow)
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()

    def _start(self, run, *given):
        thread = threading.Thread(target=run, args=given, daemon=True)
        self.threads.append(thread)
        thread.start()

    @contextlib.contextmanager
    def _client(self):
        headers = bearer(f"node:{self.node_id}")
        with httpx.Client(base_url=self.call.url, timeout=30, trust_env=False, verify=False, headers=headers) as client:
            yield client

    def _follow(self):
        """Renew the lease, and start a relay for each session."""
        after = 0
        with self._client() as client:
            while not self.over.is_set():
                self.lease([("1", 1)])
                reply = client.get(f"/v1/node/commands?after={after}&wait_s=0.3")
                if reply.status_code != 200:
                    return
                found = decode(reply.content, CommandsReply)
                after = found.last
                for command in map(decode_command, found.commands):
                    if isinstance(command, OpenExec):
                        self.opened.append(command)
                        self._start(self._relay, command.session)

    def _relay(self, name):
        here, there = socket.socketpair()
        self._start(self._send_output, name, there)
        self._start(self._read_input, name, there)
        with here:
            StreamRelay(here.fileno(), here.fileno()).run()

    def _send_output(self, name, line):
        with self._client() as client, contextlib.suppress(OSError):
            offset, data = 0, GREETING
            while data:
                body = pack(ExecOutput(offset=offset, data=data))
                reply = client.post(f"/v1/node/exec/{name}/output?packed=1", content=body)
                if reply.status_code == 404:
                    return
                if reply.status_code == 204:
                    offset += len(data)
                    data = line.recv(1 << 18)

    def _read_input(self, name, line):
        after = 0
        with self._client() as client, line, contextlib.suppress(OSError):
            while True:
                reply = client.get(f"/v1/node/exec/{name}/input?after={after}&wait_s=0.5&packed=1")
                if reply.status_code != 200 or self.over.is_set():
                    line.shutdown(socket.SHUT_RDWR)
                    return
                data = unpack(reply.content, ExecInput).data
                line.sendall(data)
                after += len(data)
