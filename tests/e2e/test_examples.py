"""The examples of MPI, JAX, TensorFlow and others as real jobs, each killed once; and a hundred starts of JAX with one slow node."""

import os
import random

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell
from tests.examples.environments import FOLDER, EnvironmentMissing, environment_of
from tests.examples.frameworks import EXAMPLES, Example, run_example

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.prove, pytest.mark.timeout(1800)]
STARTS = 100
SLOW_S = 8.0  # the longest that the second node comes late: more than an import of JAX on a loaded machine
START = """
import os, time
import jax
if os.environ["RANK"] == "1":
    time.sleep(float(os.environ["LATE_S"]))
jax.distributed.initialize()
print("started", jax.process_index(), "of", jax.process_count(), flush=True)
"""


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("examples"))
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs_is_killed_and_ends_well(phalanx, example: Example):
    try:
        environment_of(example.name)
    except EnvironmentMissing as error:
        pytest.skip(f"its packages cannot be installed here: {error}")
    run_example(example, phalanx)


def test_jax_starts_a_hundred_times_with_one_slow_node(phalanx):
    try:
        path = environment_of("jax_line")
    except EnvironmentMissing as error:
        pytest.skip(f"its packages cannot be installed here: {error}")
    (phalanx.work / "start.py").write_text(START)
    draw = random.Random(57)
    for _ in range(STARTS):
        late = f"LATE_S={draw.choice((0.0, draw.uniform(0, 1), draw.uniform(0, SLOW_S))):.2f}"
        words = ("run", "--gpus", "2x1", "-e", late, "-e", f"PATH={path}{os.pathsep}{os.environ['PATH']}")
        said = phalanx(*words, "--", "python", "start.py").stdout
        assert {"[rank 0] started 0 of 2", "[rank 1] started 1 of 2"} <= set(said.splitlines()), (late, said)


def test_every_example_of_a_framework_names_its_packages_with_their_versions():
    for example in EXAMPLES:
        lines = (FOLDER / example.name / "requirements.txt").read_text().split()
        assert lines
        assert all("==" in line for line in lines), example.name
