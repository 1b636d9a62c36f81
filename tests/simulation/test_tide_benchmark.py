"""The benchmark of one fleet for a service and training: some minutes of a day, with the real controller."""

from random import Random

from benchmarks import tide


def test_the_service_takes_gpus_from_training_and_keeps_its_target(monkeypatch):
    monkeypatch.setattr(tide, "WARM_S", 300.0)
    fleet = tide.shared_day(0.1, "public", 1)
    traffic = fleet.traffic
    assert traffic is not None
    assert traffic.served > 500
    assert traffic.kept >= tide.SLO * traffic.served
    assert fleet.preempted > 0
    whole_s = tide.GPUS * 360.0
    assert fleet.replicas_s > traffic.busy_s / tide.ENGINE.streams
    assert 0.4 * whole_s < fleet.trained_s <= whole_s - fleet.replicas_s


def test_training_alone_fills_its_pool(monkeypatch):
    monkeypatch.setattr(tide, "WARM_S", 120.0)
    fleet = tide.SimulatedFleet(19, Random(1))
    fleet.run(0.05)
    assert fleet.replicas_s == 0.0
    assert 0.9 * 19 * 180.0 < fleet.trained_s <= 19 * 180.0
