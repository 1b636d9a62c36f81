"""A MIG slice as a device to plan on: its share of the GPU, and the requests that no plan has an answer to."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import parse_gpus
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.facts.mig import find_mig_gpu


def test_a_slice_has_its_memory_and_its_share_of_bandwidth_and_rates():
    notes: list[str] = []
    whole = build_machine(parse_gpus("h100:1")).gpu
    machine = build_machine(parse_gpus("h100.1g.20gb"), notes=notes)
    known = find_mig_gpu("h100")
    assert known is not None
    profile = next(one for one in known.profiles if one.name == "1g.20gb")
    gpu = machine.gpu
    assert (machine.nodes, machine.gpus_per_node) == (1, 1)
    assert gpu.memory_bytes == profile.memory_bytes < whole.memory_bytes / 4
    assert gpu.memory_bytes_per_s == whole.memory_bytes_per_s * 2 / 8
    assert gpu.flops["bf16"] == pytest.approx(whole.flops["bf16"] / 7)
    assert gpu.best_flops["bf16"] == pytest.approx(whole.best_flops["bf16"] / 7)
    assert (gpu.link_domain, gpu.link_bytes_per_s) == (1, 0.0)
    assert any("1 of 7 compute slices and 2 of 8 memory slices" in note for note in notes)


def test_the_largest_slice_is_the_gpu_without_links():
    whole = build_machine(parse_gpus("a100-80gb:1")).gpu
    gpu = build_machine(parse_gpus("a100-80gb.7g.80gb")).gpu
    assert gpu.flops == whole.flops
    assert gpu.memory_bytes_per_s == whole.memory_bytes_per_s


def test_a_slice_on_each_of_several_nodes_is_a_node_each():
    machine = build_machine(parse_gpus("4xh100.2g.20gb"))
    assert (machine.nodes, machine.gpus_per_node, machine.gpus) == (4, 1, 4)


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("h100.1g.10gb:7", "slices of one GPU do not exchange data", "plan one: h100.1g.10gb"),
        ("h100.9g.90gb", "h100-sxm5-80gb has no MIG slice 9g.90gb", "known: 1g.10gb"),
        ("l40s.1g.10gb", "l40s-48gb has no MIG slice", "whole GPUs"),
        ("h100:1/4", "a plan needs whole GPUs or a MIG slice, not h100:0.25", "h100:1"),
        ("h100:20GiB", "a plan needs whole GPUs or a MIG slice, not h100:20GiB", "h100:1"),
        ("1g.10gb", "1g.10gb has no GPU model", "h100:8"),
    ],
)
def test_a_part_that_cannot_be_planned_is_refused_with_what_can(words, said, hint):
    with pytest.raises(BadRequest) as refused:
        build_machine(parse_gpus(words))
    assert said in refused.value.message
    assert hint in refused.value.hint
