"""The soak's books find each kind of wrong answer: a harness that cannot fail would show nothing."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import pytest

from benchmarks.soak_checks import AnswerChecks


def view(job_id, seq, state="succeeded", epoch=1, **more):
    return {"id": job_id, "seq": seq, "state": state, "epoch": epoch, "gpu_count": 1, "nodes": ["n0"], **more}


def line(seq, kind, job_id="1", epoch=1):
    return {"seq": seq, "kind": kind, "job_id": job_id, "epoch": epoch}


@pytest.fixture
def books():
    books = AnswerChecks()
    books.check_acknowledged("k1", ["1"])
    books.check_acknowledged("k2", ["2_0", "2_1"])
    return books


def whole(books, *views, **states):
    books.check_list(views, states or {"succeeded": len(views)})
    return books.wrong


def test_all_is_well(books):
    assert whole(books, view("1", 1), view("2_0", 2), view("2_1", 3)) == []
    books.check_history(
        [line(1, "submitted"), line(2, "placed"), line(3, "stopping"), line(4, "placed", epoch=2), line(5, "succeeded")]
    )
    books.check_devices([("n0", 0, "1", 1, 0, 10, 20), ("n0", 0, "2_0", 1, 0, 20, 30)])
    books.check_generations([("n0", 0, "1", 1, 0, 10, 20), ("n1", 0, "1", 2, 0, 20, 30), ("n1", 1, "1", 2, 0, 21, 30)])
    assert books.wrong == []


def test_lost_job_is_found(books):
    assert "acknowledged but not listed: ['2_1']" in whole(books, view("1", 1), view("2_0", 2))[0]


def test_job_that_is_there_twice_is_found(books):
    wrong = whole(books, view("1", 1), view("1", 4), view("2_0", 2), view("2_1", 3))
    assert any("listed twice: ['1']" in each for each in wrong)


def test_job_that_nobody_submitted_is_found(books):
    wrong = whole(books, view("1", 1), view("2_0", 2), view("2_1", 3), view("7", 5))
    assert "never acknowledged: ['7']" in wrong[0]


def test_counts_that_disagree_are_found(books):
    wrong = whole(books, view("1", 1), view("2_0", 2), view("2_1", 3), succeeded=2, failed=1)
    assert "the overview" in wrong[0]


def test_key_acknowledged_as_two_jobs_is_found(books):
    books.check_acknowledged("k1", ["9"])
    assert "k1 was acknowledged as ['1'] and as ['9']" in books.wrong[0]


@pytest.mark.parametrize("later", [view("1", 1, "running"), view("1", 1, "failed"), view("1", 1, epoch=0)])
def test_job_that_changes_after_its_end_is_found(books, later):
    books.check_view(view("1", 1))
    books.check_view(later)
    assert books.wrong


def test_cancelled_job_that_lives_is_found(books):
    books.cancelled.add("1")
    assert any(
        "was cancelled and is" in each for each in whole(books, view("1", 1, "pending"), view("2_0", 2), view("2_1", 3))
    )


@pytest.mark.parametrize("seqs", [(1, 2), (3, 3), (9, 8, 10)])
def test_page_out_of_order_is_found(books, seqs):
    books.check_page([view(str(seq), seq) for seq in seqs])
    assert books.wrong


def test_page_that_begins_too_late_is_found(books):
    books.check_page([view("5", 5)], before_seq=5)
    assert books.wrong


@pytest.mark.parametrize(
    "lines",
    [
        [line(1, "submitted"), line(3, "placed")],
        [line(1, "placed"), line(2, "succeeded"), line(3, "placed", epoch=2)],
        [line(1, "placed"), line(2, "placed", epoch=3)],
        [line(1, "placed"), line(2, "placed")],
        [line(1, "placed"), line(2, "failed"), line(3, "cancelled")],
    ],
)
def test_history_with_a_gap_or_an_impossible_turn_is_found(books, lines):
    books.check_history(lines)
    assert books.wrong


def test_device_under_two_tasks_is_found(books):
    books.check_devices([("n0", 0, "1", 1, 0, 10, 20), ("n0", 0, "2_0", 1, 0, 19, 30), ("n1", 0, "2_1", 1, 0, 10, 30)])
    assert "device ('n0', 0)" in books.wrong[0]


def test_job_in_two_epochs_at_once_is_found(books):
    books.check_generations([("n0", 0, "1", 1, 0, 10, 20), ("n1", 0, "1", 2, 0, 19, 30)])
    assert "at once" in books.wrong[0]
