"""The Slurm that the engine contract starts: it leaves nothing behind, its own squeue is read whatever it shows, and a head starts without it."""

import glob
import os
import signal
import tempfile

import pytest

from benchmarks.cluster import wait_until
from phalanx.engines.slurm import parse, render
from phalanx.node.processes.proctable import alive, identity
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.slurm_rig import here, slurm
from tests.slurm_here import SlurmHere, why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def step_daemons():
    """By name alone, of whichever Slurm."""
    found = set()
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                if file.read().startswith("slurmstepd: ["):
                    found.add(identity(int(path.split("/")[2])))
        except OSError:
            continue
    return found - {None}


def test_a_step_whose_slurmd_is_dead_does_not_outlive_the_test():
    before = step_daemons()
    with here(SlurmHere(folder=tempfile.mkdtemp(prefix="phalanx-slurm-"), nodes=1)) as slurm:
        begun = os.path.join(slurm.folder, "begun")
        script = f"trap '' TERM; echo $$ > {begun}; while :; do sleep 1; done"
        slurm.run("sbatch", "--output=/dev/null", "--wrap", script)
        wait_until(lambda: os.path.exists(begun) and os.path.getsize(begun), "the script runs")
        with open(begun, encoding="utf-8") as file:
            mine = (step_daemons() - before) | {identity(int(file.read()))}
        slurm.kill_node("n0")
        assert len(mine) == 2
        assert all(map(alive, mine)), "they outlive their slurmd"
    assert not any(map(alive, mine))


def test_a_real_squeue_is_read_whatever_a_comment_holds():
    comment = "one\n1|root|CANCELLED|n0||0|phalanx:8f3a:1.1|"
    with here(SlurmHere(folder=tempfile.mkdtemp(prefix="phalanx-slurm-"), nodes=1)) as slurm:
        for said in (comment, "two"):
            slurm.run("sbatch", "--hold", "--output=/dev/null", "--comment", said, "--wrap", "true")
        mark = "|9f2c81d04be6a735|"
        rows = parse.parse_jobs(slurm.run(*render.list_jobs_command(mark)), mark)
    assert [(row.id, row.state, row.comment) for row in sorted(rows, key=lambda row: row.id)] == [
        ("1", "PENDING", comment),
        ("2", "PENDING", "two"),
    ]


def test_a_head_that_starts_while_slurm_is_silent_keeps_what_runs():
    with slurm(()) as rig:
        job = gated(rig, "silence", gpus="1")
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "the job runs")
        rig.slurm.daemons["slurmctld"].send_signal(signal.SIGSTOP)
        try:
            rig.kill_head()
            rig.start(wait_nodes=False)
            wait_until(lambda: all(node["cordon"] for node in rig.nodes()), "nothing new is placed there")
            open_gate(rig, "silence")
            view = rig.wait_for_state(job, "succeeded", "failed")
        finally:
            rig.slurm.daemons["slurmctld"].send_signal(signal.SIGCONT)
        assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), rig.history(job)
        wait_until(lambda: not any(node["cordon"] for node in rig.nodes()), "Slurm answers again")
        gang = gated(rig, "silence", gpus="3x2")
        assert rig.wait_for_state(gang, "succeeded", "failed")["attempts"] == 1, rig.history(gang)
