"""The judge of system-call order sees what it should: a planted wrong order is named, a right one is not."""

import pytest

from tests.crash.syscalls import answers_of, calls_of, out_of_order

ASKED = r'11 recvfrom(5<TCP:[127.0.0.1:7600->127.0.0.1:99]>, "POST /v1/jobs HTTP/1.1\r\nX-Mark: m-1\r\n\r\n{\"name\":\"m-1\"}", 65536, 0, NULL, NULL) = 60'
ANSWERED = '11 sendto(5<TCP:[127.0.0.1:7600->127.0.0.1:99]>, "HTTP/1.1 201 Created\\r\\n\\r\\n{}", 30, 0, NULL, 0) = 30'
FRAME = r'12 pwrite64(8</h/phalanx.db-wal>, "\0\0\0\7\0\0\0\0salt1234sum12345", 24, 4096) = 24'
LAST_FRAME = FRAME.replace(r"\7\0\0\0\0", r"\7\0\0\0\t")  # of a commit: says how many pages the database has then
PAGE = r'12 pwrite64(8</h/phalanx.db-wal>, "\0\0{\"name\":\"m-1\"}", 4096, 4120) = 4096'
OTHERS_PAGE = r'12 pwrite64(8</h/phalanx.db-wal>, "somebody else", 4096, 8240) = 4096'
SYNCED = "12 fdatasync(8</h/phalanx.db-wal>) = 0"
WRITTEN = (FRAME, PAGE, LAST_FRAME, OTHERS_PAGE)  # a commit with the mark
OTHERS = (FRAME, OTHERS_PAGE, LAST_FRAME, OTHERS_PAGE)  # and one without


def judged(*parts, where="phalanx.db-wal", there=()):
    calls = calls_of([line for part in parts for line in ([part] if isinstance(part, str) else part)])
    (answer,) = answers_of(calls)
    return out_of_order(answer, calls, where, there)


def test_synced_before_the_answer_is_in_order():
    assert judged(ASKED, WRITTEN, SYNCED, ANSWERED) == ""


def test_what_others_write_meanwhile_may_come_later():
    assert judged(ASKED, WRITTEN, SYNCED, OTHERS, ANSWERED) == ""


def test_a_later_commit_that_writes_the_same_page_again_may_come_to_the_disk_later():
    assert judged(ASKED, WRITTEN, SYNCED, WRITTEN, ANSWERED, SYNCED) == ""
    assert judged(ASKED, WRITTEN, SYNCED, FRAME, PAGE, ANSWERED, LAST_FRAME, OTHERS_PAGE, SYNCED) == ""


def test_commits_of_others_that_came_between_do_not_count_for_it():
    assert judged(ASKED, OTHERS, SYNCED, WRITTEN, SYNCED, ANSWERED) == ""
    assert "was synced" in judged(ASKED, OTHERS, SYNCED, WRITTEN, ANSWERED, SYNCED)


BOTH = ASKED.replace("X-Mark: m-1", "X-Mark: m-1 & m-2")
SECOND = [line.replace("m-1", "m-2") for line in WRITTEN]


def test_of_several_marks_each_has_to_be_on_the_disk():
    assert judged(BOTH, WRITTEN, SYNCED, SECOND, SYNCED, ANSWERED) == ""
    assert judged(BOTH, WRITTEN, SECOND, SYNCED, ANSWERED) == ""
    assert "was synced" in judged(BOTH, WRITTEN, SYNCED, SECOND, ANSWERED, SYNCED)
    assert "its bytes were not written" in judged(BOTH, WRITTEN, SYNCED, ANSWERED, SECOND, SYNCED)


def test_without_a_mark_one_commit_has_to_be_whole():
    asked = ASKED.replace(r"X-Mark: m-1\r\n", "")
    assert judged(asked, WRITTEN, SYNCED, OTHERS, ANSWERED) == ""
    assert "was synced" in judged(asked, SYNCED, WRITTEN, ANSWERED, SYNCED)
    assert "held the whole commit" in judged(asked, FRAME, PAGE, SYNCED, ANSWERED, LAST_FRAME, OTHERS_PAGE, SYNCED)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((ASKED, WRITTEN, ANSWERED, SYNCED), "before /h/phalanx.db-wal was synced"),
        ((ASKED, SYNCED, WRITTEN, ANSWERED), "before /h/phalanx.db-wal was synced"),
        ((ASKED, ANSWERED, WRITTEN, SYNCED), "its bytes were not written"),
        ((ASKED, OTHERS, SYNCED, ANSWERED), "its bytes were not written"),
        ((WRITTEN, SYNCED, ASKED, ANSWERED), "its bytes were not written"),
        ((ASKED, WRITTEN, SYNCED.replace("= 0", "= -1 EIO (Input/output error)"), ANSWERED), "was synced"),
        ((ASKED, WRITTEN, SYNCED.replace("-wal", ""), ANSWERED), "was synced"),
        ((ASKED, WRITTEN, WRITTEN, ANSWERED, SYNCED), "was synced"),
        ((ASKED, FRAME, PAGE, SYNCED, LAST_FRAME, OTHERS_PAGE, ANSWERED, SYNCED), "was synced"),
        ((ASKED, FRAME, PAGE, SYNCED, ANSWERED, LAST_FRAME, OTHERS_PAGE, SYNCED), "held the whole commit"),
        ((ASKED, FRAME, PAGE, LAST_FRAME, SYNCED, ANSWERED, OTHERS_PAGE, SYNCED), "held the whole commit"),
        ((WRITTEN, SYNCED, ASKED, WRITTEN, SYNCED, ANSWERED), "nothing can be told: m-1 stood in"),
        ((FRAME, PAGE, ASKED, LAST_FRAME, OTHERS_PAGE, SYNCED, WRITTEN, SYNCED, ANSWERED), "nothing can be told"),
    ],
    ids=[
        "synced after",
        "synced too early",
        "written after",
        "another's bytes",
        "of before",
        "sync failed",
        "another file",
        "written twice and synced after",
        "synced amid its commit",
        "its commit had no end",
        "its commit's last page was missing",
        "the mark is an old one",
        "the mark was being written",
    ],
)
def test_a_wrong_order_is_named(lines, says):
    assert says in judged(*lines)


def test_a_sync_that_is_still_under_way_does_not_count():
    begun, done = "12 fdatasync(8</h/phalanx.db-wal> <unfinished ...>", "12 <... fdatasync resumed>) = 0"
    assert "was synced" in judged(ASKED, WRITTEN, begun, ANSWERED, done)
    assert judged(ASKED, WRITTEN, begun, done, ANSWERED) == ""


BLOB = r'13 pwrite64(9</h/blobs/.coming-x>, "m-1", 3, 0) = 3'
BLOB_SYNCED = "13 fsync(9</h/blobs/.coming-x>) = 0"
BLOB_NAMED = '13 rename("/h/blobs/.coming-x", "/h/blobs/ab/abc") = 0'
NAME_SYNCED = "13 fsync(9</h/blobs/ab>) = 0"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((BLOB, BLOB_SYNCED, BLOB_NAMED, NAME_SYNCED), ""),
        ((BLOB, BLOB_SYNCED, BLOB_NAMED), "the folder /h/blobs/ab was synced"),
        ((BLOB, BLOB_NAMED, BLOB_SYNCED, NAME_SYNCED), "it had its name already"),
        ((BLOB, BLOB_SYNCED, NAME_SYNCED, BLOB_NAMED), "the folder /h/blobs/ab was synced"),
    ],
)
def test_a_file_is_synced_then_named_then_its_folder_is_synced(lines, says):
    found = judged(ASKED, *lines, ANSWERED, where="/blobs/")
    assert says in found
    assert bool(says) == bool(found)


def test_a_new_log_needs_its_folder():
    made = (
        '14 openat(AT_FDCWD</>, "/h/logs/1/1/rank-0.log", O_RDWR|O_CREAT|O_CLOEXEC, 0600) = 20</h/logs/1/1/rank-0.log>'
    )
    written, synced = (
        '14 pwrite64(20</h/logs/1/1/rank-0.log>, "m-1", 3, 0) = 3',
        "14 fdatasync(20</h/logs/1/1/rank-0.log>) = 0",
    )
    assert "the folder /h/logs/1/1" in judged(ASKED, made, written, synced, ANSWERED, where="/logs/")
    assert judged(ASKED, made, written, synced, "14 fsync(21</h/logs/1/1>) = 0", ANSWERED, where="/logs/") == ""


def test_a_file_that_was_there_before_is_not_made_when_it_is_opened():
    opened = '14 openat(AT_FDCWD</>, "/h/phalanx.db-wal", O_RDWR|O_CREAT|O_CLOEXEC, 0600) = 20</h/phalanx.db-wal>'
    assert "the folder /h was synced" in judged(ASKED, opened, WRITTEN, SYNCED, ANSWERED)
    assert judged(ASKED, opened, WRITTEN, SYNCED, ANSWERED, there=["/h/phalanx.db-wal"]) == ""


def test_what_comes_as_base64_is_read():
    asked = r'11 recvfrom(5<TCP:[a]>, "POST /v1/node/streams HTTP/1.1\r\n\r\n{\"chunks\":[{\"data\":\"bS0x\"}]}", 99, 0, NULL, NULL) = 60'
    (answer,) = answers_of(calls_of([asked, ANSWERED.replace("127.0.0.1:7600->127.0.0.1:99", "a")]))
    assert "m-1" in answer.text


@pytest.mark.parametrize(("info", "header"), [(r"\0", 24), (r"\2", 40), (r"\5", 24)])
def test_a_mark_that_the_head_of_a_page_of_postgresql_divides_is_found(info, header):
    """XLP_LONG_HEADER is 2; what else may be said beside it changes nothing."""
    first, second = (
        r"\1\2\0\0" + "h" * 20 + "." * (8192 - 26) + "m-",
        r"\1\2" + info + r"\0" + "h" * (header - 4) + "1 and more",
    )
    written = f'13 pwrite64(9</d/pg_wal/000000010000000000000001>, "{first}{second}", 16384, 0) = 16384'
    synced = "13 fdatasync(9</d/pg_wal/000000010000000000000001>) = 0"
    assert judged(ASKED, written, synced, ANSWERED, where="/pg_wal/") == ""
    assert "was synced" in judged(ASKED, written, ANSWERED, synced, where="/pg_wal/")


def test_a_page_of_postgresql_that_others_write_again_may_come_to_the_disk_later():
    written = '13 pwrite64(9</d/pg_wal/000000010000000000000001>, "' + "h" * 24 + 'm-1", 8192, 0) = 8192'
    synced = "13 fdatasync(9</d/pg_wal/000000010000000000000001>) = 0"
    assert judged(ASKED, written, synced, written, ANSWERED, synced, where="/pg_wal/") == ""
    assert "was synced" in judged(ASKED, written, written, ANSWERED, synced, where="/pg_wal/")
