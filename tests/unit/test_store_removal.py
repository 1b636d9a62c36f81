"""`phalanx clean --stores`, against moto's S3 server: what ended jobs stored goes, and nothing else."""

# mypy: disable-error-code="arg-type, union-attr"

import os
import zlib
from types import SimpleNamespace

import pytest

from phalanx.cli.transfers.store_removal import measure_folders, remove_folder, stored_folders
from phalanx.core.work.states import JobState
from phalanx.node.data import checkpoint_objects, output_objects
from phalanx.node.data.object_store import ObjectFolder
from phalanx.wire import manifest as manifests
from phalanx.wire.manifest import CheckpointManifest, ManifestFile
from tests.object_rig import BUCKET, MOTO, faulty_store

pytestmark = pytest.mark.skipif(MOTO is None, reason="moto_server is not installed: make s3-tools")
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def moto():
    with faulty_store() as store, pytest.MonkeyPatch.context() as patch:
        for name, text in store.variables.items():
            patch.setenv(name, text)
        patch.setattr("phalanx.node.data.object_store._RETRY", {"max_retries": 0})
        yield store


@pytest.fixture
def place(moto, request):
    moto.forget()
    return f"s3://{BUCKET}/{zlib.crc32(request.node.name.encode())}"


def head(*jobs):
    """A head with these jobs, one on each page, newest first."""

    def page(*, state, before_seq, limit):
        assert state == [one.value for one in JobState if one.terminal]
        at = before_seq or 0
        return SimpleNamespace(jobs=[jobs[at]], next=at + 1 if at + 1 < len(jobs) else None)

    return SimpleNamespace(jobs=page, archives=lambda: SimpleNamespace(months=[]))


def with_archives(live, **months):
    """The head with archived jobs by month, such as m1970_02, two on each page."""

    def page(month, *, after, stored):
        assert stored
        left = [one for one in months[f"m{month.replace('-', '_')}"] if int(one.id) > after]
        return SimpleNamespace(jobs=left[:2], next=int(left[1].id) if len(left) > 2 else None)

    names = [SimpleNamespace(month=name[1:].replace("_", "-")) for name in months]
    return SimpleNamespace(jobs=live.jobs, archives=lambda: SimpleNamespace(months=names), archived_jobs=page)


def job(number, *, days=40.0, outputs="", checkpoints=()):
    paths = [SimpleNamespace(path=path) for path in checkpoints]
    return SimpleNamespace(
        id=str(number), user="ada", ended_s=100 * DAY_S - days * DAY_S, output_dir=outputs, checkpoints=paths
    )


def old(*jobs, days=30.0, kinds=()):
    return stored_folders(head(*jobs), days * DAY_S, kinds, 100 * DAY_S)


def send_outputs(url, folder, *, rank=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(os.urandom(5000))
    (folder / "log.txt").write_text("one")
    output_objects.send(ObjectFolder(url), str(folder), rank=rank, epoch=1, final=True, on_bytes=lambda _: None)


def send_checkpoint(url, folder):
    """Save a checkpoint of one file and store it."""
    folder.mkdir(parents=True)
    data = os.urandom(70_000)
    (folder / "weights").write_bytes(data)
    file = ManifestFile(path="weights", size_bytes=len(data), crc32=zlib.crc32(data))
    encoded = manifests.encode(CheckpointManifest(format=1, step=1, epoch=1, world_size=1, files=(file,)))
    (folder / manifests.MANIFEST_NAME).write_bytes(encoded)
    store, digest = ObjectFolder(url), manifests.digest(encoded)
    assert checkpoint_objects.upload(store, str(folder), digest, rank=0, nodes=1, on_bytes=lambda _: None)


def test_outputs_that_the_job_stored_go_and_what_others_put_or_changed_there_stays(place, tmp_path):
    mine, other = f"{place}/7-key", f"{place}/8-key"
    for rank in (0, 1):
        send_outputs(mine, tmp_path / str(rank), rank=rank)
    send_outputs(other, tmp_path / "other")
    store = ObjectFolder(mine)
    store.replace("report.pdf", b"of a person")
    store.replace("log.txt", b"changed by a person")
    before = ObjectFolder(other).list()
    (found,) = old(job(8, days=3, outputs=other), job(7, outputs=mine))
    assert (found.kind, found.job, found.url, found.objects) == ("outputs", "7", mine, None)
    (measured,) = measure_folders([found])
    assert list(measured.objects)[-2:] == [".phalanx/node-0.json", ".phalanx/node-1.json"]  # they name the rest
    assert 10_003 < measured.size_bytes < 12_000
    remove_folder(measured)
    assert set(store.list()) == {"report.pdf", "log.txt"}
    assert ObjectFolder(other).list() == before
    assert measure_folders([found])[0].objects == {}


def test_archived_jobs_are_among_them(place, tmp_path):
    def archived(number, *, days=60.0, outputs="", checkpoints=()):
        one = job(number, days=days, outputs=outputs)
        return SimpleNamespace(**{**vars(one), "checkpoints": list(checkpoints)})

    send_outputs(f"{place}/2-key", tmp_path / "outputs")
    steps = [f"{place}/3-key/step-{step:08d}" for step in (10, 20)]
    for url in steps:
        send_checkpoint(url, tmp_path / url.rpartition("/")[2])
    february = [
        archived(2, outputs=f"{place}/2-key"),
        archived(3, checkpoints=steps),
        archived(5, days=50, outputs="x://y"),
    ]
    march = [archived(9, days=20, outputs=f"{place}/9-key")]
    seen = with_archives(head(job(10, outputs=f"{place}/10-key")), m1970_02=february, m1970_03=march, m1970_05=[None])
    found = stored_folders(seen, 30 * DAY_S, (), 100 * DAY_S)
    assert [(one.job, one.kind, one.archived) for one in found] == [
        ("2", "outputs", True),
        ("3", "checkpoints", True),
        ("5", "outputs", True),
        ("10", "outputs", False),
    ]
    assert [one.job for one in stored_folders(seen, 30 * DAY_S, ["checkpoints"], 100 * DAY_S)] == ["3"]
    for one in measure_folders(found[:2]):
        assert one.objects
        remove_folder(one)
    assert ObjectFolder(f"{place}/2-key").list() == {}
    assert {path.split("/")[0] for path in ObjectFolder(f"{place}/3-key").list()} == {"step-00000020"}


def test_removal_that_was_interrupted_continues(place, tmp_path, moto):
    send_outputs(f"{place}/7-key", tmp_path / "outputs")
    (measured,) = measure_folders(old(job(7, outputs=f"{place}/7-key")))
    half = dict(list(measured.objects.items())[:1])
    ObjectFolder(measured.url).delete(half)
    (again,) = measure_folders(old(job(7, outputs=f"{place}/7-key")))
    assert set(again.objects) == set(measured.objects) - set(half)
    remove_folder(again)
    assert ObjectFolder(measured.url).list() == {}


def test_older_checkpoint_goes_only_while_the_newest_is_complete(place, tmp_path):
    older, newest = f"{place}/7-key/epoch-1-key/step-00000010", f"{place}/7-key/epoch-2-key/step-00000020"
    for url, name in ((older, "older"), (newest, "newest")):
        send_checkpoint(url, tmp_path / name)
    ObjectFolder(older).replace("notes.txt", b"of a person")
    jobs = job(7, outputs="/home/head/outputs/7-key", checkpoints=[older, newest])
    assert old(jobs, kinds=["outputs"]) == []
    assert old(job(7, checkpoints=[newest])) == []
    (measured,) = measure_folders(old(jobs, kinds=["checkpoints"]))
    assert next(iter(measured.objects)) == manifests.MANIFEST_NAME
    chunk = next(path for path in ObjectFolder(newest).list() if path.startswith("objects/"))
    data = ObjectFolder(newest).get(chunk)
    ObjectFolder(newest).replace(chunk, data[1:])
    (damaged,) = measure_folders(old(jobs))
    assert (damaged.objects, damaged.stays) == ({}, "the newer checkpoint is not complete in the store")
    ObjectFolder(newest).replace(chunk, data)
    before = ObjectFolder(newest).list()
    remove_folder(measured)
    assert set(ObjectFolder(older).list()) == {"notes.txt"}
    assert set(ObjectFolder(newest).list()) == set(before)


def test_store_that_does_not_answer_is_asked_once_and_its_folders_stay(place, tmp_path, moto):
    send_outputs(f"{place}/7-key", tmp_path / "outputs")
    moto.fault = lambda _method, _path, _body: True
    jobs = [job(number, outputs=f"{place}/{number}-key") for number in (9, 8, 7)]
    moto.requests.clear()
    found = measure_folders(old(*jobs))
    assert [(one.job, one.objects) for one in found] == [("7", {}), ("8", {}), ("9", {})]
    assert all(one.stays for one in found)
    assert len(moto.requests) == 1
    moto.forget()
    assert measure_folders(old(*jobs))[0].objects
