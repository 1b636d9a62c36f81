"""What nodes, engines and daemons say, spoilt: each reader gives records or the refusal it promises, never anything else."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import random
from pathlib import Path

import msgspec
import pytest

from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import PhalanxError
from phalanx.engines.local import records as local
from phalanx.engines.ray import parse as ray
from phalanx.engines.slurm import parse as slurm
from phalanx.node import membership as joined
from phalanx.planner.calibration.profile import parse_profile
from phalanx.wire import manifest
from phalanx.wire.stored_files import CheckpointUploadReply
from phalanx.wire.supervisor import (
    CommandsReply,
    UnknownEnvelopeKind,
    decode,
    decode_command,
    decode_event,
)
from tests.hostile.good import MANIFEST, good_requests
from tests.hostile.spoilt import at_edges, contents, places

GOLDEN = Path(__file__).parent.parent / "golden"
SEED = 6


def spoilt(good, flips=60):
    yield "good", good
    yield from contents(good, random.Random(SEED), flips)
    yield from at_edges(good)


def texts(good):
    for what, content in spoilt(good):
        yield what, content.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("nodes", slurm.parse_nodes),
        ("jobs", lambda text: slurm.parse_jobs(text, "|5f1c|")),
        ("partitions", slurm.parse_partitions),
        ("topology", slurm.parse_topology),
        ("nodes", lambda text: [slurm.parse_fields(line) for line in text.splitlines()]),
    ],
)
def test_what_slurm_says_spoilt_is_read_or_refused(name, read):
    for what, text in texts((GOLDEN / "slurm" / f"{name}.txt").read_bytes()):
        try:
            read(text)
        except (PhalanxError, slurm.SlurmOutputError):
            assert what != "good"


def test_the_version_that_slurm_says_spoilt_is_read_or_refused():
    for what, text in texts(b"slurm 22.05.8\n"):
        try:
            slurm.parse_version(text)
        except slurm.SlurmOutputError:
            assert what != "good"


def test_what_ray_says_spoilt_is_read():
    rows = json.loads((GOLDEN / "ray" / "ray-nodes.json").read_text())
    for _, text in texts((GOLDEN / "ray" / "ray-nodes.json").read_bytes()):
        ray.error_line(text)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, list) and all(isinstance(row, dict) for row in found):
            try:
                ray.parse_nodes(found)
            except (KeyError, TypeError, ValueError):
                assert found != rows


def test_spoilt_manifests_are_no_checkpoints(tmp_path):
    (tmp_path / "shard-0").write_bytes(b"a working directory")
    whole = 0
    for _, content in spoilt(MANIFEST):
        (tmp_path / manifest.MANIFEST_NAME).write_bytes(content)
        try:
            manifest.verify(str(tmp_path))
        except manifest.CheckpointInvalid:
            continue
        whole += 1
    assert whole >= 1


def test_things_in_a_manifests_place_are_no_checkpoints(tmp_path):
    for number, (what, path) in enumerate(places(MANIFEST, tmp_path / "places")):
        if "\x00" in path or not path:
            continue
        folder = tmp_path / f"step-{number}"
        folder.mkdir()
        (folder / manifest.MANIFEST_NAME).symlink_to(path[:4000])
        with pytest.raises(manifest.CheckpointInvalid):
            manifest.verify(str(folder))
        assert what


def test_spoilt_messages_are_refused_as_they_promise():
    event = json.dumps(good_requests("1", 1)["receive_events"].body["events"][0]).encode()
    reply = b'{"head_id": "x", "commands": [{"seq": 1, "kind": "CleanUpAttempt", "body": {"job_id": "1", "epoch": 1, "generation": 0}}], "last": 1}'
    from phalanx.wire.supervisor import Envelope

    for kind, good in ((Envelope, event), (CommandsReply, reply), (CheckpointUploadReply, b'{"missing": []}')):
        for _, content in spoilt(good):
            try:
                found = decode(content, kind)
                if isinstance(found, Envelope):
                    decode_event(found)
                if isinstance(found, CommandsReply):
                    [decode_command(framed) for framed in found.commands]
            except (msgspec.MsgspecError, UnknownEnvelopeKind, UnicodeDecodeError, RecursionError):
                continue


def test_spoilt_profiles_are_refused():
    good = json.dumps(good_requests("1", 1)["put_profile"].body).encode()
    for _, content in spoilt(good):
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            continue
        try:
            parse_profile(found)
        except PhalanxError:
            assert found != json.loads(good)


SMALL_FILES = {
    "cluster.json": b'{"port": 7600, "listen": "off", "virtual": "3x4", "lease_s": 6.0, "nodes": ["n0"]}',
    "planned_stop.json": b'{"boot_id": "x", "until_s": 12.5}',
    "head.json": b'{"url": "http://127.0.0.1:1", "pid": 1}',
}


@pytest.mark.parametrize("name", SMALL_FILES)
def test_small_files_of_a_head_spoilt_count_as_none(name, tmp_path):
    home = StateFolder.open(str(tmp_path / "home"))
    for _, content in spoilt(SMALL_FILES[name]):
        (tmp_path / "home" / name).write_bytes(content)
        assert isinstance(home.read_json(name), dict)
    for _, path in places(SMALL_FILES[name], tmp_path / "places"):
        if "\x00" in path or not path:
            continue
        (tmp_path / "home" / name).unlink()
        (tmp_path / "home" / name).symlink_to(path[:4000])
        assert isinstance(home.read_json(name), dict)


def test_records_of_nodes_spoilt_count_as_none(tmp_path):
    folder = tmp_path / "nodes" / "n0"
    folder.mkdir(parents=True)
    good = b'{"pid": 1, "start_ticks": 1, "node_key": "x", "node": "n0", "virtual_devices": 4}'
    (folder / "engine.json").write_bytes(good)
    assert len(local.recorded_nodes(str(tmp_path))) == 1
    for name in ("engine.json", "joined.json"):
        for _, content in spoilt(good):
            (folder / name).write_bytes(content)
            local.recorded_nodes(str(tmp_path))
            local.read(str(folder))
            joined.read(str(folder))
        (folder / name).unlink()
