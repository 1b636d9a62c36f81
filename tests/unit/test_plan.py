"""The planner's answers to questions that people ask."""

from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.layouts.asked import Asked
from phalanx.core.layouts.plan import choose, plan
from phalanx.core.performance.machine import Fact, Machine, Price
from phalanx.core.performance.step import Item, Method
from phalanx.core.work.layout import parse_layout
from phalanx.facts.argument import model_from
from phalanx.facts.coefficients import physics, stack_named
from phalanx.facts.gpus import gpu_named


def asked(model, gpus, seq=4096, batch=64, stack="fsdp2-compile", per_node=8, gbit=400, **more):
    count, gpu = gpus.split(" x ")
    on = Machine(
        gpu=gpu_named(gpu).gpu,
        nodes=-(-int(count) // per_node),
        gpus_per_node=min(int(count), per_node),
        network_bytes_per_s=gbit * 1e9 / 8,
        price=more.pop("price", None),
    )
    return Asked(
        model=model_from(model),
        machine=on,
        physics=physics(),
        stack=stack_named(stack),
        seq=seq,
        global_batch=batch,
        **more,
    )


SEVENTY = asked("llama-3-70b", "8 x a100-80gb")


def test_seventy_billion_on_eight_a100_is_refused_by_its_states():
    answer = plan(SEVENTY)
    assert not answer.fits
    assert answer.layouts == ()
    assert "1,129 GB" in answer.reason
    assert "687 GB" in answer.reason


def test_it_says_the_smallest_things_that_would_fit():
    ways = plan(SEVENTY).smallest
    assert [(way.method, way.gpus) for way in ways] == [(Method.LORA, 8), (Method.FULL, 16)]
    for way in ways:
        on = replace(SEVENTY.machine, nodes=way.gpus // 8)
        again = replace(SEVENTY, machine=on, method=way.method, layout=way.layout, global_batch=way.layout.global_batch)
        assert plan(again).fits


def test_adapters_of_seventy_billion_fit_at_tensor_four_by_data_two():
    answer = plan(replace(SEVENTY, method=Method.LORA, layout=parse_layout("tp=4,dp=2,sp=1")))
    assert answer.fits
    assert answer.layouts[0].layout.data == 2


def test_every_layout_offered_fits_and_uses_all_of_the_machine_and_the_batch():
    answer = plan(asked("llama-3-70b", "64 x h100", seq=8192, batch=512), top=20)
    assert len(answer.layouts) > 5
    for one in answer.layouts:
        assert one.fits
        assert one.layout.ranks == 64
        assert one.layout.global_batch == 512
        assert one.layout.tensor <= 8


def test_the_first_is_the_fastest_but_for_the_price_of_complexity():
    layouts = plan(asked("llama-3-8b", "16 x h100", seq=8192, batch=128), top=20).layouts
    assert layouts[0].step.total_s <= 1.05 * min(one.step.total_s for one in layouts)


def test_those_that_lost_say_what_it_cost_them():
    answer = plan(asked("llama-3-70b", "32 x h100", seq=8192, batch=512))
    assert all("slower" in one.why for one in answer.layouts[1:])
    assert answer.losers
    assert all("slower" in one.why or "needs" in one.why for one in answer.losers)


def test_a_small_model_is_not_split_at_all():
    best = choose(asked("gpt2", "8 x h100", seq=1024, batch=512))
    assert (best.tensor, best.pipeline, best.context) == (1, 1, 1)


def test_experts_are_spread():
    best = choose(asked("mixtral-8x7b", "64 x h100", batch=256, stack="megatron-core"))
    assert best.expert > 1


def test_a_long_sequence_is_split():
    best = choose(asked("llama-3-8b", "32 x h100", seq=262144, batch=32))
    assert best.context > 1


def test_money_needs_tokens_and_a_price():
    price = Price(usd_per_gpu_hour=2.0, kind="on-demand", offer="x", region="", fact=Fact(source="s", date="2026-11"))
    free = plan(asked("llama-3-8b", "8 x h100", batch=64)).layouts[0]
    told = plan(asked("llama-3-8b", "8 x h100", batch=64, tokens=1e9, price=price)).layouts[0]
    assert (free.train_s, free.cost_usd) == (None, None)
    low, middle, high = told.cost_usd
    assert low < middle < high
    assert middle == pytest.approx(told.train_s[1] * 8 / 3600 * 2.0)


def test_more_devices_fail_more_often_and_save_more_often():
    small, large = (
        plan(asked("llama-3-70b", f"{count} x h100", batch=2048)).layouts[0].checkpoint for count in (64, 1024)
    )
    assert large.interval_s < small.interval_s
    assert large.goodput < small.goodput < 1.0


def test_a_given_layout_is_judged_and_its_batches_filled_in():
    answer = plan(asked("llama-3-8b", "8 x h100", batch=64, layout=parse_layout("fsdp=8,mbs=2,recompute=full")))
    assert answer.judged == 1
    assert answer.layouts[0].layout.micro_batches == 4


def test_a_given_layout_that_does_not_fit_says_what_is_too_large():
    answer = plan(asked("llama-3-70b", "8 x h100", layout=parse_layout("tp=8,recompute=full")))
    assert not answer.fits
    assert "optimizer states" in answer.reason


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("tp=4", "4 ranks and the plan is for 8 GPUs"),
        ("dp=8,mbs=3", "64 does not divide"),
        ("tp=8,sp=1", None),
        ("pp=8,mbs=64", "micro-batches to fill"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(layout, line):
    question = asked("llama-3-8b", "8 x h100", layout=parse_layout(layout))
    if line is None:
        assert plan(question).judged == 1
        return
    with pytest.raises(BadRequest) as refused:
        plan(question)
    assert line in refused.value.message


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(BadRequest, match=r"25 heads cannot be shared by tp=2"):
        plan(asked("gpt2-xl", "2 x h100", seq=1024, layout=parse_layout("tp=2")))


def test_a_precision_that_the_device_lacks_is_refused():
    with pytest.raises(BadRequest, match="no fp8"):
        plan(asked("llama-3-8b", "8 x a100-80gb", precision="fp8"))


@pytest.mark.parametrize("what", [{"seq": 0}, {"batch": -1}])
def test_sizes_that_are_not_positive_are_refused(what):
    with pytest.raises(BadRequest, match="at least 1"):
        plan(asked("llama-3-8b", "8 x h100", **what))


def test_a_batch_that_divides_over_nothing_is_said():
    answer = plan(asked("llama-3-8b", "64 x h100", batch=7))
    assert not answer.fits or all(one.layout.data in {1, 7} for one in answer.layouts)


def test_the_same_question_has_the_same_answer():
    question = asked("llama-3-70b", "64 x h100", seq=8192, batch=512)
    assert plan(question) == plan(question)


def test_a_trillion_parameters_on_eight_thousand_devices_are_searched():
    answer = plan(asked("gpt-1t", "8192 x h100", seq=2048, batch=6144))
    assert answer.fits
    assert answer.judged > 50
    assert answer.layouts[0].step.items[Item.BUBBLE] < 0.2 * answer.layouts[0].step.total_s
