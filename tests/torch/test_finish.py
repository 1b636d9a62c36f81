"""After its end a training makes no steps, and a script may do other things for long: every rank says so, so that it is no hang."""

import pytest

from tests.torch.gang import Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]
SCRIPT = """
import time
import phalanx.torch

phalanx.torch.init()
phalanx.torch.report(step=1)
phalanx.torch.finish()
time.sleep(600)
"""


def test_rank_that_has_finished_says_that_no_step_will_come(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(SCRIPT)
    with Gang(tmp_path / "gang", script, world_size=2) as gang:
        gang.until(lambda g: len(g.of("busy")) == 2, "both have finished")
        assert [report["what"] for report in gang.of("busy")] == ["finished"] * 2
