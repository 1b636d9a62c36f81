"""`phalanx.Executor` at length: nodes killed in the middle of 10,000 tasks, a million tasks within the head's memory, a program and a node gone.

No result is lost and none comes twice; what ran twice ran because something died.
"""

# Ids are written as plain words here, and functions are local.
# mypy: disable-error-code="var-annotated, attr-defined"

import os
import random
import subprocess
import sys

import pytest

import phalanx
from benchmarks.cluster import ROOT, cluster, wait_until
from phalanx.client import Client

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(600)]
HEAD_MIB_MAX = 500


@pytest.fixture(scope="module")
def head():
    with cluster("2x2", revive_s=0.5) as made:
        yield made


def counted(folder):
    """A function that notes each run in a file of its worker."""

    def run(value):
        import os
        import time

        time.sleep(0.001)
        with open(os.path.join(folder, str(os.getpid())), "a") as file:
            file.write(f"{value}\n")
        return value

    return run


def runs(folder):
    seen = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            for line in file:
                seen[int(line)] = seen.get(int(line), 0) + 1
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_tasks_and_a_node_that_is_killed_somewhere(head, tmp_path, seed):
    chance = random.Random(seed)
    with phalanx.Executor(gpus=1, max_workers=4, client=Client(home=head.home)) as pool:
        futures = [pool.submit(counted(str(tmp_path)), value) for value in range(10_000)]
        futures[chance.randrange(100, 4000)].result(200)
        head.kill_node(chance.choice(["n0", "n1"]))
        assert [future.result(300) for future in futures] == list(range(10_000))
        assert head.job(pool.job_id)["attempts"] == 2
    seen = runs(tmp_path)
    assert sorted(seen) == list(range(10_000))
    print(
        f"seed {seed}: {sum(count > 1 for count in seen.values())} tasks ran twice, at most {max(seen.values())} times"
    )
    assert max(seen.values()) <= 2


def test_workers_that_are_killed_cost_no_result(head, tmp_path):
    def pids():
        import os
        import time

        time.sleep(0.05)
        return os.getpid()

    chance = random.Random(11)
    with phalanx.Executor(gpus=1, max_workers=4, client=Client(home=head.home)) as pool:
        futures = [pool.submit(counted(str(tmp_path)), value) for value in range(10_000)]
        for place in range(500, 9000, 1000):
            futures[place].result(200)
            victims = [int(name) for name in os.listdir(tmp_path) if os.path.exists(f"/proc/{name}")]
            os.kill(chance.choice(victims), 9)
        assert [future.result(300) for future in futures] == list(range(10_000))
        assert len({future.result(60) for future in [pool.submit(pids) for _ in range(40)]}) == 4
    assert max(runs(tmp_path).values()) <= 2


def test_a_million_tasks_cost_the_head_little_memory(head):
    with phalanx.Executor(gpus=1, max_workers=4, client=Client(home=head.home)) as pool:
        futures = [pool.submit(abs, -value) for value in range(1_000_000)]
        assert all(future.result(500) == value for value, future in enumerate(futures))
    with open(f"/proc/{head.head.pid}/status", encoding="utf-8") as file:
        peak_mib = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    print(f"peak of the head: {peak_mib:.0f} MiB")
    assert peak_mib < HEAD_MIB_MAX


def test_a_program_and_a_node_that_are_gone_lose_nothing_where_nodes_share_the_heads_files(head, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, phalanx, sys, time\n"
        "from phalanx.client import Client\n"
        "pool = phalanx.Executor(gpus=1, max_workers=4, client=Client(home=sys.argv[1]))\n"
        "def slow(x):\n    import time\n    time.sleep(0.01)\n    return x * 2\n"
        "futures = [pool.submit(slow, x) for x in range(2000)]\n"
        "futures[100].result()\npool.wait_connected()\ntime.sleep(1.0)\n"
        "print(pool.job_id, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    words = [sys.executable, str(program), head.home]
    job = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False).stdout.strip()
    head.kill_node("n1")
    wait_until(lambda: head.job(job)["attempts"] == 2 and head.job(job)["attempt_state"] == "running", "it runs again")
    with phalanx.Executor.attach(job, client=Client(home=head.home)) as pool:
        wait_until(lambda: len(pool.futures) == 2000, "all are found")
        assert [future.result(200) for future in pool.futures.values()] == [x * 2 for x in range(2000)]
