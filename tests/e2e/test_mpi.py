"""MPI jobs over two virtual nodes, as a user types them: one world, its exit codes, and its end.

`make test` uses a launcher of three lines, which starts one daemon on each node of its host file as mpirun does. With the tag `prove` the
installed Open MPI does the same, with a real program.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]

# Reads the variables that Open MPI reads, and starts a daemon on each node by the agent.
LAUNCHER = """#!/bin/bash
while read -r host slots; do
  "$OMPI_MCA_plm_rsh_agent" "$host" "for n in \\$(seq ${slots#slots=}); do $*; done" &
  jobs+=($!)
done < "$OMPI_MCA_orte_default_hostfile"
for job in "${jobs[@]}"; do wait "$job" || code=$?; done
exit ${code:-0}
"""
PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int count, char **words) {
  int rank, size, sum = 0;
  MPI_Init(&count, &words);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  printf("rank %d of %d, sum %d, node %s\n", rank, size, sum, getenv("PHALANX_NODE_RANK"));
  fflush(stdout);
  if (count > 1) sleep(atoi(words[1]));
  MPI_Finalize();
  return 0;
}
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("mpi"))
    launcher = shell.work / "mpirun"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture(scope="module")
def program(phalanx):
    """A real MPI program in the working directory, and none of its launcher."""
    if shutil.which("mpicc") is None or shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed: make mpi-tools")
    source = phalanx.work / "ring.c"
    source.write_text(PROGRAM)
    subprocess.run(["mpicc", str(source), "-o", str(phalanx.work / "ring")], check=True)
    return "./ring"


def test_launcher_starts_once_and_its_daemons_on_every_node(phalanx):
    done = phalanx("run", "--gpus", "2x2", "--", "./mpirun", "echo", "on $PHALANX_NODE_RANK: $PHALANX_DEVICES")
    said = sorted(re.sub(r"VIRTUAL-(n\d)-[0-9a-f]+-", r"\1.", line) for line in done.stdout.splitlines())
    assert said == ["on 0: n0.0,n0.1", "on 0: n0.0,n0.1", "on 1: n1.0,n1.1", "on 1: n1.0,n1.1"]
    assert "4 tasks: 2 nodes x 2, started by mpirun, which runs once" in done.stderr
    assert "RANK" not in phalanx("run", "--gpus", "2x1", "--", "./mpirun", "env | grep -o ^RANK || true").stdout


def test_launchers_code_is_the_jobs_and_a_daemons_code_the_launchers(phalanx):
    phalanx("run", "--gpus", "2x1", "--", "./mpirun", "exit $((3 + PHALANX_NODE_RANK))", code=4)


def test_cancelled_job_leaves_no_daemon(phalanx):
    job = phalanx("submit", "--quiet", "--gpus", "2x1", "--", "./mpirun", "echo up; exec sleep 987").stdout.strip()
    while phalanx("logs", job).stdout.count("up") < 2:
        time.sleep(0.1)
    assert len(processes("sleep", "987")) == 2
    phalanx("cancel", job)
    phalanx.until(job, "cancelled")
    assert processes("sleep", "987") == []


def test_script_that_would_start_several_worlds_is_refused(phalanx):
    script = phalanx.work / "many.sh"
    script.write_text("#!/bin/bash\n./mpirun true\n")
    script.chmod(0o755)
    done = phalanx("run", "--gpus", "2x2", "--", "./many.sh", code=1)
    assert "many.sh calls mpirun, but starts 4 times, which gives 4 separate worlds" in done.stderr


@pytest.mark.prove
def test_open_mpi_gives_one_world_over_both_nodes(phalanx, program):
    done = phalanx("run", "--nodes", "2", "--gpus", "4", "--", "mpirun", program)
    expected = [f"rank {rank} of 4, sum 6, node {rank // 2}" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.prove
def test_open_mpi_starts_a_task_for_each_gpu_without_being_told(phalanx, program):
    assert len(phalanx("run", "--gpus", "2x2", "--", "mpirun", "hostname").stdout.splitlines()) == 4
    done = phalanx("run", "--nodes", "2", "--tasks-per-node", "3", "--", "mpirun", program)
    assert "rank 5 of 6, sum 15, node 1" in done.stdout


@pytest.mark.prove
@pytest.mark.parametrize("implementation", ["openmpi", "mpich"])
def test_srun_gives_one_world_over_both_nodes_wherever_the_program_is_hidden(phalanx, implementation):
    if shutil.which(f"mpicc.{implementation}") is None:
        pytest.skip(f"mpicc.{implementation} is not installed: make mpi-tools")
    (phalanx.work / "ring.c").write_text(PROGRAM)
    ring = phalanx.work / f"ring_{implementation}"
    subprocess.run([f"mpicc.{implementation}", str(phalanx.work / "ring.c"), "-o", str(ring)], check=True)
    (phalanx.work / "late.py").write_text(f"import subprocess\nsubprocess.run(['./{ring.name}'], check=True)\n")
    steps = [
        f"srun ./{ring.name}",
        f"srun --mpi=pmix ./{ring.name}",
        f"srun --mpi=pmi2 ./{ring.name}",
        f"srun env A=1 bash -lc 'eval ./{ring.name}'",
        "srun python3 late.py",
        f"srun sh -c './{ring.name}; ./{ring.name}'",
    ]
    script = phalanx.work / "world.sh"
    lines = ["#!/bin/bash", "#SBATCH -N 2 --ntasks-per-node=2 --time=3", *(f"{step} || echo code $?" for step in steps)]
    script.write_text("\n".join([*lines, ""]))
    job = re.findall(r"job (\d+) submitted", phalanx("submit", "--wait", "world.sh").stdout)[0]
    said = phalanx("logs", job).stdout.replace("[rank 0] ", "").splitlines()
    world = [f"rank {rank} of 4, sum 6, node {rank // 2}" for rank in range(4)]
    assert sorted(said) == sorted(world * (len(steps) + 1))


@pytest.mark.prove
def test_an_mpi_program_without_a_launcher_is_refused(phalanx, program):
    assert "its 4 tasks would be 4 worlds of size 1" in phalanx("run", "--gpus", "2x2", "--", program, code=1).stderr


@pytest.mark.prove
@pytest.mark.parametrize("victim", ["rank", "daemon"])
def test_open_mpi_job_goes_on_after_a_kill(phalanx, program, victim):
    words = ("submit", "--quiet", "--retry", "1", "--gpus", "2x2", "--", "mpirun", program, "6")
    job = phalanx(*words).stdout.strip()
    while "rank 3 of 4" not in phalanx("logs", job).stdout:
        time.sleep(0.1)
    name = "orted" if victim == "daemon" else program
    os.kill(max(processes(name)), signal.SIGKILL)
    phalanx.until(job, "succeeded")
    assert phalanx("logs", job).stdout.count("rank 3 of 4") == 2
    assert processes("orted") == []


def processes(*words):
    """Pids of living processes whose command line begins with these words."""
    wanted, found = b"\0".join(word.encode() for word in words) + b"\0", []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if (entry / "cmdline").read_bytes().startswith(wanted):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
