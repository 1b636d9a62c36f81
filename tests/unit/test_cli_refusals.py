"""What a user reads when the cluster is too small for a script, and when a change makes jobs impossible."""

# The head is a stand-in with the two calls that are made.
# mypy: disable-error-code="arg-type"

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from phalanx.cli.impossible_jobs import print_change
from phalanx.cli.jobs import submit
from phalanx.cli.jobs.request import sbatch_script
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.ids import JobId
from phalanx.wire.api.jobs import ImpossibleJobView
from phalanx.wire.api.licences import LicenceChanged
from tests.unit.test_fleet_fit import fleet, job


def test_a_script_that_can_never_fit_is_told_which_numbers_are_too_large(monkeypatch):
    def refused(_):
        raise NeverFits("4 nodes x 8 = 32 GPUs can never fit")

    mapping = job("-N 4", "--gres=gpu:8")
    names = sbatch_script.SlurmNames(script="job.sh", partition="", account="")
    monkeypatch.setattr(submit, "sendable_mapping", lambda *_: mapping)
    monkeypatch.setattr(sbatch_script, "node_shapes", lambda _: fleet((2, 4, 16)))
    with pytest.raises(BadRequest, match="written for a larger cluster: it requests 4 nodes") as found:
        submit.submit_job(
            SimpleNamespace(submit=refused), SimpleNamespace(slurm_names=names, own_faults_first=nullcontext)
        )
    assert "--scale-down" in str(found.value.hint)
    with pytest.raises(NeverFits):
        submit.submit_job(
            SimpleNamespace(submit=refused), SimpleNamespace(slurm_names=None, own_faults_first=nullcontext)
        )


def test_jobs_that_a_change_makes_impossible_have_a_line_each(capsys):
    jobs = [ImpossibleJobView(id=JobId(name), why=f"needs 2 \x1b[1mof {name}") for name in ("7", "8")]
    print_change(LicenceChanged(impossible=jobs), "licence matlab has 1 seat", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["licence matlab has 1 seat", "2 waiting jobs can never start any more:"]
    assert [line.split(":")[0] for line in lines[2:]] == ["  job 7", "  job 8"]
    assert "\x1b" not in "".join(lines)
