"""Boxes of commands: in order, given again until acknowledged, bounded."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import threading

from phalanx.controller import mailboxes as module
from phalanx.controller.mailboxes import Mailboxes
from phalanx.core.state.commands import CleanUpAttempt
from phalanx.wire.supervisor import decode_command


def forget(n):
    return CleanUpAttempt(node_id="n0", job_id=str(n), epoch=1)


def jobs(framed):
    return [decode_command(one).job_id for one in framed]


def test_empty_box_gives_nothing():
    assert Mailboxes().take("n0", 0) == ([], 0)


def test_commands_come_in_order_and_again_until_asked_past():
    boxes = Mailboxes()
    for n in range(3):
        boxes.post("n0", forget(n))
    taken, last = boxes.take("n0", 0)
    assert (jobs(taken), last) == (["0", "1", "2"], 3)
    assert jobs(boxes.take("n0", 1)[0]) == ["1", "2"]
    assert boxes.take("n0", last) == ([], 3)
    assert boxes.waiting() == {}


def test_boxes_are_apart():
    boxes = Mailboxes()
    boxes.post("n0", forget(0))
    assert boxes.take("n1", 0) == ([], 0)


def test_acknowledgement_of_another_life_drops_nothing():
    boxes = Mailboxes()
    boxes.post("n0", forget(0))
    assert boxes.take("n0", 99) == ([], 1)
    assert jobs(boxes.take("n0", 0)[0]) == ["0"]


def test_who_says_hello_gets_none_of_the_old_and_goes_on_counting():
    boxes = Mailboxes()
    boxes.post("n0", forget(0))
    after = boxes.last("n0")
    boxes.post("n0", forget(1))
    taken, last = boxes.take("n0", after)
    assert (after, jobs(taken), last) == (1, ["1"], 2)
    assert jobs(boxes.take("n0", 0)[0]) == ["1"]
    assert boxes.last("n1") == 0


def test_box_that_was_forgotten_counts_on():
    """Found by reading: a node that came back asked after 2, got a box that began at 1, and was told nothing until that stood at 3."""
    boxes = Mailboxes()
    boxes.post("n0", forget(0))
    boxes.post("n0", forget(1))
    before = boxes.last("n0")  # what a hello is answered, while the loss of its node is being committed
    boxes.remove("n0")
    assert boxes.last("n0") == before
    assert boxes.take("n0", before) == ([], before)
    boxes.post("n0", forget(2))
    assert jobs(boxes.take("n0", before)[0]) == ["2"]
    boxes.post("n1", forget(3))
    assert jobs(boxes.take("n1", 0)[0]) == ["3"]


def test_full_box_loses_its_oldest(monkeypatch):
    monkeypatch.setattr(module, "BOX_COMMANDS_MAX", 2)
    boxes = Mailboxes()
    for n in range(3):
        boxes.post("n0", forget(n))
    assert jobs(boxes.take("n0", 0)[0]) == ["1", "2"]


def test_large_boxes_are_taken_in_parts(monkeypatch):
    monkeypatch.setattr(module, "TAKE_COMMANDS_MAX", 2)
    boxes = Mailboxes()
    for n in range(3):
        boxes.post("n0", forget(n))
    first, last = boxes.take("n0", 0)
    rest, end = boxes.take("n0", last)
    assert (jobs(first), jobs(rest), end) == (["0", "1"], ["2"], 3)


def test_listener_is_woken_by_posts_to_its_node_until_it_stops():
    boxes, woken = Mailboxes(), []
    stop = boxes.listen("n0", lambda: woken.append(1))
    boxes.post("n0", forget(0))
    boxes.post("n1", forget(0))
    stop()
    stop()
    boxes.post("n0", forget(1))
    assert woken == [1]


def post_many(boxes):
    for n in range(50):
        boxes.post("n0", forget(n))


def test_posts_of_many_threads_are_all_there():
    boxes = Mailboxes()
    threads = [threading.Thread(target=post_many, args=(boxes,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert [framed.seq for framed in boxes.take("n0", 0)[0]] == list(range(1, 201))


def test_several_commands_of_one_step_wake_a_reader_once():
    boxes, woken = Mailboxes(), []
    boxes.listen("n0", lambda: woken.append(1))
    boxes.post("n0", forget(0), forget(1), forget(2))
    assert woken == [1]
    assert [one.seq for one in boxes.take("n0", 0)[0]] == [1, 2, 3]
