"""Sixty `#SBATCH` scripts, and three of heterogeneous jobs, beside real Slurm: the same exit code, calls, variables and files, but for differences with a reason."""

import tempfile
from pathlib import Path

import pytest

from tests.lab.needs import why_not
from tests.lab.slurm import why_no_slurm
from tests.slurm_compat import cases
from tests.slurm_compat.__main__ import SHARED
from tests.slurm_compat.cluster import World, why_no_compiler
from tests.slurm_compat.compare import compare

MISSING = why_not() or why_no_slurm() or why_no_compiler()
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.prove,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture(scope="module")
def world():
    with tempfile.TemporaryDirectory(prefix="phalanx-compat-", dir=SHARED) as folder, World(Path(folder)) as built:
        yield built


@pytest.mark.parametrize("script", [*cases.SCRIPTS, *cases.HET_SCRIPTS], ids=lambda script: script.stem)
def test_a_script_does_what_it_does_on_slurm(world, script):
    slurm, ours = world.on_slurm(script), world.on_phalanx(script)
    found = compare(slurm, ours, script.read_text(encoding="utf-8"))
    assert bool(found) == (script.name[:2] in cases.DIFFERENT), found
