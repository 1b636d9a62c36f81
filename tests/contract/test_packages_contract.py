"""A job's packages on every engine: installed before the ranks start, found again by the next job, the installer's words where they fail."""

# mypy: disable-error-code="arg-type, var-annotated"

import shutil

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import RIGS, WHY_NOT
from tests.contract.test_engine_contract import ended, log_of
from tests.wheels import wheel

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
SHOW = "import os, pxgang; print(pxgang.VERSION, os.environ['VIRTUAL_ENV'], flush=True)"


@pytest.fixture(scope="module", params=sorted(RIGS), ids=lambda name: f"on_{name}")
def rig(request):
    why_not = WHY_NOT[request.param]()
    if why_not:
        pytest.skip(why_not)
    with RIGS[request.param]() as made:
        wait_until(lambda: sum(node["state"] == "up" for node in made.nodes()) == 3, "all nodes are up")
        yield made


def test_gang_finds_its_packages_on_every_node_and_the_next_one_installs_nothing(rig, tmp_path):
    # Its contents are those of this run alone, so that no environment of an earlier one serves.
    (tmp_path / "requirements.txt").write_text(f"--no-index\n./{wheel(tmp_path, 'pxgang', body=f'# {tmp_path}')}\n")
    venvs = set()
    try:
        for fresh in (True, False):
            job = rig.submit(
                run=["python3", "-c", SHOW],
                gpus="2x2",
                name="packages",
                workdir=str(tmp_path),
                requirements="requirements.txt",
            )
            done = ended(rig, job)
            assert done["state"] == "succeeded", (done, rig.history(job), log_of(rig, job, "supervisor"))
            lines = log_of(rig, job).splitlines()
            assert [line.split()[0] for line in lines] == ["1.0"] * 4
            venvs |= {line.split()[1] for line in lines}
            assert ("installing with" in log_of(rig, job, "supervisor")) is fresh
    finally:
        for venv in venvs:
            shutil.rmtree(venv)


def test_what_cannot_be_installed_ends_the_job_with_the_installers_words(rig, tmp_path):
    (tmp_path / "requirements.txt").write_text("--no-index\npx-nowhere==7\n")
    job = rig.submit(run=["true"], gpus="1x1", name="wrong", workdir=str(tmp_path), requirements="requirements.txt")
    done = ended(rig, job)
    assert (done["state"], done["attempts"]) == ("failed", 1), rig.history(job)
    assert "px-nowhere" in log_of(rig, job, "supervisor")
