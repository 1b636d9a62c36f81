"""The pairs of the step benchmark: slices of a gang, and processes that are stopped meanwhile."""

import os
import signal
import subprocess
import threading

import pytest

from benchmarks.step_pairs import RANKS, SlicedGang, _stopped, median_bounds


def _rank(folder, rank, seconds):
    done = os.open(folder / "done", os.O_WRONLY)
    with open(folder / f"go-{rank}", encoding="ascii") as orders:
        for order in orders:
            if not int(order):
                break
            os.write(done, f"{rank} {seconds * int(order)}\n".encode())
    os.close(done)


def test_a_slice_ends_when_every_rank_has_made_its_steps_and_counts_the_first_rank(tmp_path):
    gang = SlicedGang(str(tmp_path))
    gang.open()
    ranks = [threading.Thread(target=_rank, args=(tmp_path, rank, 0.5 + rank)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    assert [gang.step(4), gang.step(16)] == [0.5, 0.5]
    gang.end()
    for one in ranks:
        one.join(timeout=30)
    gang.close()


def test_stopped_processes_continue_also_after_an_error():
    child = subprocess.Popen(["sleep", "60"])

    def fail() -> None:
        with _stopped([child.pid]):
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.WIFCONTINUED(os.waitpid(child.pid, os.WCONTINUED)[1])
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_the_bounds_of_a_median_hold_it_between_them():
    low, high = median_bounds([float(value) for value in range(31)])
    assert low < 15.0 < high
    assert median_bounds([2.0] * 30) == (2.0, 2.0)
