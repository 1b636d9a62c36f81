"""No step is begun past the lease, and what a newer epoch replaced ends at once."""

from __future__ import annotations

import signal
import time

import pytest

pytest.importorskip("torch")

from phalanx.torch.lease_fence import EXIT_SUPERSEDED
from phalanx.wire.rank import RankStopReason, boottime_ns
from tests.torch.gang import LOOP, Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]


def steps_begun_between(gang, from_ns, until_ns):
    return [report for report in gang.of("step") if from_ns < report["begin_ns"] < until_ns]


def test_no_step_begins_past_the_deadline_and_training_goes_on_after_renewal(tmp_path):
    with Gang(tmp_path, LOOP, "--steps", "100000", "--pace-s", "0.002", world_size=2) as gang:
        gang.until_step(5)
        gang.expire()
        expired_ns = boottime_ns()
        time.sleep(0.3)
        renewed_ns = boottime_ns()
        gang.renew()
        last = max(report["step"] for report in gang.of("step"))
        gang.until_step(last + 5)
        assert steps_begun_between(gang, expired_ns, renewed_ns) == []
        excluded = [report for report in gang.of("stall") if report["cause"] == "fence"]
        assert {report["rank"] for report in excluded} <= {0, 1}
        assert 0.2 < max(report["seconds"] for report in excluded) < 30


def test_gang_stopped_past_its_lease_begins_no_step_when_it_wakes(tmp_path):
    with Gang(tmp_path, LOOP, "--steps", "100000", "--pace-s", "0.001", world_size=2) as gang:
        for lap in range(1, 11):
            gang.until_step(3 * lap)
            gang.renew(lease_s=0.05)
            gang.send(signal.SIGSTOP)
            until_ns = boottime_ns() + 50_000_000
            while boottime_ns() < until_ns:
                time.sleep(0.01)
            gang.send(signal.SIGCONT)
            time.sleep(0.05)
            renewed_ns = boottime_ns()
            gang.renew()
            last = max(report["step"] for report in gang.of("step"))
            gang.until_step(last + 2)
            assert steps_begun_between(gang, until_ns, renewed_ns) == []


@pytest.mark.parametrize("news", [{"epoch": 2}, {"generation": 1}, {"stop": RankStopReason.SUPERSEDED}])
def test_superseded_rank_exits_though_its_lease_holds(tmp_path, news):
    with Gang(tmp_path, LOOP, "--steps", "100000", "--pace-s", "0.002") as gang:
        gang.until_step(3)
        gang.page.write(**news)
        assert gang.finish() == [EXIT_SUPERSEDED]


def test_superseded_rank_exits_while_it_waits_at_the_fence(tmp_path):
    with Gang(tmp_path, LOOP, "--steps", "100000", "--pace-s", "0.002") as gang:
        gang.until_step(3)
        gang.expire()
        gang.page.write(epoch=2)
        assert gang.finish() == [EXIT_SUPERSEDED]


def test_rank_started_past_its_lease_neither_steps_nor_saves(tmp_path):
    """The fence at the start. The one before a commit is the same call, made in the saving thread; no test here times it."""
    checkpoints = tmp_path / "checkpoints"
    with Gang(tmp_path, LOOP, "--every-steps", "1", checkpoints=checkpoints, lease_s=0.0) as gang:
        time.sleep(1.0)
        assert gang.of("step") == []
        assert not list(checkpoints.glob("step-*")) if checkpoints.exists() else True
        gang.renew()
        assert gang.finish() == [0]


def test_rank_whose_page_is_missing_does_not_run_unfenced(tmp_path):
    with Gang(tmp_path, LOOP, PHALANX_LEASE_PAGE=tmp_path / "gone") as gang:
        assert gang.finish() == [1]
        assert "gone cannot be attached" in gang.log()
        assert "unset PHALANX_LEASE_PAGE" in gang.log()


def test_supervisor_that_does_not_read_costs_reports_never_the_training(tmp_path):
    with Gang(tmp_path, LOOP, "--steps", "20", PHALANX_REPORT_PIPE=tmp_path / "gone") as gang:
        assert gang.finish() == [0]
        assert "step 20 " in gang.log()
        assert gang.log().count("does not read the report pipe") == 1
