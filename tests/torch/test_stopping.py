"""should_stop: every rank stops at the same step, whoever heard of it first, and a checkpoint of that step is durable."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest

pytest.importorskip("torch")

from phalanx.torch.agreement import RankAgreement, RankRequest
from phalanx.wire import manifest
from phalanx.wire.rank import RankStopReason, boottime_ns
from tests.torch.gang import LOOP, Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]


def stop_lines(gang):
    return {line for rank in range(len(gang.ranks)) for line in gang.log(rank).splitlines() if line.startswith("stop ")}


@pytest.mark.parametrize("reason", [RankStopReason.PREEMPTED, RankStopReason.CANCELLED, RankStopReason.DRAIN])
def test_all_ranks_stop_at_one_step_with_its_checkpoint(tmp_path, reason):
    checkpoints = tmp_path / "checkpoints"
    arguments = (LOOP, "--steps", "100000", "--pace-s", "0.003")
    with Gang(tmp_path, *arguments, world_size=3, checkpoints=checkpoints) as gang:
        gang.until_step(5)
        gang.page.write(stop_by_ns=boottime_ns() + 60_000_000_000, stop=reason)
        assert gang.finish() == [0, 0, 0]
        (line,) = stop_lines(gang)
        _, name, _, step, _, durable = line.split()
        assert (name, step) == (reason.name, durable)
        assert manifest.verify(str(checkpoints / f"step-{int(step):08d}")).world_size == 3
        assert gang.of("checkpoint")[-1]["step"] == int(step)


def test_sigterm_to_one_rank_stops_all(tmp_path):
    with Gang(tmp_path, LOOP, "--steps", "100000", "--pace-s", "0.003", world_size=2) as gang:
        gang.until_step(5)
        gang.send(signal.SIGTERM, rank=1)
        assert gang.finish() == [0, 0]
        (line,) = stop_lines(gang)
        assert line.startswith("stop PREEMPTED")


def test_time_limit_stops_while_there_is_time_to_save(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    with Gang(tmp_path, LOOP, "--steps", "100000", "--pace-s", "0.003", world_size=2, checkpoints=checkpoints) as gang:
        gang.until_step(5)
        limit_ns = boottime_ns() + 6_000_000_000  # one second more than the margin
        gang.page.write(job_deadline_ns=limit_ns)
        assert gang.finish() == [0, 0]
        (line,) = stop_lines(gang)
        assert line.startswith("stop DEADLINE")
        assert gang.of("step")[-1]["end_ns"] < limit_ns


def test_supervisor_can_ask_for_a_checkpoint(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    arguments = (LOOP, "--steps", "100000", "--pace-s", "0.003", "--every-steps", "90000")
    with Gang(tmp_path, *arguments, world_size=2, checkpoints=checkpoints) as gang:
        gang.until_step(5)
        gang.page.write(checkpoint_now=1)
        gang.until(lambda gang: gang.of("checkpoint"), "a checkpoint")
        gang.page.write(checkpoint_now=2)
        gang.until(lambda gang: len(gang.of("checkpoint")) == 2, "a second checkpoint")
        last = max(report["step"] for report in gang.of("step"))
        gang.until_step(last + 50)
        assert len(gang.of("checkpoint")) == 2


def test_interval_saves_by_itself_and_learns_the_stall(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    arguments = (LOOP, "--steps", "100000", "--pace-s", "0.003")
    with Gang(tmp_path, *arguments, checkpoints=checkpoints, PHALANX_MTBF_S=10) as gang:
        gang.until(lambda gang: len(gang.of("checkpoint")) >= 3, "three checkpoints")
        steps = [report["step"] for report in gang.of("checkpoint")]
        assert steps == sorted(set(steps))
        assert all(report["stall_s"] > 0 for report in gang.of("checkpoint"))


def test_exchanges_become_rarer_as_the_pace_is_known_but_never_by_more_than_half():
    agreement = RankAgreement(None)
    uttered = {agreement.advance(lambda tick_us: RankRequest(tick_us=tick_us)).requested_at_tick for _ in range(2000)}
    gaps = [later - earlier for earlier, later in pairwise(sorted(uttered))]
    assert gaps[0] <= 2
    assert all(later <= 2 * earlier for earlier, later in pairwise(gaps))
    assert max(gaps) == 256


def test_wish_is_known_at_the_tick_it_was_uttered_in_a_gang_of_one():
    agreement = RankAgreement(None)
    agreed = agreement.advance(lambda tick_us: RankRequest(stop=2, tick_us=tick_us))
    assert (agreed.request.stop, agreed.requested_at_tick) == (2, 1)
