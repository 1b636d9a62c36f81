"""A list of machines that many calls share: complete, young, and begun after what it must show."""

import itertools
import threading

import pytest

from phalanx.providers.clouds.shared_list import AGE_MAX_S, SharedList


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_list_is_fetched_again_if_it_is_old_or_began_before_what_it_must_show():
    clock, numbers = Clock(), itertools.count(1)
    shared = SharedList[int](clock)

    def get(begun_after_s, account="a"):
        return shared.get(account, lambda: [next(numbers)], begun_after_s=begun_after_s)

    assert [get(0.0), get(0.0), get(99.0)] == [[1], [1], [1]]
    assert get(100.0) == [2], "a call at the moment of its beginning may have come after it"
    assert get(0.0, "b") == [3]
    clock.now_s += AGE_MAX_S
    assert get(0.0) == [2]
    clock.now_s += 1.0
    assert get(0.0) == [4]


def test_a_list_that_failed_is_no_list():
    shared = SharedList[int](Clock())

    def fail():
        raise OSError("503")

    with pytest.raises(OSError, match="503"):
        shared.get("a", fail, begun_after_s=0.0)
    assert shared.get("a", lambda: [1], begun_after_s=0.0) == [1]


def test_those_who_ask_meanwhile_wait_for_it():
    shared, asked, go, found = SharedList[int](), threading.Event(), threading.Event(), []
    calls = []

    def fetch():
        calls.append(1)
        asked.set()
        assert go.wait(20.0)
        return [7]

    threads = [
        threading.Thread(target=lambda: found.append(shared.get("a", fetch, begun_after_s=0.0))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    assert asked.wait(20.0)
    go.set()
    for thread in threads:
        thread.join(20.0)
    assert found == [[7]] * 8
    assert len(calls) == 1
