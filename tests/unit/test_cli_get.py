"""Unpacking outputs: an archive made by a stranger writes nowhere but below the folder."""

import errno
import io
import os
import resource
import tarfile

import pytest

from phalanx.cli.terminal import Terminal
from phalanx.cli.transfers.download_journal import JOURNAL, DownloadJournal
from phalanx.cli.transfers.get import ArchiveExtractor
from phalanx.cli.transfers.transfer_progress import ProgressReader
from phalanx.core.errors import BadFile


def archive(*members):
    """Members as (name, text) for files, or ready TarInfos."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, text = member
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    raw.seek(0)
    return raw


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def fetch(folder, raw):
    extraction = ArchiveExtractor(str(folder), ProgressReader(raw))
    extraction.run()
    return extraction


def test_files_and_folders_come_with_their_text_and_mode(tmp_path):
    script = tarfile.TarInfo("bin/run.sh")
    script.mode = 0o755
    done = fetch(
        tmp_path / "out", archive(special("empty", tarfile.DIRTYPE), ("a.txt", "A"), ("deep/b.txt", "BB"), script)
    )
    assert (done.files, done.bytes) == (3, 3)
    assert (tmp_path / "out/deep/b.txt").read_text() == "BB"
    assert (tmp_path / "out/empty").is_dir()
    assert os.access(tmp_path / "out/bin/run.sh", os.X_OK)
    assert sorted(os.listdir(tmp_path / "out")) == ["a.txt", "bin", "deep", "empty"]  # no .part is left


def test_names_that_lead_outside_are_left_out(tmp_path, capsys):
    fetch(tmp_path / "out", archive(("../evil", "x"), ("/abs", "x"), ("a/../../evil", "x"), ("good", "x")))
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["good"]
    assert capsys.readouterr().err.count("outside the folder") == 3


def test_nothing_is_written_through_a_link_of_the_archive(tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    fetch(
        tmp_path / "out",
        archive(
            special("escape", tarfile.SYMTYPE, str(outside)),
            special("up", tarfile.SYMTYPE, "../outside"),
            special("inside", tarfile.SYMTYPE, "a.txt"),
            ("a.txt", "A"),
            special("hard", tarfile.LNKTYPE, "a.txt"),
            special("dev", tarfile.CHRTYPE),
        ),
    )
    assert os.listdir(outside) == []
    assert sorted(os.listdir(tmp_path / "out")) == ["a.txt", "inside"]
    assert capsys.readouterr().err.count("left out") == 4


def test_a_link_that_was_here_before_is_not_followed(tmp_path):
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    os.symlink(outside, out / "sub")
    with pytest.raises(BadFile, match="contains a link"):
        fetch(out, archive(("sub/x", "x")))
    assert os.listdir(outside) == []


def test_a_file_of_the_same_name_is_replaced_even_if_it_is_a_link(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "precious").write_text("keep")
    os.symlink(tmp_path / "precious", out / "a.txt")
    fetch(out, archive(("a.txt", "new")))
    assert (out / "a.txt").read_text() == "new"
    assert (tmp_path / "precious").read_text() == "keep"


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_outputs_never_take_the_place_of_the_note(tmp_path, capsys, kind):
    folder = tmp_path / "out"
    journal = DownloadJournal(str(folder), "17")
    journal.set_time(2.0)
    raw = archive(special(JOURNAL, kind, "a.txt"))
    extractor = ArchiveExtractor(str(folder), ProgressReader(raw), journal)
    extractor.run()
    journal.note("b.txt", 1, 1, 1)
    journal.close()
    assert (extractor.files, DownloadJournal(str(folder), "17").after) == (0, "b.txt")
    assert JOURNAL in capsys.readouterr().err


def test_a_full_disk_is_named_with_the_file(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match=r"a\.txt") as full:
            fetch(tmp_path / "out", archive(("a.txt", "A" * 10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert full.value.errno == errno.EFBIG


def test_an_archive_cut_short_says_so(tmp_path):
    raw = archive(("a.txt", "A" * 10_000)).getvalue()
    with pytest.raises(BadFile, match="download is incomplete"):
        fetch(tmp_path / "out", io.BytesIO(raw[:4000]))


def test_progress_shows_the_share_and_the_time_left():
    screen = Terminal(width=80, height=24, interactive=True, colour=False, blocks=False)
    progress = ProgressReader(io.BytesIO(bytes(30 << 20)), label="element 2 of 8: ", screen=screen)
    progress.read()
    assert progress.line(2.0) == "element 2 of 8: 30 MiB downloaded, 15 MiB/s"
    progress.expect(120 << 20)
    assert progress.line(2.0) == "element 2 of 8: #####............... 25%  30 MiB of 120 MiB, 15 MiB/s, 6.0s left"
