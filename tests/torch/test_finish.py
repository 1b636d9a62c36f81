"""After its end a training makes no steps, and a script may do other things for long: every rank says so, so that it is no hang.

No thread of its groups is left then: one that releases a tensor while Python exits aborts the rank ("terminate called without an active
exception"), which a busy machine shows in a few of a hundred gangs.
"""

import pytest

from tests.torch.gang import Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]
SCRIPT = """
import pathlib
import time
import torch
import phalanx.torch

def gloo_threads():
    return sum("gloo_runloop" in comm.read_text() for comm in pathlib.Path("/proc/self/task").glob("*/comm"))

phalanx.torch.init()
model = torch.nn.Linear(2, 2)
saver = phalanx.torch.checkpoint(model, torch.optim.SGD(model.parameters()))
phalanx.torch.report(step=1)
saver.save(1)
print("threads before", gloo_threads() > 0, flush=True)
phalanx.torch.finish()
print("threads after", gloo_threads(), flush=True)
time.sleep(600)
"""


def test_rank_that_has_finished_says_that_no_step_will_come(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(SCRIPT)
    with Gang(tmp_path / "gang", script, world_size=2) as gang:
        gang.until(lambda g: len(g.of("busy")) == 2, "both have finished")
        assert [report["what"] for report in gang.of("busy")] == ["finished"] * 2
        gang.until(
            lambda g: all("threads after" in g.log(rank) for rank in range(2)), "both have counted their threads"
        )
        for rank in range(2):
            assert gang.log(rank).splitlines()[-2:] == ["threads before True", "threads after 0"]
