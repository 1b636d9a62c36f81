"""A rank answers with its stacks when asked, wherever it stands; and says that it is busy."""

import os
import signal
import time

import pytest

from phalanx.node.logic.evidence import stack_position
from phalanx.wire.rank import STACK_SIGNAL, stack_file
from tests.torch.gang import Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import phalanx.torch

def waits():
    dist.all_reduce(torch.ones(2))

run = phalanx.torch.init()
phalanx.torch.report(step=1)
phalanx.torch.busy("evaluation")
if run.rank == 0:
    waits()
else:
    time.sleep(600)
"""


@pytest.fixture
def gang(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(SCRIPT)
    with Gang(tmp_path / "gang", script, world_size=2, PHALANX_STACKS=tmp_path) as ranks:
        yield ranks


def dumped(folder, rank, pid):
    with open(stack_file(str(folder), rank, pid), encoding="utf-8") as file:
        return file.read()


def test_rank_in_a_collective_says_so_and_one_that_sleeps_says_where(gang, tmp_path):
    gang.until(lambda g: len(g.of("busy")) == 2, "both ranks are past their first step")
    assert [report["what"] for report in gang.of("busy")] == ["evaluation"] * 2
    time.sleep(0.5)  # into the collective
    for rank, process in enumerate(gang.ranks):
        os.kill(process.pid, STACK_SIGNAL)
        gang.until(
            lambda _, rank=rank, pid=process.pid: "most recent call first" in dumped(tmp_path, rank, pid), "it answers"
        )
    where, waits = stack_position(dumped(tmp_path, 0, gang.ranks[0].pid))
    assert waits, where
    assert "from waits (hang.py:" in where
    where, waits = stack_position(dumped(tmp_path, 1, gang.ranks[1].pid))
    assert (waits, where.startswith("<module> (hang.py:")) == (False, True)
    assert gang.ranks[1].exitcode is None  # asked, and alive


def test_stopped_rank_answers_once_it_goes_on(gang, tmp_path):
    gang.until(lambda g: len(g.of("busy")) == 2, "both ranks are past their first step")
    pid = gang.ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, STACK_SIGNAL)
    time.sleep(0.2)
    assert dumped(tmp_path, 1, pid) == ""
    os.kill(pid, signal.SIGCONT)
    gang.until(lambda _: "hang.py" in dumped(tmp_path, 1, pid), "it answers")
