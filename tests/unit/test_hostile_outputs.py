"""Outputs that somebody made to harm whoever fetches them: `phalanx get` ends in one line, or leaves files below its folder and nothing else."""

import io
import os
import random
import resource
import tarfile

import pytest

from phalanx.cli.transfers.get import ArchiveExtractor
from phalanx.cli.transfers.transfer_progress import ProgressReader
from phalanx.core.errors import BadFile
from phalanx.node.data import output_objects
from phalanx.node.data.sources import ObjectsRefused
from phalanx.store.outputs.folder import ArchiveRest, tar_archive
from tests.unit.test_hostile_uploads import OUTSIDE, member, raw

MIB = 1 << 20


@pytest.fixture(autouse=True)
def little_disk():
    """No test here may fill a disk, whatever the code under it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refusal(folder, packed):
    """Why it was not fetched whole; None where it was, but for what was left out."""
    try:
        ArchiveExtractor(str(folder), ProgressReader(io.BytesIO(packed))).run()
    except BadFile as refused:
        return refused.message
    except OSError as error:  # said in one line by whoever called: the disk's word
        return error.strerror
    return None


@pytest.mark.parametrize("why", OUTSIDE)
def test_lands_below_the_folder_or_is_left_out_or_refused(tmp_path, why, capsys):
    said = refusal(tmp_path / "w", OUTSIDE[why])
    assert said is None or "\n" not in said
    assert set(os.listdir(tmp_path)) <= {"w"}
    assert not os.path.exists("/tmp/phalanx-out")
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            assert os.path.realpath(os.path.join(folder, name)).startswith(str(tmp_path / "w"))
    assert all(line.startswith("phalanx: ") for line in capsys.readouterr().err.splitlines())


def test_a_link_that_others_lead_outside_is_taken_away_again(tmp_path, capsys):
    assert refusal(tmp_path / "w", OUTSIDE["links that add up"]) is None
    assert not os.path.lexists(tmp_path / "w" / "l")
    assert "outside the folder" in capsys.readouterr().err


def test_links_and_pipes_of_the_job_that_are_left_out_are_named(tmp_path, capsys):
    outputs = tmp_path / "outputs"
    (outputs / "runs" / "step-2").mkdir(parents=True)
    (outputs / "runs" / "step-2" / "model").write_text("weights")
    (outputs / "latest").symlink_to(outputs / "runs" / "step-2")  # absolute, as programs make them
    (outputs / "runs" / "newest").symlink_to(outputs / "runs" / "step-2" / "model")
    (outputs / "runs" / "all").symlink_to(outputs / "runs")  # the packed folder itself, if it is `runs`
    (outputs / "data").symlink_to("/srv/data")
    os.mkfifo(outputs / "pipe")
    for path in ("", "runs"):
        packed = b"".join(tar_archive(str(outputs), path, ArchiveRest(digests=True)))
        assert refusal(tmp_path / f"got-{path}", packed) is None
    got = tmp_path / "got-"
    assert sorted(os.listdir(got)) == ["latest", "runs"]
    assert (got / "latest" / "model").read_text() == "weights"
    assert os.readlink(got / "latest") == "runs/step-2"
    assert os.readlink(tmp_path / "got-runs" / "newest") == "step-2/model"
    assert os.readlink(tmp_path / "got-runs" / "all") == "."
    assert capsys.readouterr().err.splitlines() == [
        "phalanx: left out: pipe (neither file, folder nor link)",
        "phalanx: left out: data (a link to /srv/data, outside the folder)",
    ]
    with tarfile.open(fileobj=io.BytesIO(b"".join(tar_archive(str(outputs), "")))) as archive:  # as a browser gets it
        assert {"data", "pipe"}.isdisjoint(archive.getnames())


def test_what_is_all_zeros_takes_no_room_on_the_disk(tmp_path):
    packed = raw(member("hole", body=bytes(32 * MIB)), member("tail", body=b"x" + bytes(2 * MIB)))
    assert refusal(tmp_path / "w", packed) is None
    hole, tail = (tmp_path / "w" / name for name in ("hole", "tail"))
    assert hole.stat().st_size == 32 * MIB
    assert hole.stat().st_blocks * 512 < MIB
    assert tail.read_bytes() == b"x" + bytes(2 * MIB)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE])
def test_a_folder_that_stands_where_a_file_should_is_named_and_nothing_is_left_beside_it(tmp_path, kind):
    (tmp_path / "w" / "f" / "mine").mkdir(parents=True)
    said = refusal(tmp_path / "w", raw(member("f", kind, link="g", body=b"" if kind == tarfile.SYMTYPE else b"x")))
    assert said is not None
    assert "is a folder here" in said
    assert os.listdir(tmp_path / "w") == ["f"]


def test_a_file_that_stands_where_a_folder_should_is_named(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "d").write_text("mine")
    said = refusal(tmp_path / "w", raw(member("d/f", body=b"x")))
    assert said is not None
    assert "is a file here" in said
    assert (tmp_path / "w" / "d").read_text() == "mine"


def test_a_folder_of_the_users_own_that_is_a_link_is_never_written_through(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "d").symlink_to(tmp_path / "elsewhere")
    said = refusal(tmp_path / "w", raw(member("d/f", body=b"x")))
    assert said is not None
    assert "contains a link" in said
    assert os.listdir(tmp_path / "elsewhere") == []


def test_bytes_turned_over_at_random_end_in_one_line_or_below_the_folder(tmp_path, capsys):
    whole = raw(
        member("a/b", body=b"x" * 700),
        member("a/l", tarfile.SYMTYPE, link="b"),
        member("n" * 150, body=b"y"),
        member("d", tarfile.DIRTYPE),
    )
    seeds = random.Random(20261121)
    for number in range(500):
        packed = bytearray(whole)
        for _ in range(seeds.randint(1, 8)):
            packed[seeds.randrange(len(packed))] = seeds.randrange(256)
        here = tmp_path / str(number)
        here.mkdir()
        said = refusal(here / "w", bytes(packed))
        assert said is None or "\n" not in said
        assert set(os.listdir(here)) <= {"w"}
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())


def test_a_link_to_a_folder_whose_name_begins_alike_leads_outside(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "out" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(ObjectsRefused, match="leads outside"):
        output_objects.inside(str(tmp_path / "out"), "d/file")
    assert output_objects.inside(str(tmp_path / "out"), "file") == str(tmp_path / "out" / "file")
