"""`--fleet here`: which nodes a plan is made on, and what was measured of them."""

from types import SimpleNamespace

import msgspec
import pytest

from phalanx.cli.jobs.request.job_request import JobRequest
from phalanx.cli.plan.job_plan import resolve_plan
from phalanx.cli.plan.plan_option import PlanRequest
from phalanx.core.errors import BadRequest, NeverFits, Unreachable
from phalanx.core.fleet.node import NodeState
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.planner.calibration.profile import InterNodeMeasurement, NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.planner.cost.machine import Price
from phalanx.planner.facts.machines import read_fact_tables
from phalanx.plans.machine import machine_from_head
from phalanx.plans.serving.answer import compute_serving_plan
from phalanx.wire.api.nodes import CordonView, DeviceView, NodeView, ProfileReply

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"
PLAIN = {"gpus": None, "network": None, "price": None, "price_date": None, "price_kind": None}


def node(name, model, devices, **labels):
    return NodeView(
        id=name,
        state=NodeState.UP,
        engine="local",
        cpus=8,
        memory_bytes=1 << 36,
        labels=labels,
        devices=[
            DeviceView(index=index, uuid=f"{name}-{index}", model=model, memory_bytes=80 << 30)
            for index in range(devices)
        ],
    )


def head(*nodes, profile=None, fault=None):
    def asked():
        if fault is not None:
            raise fault
        return ProfileReply(profile=None if profile is None else encode_record(profile), stale=["it is 40 days old"])

    return SimpleNamespace(nodes=lambda: list(nodes), profile=asked)


def here(head, **given):
    notes: list[str] = []
    return machine_from_head(head, {**PLAIN, **given}, read_fact_tables(), notes), notes


def profile(model):
    found = NodeMeasurement(
        node="n0", gpu=model, devices=8, flops={"bf16": 6.1e14}, within_bytes_per_s=3.6e11, storage_bytes_per_s=5e9
    )
    between = InterNodeMeasurement(gpu=model, nodes=2, groups=8, all_reduce_bytes_per_s=4.2e10, latency_s=2e-5)
    return Profile(at="2026-11-01T10:00:00Z", at_s=1.0, nodes=(found,), between=(between,))


def test_most_devices_of_one_kind_are_the_fleet():
    machine, notes = here(head(node("a", A100, 8), node("b", H100, 8), node("c", H100, 8)))
    assert (machine.gpu.name, machine.nodes, machine.gpus_per_node) == ("h100-sxm5-80gb", 2, 8)
    assert any("no calibration" in note for note in notes)


def test_gpus_name_a_part_of_it():
    fleet = head(node("a", A100, 8), node("b", H100, 8), node("c", H100, 8))
    machine, _ = here(fleet, gpus="a100:4")
    assert (machine.gpu.name, machine.nodes, machine.gpus_per_node) == ("a100-sxm4-80gb", 1, 4)
    shaped, _ = here(fleet, gpus="2xh100:4")
    assert (shaped.nodes, shaped.gpus_per_node) == (2, 4)
    assert here(fleet, gpus="12")[0].gpus_per_node == 6


def test_cordoned_nodes_are_left_out():
    excluded = node("b", H100, 8)
    machine, _ = here(
        head(
            node("a", A100, 8),
            NodeView(
                **{
                    **{name: getattr(excluded, name) for name in excluded.__struct_fields__},
                    "cordon": CordonView(by="ada", why="fan", since_s=0.0, drain=True),
                }
            ),
        )
    )
    assert machine.gpu.name == "a100-sxm4-80gb"


def test_what_the_fleet_lacks_is_said_with_what_it_has():
    with pytest.raises(NeverFits) as caught:
        here(head(node("a", A100, 8)), gpus="h100:8")
    assert (caught.value.message, caught.value.hint) == ("no node of this fleet has h100 GPUs", f"available: {A100}")


def test_calibrated_rates_go_before_the_tables():
    machine, notes = here(head(node("n0", H100, 8), node("n1", H100, 8), profile=profile(H100)))
    assert machine.measured.flops["bf16"] == 6.1e14
    assert machine.measured.between_bytes_per_s == 4.2e10
    assert any("calibrated on 2026-11-01" in note for note in notes)
    assert any("it is 40 days old" in note for note in notes)
    assert not any("not stated" in note for note in notes)


def test_profile_of_other_devices_counts_for_nothing():
    machine, notes = here(head(node("n0", H100, 8), profile=profile(A100)))
    assert machine.measured is None
    assert any("no calibration" in note for note in notes)


def test_head_without_a_profile_is_no_hindrance():
    machine, notes = here(head(node("n0", H100, 8), fault=Unreachable("nobody answers")))
    assert machine.measured is None
    assert "no profile of this fleet: nobody answers" in notes


def test_network_is_what_the_nodes_labels_say():
    fleet = head(node("a", H100, 8, network="200gbit"), node("b", H100, 8, network="200gbit"))
    assert here(fleet)[0].network_bytes_per_s == 25e9
    assert here(fleet, network="ib-xdr")[0].network_bytes_per_s == 100e9


def test_own_price_is_kept():
    machine, _ = here(head(node("a", H100, 8)), price="1.5", price_date="2026-11")
    assert isinstance(machine.price, Price)
    assert machine.price.usd_per_gpu_hour == 1.5


def test_a_job_planned_for_several_models_is_sent_with_the_speed_of_its_layout_on_each(capsys):
    mapping: dict[str, object] = {"run": "python train.py", "gpus": "h100,a100:8"}
    wanted = JobRequest(
        mapping=mapping,
        judge=lambda: spec_from_mapping(mapping, workdir="/w"),
        copy=False,
        plan_request=PlanRequest(model="llama-3-8b", options={"seq": "2048", "global_batch": "64"}, folder="/w"),
    )
    planned = resolve_plan(head(node("a", A100, 8), node("b", H100, 8)), wanted)
    sent = spec_from_mapping(planned.mapping, workdir="/w")
    speeds = dict(sent.planned_speeds)
    assert planned.plan_request is None
    assert planned.mapping["plan"] == sent.plan
    assert 1.5 < speeds["h100"] / speeds["a100"] < 4.0
    assert "with this layout a step takes: h100 " in capsys.readouterr().err


def test_a_job_whose_alternatives_differ_in_number_has_no_single_layout():
    mapping: dict[str, object] = {"run": "python train.py", "gpus": "h100:8|a100:16"}
    wanted = JobRequest(
        mapping=mapping,
        judge=lambda: spec_from_mapping(mapping, workdir="/w"),
        copy=False,
        plan_request=PlanRequest(model="llama-3-8b", options={}, folder="/w"),
    )
    with pytest.raises(BadRequest, match="a layout is for one number of GPUs, but gpus is h100:8") as refused:
        resolve_plan(head(node("a", A100, 8)), wanted)
    assert refused.value.exit_code == 64


SERVED = {
    **PLAIN,
    "model": "llama-3-70b",
    "fleet": "here",
    "instance": None,
    "prices": (),
    "precision": "bf16",
    "method": "full",
    "users": "200",
    "prompt_tokens": "2000",
    "answer_tokens": "500",
    "ttft": "500ms",
    "tpot": None,
    "think": None,
    "top": 5,
}


def test_inference_is_planned_on_the_fleet_with_its_measured_matrix_rate():
    fleet = head(node("a", H100, 8), node("b", H100, 8))
    plain = compute_serving_plan(SERVED, fleet=lambda: fleet)
    assert plain.fits
    assert plain.layouts[0].gpus <= 16
    slow = head(node("a", H100, 8), node("b", H100, 8), profile=profile(H100))  # 610 instead of 795 TFLOP/s
    measured = compute_serving_plan(SERVED, fleet=lambda: slow)
    first = [
        next(one.estimates.ttft_p50_s.mid for one in found.layouts if one.tensor == 8 and one.estimates)
        for found in (plain, measured)
    ]
    assert first[1] > 1.05 * first[0]
    assert "of the calibration, inference uses the matrix rates only" in measured.notes


def test_a_fleet_that_is_too_small_for_the_users_is_said():
    fleet = head(node("a", H100, 8))
    found = compute_serving_plan({**SERVED, "users": "5000"}, fleet=lambda: fleet)
    assert not found.fits
    assert "more than the 8" in found.reason


def test_hosts_have_what_their_nodes_report_unless_it_is_stated():
    small, large = node("n0", H100, 8), node("n1", H100, 8)
    large = msgspec.structs.replace(large, memory_bytes=1 << 40)
    found, _ = here(head(small, large))
    assert found.host_memory_bytes == 1 << 36  # the smaller one: ranks are alike
    assert found.host_memory_fact.source == ""
    assert here(head(small, large), host_memory="512GiB")[0].host_memory_bytes == 512 << 30
    silent = msgspec.structs.replace(small, memory_bytes=0)
    assert here(head(silent))[0].host_memory_bytes == 2048 << 30  # of the usual server
