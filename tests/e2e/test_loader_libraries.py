"""The examples of docs/sampling.md for torchdata, Grain and litdata: killed on 2, 3, 1 and 6 ranks and ended on 4, they train each sample once an epoch, in one order."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import itertools
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import phalanx.torch
from tests.examples.environments import EnvironmentMissing, environment_of
from tests.torch.loader_libraries import EPOCHS, GLOBAL_BATCH, SAMPLES

ROOT = Path(__file__).parents[2]
WORLDS = (2, 3, 1, 6, 4)  # killed on each but the last
KILL_AFTER = 6  # batches
CHUNK = 20
WRITE = """import sys, litdata
if __name__ == "__main__":
    litdata.optimize(fn=int, inputs=list(range(int(sys.argv[2]))), output_dir=sys.argv[1], chunk_size=int(sys.argv[3]), num_workers=1)
"""

pytestmark = [pytest.mark.serial, pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python():
    try:
        return environment_of("loaders", with_phalanx=True, folder=ROOT / "tests" / "torch") / "python"
    except EnvironmentMissing as error:
        pytest.skip(str(error))


def gang(python, folder, phase, world, first_line):
    batches = 0 if world == WORLDS[-1] else KILL_AFTER + 1  # a quick machine would train to the end before it is killed
    command = [python, "-m", "tests.torch.loader_libraries", folder, str(phase), str(batches), first_line]
    variables = {**os.environ, "WORLD_SIZE": str(world), "PYTHONPATH": f"{ROOT}:{ROOT}/src", "OMP_NUM_THREADS": "1"}
    # The workers of a loader end with their rank, as they look for their parent.
    return [subprocess.Popen(command, cwd=ROOT, env={**variables, "RANK": str(rank)}) for rank in range(world)]


def lines(folder, phase, rank):
    path = folder / f"batches-{phase}-{rank}"
    told = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in told if line.endswith("\n")]


def trained(folder, worlds):
    """The samples of each batch, of all ranks in their order; what was trained again after a kill counts once, and must be the same."""
    found = {}
    for phase, world in enumerate(worlds):
        of_ranks = [dict(lines(folder, phase, rank)) for rank in range(world)]
        for position in set.intersection(*(set(one) for one in of_ranks)):
            batch = list(itertools.chain(*(one[position] for one in of_ranks)))
            assert found.setdefault(position, batch) == batch, f"batch {position} in phase {phase}"
    return [found[position] for position in sorted(found)], sorted(found)


def alone(first_line, length):
    """The batches of one process without these libraries."""
    if first_line != "# litdata":
        order = phalanx.torch.sampler(SAMPLES, 1, GLOBAL_BATCH, rank=0, world_size=1)
        return [order.global_indices(batch) for batch in range(EPOCHS * length)]
    lengths = [CHUNK] * (SAMPLES // CHUNK) + [SAMPLES % CHUNK]
    shards = phalanx.torch.ElasticShards(
        lengths,
        lambda shard, offset: range(shard * CHUNK + offset, shard * CHUNK + lengths[shard]),
        seed=1,
        global_batch=GLOBAL_BATCH,
        rank=0,
        world_size=1,
    )
    return [batch for _ in range(EPOCHS) for batch in shards.counted(shards)]


@pytest.mark.parametrize("first_line", ["# torchdata", "# torchdata, the state of the loader", "# grain", "# litdata"])
def test_an_example_of_the_page_resumes_on_other_numbers_of_ranks(python, tmp_path, first_line):
    if "litdata" in first_line:
        (tmp_path / "write.py").write_text(WRITE, encoding="utf-8")
        command = [python, tmp_path / "write.py", tmp_path / "chunks", str(SAMPLES), str(CHUNK)]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    for phase, world in enumerate(WORLDS):
        processes = gang(python, tmp_path, phase, world, first_line)
        try:
            if world == WORLDS[-1]:
                assert [process.wait(200) for process in processes] == [0] * world
                break
            limit_s = time.monotonic() + 200.0
            while len(lines(tmp_path, phase, 0)) < KILL_AFTER:
                assert time.monotonic() < limit_s
                assert {process.poll() for process in processes} == {None}, "a rank ended"
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    batches, positions = trained(tmp_path, WORLDS)
    length = -(-SAMPLES // GLOBAL_BATCH)
    assert positions == list(range(1, EPOCHS * length + 1))
    epochs = [batches[epoch * length : (epoch + 1) * length] for epoch in range(EPOCHS)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(SAMPLES))
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches == alone(first_line, length)
