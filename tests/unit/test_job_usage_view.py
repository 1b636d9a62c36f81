"""What the advice of a job is judged by, from records: MIG slices and lesser GPUs of the fleet, checkpoints and energy."""

# mypy: disable-error-code="arg-type, list-item"

from dataclasses import replace

import pytest

from phalanx.api.views.job_usage import _lesser_kinds, _mig_slices, _request_name, _saves
from phalanx.core.accounting.reports import CheckpointRecord
from phalanx.core.accounting.usage_report import sum_job_hours
from phalanx.core.fleet.mig import DeviceMig, MigProfile
from phalanx.core.ids import Epoch
from phalanx.core.recovery.interval import checkpoint_interval_s
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow
from tests.builders import make_node
from tests.unit.demo_drawn import make_scene, make_usage_summary

GIB = 1 << 30
DRIVER_H100, DRIVER_L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"


def node_of(name, model, memory_gib, *, mig=None):
    node = make_node(name, 2)
    devices = tuple(replace(one, model=model, memory_bytes=memory_gib * GIB, mig=mig) for one in node.devices)
    return replace(node, devices=devices)


def profile(name, slices):
    return MigProfile(
        name=name, id=1, compute_slices=slices, memory_slices=slices, memory_bytes=10 * slices * GIB, starts=(0,),
        max_instances=1,
    )  # fmt: skip


def test_models_have_the_name_that_a_request_finds_them_by():
    assert (_request_name(DRIVER_H100), _request_name(DRIVER_L40S)) == ("h100", "l40s")
    assert _request_name("Acme Turbo 9000") == "acme-turbo-9000"
    assert _request_name("¡no words!") == ""


def test_lesser_gpus_are_those_of_the_fleet_with_a_lower_peak_rate():
    fleet = [node_of("n0", DRIVER_H100, 80), node_of("n1", DRIVER_L40S, 48), node_of("n2", "Acme Turbo 9000", 16)]
    (kind,) = _lesser_kinds({DRIVER_H100}, fleet)
    assert (kind.model, kind.memory_bytes) == ("l40s", 48 * GIB)
    assert _lesser_kinds({DRIVER_L40S}, fleet) == ()
    assert _lesser_kinds({"Acme Turbo 9000"}, fleet) == (), "its rate is unknown"


def test_mig_slices_are_those_that_the_fleet_makes_of_the_model_now():
    on = DeviceMig(on=True, profiles=(profile("1g.10gb", 1), profile("1g.10gb+me", 1)))
    off = replace(on, on=False)
    assert _mig_slices({DRIVER_H100}, [node_of("n0", DRIVER_H100, 80, mig=off)]) == ()
    found = _mig_slices({DRIVER_H100}, [node_of("n0", DRIVER_H100, 80), node_of("n1", DRIVER_H100, 80, mig=on)])
    assert [(model, one.name) for model, one in found] == [("h100", "1g.10gb")]
    assert parse_gpus("h100.1g.10gb").is_mig
    assert _mig_slices({DRIVER_L40S}, [node_of("n1", DRIVER_H100, 80, mig=on)]) == ()


def test_checkpoints_are_compared_with_the_interval_of_phalanx_torch():
    summary = make_usage_summary(make_scene(17.0))
    records = [
        CheckpointRecord(epoch=Epoch(1), generation=0, step=step, bytes=GIB, stall_s=0.5, write_s=4.0)
        for step in (10, 20, 30, 40)
    ]
    found = _saves(replace(summary, checkpoints=tuple(records)), 50_000.0)
    spans = [one.last_step_s - one.first_step_s for one in summary.attempts if one.first_step_s is not None]
    assert found is not None
    assert found.trained_s == pytest.approx(sum(spans))
    assert found.interval_s == pytest.approx(max(0.0, sum(spans) / 4 - 0.5))
    assert found.wanted_s == checkpoint_interval_s(stall_s=0.5, write_s=4.0, mtbf_s=50_000.0)
    assert _saves(replace(summary, checkpoints=tuple(records), unread_bytes=1), 50_000.0) is None
    assert _saves(replace(summary, attempts=()), 50_000.0) is None


def test_the_energy_of_a_job_is_that_of_its_rows():
    def row(job, **more):
        return UsageRow(model="h100", pool="", project="p", user="u", queue="q", job=job, **more)

    rows = (
        row("1", amounts=(("computing", "", 600), ("idle", "", 400)), energy=(("counter", 7_000, 900),)),
        row("2", amounts=(("computing", "", 50),), energy=(("counter", 900, 50),)),
    )
    hours = [
        UsageHour(id="0", fleet=1050, rows=rows),
        UsageHour(id="3600", fleet=50, rows=(row("1", amounts=(("computing", "", 50),)),)),
    ]
    found = sum_job_hours(hours, "1")
    assert (found.amounts.total, found.amounts.by_state) == (1050, {"computing": 650, "idle": 400})
    assert (found.millijoules, found.metered) == (7_000, 900)
