"""The servers of chunks on this node, and the reports on them to the head: one for each user whose jobs stage data here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from phalanx.core.ids import SupervisorId
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.accounts import NodeAccount
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.wire.data_peers import DataPeersReply, DataPeersRequest, data_key
from phalanx.wire.head_http import FINGERPRINT_PREFIX

_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.data.server_main")
_ASK_S: Final = 5.0
_EVERY_S: Final = 2.0  # how late a node learns of another that begins to stage
_REFUSALS: Final = (HeadUnavailable, RegistrationRequired, RequestRejected, msgspec.MsgspecError)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Server:
    process: subprocess.Popen[str]
    port: int
    fingerprint: str


@dataclass(slots=True)
class DataServers:
    """See the module. Called by many threads. `address`: of this node, for its peers."""

    access: HeadAccess
    supervisor_id: SupervisorId
    address: str
    _servers: dict[str, _Server] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def share(self, member: MemberRuntime, cache: str, peers: str) -> Iterator[None]:
        """While in the context: report this node's server to the head, and keep the peers in a file of the member.

        A head of an earlier release, or one that does not answer, leaves the file empty: the node then reads the source alone.
        """
        connection, ended = HeadConnection(self.access), threading.Event()
        self._exchange(member, cache, peers, connection)
        thread = threading.Thread(
            target=self._repeat, args=(member, cache, peers, connection, ended), name="data-peers", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            connection.close()

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            for server in self._servers.values():
                _stop(server.process)
            self._servers.clear()

    def _repeat(
        self, member: MemberRuntime, cache: str, peers: str, connection: HeadConnection, ended: threading.Event
    ) -> None:
        while not ended.wait(_EVERY_S):
            self._exchange(member, cache, peers, connection)

    def _exchange(self, member: MemberRuntime, cache: str, peers: str, connection: HeadConnection) -> None:
        try:
            reply = self._ask(member, self._running(member.prepare.user), connection)
            if reply.certificate_pem:
                reply = self._ask(member, self._start(member, cache, reply), connection)
            with acting_as(member.account):
                fresh = f"{peers}.new"
                descriptor = os.open(
                    fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
                )
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(reply.peers))
                os.replace(fresh, peers)
        except _REFUSALS as error:
            _log.debug("peers of job %s: %s", member.key.job_id, error)
        except (OSError, ValueError) as error:
            _log.warning("job %s shares no data with other nodes: %s", member.key.job_id, error)

    def _ask(self, member: MemberRuntime, server: _Server | None, connection: HeadConnection) -> DataPeersReply:
        request = DataPeersRequest(
            supervisor_id=self.supervisor_id,
            job_id=member.key.job_id,
            epoch=member.key.epoch,
            port=0 if server is None else server.port,
            fingerprint="" if server is None else server.fingerprint,
        )
        body = connection.call("POST", "/v1/node/data", msgspec.json.encode(request), timeout_s=_ASK_S)
        return msgspec.json.decode(body, type=DataPeersReply)

    def _running(self, user: str) -> _Server | None:
        with self._lock:
            server = self._servers.get(user)
            return server if server is not None and server.process.poll() is None else None

    def _start(self, member: MemberRuntime, cache: str, reply: DataPeersReply) -> _Server:
        """Start the server of the member's user.

        Raises:
            OSError, ValueError: it does not start.
        """
        user = member.prepare.user
        with self._lock:
            server = self._servers.get(user)
            if server is not None and server.process.poll() is None:
                return server
            process = subprocess.Popen(
                _PROGRAM,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd="/",
                env={"PATH": os.defpath},  # it may run as another account, which reads the environment of its processes
                start_new_session=True,
                **_account(member.account),
            )
            order = {
                "cache": cache,
                "address": self.address,
                "key": data_key(self.access.token, user),
                "certificate": reply.certificate_pem,
                "certificate_key": reply.key_pem,
            }
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
                port = int(json.loads(process.stdout.readline())["port"])
            except (OSError, ValueError):
                _stop(process)
                raise
            der = ssl.PEM_cert_to_DER_cert(reply.certificate_pem)
            server = _Server(process, port, FINGERPRINT_PREFIX + hashlib.sha256(der).hexdigest())
            self._servers[user] = server
            return server


def _account(account: NodeAccount | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": account.groups}


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
