"""Nodes that stage the same dataset: who reads what, real servers of chunks, and what they refuse."""

import hashlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from phalanx.api.nodes.data_peers import make_certificate
from phalanx.core.access.node_tokens import node_token
from phalanx.core.ids import NodeId
from phalanx.node.data.peer_link import PeerFile, PeerLink
from phalanx.node.data.staging import PeerGone, Staging
from phalanx.node.data.stored_dataset import StoredDataset
from phalanx.node.logic.dataset import CHUNK_BYTES_MIN, DataFile, Dataset
from phalanx.wire.data_peers import DataPeer, data_key, data_token, is_data_token
from phalanx.wire.head_http import fingerprint, unverified_context

SECRET = b"s" * 32
CHUNKS = 9
DATA = random.Random(3).randbytes((CHUNKS - 1) * CHUNK_BYTES_MIN + 321)
DATASET = Dataset("/d", [DataFile("a", CHUNK_BYTES_MIN + 7, "v"), DataFile("b", len(DATA) - CHUNK_BYTES_MIN - 7, "v")])


class Source:
    """The source, which counts what is read."""

    threads = 4

    def __init__(self):
        self.bytes = 0
        self._lock = threading.Lock()

    def read(self, file, offset, size_bytes):
        with self._lock:
            self.bytes += size_bytes
        begin = offset if file.path == "a" else CHUNK_BYTES_MIN + 7 + offset
        return DATA[begin : begin + size_bytes]


class Node:
    """A node's cache, its server, and how others reach it."""

    def __init__(self, tmp_path, rank, user="ann"):
        self.rank, self.name = rank, NodeId(f"n{rank}")
        self.cache = tmp_path / self.name
        self.stored = StoredDataset(str(self.cache / "data" / DATASET.id), DATASET)
        self.key = data_key(node_token(SECRET, self.name), user)
        certificate, secret = make_certificate(self.name)
        self.fingerprint = fingerprint(certificate)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-m", "phalanx.node.data.server_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        order = {"cache": str(self.cache), "address": "127.0.0.1", "key": self.key}
        order |= {"certificate": certificate, "certificate_key": secret}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, output = self.process.stdin, self.process.stdout
        self.input.write(json.dumps(order) + "\n")
        self.input.flush()
        self.output = output
        self.port = json.loads(output.readline())["port"]

    def peer(self, **more):
        about = {
            "node": self.name,
            "rank": self.rank,
            "address": "127.0.0.1",
            "port": self.port,
            "fingerprint": self.fingerprint,
            "token": data_token(self.key, time.time() + 60),
        }
        return DataPeer(**{**about, **more})

    def stage(self, source, nodes, peers, says=None):
        links = [PeerLink(one.peer(), DATASET.id) for one in peers]
        said = [] if says is None else says
        run = Staging(
            stored=self.stored, source=source, rank=self.rank, nodes=nodes, peers=lambda: links, log=said.append
        )
        return run.run()

    def fill(self):
        for index in range(CHUNKS):
            self.stored.put(index, DATA[index * CHUNK_BYTES_MIN :][: DATASET.chunk_size(index)])

    def bytes(self):
        return b"".join((self.cache / "data" / DATASET.id / "files" / name).read_bytes() for name in "ab")


@contextmanager
def cluster(tmp_path, count):
    with ExitStack() as stack:
        nodes = []
        for rank in range(count):
            node = Node(tmp_path, rank)
            stack.callback(node.process.wait)
            stack.callback(node.input.close)
            stack.callback(node.output.close)
            nodes.append(node)
        yield nodes


@pytest.mark.serial
def test_nodes_that_stage_together_read_each_chunk_of_the_source_once(tmp_path):
    source = Source()
    with cluster(tmp_path, 3) as nodes:
        threads = [
            threading.Thread(target=node.stage, args=(source, 3, [one for one in nodes if one is not node]))
            for node in nodes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(node.bytes() == DATA for node in nodes)
    assert source.bytes == len(DATA)


@pytest.mark.serial
def test_corrupt_chunk_of_a_peer_is_detected_and_read_from_the_source(tmp_path):
    source = Source()
    says: list[str] = []
    with cluster(tmp_path, 2) as (holder, node):
        holder.fill()
        with open(holder.stored.files + "/a", "r+b") as file:
            file.seek(100)
            file.write(b"damage")
        holder.rank = None  # it is outside the job
        last = node.stage(source, 1, [holder], says)
        assert node.bytes() == DATA
    assert source.bytes == last.from_source == CHUNK_BYTES_MIN
    assert any("node n0: chunk 0" in line and "SHA-256" in line for line in says)


@pytest.mark.serial
def test_part_of_a_node_that_died_is_read_from_the_source_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.node.data.staging._SILENT_S", 0.5)
    source = Source()
    with cluster(tmp_path, 2) as (dead, node):
        dead.stored.put(0, DATA[:CHUNK_BYTES_MIN])
        dead.process.kill()
        node.stage(source, 2, [dead])
        assert node.bytes() == DATA


@pytest.mark.serial
def test_server_refuses_foreign_tokens_and_peers_refuse_a_foreign_server(tmp_path):
    with cluster(tmp_path, 1) as (node,):
        node.fill()
        other_user = data_token(data_key(node_token(SECRET, node.name), "bob"), time.time() + 60)
        other_node = data_token(data_key(node_token(SECRET, NodeId("n9")), "ann"), time.time() + 60)
        old = data_token(node.key, time.time() - 4000)
        for token in (other_user, other_node, old, "", "x" * 4000):
            with pytest.raises(PeerGone, match="401"):
                PeerLink(node.peer(token=token), DATASET.id).poll()
        with pytest.raises(PeerGone, match="404"):
            PeerLink(node.peer(), "0" * 32).poll()
        with pytest.raises(PeerGone, match="404"):
            PeerLink(node.peer(), f"../{DATASET.id}").poll()
        with pytest.raises(PeerGone, match="certificate"):
            PeerLink(node.peer(fingerprint="sha256:" + "0" * 64), DATASET.id).poll()
        plain = http.client.HTTPConnection("127.0.0.1", node.port, timeout=5)
        plain.request("GET", f"/v1/data/{DATASET.id}/chunks")
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.getresponse()
        assert PeerLink(node.peer(), DATASET.id).read(8) == DATA[8 * CHUNK_BYTES_MIN :]
    assert unverified_context().verify_mode == 0


def test_token_is_for_one_key_and_one_time():
    token = data_token("key", 1000.0)
    assert is_data_token("key", token, 1200.0)
    assert not is_data_token("key", token, 1301.0)
    assert not is_data_token("other", token, 900.0)
    assert not is_data_token("key", f"9999.{token.partition('.')[2]}", 900.0)
    assert not is_data_token("key", "\udce9.x", 900.0)


def test_peers_of_a_file_keep_what_they_learned_when_it_gets_new_tokens(tmp_path):
    path = tmp_path / "peers"
    peers = PeerFile(str(path), DATASET.id)
    assert list(peers()) == []
    about = DataPeer(
        node=NodeId("n1"), rank=1, address="a", port=1, fingerprint="f", token=hashlib.sha256().hexdigest()
    )
    path.write_bytes(msgspec.json.encode([about]))
    (first,) = peers()
    path.with_suffix(".new").write_bytes(msgspec.json.encode([msgspec.structs.replace(about, token="fresh")]))
    path.with_suffix(".new").replace(path)
    (second,) = peers()
    assert second is first
    assert isinstance(second, PeerLink)
    assert second.about.token == "fresh"
