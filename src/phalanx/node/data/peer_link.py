"""Another node that serves chunks, as the staging program sees it: its journal, and chunks by their index. Implements `staging.Peer`."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from phalanx.node.data.staging import Peer, PeerGone
from phalanx.node.data.stored_dataset import RECORD
from phalanx.wire.data_peers import DataPeer
from phalanx.wire.head_http import FINGERPRINT_PREFIX, unverified_context

_TIMEOUT_S: Final = 30.0  # of each send and receive: a chunk of 4 MiB at 1 Mbit/s sends something in that time
_PEERS_BYTES_MAX: Final = 4 << 20


class PeerLink:
    """See the module. Thread-safe: each thread has a connection of its own."""

    def __init__(self, peer: DataPeer, dataset: str) -> None:
        self.about = peer
        self.name: str = peer.node
        self.rank = peer.rank
        self.digests: dict[int, bytes] = {}
        self._dataset = dataset
        self._after = 0
        self._own = threading.local()

    def poll(self) -> bool:
        """See `Peer`."""
        data = self._get(f"chunks?after={self._after}")
        whole = len(data) - len(data) % RECORD.size
        for index, digest in RECORD.iter_unpack(data[:whole]):
            self.digests[index] = digest
        self._after += whole
        return whole > 0

    def read(self, index: int) -> bytes:
        """See `Peer`."""
        return self._get(f"chunk/{index}")

    def _get(self, what: str) -> bytes:
        headers = {"Authorization": f"Bearer {self.about.token}"}
        try:
            connection = self._connection()
            connection.request("GET", f"/v1/data/{self._dataset}/{what}", headers=headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._own.connection = None
            raise PeerGone(f"{self.about.address} port {self.about.port}: {error!r}") from error
        if answer.status != 200:
            raise PeerGone(f"it answers {answer.status} to {what.partition('?')[0]}")
        return data

    def _connection(self) -> http.client.HTTPSConnection:
        opened: http.client.HTTPSConnection | None = getattr(self._own, "connection", None)
        if opened is None:
            context = unverified_context()  # the certificate is compared below, before the token is sent
            opened = http.client.HTTPSConnection(
                self.about.address, self.about.port, timeout=_TIMEOUT_S, context=context
            )
            opened.connect()
            der = opened.sock.getpeercert(binary_form=True) or b""
            if not hmac.compare_digest(FINGERPRINT_PREFIX + hashlib.sha256(der).hexdigest(), self.about.fingerprint):
                opened.close()
                raise OSError("another program answers there: its certificate is not the one that the head named")
            self._own.connection = opened
        return opened


class PeerFile:
    """The peers that the supervisor writes to a file, as links that keep what they learned when the file changes."""

    def __init__(self, path: str, dataset: str) -> None:
        self._path, self._dataset = path, dataset
        self._links: dict[str, PeerLink] = {}
        self._seen: object = None

    def __call__(self) -> Sequence[Peer]:
        """The peers now; empty before the supervisor knows any."""
        try:
            found = os.stat(self._path)
            mark = (found.st_ino, found.st_mtime_ns)
            if mark != self._seen:
                with open(self._path, "rb") as file:
                    listed = msgspec.convert(json.loads(file.read(_PEERS_BYTES_MAX)), list[DataPeer])
                self._links = {one.node: self._link(one) for one in listed}
                self._seen = mark
        except (OSError, ValueError, msgspec.MsgspecError):
            pass
        return list(self._links.values())

    def _link(self, peer: DataPeer) -> PeerLink:
        known = self._links.get(peer.node)
        if known is None or (known.about.port, known.about.fingerprint) != (peer.port, peer.fingerprint):
            return PeerLink(peer, self._dataset)
        known.about = peer  # with a new token
        return known
