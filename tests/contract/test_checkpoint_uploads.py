"""What the head keeps for nodes that do not share its folders: the real head's API, and the supervisor's own hands at the other end."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import math
import os
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest

from phalanx.core.access.node_tokens import node_token
from phalanx.core.errors import BadRequest, Conflict, TryLater
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.reports import CheckpointSaved, MemberReady, MemberStarted, NodeDied
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.states import AttemptState
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess, HeadConnection
from phalanx.node.logic.events import MemberKey
from phalanx.node.logic.local_copies import checkpoints_folder, epoch_folder, local_checkpoint_path
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.scratch import scratch_of
from phalanx.node.transfer import checkpoint_download
from phalanx.node.transfer.checkpoint_upload import CheckpointUpload, CheckpointUploader
from phalanx.node.transfer.shared_storage import check_head_files
from phalanx.store.checkpoints.copies import CheckpointCopies, CheckpointKey
from phalanx.torch import checkpoint_folder as folders
from phalanx.wire import manifest
from phalanx.wire.stored_files import CheckpointUploadReply
from phalanx.wire.supervisor import CommandsReply, decode_command
from tests.contract import records
from tests.contract.api_head import SECRET, ApiHead, Supervisor, code, until

BIG = 9 << 20  # more than two pieces


@pytest.fixture
def head(tmp_path):
    head = ApiHead(str(tmp_path / "head"))
    head.driver.leases.grant_long(3600.0, math.inf)  # nobody renews here
    yield head
    head.close()


@pytest.fixture
def call(head):
    with head.calling() as call:
        yield call


class Server:
    """One node of the gang, with a disk of its own."""

    def __init__(self, call, tmp_path, name):
        self.call, self.name, self.folder = call, name, str(tmp_path / name)
        self.said = []
        self.supervisor = Supervisor(call, name, f"life-of-{name}", devices=1)
        self.supervisor.hello()
        self.supervisor.lease()
        self.access = HeadAccess(address=HeadAddress(call.url, None), token=node_token(SECRET, name))
        self.ended = threading.Event()
        self.uploader = CheckpointUploader(self.access, self.ended)

    def prepare(self):
        reply = self.call(f"node:{self.name}", "GET", "/v1/node/commands?wait_s=3").content
        commands = [decode_command(framed) for framed in msgspec.json.decode(reply, type=CommandsReply).commands]
        order = [command for command in commands if isinstance(command, PrepareTasks)][-1]
        key = MemberKey(order.job_id, order.epoch, order.generation)
        scratch = scratch_of(self.folder, order.job_id, order.epoch)
        self.present = MemberRuntime(
            key=key,
            prepare=order,
            grant=order.allocation.grant_on(self.name),
            scratch=scratch,
            workdir="/",
            checkpoints=checkpoints_folder(self.folder, order),
        )
        return order

    def place(self):
        return {
            "job_id": self.present.key.job_id,
            "epoch": self.present.key.epoch,
            "generation": 0,
            "node_id": self.name,
        }

    def save(self, step, files, whole):
        """Write this node's part of a checkpoint, and the manifest of all of it."""
        epoch = self.present.key.epoch
        path = Path(epoch_folder(self.present.checkpoints, self.present.prepare)) / f"step-{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (path / name).write_bytes(data)
        sealed = [
            manifest.ManifestFile(path=name, size_bytes=len(data), crc32=crc(data)) for name, data in whole.items()
        ]
        encoded = folders.encode_manifest(step=step, epoch=epoch, world_size=2, files=sealed)
        return str(path), folders.write_manifest(str(path), encoded)

    def upload(self, step, path, digest, *, kept=None):
        self.uploader.submit(
            CheckpointUpload(
                job_id=self.present.key.job_id,
                epoch=self.present.key.epoch,
                step=step,
                digest=digest,
                folder=path,
                note=self.said.append,
                on_stored=kept,
            )
        )

    def idle(self):
        return not self.uploader.unfinished_folders()


def crc(data):
    return zlib.crc32(data)


@pytest.fixture
def gang(call, tmp_path):
    """A job on n0 and n1, which share nothing."""
    nodes = [Server(call, tmp_path, name) for name in ("n0", "n1")]
    job = call.submit(gpus="2x1", tasks_per_node=1)
    orders = [node.prepare() for node in nodes]
    assert [order.kept for order in orders] == [True, True]
    for number, node in enumerate(nodes):
        node.supervisor.tell(MemberReady(**node.place(), port=29500 if number == 0 else None))
    for node in nodes:
        node.supervisor.tell(MemberStarted(**node.place(), at_s=1.0))
    yield job, nodes
    for node in nodes:
        node.ended.set()


def parts(step):
    return {"a.bin": bytes([step]) * BIG, "empty": b""}, {"b.bin": bytes([step, 1]) * 1000}


def save_everywhere(nodes, step):
    """Both nodes hold their part; answers where on each, and the digest."""
    both = parts(step)
    whole = {**both[0], **both[1]}
    saved = [node.save(step, part, whole) for node, part in zip(nodes, both, strict=True)]
    return [path for path, _ in saved], saved[0][1]


def publish(nodes, step):
    """What supervisors do with a checkpoint, to the end."""
    paths, digest = save_everywhere(nodes, step)
    kept = threading.Event()
    nodes[1].upload(step, paths[1], digest)
    nodes[0].upload(step, paths[0], digest, kept=kept.set)
    assert kept.wait(100), nodes[0].said + nodes[1].said
    until(lambda: all(node.idle() for node in nodes))
    order = nodes[0].present.prepare
    resume = PublishedCheckpoint(
        epoch=order.epoch, step=step, path=f"{order.checkpoint_dir}/step-{step:08d}", digest=digest
    )
    nodes[0].supervisor.tell(
        CheckpointSaved(job_id=order.job_id, generation=0, node_id="n0", resume=resume, stall_s=0.0, write_s=0.0)
    )
    return resume


def test_a_node_proves_that_it_sees_the_heads_folders_and_no_other_does(head, call, tmp_path):
    server = Server(call, tmp_path, "n0")
    assert check_head_files(HeadConnection(server.access)) is True
    nonce = Path(head.parts.checkpoint_root, ".phalanx-head")
    nonce.write_text("another head's")
    assert check_head_files(HeadConnection(server.access)) is False
    nonce.unlink()
    assert check_head_files(HeadConnection(server.access)) is False


def test_parts_of_two_nodes_become_one_checkpoint_that_is_told_only_when_it_is_whole(head, gang):
    _, nodes = gang
    paths, digest = save_everywhere(nodes, 7)
    kept = threading.Event()
    nodes[0].upload(7, paths[0], digest, kept=kept.set)
    until(lambda: list(Path(head.parts.checkpoint_root).rglob("*.tmp-kept-*/a.bin")))
    order = nodes[0].present.prepare
    assert not kept.wait(0.5)
    assert not os.path.exists(f"{order.checkpoint_dir}/step-00000007")
    nodes[1].upload(7, paths[1], digest)
    assert kept.wait(100)
    manifest.verify(f"{order.checkpoint_dir}/step-00000007", expected_digest=digest)
    assert not list(Path(head.parts.checkpoint_root).rglob("*.tmp-*"))
    assert nodes[0].said == nodes[1].said == []


def test_a_replaced_gang_has_the_checkpoint_brought_and_what_a_node_holds_stays(gang, call, tmp_path):
    _, nodes = gang
    resume = publish(nodes, 7)
    own = Path(local_checkpoint_path(nodes[1].present.prepare, resume, nodes[1].present.checkpoints))
    held = (own / "b.bin").stat().st_ino
    checkpoint_download.download_checkpoint(nodes[1].present, resume, nodes[1].access, nodes[1].present.checkpoints)
    manifest.verify(str(own), expected_digest=resume.digest)
    assert (own / "b.bin").stat().st_ino == held
    (own / "b.bin").write_bytes(b"rotten")
    (own / "a.bin.partial").write_bytes(parts(7)[0]["a.bin"][: BIG // 2])  # a fetch that broke off
    (own / "a.bin").unlink()
    checkpoint_download.download_checkpoint(nodes[1].present, resume, nodes[1].access, nodes[1].present.checkpoints)
    manifest.verify(str(own), expected_digest=resume.digest)


def test_a_copy_that_rots_on_the_heads_disk_is_passed_over_for_the_one_before(gang):
    _, nodes = gang
    older, newer = publish(nodes, 7), publish(nodes, 9)
    with open(f"{newer.path}/b.bin", "r+b") as file:
        file.write(b"rot")
    present, said = nodes[0].present, []
    present.prepare = replace(present.prepare, candidates=(newer, older))
    found = checkpoint_download.newest_complete(present, nodes[0].access, present.checkpoints, said.append)
    assert found == older
    assert len(said) == 1
    assert "step 9" in said[0]
    assert "b.bin" in said[0]


def test_a_copy_of_which_the_head_lost_a_file_is_passed_over_for_the_one_before(gang):
    _, nodes = gang
    older, newer = publish(nodes, 7), publish(nodes, 9)
    os.unlink(f"{newer.path}/b.bin")
    present, said = nodes[0].present, []
    present.prepare = replace(present.prepare, candidates=(newer, older))
    assert checkpoint_download.newest_complete(present, nodes[0].access, present.checkpoints, said.append) == older
    assert "step 9" in said[0]
    assert "b.bin" in said[0]


def test_retention_and_the_end_of_the_attempt_leave_what_is_published_and_nothing_else(gang, call):
    job, nodes = gang
    for step in (3, 5, 7):
        publish(nodes, step)
    root = Path(nodes[0].present.prepare.checkpoint_dir)
    until(lambda: sorted(path.name for path in root.glob("step-*")) == ["step-00000005", "step-00000007"])
    own = Path(epoch_folder(nodes[1].present.checkpoints, nodes[1].present.prepare))
    assert sorted(path.name for path in own.iterdir()) == ["step-00000005", "step-00000007"]
    paths, digest = save_everywhere(nodes, 9)
    nodes[0].upload(9, paths[0], digest, kept=lambda: None)
    until(lambda: list(root.glob("step-00000009.tmp-kept-*/a.bin")))
    call("user", "POST", f"/v1/jobs/{job}/cancel")
    for node in nodes:
        node.supervisor.end(job, ranks=0)
    until(lambda: sorted(path.name for path in root.iterdir() if path.is_dir()) == ["step-00000005", "step-00000007"])
    until(nodes[0].idle)
    assert "step 9" in nodes[0].said[-1]


def test_node_rank_zero_hears_that_a_node_was_lost_before_its_part_was_here(head, gang):
    _, nodes = gang
    paths, digest = save_everywhere(nodes, 7)
    told = threading.Event()
    nodes[0].upload(7, paths[0], digest, kept=told.set)
    until(lambda: list(Path(head.parts.checkpoint_root).rglob("a.bin")))
    head.driver.report([NodeDied(node_id="n1", supervisor_id=None, why="power", confirmed=True)]).result(timeout=60)
    until(nodes[0].idle)
    assert not told.is_set()
    assert "n1 was lost before it had uploaded its part" in nodes[0].said[-1]


def test_a_head_that_goes_away_in_mid_upload_gets_the_rest_when_it_is_back(head, tmp_path):
    with head.calling() as call:
        port = int(call.url.rpartition(":")[2])
        nodes, _ = one_node(call, tmp_path)
        path, digest = nodes[0].save(7, parts(7)[0], parts(7)[0])
    kept = threading.Event()
    nodes[0].upload(7, path, digest, kept=kept.set)
    assert not kept.wait(1.0)
    assert nodes[0].uploader.unfinished_folders() == {path}
    with head.served(port=port):
        assert kept.wait(100), nodes[0].said
    manifest.verify(f"{nodes[0].present.prepare.checkpoint_dir}/step-00000007", expected_digest=digest)


def test_node_begins_again_when_the_head_restarted_and_lost_its_open_uploads(head, gang):
    """Found by reading: the node looked for words in the message, which had been reworded, and gave the checkpoint up."""
    _, nodes = gang
    paths, digest = save_everywhere(nodes, 7)
    stored = threading.Event()
    nodes[0].upload(7, paths[0], digest, kept=stored.set)
    copies = head.app.state.runtime.checkpoint_copies
    until(lambda: any(set(upload.ends) >= {"a.bin"} for upload in copies._uploads.values()))
    copies._uploads.clear()
    nodes[1].upload(7, paths[1], digest)
    assert stored.wait(100), nodes[0].said
    assert nodes[0].said == nodes[1].said == []


def test_the_end_of_a_member_waits_for_its_checkpoint_while_bytes_move_and_for_a_crash_not_long(head, tmp_path):
    with head.calling() as call:
        port = int(call.url.rpartition(":")[2])
        nodes, _ = one_node(call, tmp_path)
        path, digest = nodes[0].save(7, parts(7)[0], parts(7)[0])
    order, in_haste = threading.Event(), threading.Event()
    nodes[0].upload(7, path, digest, kept=lambda: None)
    key = nodes[0].present.key
    nodes[0].uploader.notify_when_uploaded(key.job_id, key.epoch, in_haste.set, patient=False)
    nodes[0].uploader.notify_when_uploaded(key.job_id, key.epoch, order.set, patient=True)
    assert in_haste.wait(100), "it starts again here, and brings the rest then"
    assert not order.is_set()
    with head.served(port=port):
        assert order.wait(100)
    assert nodes[0].idle()


def one_node(call, tmp_path):
    node = Server(call, tmp_path, "n0")
    job = call.submit(gpus=1)
    node.prepare()
    return [node], job


def test_a_checkpoint_that_another_node_skipped_gives_way_to_the_next(gang):
    _, nodes = gang
    paths, digest = save_everywhere(nodes, 7)
    told = threading.Event()
    nodes[0].upload(7, paths[0], digest, kept=told.set)
    publish(nodes, 9)
    assert not told.is_set()
    assert nodes[0].said == ["checkpoint of step 7 is incomplete: another node has not uploaded its part"]


def test_what_never_became_whole_leaves_the_heads_disk_when_all_that_is_published_is_newer(gang):
    _, nodes = gang
    paths, digest = save_everywhere(nodes, 7)
    nodes[0].upload(7, paths[0], digest, kept=lambda: None)
    root = Path(nodes[0].present.prepare.checkpoint_dir)
    until(lambda: list(root.glob("step-00000007.tmp-kept-*/a.bin")))
    publish(nodes, 8)
    until(lambda: [path.name for path in root.glob("step-*")] == ["step-00000008"])


def test_of_a_checkpoint_that_is_whole_the_head_holds_nothing_in_memory(tmp_path):
    file = manifest.ManifestFile(path="a", size_bytes=4, crc32=crc(b"four"))
    kept = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    places = []
    for step in range(3):
        encoded = folders.encode_manifest(step=step, epoch=1, world_size=1, files=[file])
        places.append(key_of("7", step, encoded))
        kept.begin_upload(places[-1], encoded, published=())
        assert kept.append(places[-1], "a", 0, b"four") == 4
    assert [kept.upload_state(place) for place in places] == [(True, 0)] * 3
    with pytest.raises(Conflict):
        kept.append(places[-1], "a", 4, b"")


def test_only_a_node_of_the_live_attempt_may_write_and_only_files_of_the_manifest(gang, call, tmp_path):
    job, nodes = gang
    Supervisor(call, "n2", "s2").hello()
    paths, digest = save_everywhere(nodes, 7)
    encoded = Path(paths[0], "manifest.json").read_bytes()

    def put(role, what, data, **more):
        about = {"job_id": job, "epoch": 1, "step": 7, "digest": digest, **more}
        return call(role, "PUT", f"/v1/node/checkpoints/{what}?{urlencode(about)}", content=data)

    assert code(put("node:n2", "manifest", encoded)) == (403, "not_permitted")
    assert code(put("node:n0", "manifest", encoded, epoch=2)) == (403, "not_permitted")
    assert code(put("node:n0", "manifest", encoded + b" ")) == (400, "bad_request")
    assert code(put("node:n0", "manifest", encoded, step=8)) == (400, "bad_request")
    assert code(put("node:n0", "file", b"x", path="b.bin", offset=0)) == (409, "upload_not_begun")
    ends = msgspec.json.decode(put("node:n0", "manifest", encoded).content, type=CheckpointUploadReply).sizes
    assert {path: end for path, end in ends.items() if end} == {}
    assert code(put("node:n0", "file", b"x", path="../../x", offset=0)) == (400, "bad_request")
    assert code(put("node:n0", "file", b"x", path="manifest.json", offset=0)) == (400, "bad_request")
    assert code(put("node:n0", "file", bytes(5 << 20), path="a.bin", offset=0)) == (413, "too_large")
    assert put("node:n0", "file", b"\7\1" * 10, path="b.bin", offset=0).json() == {"end": 20}
    assert put("node:n0", "file", b"\7\1" * 10, path="b.bin", offset=0).json() == {"end": 20}, "again changes nothing"
    assert put("node:n1", "file", b"late", path="b.bin", offset=99).json() == {"end": 20}, "a gap is never made"
    assert code(put("node:n1", "file", b"\7\2" * 990, path="b.bin", offset=20)) == (400, "bad_request"), "other bytes"
    assert put("node:n1", "file", b"", path="b.bin", offset=0).json() == {"end": 0}, "and begins anew"

    def get(role, **more):
        about = {"job_id": job, "epoch": 1, "of_epoch": 1, "step": 7, "path": "a.bin", **more}
        return call(role, "GET", f"/v1/node/checkpoints/file?{urlencode(about)}")

    resume = publish(nodes, 7)
    assert code(get("node:n2")) == (403, "not_permitted")
    assert code(get("node:n0", path="../../../token")) == (404, "not_found")
    assert code(get("node:n0", step=8)) == (404, "not_found")
    assert len(get("node:n1", offset=BIG - 3).content) == 3
    assert manifest.digest(get("node:n1", path="manifest.json").content) == resume.digest


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b", "manifest.json", "a//b", "./a", ""])
def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(tmp_path, name):
    kept = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    file = manifest.ManifestFile(path=name, size_bytes=1, crc32=0)
    encoded = folders.encode_manifest(step=1, epoch=1, world_size=1, files=[file])
    place = key_of("7", 1, encoded)
    with pytest.raises(BadRequest):
        kept.begin_upload(place, encoded, published=())
    assert kept.jobs == frozenset()


def test_a_head_that_died_in_mid_upload_goes_on_where_its_disk_ends(tmp_path):
    data = os.urandom(1000)
    file = manifest.ManifestFile(path="a", size_bytes=1000, crc32=crc(data))
    encoded = folders.encode_manifest(step=1, epoch=1, world_size=1, files=[file])
    place = key_of("7", 1, encoded)
    first = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    assert first.begin_upload(place, encoded, published=()) == (False, 1000, {})
    assert first.append(place, "a", 0, data[:300]) == 300
    second = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    assert second.jobs == {"7"}
    assert second.begin_upload(place, encoded, published=()) == (False, 700, {"a": 300})
    assert second.append(place, "a", 300, data[300:]) == 1000
    assert second.upload_state(place) == (True, 0)
    manifest.verify(str(tmp_path / "c/7-k/epoch-1-k/step-00000001"), expected_digest=place.digest)
    assert CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o")).begin_upload(place, encoded, published=()) == (
        True,
        0,
        {},
    )


def key_of(job_id, step, encoded):
    digest = manifest.digest(encoded)
    return CheckpointKey(job_id=job_id, epoch=1, folder=f"{job_id}-k/epoch-1-k", step=step, digest=digest)


def ended(job_id):
    """A job without checkpoints whose only attempt is over."""
    return records.job(int(job_id)), [records.attempt(int(job_id), state=AttemptState.ENDED)]


def checkpoint_of(job_id, step=1):
    file = manifest.ManifestFile(path="a", size_bytes=1000, crc32=0)
    encoded = folders.encode_manifest(step=step, epoch=1, world_size=1, files=[file])
    return key_of(job_id, step, encoded), encoded


@pytest.fixture
def slow_disk(tmp_path, monkeypatch):
    """A head after a restart, of which checkpoint 1 of job 7 came in part; its disk stands still while that is read."""
    first = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    place, encoded = checkpoint_of("7")
    first.begin_upload(place, encoded, published=())
    first.append(place, "a", 0, b"begun")
    reading, goes_on, checksum = threading.Event(), threading.Event(), manifest.checksum

    def slowly(path):
        reading.set()
        assert goes_on.wait(100)
        return checksum(path)

    monkeypatch.setattr(manifest, "checksum", slowly)
    kept = CheckpointCopies(str(tmp_path / "c"), str(tmp_path / "o"))
    said = []
    opening = threading.Thread(target=lambda: said.append(kept.begin_upload(place, encoded, published=())))
    opening.start()
    assert reading.wait(100)
    yield kept, goes_on, said, opening
    goes_on.set()
    opening.join(100)


def test_a_checkpoint_that_is_read_after_a_restart_holds_up_no_other(slow_disk):
    """Found by reading: one lock was held while all that had come before was read, for minutes, and every other node waited for it."""
    kept, goes_on, said, opening = slow_disk
    for place, encoded in (checkpoint_of("8"), checkpoint_of("7", step=2)):
        assert kept.begin_upload(place, encoded, published=()) == (False, 1000, {})
        assert kept.append(place, "a", 0, b"more") == 4
    kept.remove_unneeded(*ended("8"))
    with pytest.raises(TryLater, match="is reading the files"):
        kept.begin_upload(*checkpoint_of("7"), published=())
    goes_on.set()
    opening.join(100)
    assert said == [(False, 995, {"a": 5})]
    assert kept.begin_upload(*checkpoint_of("7"), published=()) == said[0]


def test_what_was_being_read_of_an_attempt_that_is_over_does_not_come_back(slow_disk, tmp_path):
    kept, goes_on, _, opening = slow_disk
    settling = threading.Thread(target=lambda: kept.remove_unneeded(*ended("7")))
    settling.start()
    goes_on.set()
    for thread in (opening, settling):
        thread.join(100)
    with pytest.raises(Conflict, match="no upload has begun"):
        kept.upload_state(checkpoint_of("7")[0])
    assert not (tmp_path / "c" / "7-k").exists()
    assert kept.jobs == frozenset()
