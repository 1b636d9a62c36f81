"""What the head knows of the speed of devices: peaks from the tables, rates of a calibration, and when they are read."""

import json

import pytest

from phalanx.controller.speed_facts import SpeedFactsKeeper
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.world import World, WorldChange
from phalanx.planner.calibration.profile import NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.planner.facts.device_speeds import device_speed_facts
from tests.builders import make_fleet

A100, H100, V100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"


def profile(**flops):
    nodes = [
        NodeMeasurement(node=f"n{number}", gpu=gpu, devices=8, flops=rates)
        for number, (gpu, rates) in enumerate(flops.items())
    ]
    return encode_record(Profile(at="2026-11-20T10:00:00", at_s=1.0, nodes=tuple(nodes)))


def test_peaks_are_those_of_one_precision():
    peak = device_speed_facts((A100, H100), None).peak
    assert peak[H100] / peak[A100] == pytest.approx(989 / 312, rel=0.02)
    with_older = device_speed_facts((A100, H100, V100), None).peak  # a V100 has no bf16
    assert set(with_older) in ({A100, H100, V100}, {A100, H100})
    assert with_older[H100] / with_older[A100] == pytest.approx(989 / 312, rel=0.02)


def test_models_that_no_table_has_and_stand_ins_on_cpus_have_no_peak():
    assert device_speed_facts(("virtual fast", "virtual slow", "abacus"), None).peak == {}


def test_a_calibration_gives_the_median_rate_of_each_model():
    found = device_speed_facts((A100, H100), profile(**{A100: {"bf16": 2e14}, H100: {"bf16": 5e14}}))
    assert found.calibrated == {A100: 2e14, H100: 5e14}
    mixed = device_speed_facts((A100, H100), profile(**{A100: {"fp16": 2e14}, H100: {"bf16": 5e14}}))
    assert len(mixed.calibrated) == 1  # rates of two precisions are no ratio


def test_facts_are_read_again_only_for_new_models_or_another_calibration():
    asked = []

    def read(models, stored):
        asked.append((tuple(models), stored is not None))
        return device_speed_facts(models, stored)

    world = World()
    keeper = SpeedFactsKeeper(world, read)
    assert keeper.facts(()).peak == {}
    change = WorldChange(world=world)
    nodes = make_fleet("r: n0=h100:8 n1=a100:8 n2=h100:8").nodes
    for node in nodes.values():
        change.put(node)
    known = keeper.facts(change.records)
    assert set(known.peak) == {"a100", "h100"}
    assert keeper.facts([nodes[NodeId("n0")]]) is known
    document = FleetDocument(
        text=json.dumps(profile(h100={"bf16": 5e14}, a100={"bf16": 2e14})), by=UserId("op"), at_s=1.0
    )
    change.put(document)
    assert keeper.facts([document]).calibrated == {"h100": 5e14, "a100": 2e14}
    assert asked == [(("a100", "h100"), False), (("a100", "h100"), True)]


def test_a_profile_that_cannot_be_read_leaves_the_peaks():
    world = World()
    change = WorldChange(world=world)
    for node in make_fleet("r: n0=h100:8 n1=a100:8").nodes.values():
        change.put(node)
    change.put(FleetDocument(text="{]", by=UserId("op"), at_s=1.0))
    found = SpeedFactsKeeper(world, device_speed_facts).facts(())
    assert (set(found.peak), found.calibrated) == ({"a100", "h100"}, {})
