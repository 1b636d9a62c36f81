"""A fleet of virtual nodes is really measured, as a user would: gloo between ranks, files on this disk, short trainings on the CPU."""

import re
import signal
import subprocess

import pytest

from benchmarks.cluster import free_port
from phalanx.planner.calibration.profile import measured_rates, parse_profile
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("calibrate"))
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture(scope="module")
def measured(phalanx):
    """The fleet, calibrated once."""
    return phalanx("calibrate", "--quick", "--json")


def test_every_figure_of_the_fleet_is_measured(phalanx, measured):
    profile = parse_profile(phalanx.json("calibrate", "--show")["profile"])
    found = measured_rates(profile, gpu="virtual")
    figures = (
        found.memory_bytes_per_s,
        found.within_bytes_per_s,
        found.between_bytes_per_s,
        found.all_to_all_within_bytes_per_s,
        found.all_to_all_between_bytes_per_s,
        found.storage_bytes_per_s,
        *found.flops.values(),
    )
    assert set(found.flops) == {"fp32", "bf16"}
    assert all(figure is not None and figure > 0 for figure in figures)
    assert [(node.node, node.devices, node.virtual) for node in profile.nodes] == [("n0", 2, True), ("n1", 2, True)]
    assert [(pair.first, pair.second) for pair in profile.pairs] == [("n0", "n1")]


def test_one_model_was_trained_under_three_layouts(phalanx, measured):
    profile = parse_profile(phalanx.json("calibrate", "--show")["profile"])
    degrees = {(run.layout.tensor, run.layout.pipeline, run.layout.data) for run in profile.runs}
    assert degrees == {(1, 1, 4), (2, 1, 2), (1, 2, 2)}
    assert {run.layout.global_batch for run in profile.runs} == {16}
    assert len({run.model for run in profile.runs}) == 1


def test_progress_is_told_by_measurement_and_the_job_is_an_ordinary_one(phalanx, measured):
    assert "1/11 matrix products" in measured.stderr
    assert "11/11 training with 2 pipeline parallel, 2 data parallel" in measured.stderr
    (job,) = [job for job in phalanx.json("ps", "-a") if job["name"] == "calibrate"]
    assert (job["state"], job["gpus"], job["progress"]["step"]) == ("succeeded", "2x2", 11)


def test_the_table_is_shown_again_without_measuring(phalanx, measured):
    shown = phalanx("calibrate", "--show").stdout
    for part in (
        "matmul fp32",
        "all-reduce within nodes",
        "all-to-all between nodes",
        "storage write",
        "step on 2x2: 4 data",
    ):
        assert part in shown
    assert shown.splitlines()[-1].startswith("next: phalanx plan")


@pytest.mark.prove
def test_named_nodes_alone_are_measured_and_what_is_known_of_the_others_stays(phalanx, measured):
    before = parse_profile(phalanx.json("calibrate", "--show")["profile"])
    phalanx("calibrate", "--quick", "--nodes", "n1")
    after = parse_profile(phalanx.json("calibrate", "--show")["profile"])
    assert after.nodes[0] == before.nodes[0]
    assert after.nodes[1].at_s > before.nodes[1].at_s
    assert after.between == before.between
    assert "no reservations" in phalanx("nodes", "reservations").stdout


def test_a_busy_fleet_is_not_disturbed(phalanx):
    job = phalanx("submit", "--gpus", "1", "--quiet", "--", "sleep", "300").stdout.strip()
    phalanx.until(job, "running")
    refused = phalanx("calibrate", "--quick", code=75)
    assert f"busy with job {job}" in refused.stderr
    assert refused.stderr.count("\n") == 1
    phalanx("cancel", job)
    phalanx.until(job, "cancelled")


def test_ctrl_c_cancels_the_job(phalanx):
    process = subprocess.Popen(
        phalanx.argv("calibrate"),
        cwd=phalanx.work,
        env=phalanx.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = next(line for line in process.stderr if line.startswith(("1/", "2/")))
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, (seen, rest)
    job = phalanx.json("ps", "-a")[-1]["id"]
    assert f"cancelled job {job}" in rest
    assert phalanx.until(job, "cancelled")["state"] == "cancelled"


def test_a_calibration_that_fails_shows_why(phalanx):
    failed = phalanx("calibrate", "--quick", "--python", "/bin/false", code=1)
    assert re.search(r"failed: rank \d on n\d: exit code 1", failed.stderr)  # whichever ends first
    assert "phalanx logs" in failed.stderr
    assert failed.stdout == ""
