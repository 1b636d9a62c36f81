"""What a step costs: each test changes one thing and says which item must answer."""

import math
from dataclasses import replace
from random import Random

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.layouts.layout import Layout, Recompute, parse_layout
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.layer_time import best_flops, expert_copies
from phalanx.planner.cost.machine import Machine, MeasuredRates
from phalanx.planner.cost.memory import (
    MemoryItem,
    estimate_memory,
    exceeds_memory,
    micro_batches_in_flight,
    stored_activation_bytes,
)
from phalanx.planner.cost.model_shape import MixtureOfExperts, ModelShape
from phalanx.planner.cost.step_time import StepItem, step_time
from phalanx.planner.cost.training_task import TrainingMethod, TrainingTask
from phalanx.planner.cost.uncertainty import interval_s
from phalanx.planner.facts.coefficient_table import find_stack, physics, stacks
from phalanx.planner.facts.gpus import find_gpu
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.facts.model_argument import parse_model_argument

LLAMA_8B = ModelShape(
    name="llama-3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)
EXPERTS = replace(LLAMA_8B, name="8x", mixture=MixtureOfExperts(experts=8, per_token=2, ffn=14336))
GB = 1e9


def machine(nodes=1, gpu="h100", per_node=8, network_gbit=400, **more):
    return Machine(
        gpu=find_gpu(gpu).gpu, nodes=nodes, gpus_per_node=per_node, network_bytes_per_s=network_gbit * 1e9 / 8, **more
    )


def step(layout, model=LLAMA_8B, seq=8192, on=None, stack="fsdp2-compile", **task):
    layout = parse_layout(layout) if isinstance(layout, str) else layout
    on = on or machine(nodes=-(-layout.ranks // 8))
    stack = find_stack(stack) if isinstance(stack, str) else stack
    return step_time(TrainingTask(model=model, seq=seq, **task), layout, on, physics(), stack)


def memory(layout, model=LLAMA_8B, seq=8192, gpu="h100", stack="fsdp2-compile", **task):
    return estimate_memory(
        TrainingTask(model=model, seq=seq, **task), parse_layout(layout), find_gpu(gpu).gpu, stacks()[stack]
    )


# ---------------------------------------------------------------------------------------------------------------- time


def test_items_add_up_to_the_step():
    one = step("tp=2,pp=2,vpp=2,fsdp=2,accumulate=8,recompute=full,sp=1")
    assert math.isclose(sum(one.items.values()), one.total_s)
    assert all(seconds >= 0.0 for seconds in one.items.values())


def test_matrix_products_take_what_their_work_takes():
    one = step("dp=8")
    flops = 6.0 * (LLAMA_8B.parameters - 2 * LLAMA_8B.vocab * LLAMA_8B.hidden) * 8192
    assert (
        0.85
        < flops / find_gpu("h100").gpu.best_flops["bf16"] / physics().matmul_share / one.items[StepItem.MATMUL]
        < 1.0
    )


def test_full_recomputation_is_one_more_forward_pass():
    plain, again = step("dp=8"), step("dp=8,recompute=full")
    assert plain.items[StepItem.RECOMPUTATION] == 0.0
    assert again.items[StepItem.RECOMPUTATION] > 0.3 * plain.items[StepItem.MATMUL]


def test_the_bubble_is_stages_less_one_over_micro_batches():
    few, many = step("pp=8,accumulate=8"), step("pp=8,accumulate=64")
    assert math.isclose(few.items[StepItem.BUBBLE], many.items[StepItem.BUBBLE])
    assert 0.6 < few.items[StepItem.BUBBLE] / (few.total_s - few.items[StepItem.BUBBLE]) < 7 / 8


def test_interleaving_divides_the_bubble_and_multiplies_the_sends():
    plain, runs = step("pp=4,accumulate=16"), step("pp=4,vpp=4,accumulate=16")
    assert runs.items[StepItem.BUBBLE] < plain.items[StepItem.BUBBLE] / 3
    assert math.isclose(runs.items[StepItem.PIPELINE], 4 * plain.items[StepItem.PIPELINE])


def test_tensor_parallel_over_the_network_costs_more_than_over_links():
    inside, across = step("tp=8,dp=2"), step("tp=16")
    assert across.items[StepItem.TENSOR] > 1.4 * inside.items[StepItem.TENSOR]


def test_a_naive_order_puts_tensor_parallel_on_the_network():
    planned = parse_layout("tp=2,dp=8")
    naive = parse_layout("tp=2,dp=8,order=replicate-context-shard-pipeline-tensor")
    slow = machine(nodes=2, network_gbit=100)
    assert step(naive, on=slow).items[StepItem.TENSOR] > 5 * step(planned, on=slow).items[StepItem.TENSOR]


def test_sharded_parameters_hide_behind_large_micro_batches():
    small, large = step("fsdp=64"), step("fsdp=64,mbs=4")
    assert small.items[StepItem.SHARD] / small.total_s > large.items[StepItem.SHARD] / large.total_s


def test_sharded_weights_in_4_bits_are_gathered_in_4_bits_whatever_the_precision_of_the_products():
    slow = machine(nodes=2, network_gbit=0.01)  # next to it nothing else counts

    def gathered_s(method, words):
        return step(f"fsdp=16{words}", on=slow, method=method).items[StepItem.SHARD]

    full = gathered_s(TrainingMethod.LORA, "")
    assert 0.25 < gathered_s(TrainingMethod.QLORA, "") / full < 0.27
    assert 0.25 < gathered_s(TrainingMethod.QLORA, ",precision=fp32") / full < 0.27


def test_a_mixture_keeps_the_host_as_busy_with_all_experts_here_as_with_them_spread():
    small = replace(EXPERTS, layers=24, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=512, vocab=1024)
    small = replace(small, mixture=MixtureOfExperts(experts=8, per_token=2, ffn=512))
    together, spread = (step(layout, small, seq=128) for layout in ("dp=8", "dp=8,ep=8"))
    host_s = 24 * 2 * 2 * stacks()["fsdp2-compile"].host_s  # both passes, twice the kernels
    assert together.total_s > host_s
    assert spread.total_s > host_s


def test_a_tiny_model_is_as_slow_as_its_host():
    tiny = ModelShape(name="tiny", layers=24, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=1000)
    one = step("single", model=tiny, seq=128, stack="fsdp2-eager")
    assert one.items[StepItem.HOST] > 0.9 * (one.total_s - one.items[StepItem.FIXED])
    assert one.total_s > 24 * 2 * stacks()["fsdp2-eager"].host_s


def test_eight_bits_are_faster_where_the_device_has_them_and_change_nothing_elsewhere():
    eight, sixteen = step("dp=8,precision=fp8"), step("dp=8")
    assert eight.items[StepItem.MATMUL] < 0.65 * sixteen.items[StepItem.MATMUL]
    assert eight.items[StepItem.ATTENTION] == sixteen.items[StepItem.ATTENTION]
    old = machine(gpu="a100-80gb")
    assert step("dp=8,precision=fp8", on=old).total_s == step("dp=8", on=old).total_s


def test_adapters_keep_the_host_and_the_memory_busy():
    def lora(seq, adapters):
        one = step("single", seq=seq, method=TrainingMethod.LORA, adapters=adapters, stack="transformers")
        return one.total_s, one.items[StepItem.ELEMENTWISE]

    short, long = ([lora(seq, names) for names in (("q", "v"), ())] for seq in (64, 8192))
    added_s = 32 * 2 * 5 * physics().adapter_s
    assert short[1][0] - short[0][0] == pytest.approx(added_s, rel=0.15)  # few tokens: kernels that the host issues
    assert long[1][1] > 1.3 * long[0][1]


def test_adapters_spare_the_gradients_of_the_weights():
    full, lora = step("dp=8"), step("dp=8", method=TrainingMethod.LORA)
    assert 0.6 < lora.items[StepItem.MATMUL] / full.items[StepItem.MATMUL] < 0.7


def test_a_token_visits_two_of_eight_experts():
    dense, mixed = step("dp=8"), step("dp=8", model=EXPERTS)
    assert 1.5 < mixed.items[StepItem.MATMUL] / dense.items[StepItem.MATMUL] < 2.2
    assert mixed.items[StepItem.EXPERT] == 0.0


def test_experts_on_other_ranks_are_reached_by_all_to_all():
    near, far = (
        step("dp=8,ep=8", model=EXPERTS),
        step("dp=64,ep=8,order=replicate-tensor-context-shard-pipeline", model=EXPERTS),
    )
    assert near.items[StepItem.EXPERT] > 0.0
    assert far.items[StepItem.EXPERT] >= near.items[StepItem.EXPERT]


def test_a_token_is_sent_once_to_each_node_where_a_stack_does_so():
    eight = MixtureOfExperts(experts=256, per_token=8, ffn=128)
    near, far = expert_copies(32, 8, eight, once=False)
    assert (near, far) == (8 * 7 / 32, 8 * 24 / 32)
    near_once, far_once = expert_copies(32, 8, eight, once=True)
    assert far_once == pytest.approx(3 * (1 - 0.75**8))  # three other nodes, each with a chance of one of eight experts
    assert far_once < far / 2
    assert near_once > near  # what arrives is passed on inside the node
    one = replace(eight, per_token=1)
    assert expert_copies(8, 8, one, once=True) == pytest.approx(expert_copies(8, 8, one, once=False))


@pytest.mark.parametrize(
    ("ranks", "near"), [(16, 8), (32, 8), (64, 8), (128, 8), (64, 4), (64, 64), (8, 8), (256, 8), (72, 72)]
)
def test_a_router_that_limits_groups_visits_as_many_places_as_drawn_tokens_do(ranks, near):
    """DeepSeek-V3: the eight experts of a token lie in four of eight groups of 32 experts, which lie on the ranks in order."""
    mixture = MixtureOfExperts(experts=256, per_token=8, ffn=128, groups=8, group_limit=4)
    random, drawn, nodes, places = Random(5), 4000, 0, 0
    for _ in range(drawn):
        groups = random.sample(range(8), 4)
        experts = [32 * random.choice(groups) + random.randrange(32) for _ in range(8)]
        nodes += len({expert * ranks // 256 // near for expert in experts})
        places += len({expert * ranks // 256 for expert in experts})
    copies = expert_copies(ranks, near, mixture, once=True)
    assert copies[0] == pytest.approx((ranks - 1) / ranks * places / drawn, rel=0.06)
    assert copies[1] == pytest.approx((1.0 - near / ranks) * nodes / drawn, rel=0.06, abs=1e-9)
    free = expert_copies(ranks, near, replace(mixture, groups=1, group_limit=1), once=True)
    assert copies[1] <= free[1] + 1e-9
    whole = expert_copies(ranks, near, mixture, once=False)
    assert whole == expert_copies(ranks, near, replace(mixture, groups=1, group_limit=1), once=False)


def test_known_models_and_configs_have_the_limits_of_their_routers():
    def limits(text):
        mixture = parse_model_argument(text).mixture
        assert mixture is not None
        return mixture.groups, mixture.group_limit

    assert limits("deepseek-v3") == (8, 4)
    assert limits("qwen3-30b-a3b") == (1, 1)
    sizes = "layers=4,hidden=128,heads=4,vocab=100,experts=64,per_token=4"
    assert limits(f"{sizes},groups=8,group_limit=2") == (8, 2)
    for wrong in ("groups=8,group_limit=9", "groups=7,group_limit=2", "group_limit=2"):
        with pytest.raises(BadRequest, match="groups, which must divide"):
            parse_model_argument(f"{sizes},{wrong}")


def test_experts_of_a_rank_are_issued_one_by_one():
    small = MixtureOfExperts(experts=8, per_token=2, ffn=128)
    model = replace(EXPERTS, hidden=512, heads=8, kv_heads=8, head_dim=64, vocab=1024, mixture=small)
    few, many = (step(layout, model=model, seq=64) for layout in ("dp=8,ep=8", "dp=8"))
    added_s = 32 * 2 * 7 * physics().expert_host_s  # seven more experts, two passes of 32 layers
    assert many.total_s - few.total_s == pytest.approx(added_s, rel=0.25)


def test_zero_2_reduces_once_a_step_where_micro_batches_alternate_in_a_pipeline():
    stack = replace(find_stack("deepspeed"), whole_gradients=False)
    one, two = (step(f"pp=2,fsdp=4,accumulate=8,zero={zero}", stack=stack) for zero in (1, 2))
    assert two.total_s == pytest.approx(one.total_s)
    alone, each = (step(f"fsdp=8,accumulate=8,zero={zero}", stack=stack) for zero in (1, 2))
    assert each.items[StepItem.GRADIENTS] > alone.items[StepItem.GRADIENTS]
    kept = replace(stack, whole_gradients=True)
    assert step("fsdp=8,accumulate=8,zero=2", stack=kept).total_s == pytest.approx(alone.total_s)


def test_layers_that_stages_do_not_divide_leave_fewer_to_the_stage_with_the_output():
    seven, eight = (step("pp=4,accumulate=64", model=replace(LLAMA_8B, layers=count)) for count in (7, 8))
    busiest = seven.stages[1]
    assert busiest < eight.stages[1]
    assert busiest >= seven.stages[0]


def test_attention_is_slower_where_no_flash_attention_2_exists():
    def share(gpu):
        on = machine(gpu=gpu)
        one = step("dp=8,precision=fp16", on=on, stack="transformers", seq=16384)
        return one.items[StepItem.ATTENTION] / one.items[StepItem.MATMUL]

    assert share("v100") > 1.5 * share("a100")
    assert share("t4") > 1.5 * share("a100")


def test_narrower_operands_multiply_faster_on_a_device_that_has_them():
    on = machine(gpu="gb200", per_node=4)
    times = [step(f"dp=4,precision={one}", on=on).items[StepItem.MATMUL] for one in ("bf16", "fp8", "nvfp4")]
    assert times == sorted(times, reverse=True)
    old = machine(gpu="a100")
    assert step("dp=8,precision=nvfp4", on=old).total_s == pytest.approx(step("dp=8", on=old).total_s)


def test_what_was_measured_goes_before_what_the_tables_say():
    found = MeasuredRates(flops={"bf16": 100e12}, within_bytes_per_s=10e9)
    known, measured = step("tp=8"), step("tp=8", on=machine(measured=found))
    assert measured.items[StepItem.MATMUL] > 5 * known.items[StepItem.MATMUL]
    assert measured.items[StepItem.TENSOR] > 10 * known.items[StepItem.TENSOR]


# ----------------------------------------------------------------------------------------------------------- exchanges


def test_a_group_enters_a_node_through_as_many_ports_as_it_has_devices_there():
    network = RankNetwork(machine(nodes=4), physics())
    one, eight = network.group(4, 8), network.group(32, 1)
    assert (one.near, eight.near) == (1, 8)
    assert math.isclose(eight.bytes_per_s, min(network.near_bytes_per_s, 8 * one.bytes_per_s))


def test_nothing_is_exchanged_alone():
    network = RankNetwork(machine(), physics())
    assert network.group(1, 1).all_reduce_s(1e9) == 0.0
    assert network.all_to_all_s(network.group(1, 1), 1e9, 1e9) == 0.0


def test_an_nvlink_domain_of_nine_trays_is_one_island():
    assert RankNetwork(machine(nodes=18, gpu="gb200", per_node=4), physics()).island == 72


def test_links_of_a_server_do_not_reach_other_servers():
    alone, together = (RankNetwork(build_machine(parse_gpus(gpus)), physics()) for gpus in ("8xh100:1", "h100:8"))
    assert (alone.island, together.island) == (1, 8)
    assert alone.group(8, 1).bytes_per_s < 0.2 * together.group(8, 1).bytes_per_s


def test_nodes_of_two_link_domains_are_taken_evenly():
    network = RankNetwork(build_machine(parse_gpus("32xgb200:4")), physics())
    assert network.island == 64
    assert network.group(16, 1).near == 16


def test_a_group_that_lies_across_two_nodes_talks_over_the_network():
    network = RankNetwork(machine(nodes=2, per_node=6), physics())
    assert network.group(2, 1).near == 2
    assert network.group(4, 1).near == 2  # 0 to 3 share a node, 4 to 7 do not


def test_bridged_cards_use_pcie_in_wider_groups_within_the_node_and_beyond():
    network = RankNetwork(machine(nodes=2, gpu="h100-nvl"), physics())
    assert network.group(2, 1).bytes_per_s > network.group(8, 1).bytes_per_s
    assert network.group(16, 1).bytes_per_s <= network.pcie_bytes_per_s
    assert network.hop_bytes_per_s(4) == network.pcie_bytes_per_s


def test_a_measured_all_to_all_goes_before_what_links_promise():
    known = machine(nodes=2)
    slow = replace(known, measured=MeasuredRates(all_to_all_within_bytes_per_s=1e9, all_to_all_between_bytes_per_s=1e8))
    sent = [RankNetwork(one, physics()) for one in (known, slow)]
    for size in (8, 16):
        fast, slower = (network.all_to_all_s(network.group(size, 1), 1e8, 1e8 * (size > 8)) for network in sent)
        assert slower > 10 * fast


def test_replicas_sum_only_the_shard_that_context_parallel_leaves():
    two = machine(nodes=4)
    plain, split = step("fsdp=8,dp=4", on=two), step("cp=2,fsdp=4,dp=4,zero=3", on=two)
    assert math.isclose(plain.items[StepItem.GRADIENTS], split.items[StepItem.GRADIENTS], rel_tol=0.01)


def test_thirty_two_bits_are_twice_as_much_to_keep_and_to_send():
    half, whole = step("tp=8,sp=1"), step("tp=8,sp=1,precision=fp32")
    assert whole.items[StepItem.TENSOR] > 1.8 * half.items[StepItem.TENSOR]
    assert whole.items[StepItem.ELEMENTWISE] > 1.9 * half.items[StepItem.ELEMENTWISE]
    held = [memory(f"tp=8,sp=1,precision={name}").items[MemoryItem.ACTIVATIONS] for name in ("bf16", "fp32")]
    assert math.isclose(2.0 * held[0], held[1])


def test_four_bit_weights_are_unpacked_in_each_pass():
    lora, qlora = (
        step("tp=8", method=method).items[StepItem.ELEMENTWISE]
        for method in (TrainingMethod.LORA, TrainingMethod.QLORA)
    )
    again = [
        step("tp=8,recompute=full", method=method).items[StepItem.RECOMPUTATION]
        for method in (TrainingMethod.LORA, TrainingMethod.QLORA)
    ]
    assert qlora > lora
    assert again[1] > again[0]


def test_frozen_weights_pass_gradients_of_keys_and_values_round_all_the_same():
    full, lora = (
        step("cp=8", method=method).items[StepItem.CONTEXT] for method in (TrainingMethod.FULL, TrainingMethod.LORA)
    )
    assert full == lora


# -------------------------------------------------------------------------------------------------------------- memory


def test_the_stage_with_most_layers_is_the_fullest():
    held = [memory("pp=8,accumulate=8", model=replace(LLAMA_8B, layers=layers)).total_bytes for layers in (33, 40)]
    assert held[0] == held[1]  # 33 layers put five on the first of eight stages, as 40 do


def test_full_training_keeps_sixteen_bytes_a_parameter():
    held = memory("fsdp=8", model=LLAMA_8B)
    states = sum(held.items[part] for part in (MemoryItem.PARAMETERS, MemoryItem.GRADIENTS, MemoryItem.STATES)) * 8
    assert 0.99 < states / (16 * LLAMA_8B.parameters) < 1.01


@pytest.mark.parametrize(("zero", "split"), [(1, [MemoryItem.STATES]), (2, [MemoryItem.STATES, MemoryItem.GRADIENTS])])
def test_each_degree_of_zero_splits_one_thing_more(zero, split):
    whole, less = memory("dp=8", stack="deepspeed"), memory(f"fsdp=8,zero={zero}", stack="deepspeed")
    for part in (MemoryItem.PARAMETERS, MemoryItem.GRADIENTS, MemoryItem.STATES):
        assert math.isclose(less.items[part] * (8 if part in split else 1), whole.items[part])


def test_recomputation_keeps_only_what_enters_a_block():
    none, selective, full = (memory(f"fsdp=8,recompute={what}").items[MemoryItem.ACTIVATIONS] for what in Recompute)
    assert full < 0.5 * selective < 0.5 * none


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    assert micro_batches_in_flight(Layout(pipeline=4, micro_batches=16)) == 4.0
    assert micro_batches_in_flight(Layout(pipeline=4, micro_batches=2)) == 2.0
    assert micro_batches_in_flight(Layout(pipeline=4, interleave=2, micro_batches=16)) == 5.5


def test_the_published_eight_billion_run_fits_as_it_was_measured():
    held = memory("fsdp=8,mbs=2,recompute=selective", gpu="h100-96hbm2e", stack="fsdp2-eager")
    assert abs(held.reserved_bytes / 2**30 / 82.4 - 1.0) < 0.05  # torchtitan, December 2024


def test_four_bit_weights_take_a_quarter_and_embeddings_and_output_stay_as_they_are():
    lora, qlora = (
        memory("single", method=method).items[MemoryItem.PARAMETERS]
        for method in (TrainingMethod.LORA, TrainingMethod.QLORA)
    )
    ends = 2 * 128256 * 4096
    packed = LLAMA_8B.parameters - LLAMA_8B.norm_parameters - ends
    assert math.isclose(lora - qlora, packed * (2.0 - 4.127 / 8.0), rel_tol=1e-6)
    assert 5.6 * GB < qlora < 5.8 * GB


def test_adapters_keep_what_autograd_keeps():
    # Counted with saved-tensor hooks on a CPU: transformers 5.24, peft 0.21, bf16 under autocast, one layer of hidden 512 and MLP 1024.
    shape = ModelShape(name="small", layers=8, hidden=512, heads=8, kv_heads=2, head_dim=64, ffn=1024, vocab=128)
    adapters = {"every": (), "queries and values": ("q", "v")}
    counted = {"every": 24 * 512 + 8 * 1024 + 4 * 128, "queries and values": 16 * 512 + 6 * 1024 + 4 * 128}
    for name, names in adapters.items():
        task = TrainingTask(model=shape, seq=64, method=TrainingMethod.LORA, adapters=names)
        assert stored_activation_bytes(task, Layout(), stacks()["transformers"]) == 64 * counted[name]
    full = TrainingTask(model=shape, seq=64)
    assert stored_activation_bytes(full, Layout(), stacks()["transformers"]) == 64 * (30 * 512 + 8 * 1024 + 4 * 128)


def test_the_interval_of_memory_is_what_refuses():
    held = memory("single", method=TrainingMethod.QLORA, stack="transformers", seq=2048)
    assert held.low_bytes < held.total_bytes < held.high_bytes
    full = memory("fsdp=8,recompute=full", model=LLAMA_8B)
    assert (
        held.high_bytes / held.total_bytes > full.high_bytes / full.total_bytes
    )  # programs differ more in what they keep of adapters
    for usable, refused in ((held.low_bytes * 1.001, False), (held.low_bytes * 0.999, True)):
        assert exceeds_memory(replace(held, usable_bytes=usable)) is refused


# ---------------------------------------------------------------------------------------------------------- how sure


def test_the_truth_is_expected_in_the_middle_of_its_interval():
    one = step("dp=8")
    low_s, high_s = interval_s(one, physics(), 0.1, find_gpu("h100").gpu, mixture=False)
    assert low_s < one.total_s < high_s
    assert math.isclose(low_s * high_s, one.total_s**2)


def test_a_step_that_waits_for_the_network_is_less_sure():
    def width(layout, on):
        one = step(layout, on=on)
        low_s, high_s = interval_s(one, physics(), 0.05, on.gpu, mixture=False)
        return high_s / low_s

    assert width("fsdp=64", machine(nodes=8, network_gbit=10)) > width("fsdp=64,mbs=4", machine(nodes=8))


def test_an_unseen_device_and_a_mixture_widen_the_interval():
    one = step("dp=8")
    known = interval_s(one, physics(), 0.05, find_gpu("h100").gpu, mixture=False)
    other = interval_s(one, physics(), 0.05, find_gpu("mi300x").gpu, mixture=False)
    mixed = interval_s(one, physics(), 0.05, find_gpu("h100").gpu, mixture=True)
    adapted = interval_s(one, physics(), 0.05, find_gpu("h100").gpu, mixture=False, adapters=True)
    assert other[1] > known[1]
    assert mixed[1] > known[1]
    assert adapted[1] > known[1]


def test_a_source_is_off_as_a_whole_so_no_interval_is_narrower_than_the_spread_between_sources():
    one, found = step("dp=8"), physics()
    surest = replace(found, spreads={**dict.fromkeys(found.spreads, 0.0), "source": 0.1})
    low_s, high_s = interval_s(one, surest, 0.0, find_gpu("h100").gpu, mixture=False)
    assert math.log(high_s / low_s) == pytest.approx(2 * 1.2816 * 0.1)


# ------------------------------------------------------------------------------------------------------------- shapes


def test_frozen_weights_need_a_third_less_work():
    full, frozen = LLAMA_8B.flops_per_token(1), LLAMA_8B.flops_per_token(1, frozen=True)
    assert 0.66 < frozen / full < 0.68


def test_attention_grows_with_the_sequence():
    short, long = LLAMA_8B.flops_per_token(1024), LLAMA_8B.flops_per_token(8192)
    assert math.isclose(long - short, 6 * 32 * (8192 - 1024) * 4096)


def test_attention_kernels_are_told_apart_by_their_version():
    """T. Dao, FlashAttention-2, section 1: the first version reaches 25 to 35 % of the peak backward, the second up to 63 %."""
    old, new = stacks()["composer"], stacks()["fsdp2-eager"]
    assert (
        old.flash_share("a100-sxm4-80gb") * old.flash_backward < new.flash_share("a100-sxm4-80gb") * new.flash_backward
    )
    assert 0.25 < old.flash_share("a100-sxm4-80gb") * old.flash_backward * 271.2 / 312.0 < 0.35
    assert new.flash_ramp > 0.0
    model = parse_model_argument("llama-2-7b")
    machine = build_machine(parse_gpus("a100-80gb:1"))

    def attention_s(seq):  # of as many tokens, so that it doubles with the length alone
        layout = Layout(micro_batch=65536 // seq)
        return step_time(TrainingTask(model=model, seq=seq), layout, machine, physics(), new).items[StepItem.ATTENTION]

    assert 1.5 < attention_s(1024) / attention_s(512) < 1.7  # not twice: kernels reach more of their rate
    assert 1.9 < attention_s(65536) / attention_s(32768) < 2.0


@pytest.mark.parametrize(
    ("watts", "tflops", "share"), [(275, 119.5, 0.92), (400, 312, 0.87), (700, 989, 0.80), (1000, 2250, 0.78)]
)
def test_an_unmeasured_rate_follows_from_flops_per_watt(watts, tflops, share):
    """L20: github:DefTruth/CUDA-Learn-Notes hgemm; A100, H100, B200: ml-engineering compute/accelerator."""
    gpu = replace(find_gpu("rtx-4090").gpu, watts=watts, flops={"bf16": tflops * 1e12}, best_flops={})
    assert best_flops(gpu, physics(), "bf16") / (tflops * 1e12) == pytest.approx(share, abs=0.02)
    measured = replace(gpu, best_flops={"bf16": 1e14})
    assert best_flops(measured, physics(), "fp16") == 1e14  # of the other 16 bits
