"""Working directories that somebody packed to harm: each is refused in one line, or lands inside its folder; nothing is read whole, nothing hangs."""

import gzip
import io
import os
import random
import resource
import stat
import tarfile
import threading
import tracemalloc

import pytest

from phalanx.node.files import workdir_upload
from phalanx.node.files.workdir_upload import UploadInvalid

GIB = 1 << 30


def member(name, kind=tarfile.REGTYPE, *, size=0, body=b"", link="", mode=0o644, pax=None):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    info.size = size or len(body)
    if pax:
        info.pax_headers = pax
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + body + bytes(-len(body) % 512)


def raw(*members):
    return b"".join(members) + bytes(1024)


def unpacked(tmp_path, packed):
    return workdir_upload.unpack(io.BytesIO(packed), str(tmp_path / "w"), threading.Event())


def refusal(folder, packed):
    """What is said of it; None where it is taken."""
    try:
        unpacked(folder, packed)
    except UploadInvalid as refused:
        return str(refused)
    return None


def header_of(kind, size):
    """A header of a name or of further fields, which says that so many bytes of it follow."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


OUTSIDE = {
    "climbs": raw(member("../out", body=b"x")),
    "absolute": raw(member("/tmp/phalanx-out", body=b"x")),
    "climbs within": raw(member("a/../../out", body=b"x")),
    "an absolute name in a long header": raw(member("x", body=b"x", pax={"path": "/tmp/phalanx-out"})),
    "a link out": raw(member("l", tarfile.SYMTYPE, link="/etc/passwd")),
    "a link to above": raw(member("l", tarfile.SYMTYPE, link="..")),
    "a link and a file through it": raw(member("l", tarfile.SYMTYPE, link="/tmp"), member("l/phalanx-out", body=b"x")),
    "links that add up": raw(
        member("a/b/up", tarfile.SYMTYPE, link="../.."), member("l", tarfile.SYMTYPE, link="a/b/up/..")
    ),
    "a hard link": raw(member("h", tarfile.LNKTYPE, link="/etc/shadow")),
    "a device": raw(member("null", tarfile.CHRTYPE)),
    "a disk": raw(member("sda", tarfile.BLKTYPE)),
    "a pipe": raw(member("p", tarfile.FIFOTYPE)),
    "an unknown kind": raw(member("u", b"Z")),
    "a file that is a folder too": raw(member("a", body=b"x"), member("a/b", body=b"x")),
    "a folder that is a file too": raw(member("a", tarfile.DIRTYPE), member("a", body=b"x")),
    "a name longer than any": raw(member("n" * 300, body=b"x")),
    "a path longer than any": raw(member("/".join(["d" * 200] * 40), body=b"x")),
    "a NUL in a link": raw(member("l", tarfile.SYMTYPE, pax={"linkpath": "a\0b"})),
    "a NUL in a name": raw(member("n", body=b"x", pax={"path": "a\0b"})),
    "a negative size": raw(member("n", pax={"size": "-1"})),
    "a size that is none": raw(member("n", pax={"size": "many"})),
    "a huge sparse file": raw(
        member(
            "s",
            pax={
                "GNU.sparse.major": "0",
                "GNU.sparse.size": str(1 << 62),
                "GNU.sparse.map": "0,0",
                "GNU.sparse.realsize": str(1 << 62),
            },
        )
    ),
    "more than it has": raw(member("n", size=9 * GIB)),
    "headers in headers": b"".join(member("x", b"x", body=b"12 path=aaa\n") for _ in range(5000)),
    "nothing": b"",
    "half a header": member("n", body=b"x")[:300],
    "a broken gzip": gzip.compress(raw(member("n", body=b"x")))[:40],
    "gzip of noise": gzip.compress(random.Random(1).randbytes(4096)),
    "a bad checksum of gzip": gzip.compress(raw(member("n", body=b"x" * 9999)))[:-8] + bytes(8),
}


# Python's reader may pass these over, or take less than is said; what counts is that nothing lands outside.
HARMLESS = {
    "nothing",
    "a size that is none",
    "a NUL in a name",
    "a NUL in a link",
    "a negative size",
    "a huge sparse file",
    "a bad checksum of gzip",
}


@pytest.mark.parametrize("why", OUTSIDE)
def test_is_refused_in_one_line_and_writes_nothing_outside(tmp_path, why):
    said = refusal(tmp_path, OUTSIDE[why])
    assert said is not None or why in HARMLESS
    assert said is None or ("\n" not in said and len(said) < 600)
    assert set(os.listdir(tmp_path)) <= {"w"}
    assert not os.path.exists("/tmp/phalanx-out")


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_a_header_that_says_it_has_gigabytes_is_not_read_whole(tmp_path, kind):
    """A few kilobytes of gzip that unpack to zeros: the header's own length would be taken into memory in one piece."""
    bomb = io.BytesIO()
    with gzip.GzipFile(fileobj=bomb, mode="wb", compresslevel=1) as packed:
        packed.write(header_of(kind, 2 * GIB))
        for _ in range(64):
            packed.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(UploadInvalid, match="header"):
        unpacked(tmp_path, bomb.getvalue())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


def test_rights_of_root_and_of_the_group_do_not_travel(tmp_path):
    unpacked(
        tmp_path,
        raw(
            member("s", body=b"x", mode=0o6777),
            member("d", tarfile.DIRTYPE, mode=0o7777),
            member("d/f", body=b"y", mode=0o2755),
        ),
    )
    for name in ("s", "d", "d/f"):
        assert not stat.S_IMODE((tmp_path / "w" / name).stat().st_mode) & (
            stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | 0o022
        )


def test_names_that_no_screen_should_see_are_kept_as_they_are_and_shown_in_no_message(tmp_path):
    unpacked(tmp_path, raw(member("a\x1b[31m\n", body=b"x"), member("caf\udce9", body=b"y")))
    assert set(os.listdir(os.fsencode(tmp_path / "w"))) == {b"a\x1b[31m\n", b"caf\xe9"}
    (tmp_path / "more").mkdir()
    with pytest.raises(UploadInvalid) as refused:
        unpacked(tmp_path / "more", raw(member("\x1b[31m\n", tarfile.CHRTYPE)))
    assert str(refused.value).isprintable()


def test_many_entries_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_upload, "MEMBERS_MAX", 100)
    with pytest.raises(UploadInvalid, match="more than 100 entries"):
        unpacked(tmp_path, raw(*(member(f"d{number}", tarfile.DIRTYPE) for number in range(200))))


def test_bytes_turned_over_at_random_are_refused_or_stay_inside(tmp_path):
    """1,000 archives, one to eight bytes of each another: no other error than a refusal, nothing outside, no memory."""
    whole = raw(
        member("a/b", body=b"x" * 700),
        member("a/l", tarfile.SYMTYPE, link="b"),
        member("n" * 150, body=b"y", pax={"comment": "z" * 300}),
        member("d", tarfile.DIRTYPE),
    )
    seeds = random.Random(20261121)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, hard))
    try:
        for number in range(1000):
            packed = bytearray(whole)
            for _ in range(seeds.randint(1, 8)):
                packed[seeds.randrange(len(packed))] = seeds.randrange(256)
            here = tmp_path / str(number)
            here.mkdir()
            said = refusal(here, bytes(packed) if number % 2 else gzip.compress(bytes(packed), 1))
            assert said is None or "\n" not in said
            assert set(os.listdir(here)) == {"w"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir(tmp_path)) == 1000
