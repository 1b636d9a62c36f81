"""The planner's answers to questions that people ask."""

import math
from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.job_file.plan_key import layout_text
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.planner.cost.machine import FactSource, Machine, Price
from phalanx.planner.cost.step_time import StepItem
from phalanx.planner.cost.training_task import TrainingMethod
from phalanx.planner.facts.coefficient_table import find_stack, physics
from phalanx.planner.facts.gpus import find_gpu
from phalanx.planner.facts.model_argument import parse_model_argument
from phalanx.planner.search.layout_search import plan_layouts
from phalanx.planner.search.request import LayoutRequest


def asked(model, gpus, seq=4096, batch=64, stack="fsdp2-compile", per_node=8, gbit=400, **more):
    count, gpu = gpus.split(" x ")
    on = Machine(
        gpu=find_gpu(gpu).gpu,
        nodes=-(-int(count) // per_node),
        gpus_per_node=min(int(count), per_node),
        network_bytes_per_s=gbit * 1e9 / 8,
        price=more.pop("price", None),
    )
    return LayoutRequest(
        model=parse_model_argument(model),
        machine=on,
        physics=physics(),
        stack=find_stack(stack),
        seq=seq,
        global_batch=batch,
        **more,
    )


def chosen(question):
    return plan_layouts(question, top=1).layouts[0].layout


SEVENTY = asked("llama-3-70b", "8 x a100-80gb")


def test_seventy_billion_on_eight_a100_is_refused_by_its_states():
    answer = plan_layouts(SEVENTY)
    assert not answer.fits
    assert answer.layouts == ()
    assert "1,129 GB" in answer.reason
    assert "687 GB" in answer.reason


def test_it_says_the_smallest_things_that_would_fit():
    ways = plan_layouts(SEVENTY).fitting_changes
    assert [(way.method, way.gpus) for way in ways] == [(TrainingMethod.LORA, 8), (TrainingMethod.FULL, 16)]
    for way in ways:
        on = replace(SEVENTY.machine, nodes=way.gpus // 8)
        again = replace(SEVENTY, machine=on, method=way.method, layout=way.layout, global_batch=way.layout.global_batch)
        assert plan_layouts(again).fits


def test_adapters_of_seventy_billion_fit_at_tensor_four_by_data_two():
    answer = plan_layouts(replace(SEVENTY, method=TrainingMethod.LORA, layout=parse_layout("tp=4,dp=2,sp=1")))
    assert answer.fits
    assert answer.layouts[0].layout.data == 2


def test_every_layout_offered_fits_and_uses_all_of_the_machine_and_the_batch():
    answer = plan_layouts(asked("llama-3-70b", "64 x h100", seq=8192, batch=512), top=20)
    assert len(answer.layouts) > 5
    for one in answer.layouts:
        assert one.fits
        assert one.layout.ranks == 64
        assert one.layout.global_batch == 512
        assert one.layout.tensor <= 8


def test_the_first_is_the_fastest_but_for_the_price_of_complexity():
    layouts = plan_layouts(asked("llama-3-8b", "16 x h100", seq=8192, batch=128), top=20).layouts
    assert layouts[0].step.total_s <= 1.05 * min(one.step.total_s for one in layouts)


def test_those_that_lost_say_what_it_cost_them():
    answer = plan_layouts(asked("llama-3-70b", "32 x h100", seq=8192, batch=512))
    assert all("slower" in one.why for one in answer.layouts[1:])
    assert answer.rejected
    assert all("slower" in one.why or "needs" in one.why for one in answer.rejected)


def test_a_small_model_is_not_split_at_all():
    best = chosen(asked("gpt2", "8 x h100", seq=1024, batch=512))
    assert (best.tensor, best.pipeline, best.context) == (1, 1, 1)


def test_experts_are_spread():
    best = chosen(asked("mixtral-8x7b", "64 x h100", batch=256, stack="megatron-core"))
    assert best.expert > 1


def test_a_long_sequence_is_split():
    best = chosen(asked("llama-3-8b", "32 x h100", seq=262144, batch=32))
    assert best.context > 1


def test_money_needs_tokens_and_a_price():
    price = Price(
        usd_per_gpu_hour=2.0, kind="on-demand", offer="x", region="", fact=FactSource(source="s", date="2026-11")
    )
    free = plan_layouts(asked("llama-3-8b", "8 x h100", batch=64)).layouts[0]
    told = plan_layouts(asked("llama-3-8b", "8 x h100", batch=64, tokens=1e9, price=price)).layouts[0]
    assert (free.train_s, free.cost_usd) == (None, None)
    assert told.cost_usd is not None
    assert told.train_s is not None
    low, middle, high = told.cost_usd
    assert low < middle < high
    assert middle == pytest.approx(told.train_s[1] * 8 / 3600 * 2.0)


def test_more_devices_fail_more_often_and_save_more_often():
    small, large = (
        plan_layouts(asked("llama-3-70b", f"{count} x h100", batch=2048)).layouts[0].checkpoint for count in (64, 1024)
    )
    assert large.interval_s < small.interval_s
    assert large.goodput < small.goodput < 1.0


def test_a_given_layout_is_judged_and_its_batches_filled_in():
    answer = plan_layouts(asked("llama-3-8b", "8 x h100", batch=64, layout=parse_layout("fsdp=8,mbs=2,recompute=full")))
    assert answer.evaluated == 1
    assert answer.layouts[0].layout.micro_batches == 4


def test_a_given_layout_that_does_not_fit_says_what_is_too_large():
    answer = plan_layouts(asked("llama-3-70b", "8 x h100", layout=parse_layout("tp=8,recompute=full")))
    assert not answer.fits
    assert "optimizer states" in answer.reason


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("tp=4", "4 ranks, but the plan is for 8 GPUs"),
        ("dp=8,mbs=3", "64 is not divisible"),
        ("tp=8,sp=1", None),
        ("pp=8,mbs=64", "micro-batches to fill"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(layout, line):
    question = asked("llama-3-8b", "8 x h100", layout=parse_layout(layout))
    if line is None:
        assert plan_layouts(question).evaluated == 1
        return
    with pytest.raises(BadRequest) as refused:
        plan_layouts(question)
    assert line in refused.value.message


def test_a_given_layout_over_by_less_than_the_estimate_errs_may_fit():
    # As Llama 3.1 405B was trained (A. Grattafiori et al., 2024, table 4), but for its interleaving.
    given = parse_layout("tp=8,pp=16,fsdp=128,zero=1,sp=1")
    answer = plan_layouts(
        asked("llama-3.1-405b", "16384 x h100", seq=8192, batch=2048, stack="megatron-core", layout=given), top=1
    )
    one = answer.layouts[0]
    assert answer.fits
    assert one.is_tight
    assert "may fit" in answer.reason
    assert "so it may run" in one.why


def test_adapters_are_planned_for_what_peft_can_do():
    answer = plan_layouts(
        replace(asked("llama-2-70b", "8 x a100-80gb", batch=64, stack="transformers"), method=TrainingMethod.LORA)
    )
    assert answer.fits
    assert all(one.layout.tensor == one.layout.pipeline == one.layout.context == 1 for one in answer.layouts)


def test_what_is_searched_leaves_room_for_the_error():
    answer = plan_layouts(asked("llama-3-70b", "32 x h100", batch=1024))
    assert not any(one.is_tight for one in answer.layouts)


def test_a_given_layout_that_does_not_fit_points_at_one_that_does_on_the_same_devices():
    answer = plan_layouts(asked("llama-3-8b", "8 x h100", layout=parse_layout("dp=8")))
    (way,) = answer.fitting_changes
    assert (way.method, way.gpus) == (TrainingMethod.FULL, 8)
    assert plan_layouts(asked("llama-3-8b", "8 x h100", layout=way.layout)).fits


def test_what_would_fit_is_a_number_of_nodes_that_somebody_would_build():
    for nodes in (2, 6):
        grown = (
            plan_layouts(asked("gpt-1t", f"{8 * nodes} x a100-80gb", seq=2048, batch=1024)).fitting_changes[-1].gpus
            // 8
        )
        low = nodes * 2 ** int(math.log2((grown - 1) / nodes))
        assert nodes < grown <= 2 * low
        assert (grown - low) % max(1, low // 4) == 0


def test_a_model_past_all_machines_is_refused_and_not_computed_to_infinity():
    answer = plan_layouts(asked("layers=10000,hidden=10000000,heads=1,vocab=10000000,ffn=10000000", "8 x h100"))
    assert not answer.fits
    assert answer.rejected[0].checkpoint.goodput == 0.0


def test_a_given_layout_has_the_precision_that_is_asked_for():
    given = parse_layout("tp=2,fsdp=4")
    (one,) = plan_layouts(asked("llama-3-8b", "8 x h100", precision="fp8", layout=given)).layouts
    assert one.layout.precision == "fp8"


def test_states_that_fill_a_node_are_sharded_over_some_nodes_and_copied_over_others():
    answer = plan_layouts(asked("llama-3-70b", "512 x a100-80gb", seq=8192, batch=1024), top=50)
    assert any(8 < one.layout.tensor * one.layout.shard < 512 and one.layout.replicate > 1 for one in answer.layouts)


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(BadRequest, match=r"25 heads cannot be shared by tp=2"):
        plan_layouts(asked("gpt2-xl", "2 x h100", seq=1024, layout=parse_layout("tp=2")))


def test_a_precision_that_the_device_lacks_is_refused():
    with pytest.raises(BadRequest, match="does not support fp8"):
        plan_layouts(asked("llama-3-8b", "8 x a100-80gb", precision="fp8"))


@pytest.mark.parametrize("what", [{"seq": 0}, {"batch": -1}])
def test_sizes_that_are_not_positive_are_refused(what):
    with pytest.raises(BadRequest, match="at least 1"):
        plan_layouts(asked("llama-3-8b", "8 x h100", **what))


def test_nodes_that_nothing_joins_are_refused():
    with pytest.raises(BadRequest, match="the 2 nodes have no network"):
        plan_layouts(asked("llama-3-8b", "16 x h100", gbit=0))
    assert plan_layouts(asked("llama-3-8b", "8 x h100", gbit=0)).fits


def test_small_devices_are_refused_in_tenths_of_gigabytes():
    answer = plan_layouts(asked("gpt2", "4 x virtual", seq=1024, per_node=2))
    assert "does not fit on 4 x virtual: the smallest layout" in answer.reason
    assert "which has 2.1 GB usable" in answer.reason


def test_a_batch_that_divides_over_nothing_is_said():
    answer = plan_layouts(asked("llama-3-8b", "64 x h100", batch=7))
    assert not answer.fits or all(one.layout.data in {1, 7} for one in answer.layouts)


def test_the_same_question_has_the_same_answer():
    question = asked("llama-3-70b", "64 x h100", seq=8192, batch=512)
    assert plan_layouts(question) == plan_layouts(question)


def test_a_trillion_parameters_on_eight_thousand_devices_are_searched():
    answer = plan_layouts(asked("gpt-1t", "8192 x h100", seq=2048, batch=6144))
    assert answer.fits
    assert answer.evaluated > 50
    assert answer.layouts[0].step.items[StepItem.BUBBLE] < 0.2 * answer.layouts[0].step.total_s


def test_layouts_that_need_equal_memory_are_listed_in_a_fixed_order():
    assert plan_layouts(asked("llama-2-70b", "16 x a100-80gb", batch=1024)).fits


def test_every_layout_offered_can_be_written_and_read_again():
    for question in (
        asked("llama-3-70b", "32 x h100", seq=8192, batch=512),
        asked("mixtral-8x7b", "64 x h100", batch=256),
    ):
        for one in plan_layouts(question, top=20).layouts:
            assert parse_layout(layout_text(one.layout)) == one.layout


def test_a_batch_that_divides_over_nothing_is_no_question_of_more_gpus():
    answer = plan_layouts(asked("qwen3-0.6b", "8 x h100", seq=4096, batch=1, stack="phalanx"))
    assert (answer.fits, answer.fitting_changes, answer.evaluated) == (False, (), 0)
    assert "global batch of 1" in answer.reason


def test_more_gpus_are_proposed_with_the_batch_that_divides_over_them():
    ways = plan_layouts(asked("llama-2-70b", "8 x a100-80gb", seq=4096, batch=10)).fitting_changes
    (grown,) = (way for way in ways if way.gpus > 8)
    assert grown.layout.global_batch >= 10
    assert grown.layout.global_batch % grown.gpus == 0
