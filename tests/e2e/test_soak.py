"""Two minutes of load on a whole cluster: the soak in small (`make soak` is the real one)."""

import pytest

from benchmarks.soak import run_soak


@pytest.mark.prove
@pytest.mark.serial
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_two_minutes_of_load_and_blows_give_no_wrong_answer():
    with run_soak(minutes=2.0, supervisors=100, standing=2_000, users=6, seed=1) as soak:
        for figure in soak.figures():
            print(figure.name, round(figure.value, 1), figure.unit, figure.note)
        assert soak.books.wrong == []
        assert soak.books.counts["requests"] > 100
        assert soak.books.counts["blows: head"] >= 1
        assert soak.books.counts["attempts"] > 100
