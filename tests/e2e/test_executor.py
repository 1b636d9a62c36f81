"""`phalanx.Executor` as a `concurrent.futures.Executor`, on a real head with two nodes, and what happens when a part of it dies.

Functions are local ones, so that they travel by value and no worker imports this module.
"""

# Ids are written as plain words here, and functions are local.
# mypy: disable-error-code="var-annotated, attr-defined"

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

import phalanx
from benchmarks.cluster import ROOT, cluster, wait_until
from phalanx.client import Client
from phalanx.core.errors import BadRequest
from phalanx.executor.futures import ExecutorBroken, WorkerDied

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def head():
    with cluster("2x2", revive_s=0.5) as made:
        yield made


@pytest.fixture(scope="module")
def pool(head):
    with phalanx.Executor(gpus=1, max_workers=4, client=Client(home=head.home)) as made:
        made.submit(int).result()
        made.wait_connected()
        yield made


@contextlib.contextmanager
def another(head, **given):
    with phalanx.Executor(**{"gpus": 0, "client": Client(home=head.home), **given}) as made:
        yield made


def waits_for(path):
    """A function that returns once the file is there."""

    def wait(value=None):
        import os
        import time

        while not os.path.exists(path):
            time.sleep(0.005)
        return value

    return wait


def touch(path):
    path.write_text("")


# ---- as CPython's own pools -------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_function_does_and_says_where(pool):
    future = pool.submit(lambda *given, **named: (given, named), 1, "a", b=[2])
    assert future.result(60) == ((1, "a"), {"b": [2]})
    assert (future.node in ("n0", "n1"), future.worker in (0, 1), future.done()) == (True, True, True)


def test_arguments_named_as_parameters_of_submit_reach_the_function(pool):
    assert pool.submit(lambda self, fn: (self, fn), self=1, fn=2).result(60) == (1, 2)


def test_an_exception_comes_with_its_traceback_on_the_worker(pool):
    def fails():
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone") as raised:
        pool.submit(fails).result(60)
    assert ", in fails" in "".join(traceback.format_exception(raised.value))


def test_an_exception_that_cannot_be_pickled_is_told_in_words(pool):
    def fails():
        class Odd(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        raise Odd("this", "that")

    with pytest.raises(RuntimeError, match="Odd: this and that"):
        pool.submit(fails).result(60)


def test_what_cannot_be_pickled_fails_its_own_task_only(pool):
    with pytest.raises(TypeError):
        pool.submit(lambda lock: lock, threading.Lock()).result(60)
    with pytest.raises(TypeError):
        pool.submit(lambda: __import__("threading").Lock()).result(60)
    assert pool.submit(lambda: 5).result(60) == 5


def test_an_exit_of_the_function_is_its_result(pool):
    with pytest.raises(SystemExit):
        pool.submit(sys.exit, 3).result(60)


def test_map_keeps_the_order_and_stops_at_the_shortest(pool):
    assert list(pool.map(pow, range(10), range(10))) == [number**number for number in range(10)]
    assert list(pool.map(lambda a, b: (a, b), "abc", [1, 2])) == [("a", 1), ("b", 2)]
    assert list(pool.map(lambda x: -x, range(50), chunksize=7)) == [-number for number in range(50)]
    assert list(pool.map(abs, [])) == []
    with pytest.raises(ValueError, match="chunksize"):
        pool.map(abs, [1], chunksize=0)


def test_map_raises_where_the_call_failed_and_after_its_limit(pool, tmp_path):
    found = pool.map(lambda x: 1 // x, [1, 0, 2])
    assert next(found) == 1
    with pytest.raises(ZeroDivisionError):
        next(found)
    with pytest.raises(concurrent.futures.TimeoutError):
        list(pool.map(waits_for(str(tmp_path / "gate")), [1], timeout=0.05))
    touch(tmp_path / "gate")


def test_wait_and_as_completed(pool, tmp_path):
    quick, slow = pool.submit(int), pool.submit(waits_for(str(tmp_path / "gate")))
    done, open_ = concurrent.futures.wait([quick, slow], return_when=concurrent.futures.FIRST_COMPLETED, timeout=60)
    assert (done, open_) == ({quick}, {slow})
    wait_until(slow.running, "a worker has it")
    touch(tmp_path / "gate")
    assert set(concurrent.futures.as_completed([quick, slow], timeout=60)) == {quick, slow}


def test_callbacks_run_once_and_may_submit(pool):
    seen, again = [], []
    future = pool.submit(int)
    future.add_done_callback(seen.append)
    future.add_done_callback(lambda _: again.append(pool.submit(lambda: 7)))
    wait_until(lambda: seen and again, "callbacks ran")
    assert (seen, again[0].result(60)) == ([future], 7)


def test_cancel_takes_back_what_no_worker_has(pool, tmp_path):
    gate = tmp_path / "gate"
    busy = [pool.submit(waits_for(str(gate)), index) for index in range(4)]
    wait_until(lambda: all(future.running() for future in busy), "all workers are busy")
    waiting = [pool.submit(int) for _ in range(50)]
    assert not busy[0].cancel()
    assert all(future.cancel() for future in waiting)
    with pytest.raises(concurrent.futures.CancelledError):
        waiting[0].result(1)
    assert concurrent.futures.wait(waiting, timeout=60).not_done == set()
    touch(gate)
    assert [future.result(60) for future in busy] == [0, 1, 2, 3]


def test_inputs_may_be_futures(pool, tmp_path):
    gate = tmp_path / "gate"
    first = pool.submit(waits_for(str(gate)), 20)
    second = pool.submit(lambda a, b: a + b, first, b=pool.submit(lambda: 1))
    third = pool.submit(lambda a: a * 2, second)
    touch(gate)
    assert third.result(60) == 42
    failed = pool.submit(lambda a: a, pool.submit(lambda: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        failed.result(60)


def test_a_large_argument_and_a_large_result_come_whole(pool):
    data = os.urandom(5_000_000)
    assert pool.submit(lambda given: given[::-1], data).result(100) == data[::-1]
    assert len(pool.submit(lambda: b"x" * 20_000_000).result(100)) == 20_000_000


def test_each_worker_sees_its_own_devices(pool):
    def own():
        import os
        import time

        time.sleep(0.05)
        return os.environ["PHALANX_DEVICES"]

    futures = [pool.submit(own) for _ in range(40)]
    concurrent.futures.wait(futures, timeout=60)
    seen = {(future.node, future.worker): future.result(60) for future in futures}
    assert len(set(seen.values())) == len(seen) == 4, seen


def test_work_is_evened_out_between_nodes(pool, tmp_path):
    """One node is held up; the other takes what was given to it."""
    gate = str(tmp_path / "gate")
    held = [pool.submit(waits_for(gate)) for _ in range(2)]
    wait_until(lambda: all(future.running() for future in held), "they run")
    futures = [pool.submit(int) for _ in range(500)]
    concurrent.futures.wait(futures, timeout=100)
    assert all(future.done() for future in futures)
    touch(tmp_path / "gate")


def test_after_shutdown_nothing_is_taken_and_what_was_taken_is_done(head):
    with another(head, max_workers=2) as made:
        futures = [made.submit(lambda x=x: x) for x in range(20)]
        made.shutdown(wait=False)
        with pytest.raises(RuntimeError, match="after shutdown"):
            made.submit(int)
    assert [future.result(0) for future in futures] == list(range(20))
    assert head.wait_for_state(made.job_id, "succeeded", "failed", "cancelled")["state"] == "succeeded"


def test_shutdown_can_cancel_what_waits(head, tmp_path):
    made = phalanx.Executor(gpus=0, client=Client(home=head.home))
    busy = made.submit(waits_for(str(tmp_path / "gate")), 1)
    wait_until(busy.running, "it runs")
    waiting = [made.submit(int) for _ in range(10)]
    threading.Timer(0.3, touch, (tmp_path / "gate",)).start()
    made.shutdown(cancel_futures=True)
    assert (busy.result(0), [future.cancelled() for future in waiting]) == (1, [True] * 10)


def test_an_initializer_runs_in_each_worker_and_its_failure_breaks_the_pool(head):
    def prepare(value):
        import builtins

        builtins.prepared = value

    with another(head, max_workers=2, initializer=prepare, initargs=("yes",)) as made:
        assert set(made.map(lambda _: __import__("builtins").prepared, range(20))) == {"yes"}
    with (
        another(head, initializer=lambda: 1 // 0) as made,
        pytest.raises(ExecutorBroken, match="initializer failed: ZeroDivisionError"),
    ):
        made.submit(int).result(60)
    head.wait_for_state(made.job_id, "cancelled")


@pytest.mark.parametrize(
    "given", [{"gpus": -1}, {"gpus": 1.5}, {"max_workers": 0}, {"run": "true"}, {"tasks_per_node": 2}]
)
def test_arguments_that_make_no_sense_are_refused_at_once(head, given):
    with pytest.raises(BadRequest):
        phalanx.Executor(client=Client(home=head.home), **given)


def test_what_never_fits_is_told_by_the_first_future(head):
    with another(head, gpus=64) as made, pytest.raises(ExecutorBroken, match="can never fit"):
        made.submit(int).result(60)


def test_a_decorated_function_runs_here_or_there_and_in_an_event_loop(head, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", head.home)

    @phalanx.function(gpus=0, max_workers=2)
    def where(value):
        """Say it."""
        import os

        return value, os.getpid()

    async def both():
        return await asyncio.gather(where.aio(1), where.aio(2))

    assert (where.__name__, where.__doc__, where(7)) == ("where", "Say it.", (7, os.getpid()))
    there = [where.remote(1), where.submit(1).result(60), *where.map([1, 1]), *asyncio.run(both())]
    assert [value for value, _ in there] == [1, 1, 1, 1, 1, 2]
    assert os.getpid() not in {pid for _, pid in there}
    job = where.executor.job_id
    assert head.job(job)["name"] == "where"
    assert where.executor.submit(lambda: where(3)[0]).result(60) == 3, "a plain call in a worker"
    where.close()
    assert head.wait_for_state(job, "succeeded", "failed", "cancelled")["state"] == "succeeded"


def test_an_event_loop_takes_it_as_its_executor(pool):
    async def call():
        return await asyncio.get_running_loop().run_in_executor(pool, pow, 2, 10)

    assert asyncio.run(call()) == 1024


# ---- what dies --------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_its_own_task_one_more_run(pool, tmp_path):
    def dies_once(path):
        import os

        if not os.path.exists(path):
            with open(path, "w"):
                pass
            os.kill(os.getpid(), 9)
        return "second"

    others = [pool.submit(lambda x=x: x) for x in range(200)]
    assert pool.submit(dies_once, str(tmp_path / "seen")).result(60) == "second"
    assert [future.result(60) for future in others] == list(range(200))


def test_a_worker_that_dies_twice_fails_its_task_alone(pool):
    with pytest.raises(WorkerDied, match=r"ended twice.*exited with code 3"):
        pool.submit(os._exit, 3).result(60)
    assert pool.submit(lambda: 1).result(60) == 1


def test_a_job_that_is_cancelled_breaks_its_futures(head):
    with another(head) as made:
        assert made.submit(int).result(60) == 0
        waits = made.submit(time.sleep, 100)
        wait_until(waits.running, "it runs")
        Client(home=head.home).cancel(made.job_id)
        with pytest.raises(ExecutorBroken, match="cancelled"):
            waits.result(60)
        with pytest.raises(ExecutorBroken):
            made.submit(int)


def test_a_head_that_is_killed_and_comes_back_costs_nothing(head, tmp_path):
    def slow(value, path):
        import time

        time.sleep(0.01)
        with open(path, "a") as file:
            file.write(f"{value}\n")
        return value

    ran = tmp_path / "ran"
    with another(head, max_workers=2) as made:
        futures = [made.submit(slow, value, str(ran)) for value in range(300)]
        futures[5].result(60)
        head.kill_head()
        head.start(wait_nodes=False)
        assert [future.result(100) for future in futures] == list(range(300))
    assert sorted(map(int, ran.read_text().split())) == list(range(300)), "each once"


def test_a_program_that_is_gone_is_taken_over_with_its_futures(head, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, phalanx, sys\n"
        "from phalanx.client import Client\n"
        "pool = phalanx.Executor(gpus=0, max_workers=2, client=Client(home=sys.argv[1]))\n"
        "def slow(x):\n    import time\n    time.sleep(0.01)\n    return x * 2\n"
        "futures = [pool.submit(slow, x) for x in range(200)]\n"
        "futures[10].result()\n"
        "pool.wait_connected()\n"
        "import time\ntime.sleep(0.3)\n"
        "print(pool.job_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    words = [sys.executable, str(program), head.home]
    said = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert said.returncode == -signal.SIGKILL, said.stderr
    with phalanx.Executor.attach(said.stdout.strip(), client=Client(home=head.home)) as made:
        wait_until(lambda: len(made.futures) == 200, "all are found")
        assert [future.result(100) for future in made.futures.values()] == [x * 2 for x in range(200)]
        assert made.submit(lambda: "new").result(60) == "new"
    assert head.wait_for_state(made.job_id, "succeeded", "failed", "cancelled")["state"] == "succeeded"
    with pytest.raises(BadRequest, match="no Executor's"):
        phalanx.Executor.attach(head.submit(run="true", gpus=0), client=Client(home=head.home))


def test_neither_the_head_nor_the_broker_imports_the_users_code(head, tmp_path):
    seen = tmp_path / "seen"
    (tmp_path / "planted.py").write_text(
        "import os\n"
        f"with open({str(seen)!r}, 'a') as file:\n    file.write(f'{{os.getpid()}}\\n')\n"
        "def answer():\n    return os.getpid()\n"
    )

    def asks():
        import planted  # type: ignore[import-not-found]

        return planted.answer()

    with another(head, workdir=str(tmp_path)) as made:
        worker = made.submit(asks).result(60)
    assert [int(line) for line in seen.read_text().split()] == [worker]


def test_a_node_that_dies_takes_no_task_with_it(head, pool):
    """Last of the file: the node comes back by itself."""

    def slow(value):
        import time

        time.sleep(0.005)
        return value

    futures = [pool.submit(slow, value) for value in range(1000)]
    futures[100].result(60)
    wait_until(lambda: len({future.node for future in futures if future.done()}) == 2, "both work")
    head.kill_node("n1")
    assert [future.result(200) for future in futures] == list(range(1000))
    assert head.job(pool.job_id)["attempts"] == 2
