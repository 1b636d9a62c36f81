"""What a store of output streams must do."""

import errno
import os
import shutil
import tempfile
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import BadRequest
from phalanx.failpoints import FAILPOINTS, FailureMode, armed
from phalanx.ports.logs import stream_key
from phalanx.ports.store import StoreRefused
from phalanx.store.logs import files as store_files
from phalanx.store.logs import open_files
from phalanx.store.logs.files import FileLogs
from tests.contract.records import attempt
from tests.effort import examples


@pytest.fixture
def logs(tmp_path):
    opened = FileLogs(str(tmp_path / "logs"))
    yield opened
    opened.close()


@pytest.fixture
def files(logs):
    return logs


def key(stream="rank-0", job_id="7", epoch=1, folder=None):
    one = attempt(job_id, epoch)
    return stream_key(one if folder is None else replace(one, folder=folder), stream)


JOB_7 = [attempt(7, epoch) for epoch in (1, 2, 10)]
FIRST = "logs/7-k/epoch-1-k"  # the folder of its first attempt


# ---- appending by offset ---------------------------------------------------------------------------------------------


def test_what_is_appended_is_read(logs):
    assert logs.append([(key(), 0, b"one "), (key("rank-1"), 0, b"uno "), (key(), 4, b"two")]) == {
        key(): 7,
        key("rank-1"): 4,
    }
    assert logs.read(key(), 0, 100) == b"one two"
    assert logs.read(key(), 4, 2) == b"tw"
    assert logs.read(key(), 7, 10) == b""
    assert logs.read(key(), 99, 10) == b""
    assert logs.end(key()) == 7


def test_a_chunk_sent_again_changes_nothing(logs):
    for _ in range(3):
        assert logs.append([(key(), 0, b"once")]) == {key(): 4}
    assert logs.read(key(), 0, 100) == b"once"


def test_of_an_overlapping_chunk_what_is_new_is_taken(logs):
    logs.append([(key(), 0, b"abcd")])
    assert logs.append([(key(), 2, b"cdef")]) == {key(): 6}
    assert logs.append([(key(), 0, b"abc")]) == {key(): 6}
    assert logs.read(key(), 0, 100) == b"abcdef"


def test_a_chunk_past_the_end_is_not_written_and_the_end_is_told(logs):
    logs.append([(key(), 0, b"abcd")])
    assert logs.append([(key(), 5, b"later")]) == {key(): 4}
    assert logs.append([(key("rank-9"), 1, b"later")]) == {key("rank-9"): 0}
    assert logs.streams(JOB_7) == [key()]


def test_an_empty_append_asks_for_the_end_and_makes_nothing(logs):
    logs.append([(key(), 0, b"abcd")])
    assert logs.append([(key(), 0, b""), (key("rank-1"), 0, b"")]) == {key(): 4, key("rank-1"): 0}
    assert logs.append([]) == {}
    assert logs.streams(JOB_7) == [key()]


def test_an_unknown_stream_is_empty(logs):
    assert logs.end(key()) == 0
    assert logs.read(key(), 0, 10) == b""
    assert logs.streams(JOB_7) == []


def test_bytes_are_kept_as_they_are(logs):
    everything = bytes(range(256)) * 40
    logs.append([(key(), 0, everything)])
    assert logs.read(key(), 0, 20_000) == everything


def test_streams_are_ordered_by_epoch_and_number(logs):
    names = [(2, "rank-0"), (1, "rank-10"), (1, "steps-0"), (10, "rank-0"), (1, "rank-2"), (1, "supervisor-0")]
    logs.append([(key(stream, epoch=epoch), 0, b"x") for epoch, stream in names])
    logs.append([(key(job_id="70"), 0, b"x")])
    assert [(found.epoch, found.stream) for found in logs.streams(JOB_7)] == [
        (1, "rank-2"),
        (1, "rank-10"),
        (1, "steps-0"),
        (1, "supervisor-0"),
        (2, "rank-0"),
        (10, "rank-0"),
    ]


def test_streams_of_an_attempt_that_a_restore_lost_are_not_of_the_one_with_its_numbers(logs):
    logs.append([(key("rank-1", folder="7-old/epoch-1-old"), 0, b"lost"), (key(folder="7-k/epoch-1-old"), 0, b"lost")])
    assert logs.streams(JOB_7) == []
    assert (logs.end(key()), logs.read(key(), 0, 10)) == (0, b"")
    assert logs.append([(key(), 0, b"new")]) == {key(): 3}
    assert [logs.read(one, 0, 10) for one in logs.streams(JOB_7)] == [b"new"]


def test_a_deleted_job_leaves_nothing_and_others_stay(logs):
    logs.append([(key(), 0, b"a"), (key(job_id="70"), 0, b"b")])
    logs.delete("7-k")
    logs.delete("7-k")
    assert logs.streams(JOB_7) == []
    assert logs.end(key()) == 0
    assert logs.read(key(job_id="70"), 0, 10) == b"b"
    assert logs.append([(key(), 0, b"new")]) == {key(): 3}


@pytest.mark.parametrize(
    "bad",
    [
        key("../../etc/passwd"),
        key("rank-1/../x"),
        key("rank"),
        key("rank-"),
        key("rank-01"),
        key("rank--1"),
        key("Rank-1"),
        key(""),
        key("rank-1\n"),
        key("rank-١"),
        key("a" * 33 + "-1"),
        key("rank-1" + "0" * 9),
        key(folder=".."),
        key(folder="7-k/.."),
        key(folder=""),
        key(folder="7-k"),
        key(folder="7-k/epoch-1-k\n"),
        key(folder="٧-k/epoch-1-k"),
        key(folder="7/epoch-1"),
        key(folder="7-k/epoch--1-k"),
        key(folder="7-k/epoch-1-k/.."),
    ],
)
def test_a_name_that_is_none_is_refused(logs, bad):
    for ask in (
        lambda: logs.append([(key("rank-5"), 0, b"y"), (bad, 0, b"x")]),
        lambda: logs.end(bad),
        lambda: logs.read(bad, 0, 1),
    ):
        with pytest.raises(BadRequest):
            ask()
    assert logs.end(key("rank-5")) == 0


def test_a_job_that_is_none_is_refused(logs):
    for folder in ("..", "7", "7-k/..", ""):
        with pytest.raises(BadRequest):
            logs.delete(folder)


def test_many_threads_append_to_streams_of_their_own_and_to_one_in_common(logs):
    whole = b"".join(f"{number}\n".encode() for number in range(200))

    def write(rank):
        end = 0
        while end < len(whole):
            common = key("steps-0")
            ends = logs.append(
                [(key(f"rank-{rank}"), end, whole[end : end + 97]), (common, end, whole[end : end + 97])]
            )
            end = ends[key(f"rank-{rank}")]

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in ("rank-0", "rank-1", "rank-2", "rank-3", "steps-0"):
        assert logs.read(key(stream), 0, 10**6) == whole


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch):
    """Paths synced, in order."""
    paths = []

    def remembering(real):
        def sync(fd):
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        return sync

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, remembering(getattr(os, name)))
    return paths


def test_every_touched_file_is_synced_and_every_new_name(files, synced, tmp_path):
    files.append([(key(), 0, b"a"), (key("rank-1"), 0, b"b")])
    root = str(tmp_path / "logs")
    first = f"{tmp_path}/{FIRST}"
    assert sorted(synced) == [root, root + "/7-k", first, f"{first}/rank-0.log", f"{first}/rank-1.log"]
    synced.clear()
    files.append([(key(), 1, b"c"), (key("rank-1"), 0, b"b")])
    assert synced == [f"{first}/rank-0.log"]


def test_what_another_life_wrote_is_acknowledged_only_after_a_sync(files, synced, tmp_path):
    files.append([(key(), 0, b"abcd")])
    files.close()
    again = FileLogs(str(tmp_path / "logs"))
    synced.clear()
    assert again.append([(key(), 0, b"abcd")]) == {key(): 4}
    assert f"{tmp_path}/{FIRST}/rank-0.log" in synced
    again.close()


def test_open_files_are_bounded(files, monkeypatch):
    monkeypatch.setattr(open_files, "OPEN_MAX", 10)
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(3):
        ends = files.append([(key(f"rank-{rank}"), turn * 2, b"xy") for rank in range(150)])
        assert set(ends.values()) == {turn * 2 + 2}
        assert len(os.listdir("/proc/self/fd")) <= before + 10
    assert all(files.read(key(f"rank-{rank}"), 0, 9) == b"xyxyxy" for rank in range(150))


def test_of_a_long_stream_the_newest_part_is_kept(files, tmp_path, monkeypatch):
    monkeypatch.setattr(store_files, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(store_files, "_STEP_BYTES", 1 << 16)
    piece = bytes(range(1, 256)) * 257  # 65,535 bytes
    for number in range(40):
        files.append([(key(), number * len(piece), piece)])
    end = 40 * len(piece)
    begin = files.begin(key())
    if files.stored_bytes(key().folder.partition("/")[0]) > 2 << 20:
        pytest.skip("this file system frees no ranges")
    assert files.end(key()) == end
    assert 1 << 20 <= end - begin <= (1 << 20) + (1 << 17)
    assert files.read(key(), begin, end) == (piece * 40)[begin:]
    assert files.append([(key(), end, b"x")]) == {key(): end + 1}
    assert files.begin(key("rank-1")) == 0


def test_files_are_readable_by_their_owner_alone(files, tmp_path):
    files.append([(key(), 0, b"a")])
    assert (tmp_path / FIRST / "rank-0.log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_strangers_among_the_files_are_no_streams(files, tmp_path):
    files.append([(key(), 0, b"a")])
    (tmp_path / FIRST / "notes.txt").write_text("x")
    (tmp_path / FIRST / "rank-x.log").write_text("x")
    (tmp_path / "logs/7-k/other").mkdir()
    (tmp_path / "logs/7-k/file").write_text("x")
    assert files.streams(JOB_7) == [key()]


def test_a_link_is_not_followed(files, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / FIRST).mkdir(parents=True)
    (tmp_path / FIRST / "rank-0.log").symlink_to(secret)
    with pytest.raises(StoreRefused):
        files.append([(key(), 6, b"x")])
    assert secret.read_text() == "secret"


# ---- failing disks ---------------------------------------------------------------------------------------------------

FAILING = [
    (name, failure)
    for name, failures in FAILPOINTS.items()
    if name.startswith("logs.append.")
    for failure in sorted(failures & {FailureMode.ERROR, FailureMode.FULL})
]


@pytest.mark.parametrize(("point", "failure"), FAILING)
def test_a_refused_append_leaves_every_stream_as_it_was(files, tmp_path, point, failure):
    files.append([(key("rank-1"), 0, b"old")])
    chunks = [(key("rank-1"), 3, b" and new"), (key("rank-0"), 0, b"first"), (key("rank-2", epoch=2), 0, b"other")]
    with (
        armed(point, failure),
        pytest.raises(StoreRefused, match="full" if failure is FailureMode.FULL else "cannot be written"),
    ):
        files.append(chunks)
    assert files.append([(chunk[0], 0, b"") for chunk in chunks]) == {
        key("rank-0"): 0,
        key("rank-1"): 3,
        key("rank-2", epoch=2): 0,
    }
    assert files.read(key("rank-1"), 0, 99) == b"old"
    assert files.streams(JOB_7) == [key("rank-1")]
    again = FileLogs(str(tmp_path / "logs"))
    assert again.end(key("rank-1")) == 3
    again.close()
    assert files.append(chunks) == {key("rank-0"): 5, key("rank-1"): 11, key("rank-2", epoch=2): 5}
    assert files.read(key("rank-1"), 0, 99) == b"old and new"


def test_a_disk_that_fills_up_in_the_middle_of_a_write_takes_none_of_it(files, monkeypatch):
    files.append([(key(), 0, b"old")])
    real, room = os.pwrite, [10]

    def pwrite(fd, data, offset):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "no space")
        written = real(fd, bytes(data)[: room[0]], offset)
        room[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreRefused, match="the disk is full"):
        files.append([(key(), 3, b"x" * 100)])
    assert files.end(key()) == 3
    room[0] = 10**6
    assert files.append([(key(), 3, b"x" * 100)]) == {key(): 103}


def test_readers_never_see_what_is_not_synced(files):
    files.append([(key(), 0, b"old")])
    seen = []
    real = os.fdatasync

    def fdatasync(fd):
        seen.append((files.read(key(), 0, 99), files.end(key())))
        real(fd)

    os.fdatasync = fdatasync
    try:
        files.append([(key(), 3, b" new")])
    finally:
        os.fdatasync = real
    assert seen == [(b"old", 3)]
    assert files.read(key(), 0, 99) == b"old new"


def test_a_failed_delete_is_said_and_can_be_repeated(files):
    files.append([(key(), 0, b"a")])
    with armed("logs.delete.remove", FailureMode.ERROR), pytest.raises(StoreRefused):
        files.delete("7-k")
    files.delete("7-k")
    assert files.streams(JOB_7) == []


# ---- both, side by side ----------------------------------------------------------------------------------------------

WHOLE = {
    stream: bytes((number * 7 + len(stream)) % 256 for number in range(64))
    for stream in ("rank-0", "rank-1", "steps-0")
}
CHUNKS = st.lists(
    st.tuples(st.sampled_from(sorted(WHOLE)), st.integers(0, 40), st.integers(0, 24)).map(
        lambda of: (key(of[0]), of[1], WHOLE[of[0]][of[1] : of[1] + of[2]])
    ),
    max_size=5,
)
POINTS = st.none() | st.tuples(st.sampled_from(FAILING), st.integers(1, 4))


class Model:
    """The end of each stream, by the rule of the port: a chunk counts if it begins at or before the end and goes past it."""

    def __init__(self):
        self.ends = {}

    def append(self, chunks):
        for key, offset, content in chunks:
            end = self.ends.get(key, 0)
            self.ends[key] = offset + len(content) if offset <= end < offset + len(content) else end
        return {key: self.ends[key] for key, _, _ in chunks}


@settings(max_examples=examples(60), deadline=None)
@given(turns=st.lists(st.tuples(CHUNKS, POINTS, st.booleans()), max_size=8))
def test_files_agree_with_the_model_whatever_is_sent_and_whatever_fails(turns):
    folder = tempfile.mkdtemp(prefix="phalanx-logs-")
    files, model = FileLogs(folder), Model()
    try:
        for chunks, point, again in turns:
            if point is None:
                assert files.append(chunks) == model.append(chunks)
            else:
                (name, failure), nth = point
                try:
                    with armed(name, failure, nth):
                        found = files.append(chunks)
                except StoreRefused:
                    pass
                else:
                    assert found == model.append(chunks)
            if again:
                files.close()
                files = FileLogs(folder)
            ends = {key: end for key, end in model.ends.items() if end}
            assert {found: files.end(found) for found in files.streams(JOB_7)} == ends
            for stream, whole in WHOLE.items():
                assert files.read(key(stream), 0, 99) == whole[: ends.get(key(stream), 0)]
    finally:
        files.close()
        shutil.rmtree(folder)
