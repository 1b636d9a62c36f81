"""Whatever is asked, an answer keeps its promises."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.model_shape import MixtureOfExperts, ModelShape
from phalanx.planner.cost.training_task import TrainingMethod
from phalanx.planner.facts.coefficient_table import physics, stacks
from phalanx.planner.facts.gpus import find_gpu
from phalanx.planner.search.layout_search import plan_layouts
from phalanx.planner.search.request import LayoutRequest
from tests.effort import examples


@st.composite
def questions(draw):
    heads = draw(st.sampled_from([8, 12, 16, 32, 40, 64]))
    kv_heads = draw(st.sampled_from([count for count in (1, 2, 4, 8, heads) if heads % count == 0]))
    mixture = None
    if draw(st.booleans()):
        experts = draw(st.sampled_from([4, 8, 60]))
        mixture = MixtureOfExperts(experts=experts, per_token=2, ffn=1024, shared_ffn=draw(st.sampled_from([0, 512])))
    model = ModelShape(
        name="drawn",
        layers=draw(st.integers(1, 100)),
        hidden=heads * 64,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        ffn=draw(st.sampled_from([1024, 4096, 11008])),
        vocab=draw(st.sampled_from([1000, 32000, 128256])),
        mixture=mixture,
    )
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    machine = Machine(
        gpu=find_gpu(draw(st.sampled_from(["h100", "a100-40gb", "t4", "l40s", "gb200"]))).gpu,
        nodes=draw(st.integers(1, 12)),
        gpus_per_node=per_node,
        network_bytes_per_s=draw(st.sampled_from([1e8, 2.5e10, 5e10])),
    )
    precision = "fp16" if machine.gpu.name.startswith("t4") else "bf16"
    able = sorted(name for name, stack in stacks().items() if precision in stack.precisions)
    return LayoutRequest(
        model=model,
        machine=machine,
        physics=physics(),
        stack=stacks()[draw(st.sampled_from(able))],
        seq=draw(st.sampled_from([128, 2048, 8192, 65536])),
        global_batch=draw(st.integers(1, 300)),
        method=draw(st.sampled_from(TrainingMethod)),
        precision=precision,
    )


@settings(max_examples=examples(60), deadline=None)
@given(questions())
def test_what_is_offered_can_run(asked):
    answer = plan_layouts(asked)
    assert answer.fits == bool(answer.layouts)
    assert answer.reason
    for one in answer.layouts:
        layout = one.layout
        assert layout.ranks == asked.machine.gpus
        assert layout.global_batch == asked.global_batch
        assert one.fits
        assert one.low_s < one.step.total_s < one.high_s
        assert abs(sum(one.step.items.values()) - one.step.total_s) < 1e-9 * one.step.total_s
        assert asked.model.heads % layout.tensor == 0
        assert asked.model.kv_heads % layout.tensor == 0
        assert layout.pipeline <= asked.model.layers
        assert 0.0 < one.checkpoint.goodput <= 1.0


@settings(max_examples=examples(40), deadline=None)
@given(questions())
def test_the_given_layout_is_judged_as_the_search_judged_it(asked):
    answer = plan_layouts(asked, top=2)
    for one in answer.layouts:
        again = plan_layouts(replace(asked, layout=one.layout))
        assert again.layouts[0].step == one.step


@settings(max_examples=examples(40), deadline=None)
@given(questions())
def test_what_fits_fits_on_a_larger_device_too(asked):
    if plan_layouts(asked).fits:
        gpu = replace(asked.machine.gpu, memory_bytes=2 * asked.machine.gpu.memory_bytes)
        assert plan_layouts(replace(asked, machine=replace(asked.machine, gpu=gpu))).fits
