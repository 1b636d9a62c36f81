"""4-bit weights: what each format stores, moves and keeps, and what programs do with the parts that stay wide."""

from dataclasses import replace

import pytest

from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.planner.cost.memory import CONTEXT_BYTES, MemoryItem, estimate_memory, packed_model_bytes
from phalanx.planner.cost.packed_weights import PACKED_FORMATS
from phalanx.planner.cost.step_time import StepItem, step_time
from phalanx.planner.cost.training_task import TrainingMethod, TrainingTask
from phalanx.planner.facts.coefficient_table import physics, stacks
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.facts.model_argument import parse_model_argument
from tests.planned import planned

SEVEN = TrainingTask(model=parse_model_argument("llama-2-7b"), seq=512, method=TrainingMethod.QLORA)
A100 = build_machine(parse_gpus("a100-80gb:1"))
PLAIN = stacks()["transformers"]


def memory(layout, stack=PLAIN, **changes):
    return estimate_memory(replace(SEVEN, **changes), parse_layout(layout), A100.gpu, stack)


def seconds(layout, stack, **changes):
    return step_time(replace(SEVEN, **changes), parse_layout(layout), A100, physics(), stack)


def test_stored_bytes_are_those_of_the_papers():
    # T. Dettmers et al., QLoRA, section 3: double quantisation saves 0.373 bits a weight
    saved = PACKED_FORMATS["nf4"].weight_bytes - PACKED_FORMATS["nf4-dq"].weight_bytes
    assert saved * 8 == pytest.approx(0.373, abs=0.001)
    # Qwen-7B-Chat-Int4 on the hub: 5.86 GB, with 1.24 billion parameters of embeddings and output in 16 bits
    qwen = parse_model_argument("layers=32,hidden=4096,heads=32,kv_heads=32,ffn=11008,vocab=151936")
    assert packed_model_bytes(qwen, parse_layout("dp=1"), stacks()["transformers-gptq"]) == pytest.approx(
        5.86e9, rel=0.02
    )


def test_peft_widens_the_ends_of_a_4_bit_model_to_32_bits():
    ends = SEVEN.model.embedding_parameters
    kept, widened = (
        packed_model_bytes(SEVEN.model, parse_layout("dp=1"), replace(PLAIN, packed_ends_bytes=bytes_))
        for bytes_ in (2.0, 4.0)
    )
    assert widened - kept == pytest.approx(2.0 * ends)
    assert PLAIN.packed_ends_bytes == 4.0
    assert stacks()["transformers-gptq"].packed_ends_bytes == 2.0


def test_what_autograd_keeps_is_not_unpacked_again():
    """With recomputation, NF4 unpacks three times and GPTQ twice; without, twice and once."""
    for name, most in (("nf4-dq", 3.0), ("gptq", 2.0)):
        packed = replace(PLAIN, packing=name)
        wide = replace(SEVEN, method=TrainingMethod.LORA)
        spent = []
        for recompute in ("full", "none"):
            layout = parse_layout(f"mbs=8,recompute={recompute}")
            items = (
                step_time(SEVEN, layout, A100, physics(), packed).items,
                step_time(wide, layout, A100, physics(), packed).items,
            )
            spent.append(
                sum(
                    one[item] * sign
                    for one, sign in zip(items, (1, -1), strict=True)
                    for item in (StepItem.ELEMENTWISE, StepItem.RECOMPUTATION)
                )
            )
        assert spent[0] / spent[1] == pytest.approx(most / (most - 1.0), rel=1e-6)


def test_gptq_holds_a_layer_unpacked_and_more_without_recomputation():
    plain, kept = (replace(PLAIN, packing=name) for name in ("nf4-dq", "gptq"))
    layer = SEVEN.model.attention_parameters + SEVEN.model.dense_mlp_parameters
    for recompute, layers in (("full", 1), ("none", 32)):
        more = memory(f"mbs=1,recompute={recompute}", kept).items[MemoryItem.ACTIVATIONS]
        more -= memory(f"mbs=1,recompute={recompute}", plain).items[MemoryItem.ACTIVATIONS]
        assert more == pytest.approx(2.0 * layers * layer + 4.0 * 4096 * 11008)


def test_the_host_issues_the_kernels_that_unpack():
    """With one token a step waits for the host: a chain of operations for GPTQ, a few for NF4."""
    nf4, gptq = (
        seconds("mbs=1,recompute=full", replace(PLAIN, packing=name), seq=1).total_s for name in ("nf4", "gptq")
    )
    assert gptq > nf4 > seconds("mbs=1,recompute=full", PLAIN, seq=1, method=TrainingMethod.LORA).total_s


def test_the_optimizer_takes_room_only_where_activations_had_less():
    full = {"method": TrainingMethod.FULL, "seq": 128}
    older = stacks()["transformers-4"]
    small, large = (memory(f"mbs={size},recompute=full", older, **full) for size in (1, 256))
    assert small.items[MemoryItem.BUFFERS] > 0.9 * 4.0 * SEVEN.model.parameters  # the foreach form of AdamW
    assert large.items[MemoryItem.BUFFERS] == 0.0
    assert memory("mbs=1,recompute=full", **full).items[MemoryItem.BUFFERS] == 0.0  # the fused form


def test_fragments_are_shown_but_do_not_decide_what_fits():
    found = memory("mbs=1,recompute=full")
    tensors = found.total_bytes - found.items[MemoryItem.OTHER]
    assert found.device_bytes == pytest.approx(tensors / 0.85 + CONTEXT_BYTES)
    assert found.device_bytes > found.total_bytes
    full = memory("mbs=64,recompute=full,accumulate=1", seq=2048)
    assert full.device_bytes == max(full.total_bytes, full.usable_bytes)  # torch frees cached blocks before it fails


def test_a_stack_for_16_bit_floats_alone_is_planned_in_them():
    """auto-gptq trains in fp16: github:QwenLM/Qwen finetune/finetune_qlora_single_gpu.sh."""
    plan = planned("llama-2-7b", "a100-80gb:1", method="qlora", stack="transformers-gptq")
    assert plan.fits
    assert plan.layouts[0].layout.precision == "fp16"
