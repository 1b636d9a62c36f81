"""The parts of `phalanx.Executor` that need no cluster: frames however they are cut, the journal across crashes, and the dispatcher's books."""

# Ids are written as plain words here, and functions are local.
# mypy: disable-error-code="var-annotated, attr-defined"

import os
import pickle
import random
import threading

import pytest

from phalanx.executor import journal as journals
from phalanx.executor.broker import _journal_path
from phalanx.executor.dispatcher import Dispatcher, Task
from phalanx.executor.frames import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    INITIALIZER,
    FrameKind,
    FrameReader,
    InvalidFrame,
    ResultStatus,
    frame,
    numbers_frame,
    result_frame,
    split_fetch,
    split_numbers,
    split_piece,
    split_result,
    split_task,
    task_frame,
)
from phalanx.executor.futures import TaskFuture
from phalanx.executor.journal import Journal
from phalanx.wire.rank import LOCAL_CHECKPOINTS_VARIABLE

DIGEST = b"0123456789abcdef"


def test_frames_come_out_as_they_went_in_however_they_are_cut():
    sent = [(FrameKind.TASK, os.urandom(size)) for size in (0, 1, 7, 1000, 70_000)] * 3
    data = b"".join(frame(kind, body) for kind, body in sent)
    chance = random.Random(7)
    for _ in range(20):
        reader, found, start = FrameReader(), [], 0
        while start < len(data):
            size = chance.choice((1, 3, 5, 100, 40_000))
            found += reader.feed(data[start : start + size])
            start += size
        assert found == sent


@pytest.mark.parametrize(
    "data", [b"\x63\0\0\0\0", b"\x04" + (BODY_BYTES_MAX + 1).to_bytes(4, "big"), b"no broker listens\n"]
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(InvalidFrame):
        list(FrameReader().feed(data))


@pytest.mark.parametrize("split", [split_task, split_result, split_piece, split_fetch, split_numbers])
def test_bodies_that_are_too_short_are_refused(split):
    with pytest.raises(InvalidFrame):
        split(b"abc")


def function(data=b"f"):
    return frame(FrameKind.FUNCTION, DIGEST, data)


def filled(path):
    """Tasks 1 to 5: 1 has a result, 2 was given back."""
    made = Journal(str(path))
    made.add_function(DIGEST, function())
    for task in range(1, 6):
        made.add_task(task, DIGEST, task_frame(task, DIGEST, b"arguments %d" % task))
    made.add_result(1, result_frame(0, 1, ResultStatus.VALUE, 0, 0.5, b"one"))
    made.drop([2])
    made.flush()
    return made


def books(journal):
    return list(journal.waiting), journal.results, sorted(journal.functions)


def test_a_journal_is_the_same_after_its_process_died(tmp_path):
    before = filled(tmp_path / "j")
    after = Journal(str(tmp_path / "j"))
    assert books(after) == books(before) == ([3, 4, 5], 1, [DIGEST])
    assert split_result(after.result(0)[HEADER_BYTES:])[1:3] == (1, ResultStatus.VALUE)
    assert split_task(after.read(after.waiting[4])[HEADER_BYTES:]) == (4, DIGEST, b"arguments 4")
    assert 1 in after
    assert 3 in after
    assert 2 not in after, "it may come again"


def test_a_frame_that_was_not_finished_is_cut_off_wherever_it_ends(tmp_path):
    filled(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    last = numbers_frame(FrameKind.GIVEN, [2])
    for cut in range(1, len(last) + 1):
        (tmp_path / "k").write_bytes(data[: len(data) - cut])
        after = Journal(str(tmp_path / "k"))
        assert list(after.waiting) == [2, 3, 4, 5]
        after.add_task(6, DIGEST, task_frame(6, DIGEST, b"new"))
        after.flush()
        assert list(Journal(str(tmp_path / "k")).waiting) == [2, 3, 4, 5, 6]


def test_a_long_journal_is_written_anew_without_what_was_delivered(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "COMPACT_BYTES", 10)
    made = filled(tmp_path / "j")
    made.add_initializer(task_frame(INITIALIZER, DIGEST, b"first"))
    made.add_result(3, result_frame(1, 3, ResultStatus.VALUE, 0, 0.5, b"three"))
    assert not made.is_long
    made.delivered(made.result(0))
    assert made.is_long
    size = os.path.getsize(made.path)
    made.compact(1)
    assert (made.generation, made.is_long, os.path.getsize(made.path) < size) == (1, False, True)
    for one in (made, Journal(made.path)):
        assert list(one.waiting) == [4, 5]
        assert split_task(one.read(one.waiting[5])[HEADER_BYTES:])[2] == b"arguments 5"
        assert one.function_of(5) == one.initializer_function
        assert one.initializer
    assert (made.results, made.first) == (2, 1)
    assert split_result(made.result(1)[HEADER_BYTES:])[1] == 3
    made.add_result(4, result_frame(2, 4, ResultStatus.VALUE, 0, 0.5, b"four"))
    assert split_result(made.result(2)[HEADER_BYTES:])[1] == 4


def test_the_journal_lasts_where_nodes_share_the_heads_folder_and_is_not_copied_to_it_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_OUTPUT_DIR", str(tmp_path))
    monkeypatch.setenv("PHALANX_NODE_RANK", "3")
    monkeypatch.delenv(LOCAL_CHECKPOINTS_VARIABLE, raising=False)
    assert _journal_path("/scratch") == f"{tmp_path}/.executor-3"
    monkeypatch.setenv(LOCAL_CHECKPOINTS_VARIABLE, "1")
    assert _journal_path("/scratch") == "/scratch/.executor"


# ---- the dispatcher ---------------------------------------------------------------------------------------------------


class PlayedLink:
    """The connection to one broker, which a test plays."""

    def __init__(self, rank):
        self.rank, self.sent, self.welcomed = rank, [], False

    def send(self, *frames):
        for data in frames:
            self.sent += FrameReader().feed(data)

    def tasks(self):
        return [split_task(body)[0] for kind, body in self.sent if kind is FrameKind.TASK]


def dispatcher(nodes=2, *, attached=False):
    made = Dispatcher(threading.Condition(threading.RLock()), lambda why: None, attached=attached)
    made.set_nodes([f"n{rank}" for rank in range(nodes)])
    return made


def add(made, *numbers):
    futures = [TaskFuture(number, made.cancelled) for number in numbers]
    for future in futures:
        made.expect(future)
        made.add(Task(future, DIGEST, b"arguments"), b"function")
    return futures


def welcome(made, link, *, run="r", workers=2, accepted=0, results=0, held=None):
    body = b'{"run": "%s", "workers": %d, "accepted": %d, "results": %d}' % (run.encode(), workers, accepted, results)
    frames = [(FrameKind.WELCOME, body)]
    if held is not None:
        frames += FrameReader().feed(numbers_frame(FrameKind.HELD, held))
    made.on_frames(link, frames)


def finish(made, link, place, task, value):
    body = result_frame(place, task, ResultStatus.VALUE, 1, 0.1, pickle.dumps(value))
    made.on_frames(link, list(FrameReader().feed(body)))


def test_tasks_wait_for_a_node_and_are_spread_by_load():
    made, links = dispatcher(), [PlayedLink(0), PlayedLink(1)]
    add(made, *range(6))
    welcome(made, links[0])
    assert links[0].tasks() == list(range(6)), "the only one that is connected"
    welcome(made, links[1])
    add(made, *range(6, 18))
    assert (len(links[0].tasks()), len(links[1].tasks())) == (9, 9)
    assert sum(kind is FrameKind.FUNCTION for kind, _ in links[1].sent) == 1, "once for each node"


def test_after_a_broken_connection_only_what_the_broker_lacks_is_sent_again():
    made = dispatcher(1)
    welcome(made, PlayedLink(0))
    futures = add(made, *range(5))
    made.lost(0)
    again = PlayedLink(0)
    welcome(made, again, accepted=3)
    assert again.tasks() == [3, 4]
    finish(made, again, 0, 2, "two")
    finish(made, again, 0, 2, "twice")
    assert (futures[2].result(0), futures[2].node, futures[2].worker, made.open_count) == ("two", "n0", 1, 4)


def test_a_broker_that_started_anew_gets_all_that_has_no_result():
    made = dispatcher(1)
    welcome(made, PlayedLink(0), run="first")
    add(made, *range(4))
    made.lost(0)
    again = PlayedLink(0)
    welcome(made, again, run="second", held=[])
    assert again.tasks() == [0, 1, 2, 3]


def test_tasks_of_a_node_that_the_next_attempt_lacks_go_to_the_others():
    made, links = dispatcher(2), [PlayedLink(0), PlayedLink(1)]
    for link in links:
        welcome(made, link)
    add(made, *range(4))
    made.set_nodes(["n0"])
    again = PlayedLink(0)
    welcome(made, again, run="second", held=[])
    assert sorted(again.tasks()) == [0, 1, 2, 3]


def test_a_node_with_little_work_takes_from_the_one_with_the_most_once():
    made, links = dispatcher(2), [PlayedLink(0), PlayedLink(1)]
    welcome(made, links[0])
    add(made, *range(100))
    welcome(made, links[1])
    made.on_frames(links[1], [])
    takes = [body for kind, body in links[0].sent if kind is FrameKind.TAKE]
    assert [int.from_bytes(body, "big") for body in takes] == [50]
    made.on_frames(links[0], list(FrameReader().feed(numbers_frame(FrameKind.GIVEN, range(50, 100)))))
    assert sorted(links[1].tasks()) == list(range(50, 100))


def test_a_cancelled_task_is_dropped_and_its_late_result_ignored():
    made, link = dispatcher(1), PlayedLink(0)
    welcome(made, link)
    (future,) = add(made, 7)
    assert future.cancel()
    assert (FrameKind.DROP, (7).to_bytes(8, "big")) in link.sent
    finish(made, link, 0, 7, "late")
    assert (future.cancelled(), made.open_count) == (True, 0)


def test_what_an_earlier_program_submitted_is_found_done_or_not_or_lost():
    made, link = dispatcher(1, attached=True), PlayedLink(0)
    welcome(made, link, held=[5, 6], results=1)
    finish(made, link, 0, 4, "done before")
    assert sorted(made.earlier) == [4, 5, 6]
    assert (made.earlier[4].result(0), made.earlier[5].done()) == ("done before", False)
    finish(made, link, 1, 5, "done now")
    assert made.earlier[5].result(0) == "done now"
    made.lost(0)
    again = PlayedLink(0)
    welcome(made, again, run="second", held=[], results=0)
    with pytest.raises(Exception, match="lost with its node"):
        made.earlier[6].result(0)
