"""The number of replicas under twenty loads that are drawn from seeds, request by request in virtual time."""

from random import Random

import pytest

from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.simulator.serving.load_traces import load_trace
from phalanx.simulator.serving.simulated_service import EngineModel, SimulatedService, reversals_max
from tests import effort

TARGETS = (
    (ScaleTerms(ttft_s=1.0, queue_s=2.0), 32),  # and the requests that a replica takes, of which it answers 8 at once
    (ScaleTerms(ttft_s=1.0), 256),
    (ScaleTerms(in_flight=8), 32),
    (ScaleTerms(queue_s=2.0), 8),
)
SECONDS = 7200 if effort.FULL else 1500


@pytest.mark.parametrize("seed", range(20))
def test_trace(seed):
    name, rate = load_trace(seed)
    terms, limit = TARGETS[seed % len(TARGETS)]
    service = SimulatedService(terms, seed % 2, 12, rate, EngineModel(limit=limit), Random(seed))
    for _ in range(SECONDS):
        service.step()
        assert seed % 2 <= service.wanted <= 12
    moves = service.moves
    assert any(one.after > one.before for one in moves), f"{name}: never more"
    assert reversals_max(moves) <= 1, f"{name}: {moves}"
    assert service.reaction_max_s <= 5.0, f"{name}: {moves}"
    for one in moves:  # fewer only after ten minutes that needed no more, or without a request
        late = [before for before in moves if before.after > before.before and 0 < one.at_s - before.at_s < 600]
        assert one.after > one.before or not late or one.why.startswith("no request"), f"{name}: {one}"
    assert service.served > 100


def test_a_burst_is_met_and_given_back():
    """Ten quiet minutes, ten with six times the load, and twenty quiet ones."""
    engine = EngineModel(streams=4, limit=4, start_s=10.0)
    service = SimulatedService(
        ScaleTerms(queue_s=1.0), 1, 10, lambda at_s: 3.0 if 600 <= at_s < 1200 else 0.3, engine, Random(3)
    )
    wanted = []
    for _ in range(2400):
        service.step()
        wanted.append(service.wanted)
    assert wanted[599] <= 2
    assert max(wanted[600:1200]) >= 4
    assert wanted[1150] == wanted[1250] == max(wanted), "they stay for ten minutes"
    assert wanted[-1] <= 2
