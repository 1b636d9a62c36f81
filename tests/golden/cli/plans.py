"""Recorded answers of the planner, for the page alone: the figures are made up and only their looks are looked at."""

from dataclasses import replace

from phalanx.core.work.layouts.layout import parse_layout
from phalanx.plans.records import (
    CheckpointCost,
    Estimate,
    Formula,
    LayoutFigures,
    PlanAnswer,
    ShownEffect,
)

MEMORY = (
    ("parameters", 17.6e9),
    ("gradients", 8.8e9),
    ("optimizer states", 13.2e9),
    ("activations", 21.4e9),
    ("context and fragments", 3.3e9),
)
STEP = (
    ("matmul", 4.91),
    ("attention", 0.82),
    ("small kernels", 0.61),
    ("tensor parallel", 0.74),
    ("pipeline bubble", 0.47),
    ("gradients", 0.18),
    ("optimizer", 0.08),
    ("per step", 0.001),
)


def scaled(one, factor):
    return Estimate(mid=one.mid * factor, low=one.low * factor, high=one.high * factor)


def figures(layout, step_s, *, why="", room=0.0):
    mid = Estimate(mid=step_s, low=step_s / 1.11, high=step_s * 1.11)
    days = scaled(mid, 300e9 / 4194304)
    return LayoutFigures(
        layout=parse_layout(layout),
        memory_bytes=MEMORY,
        used_bytes=sum(value for _, value in MEMORY) - room,
        usable_bytes=84.6e9,
        step_items_s=STEP,
        step_s=mid,
        tokens_per_s=4194304 / step_s,
        mfu=0.43 * 7.81 / step_s,
        train_s=days,
        gpu_hours=scaled(days, 32 / 3600),
        usd=scaled(days, 32 / 3600 * 2.69),
        checkpoint_cost=CheckpointCost(bytes=988e9, write_s=123.0, interval_s=2310.0, goodput=0.957),
        why=why,
    )


def fitting():
    return PlanAnswer(
        request="llama-3-70b (70.6B parameters), full training on 300B tokens: 4 nodes x 8 = 32 h100-sxm5-80gb, sequence 4096, global batch 1024",
        model="llama-3-70b",
        layers=80,
        nodes=4,
        gpus_per_node=8,
        gpu="h100-sxm5-80gb",
        seq=4096,
        global_batch=1024,
        step_tokens=4096 * 1024,
        tokens=300e9,
        method="full",
        stack="fsdp2-compile",
        price="$2.69 a GPU-hour (RunPod, on-demand, 2026-11-09)",
        fits=True,
        reason="",
        layouts=(
            figures("tp=4,pp=2,fsdp=4,accumulate=256,sp=1", 7.81),
            figures("tp=4,fsdp=8,accumulate=128,sp=1", 8.02, why="sharded parameters +0.4 s", room=4e9),
            figures(
                "tp=8,pp=4,accumulate=1024,sp=1,recompute=selective",
                9.4,
                why="pipeline bubble +1.1 s, tensor parallel +0.6 s",
            ),
        ),
        losers=(
            figures("fsdp=32,mbs=1,accumulate=32", 9.9, why="sharded parameters wait for the network: +2.1 s"),
            figures("tp=2,fsdp=16", 8.8, why="does not fit: 12 GB of activations too much"),
        ),
        notes=("network between nodes not stated: 400 Gbit/s per GPU, NVIDIA DGX H100",),
        formulas=(
            Formula(
                name="matmul",
                symbols="2 M K N / R",
                numbers="2 x 4096 x 8192 x 28672 / 6.1e14 FLOP/s",
                source="roofline after S. Williams et al., CACM 52(4), 2009",
            ),
        ),
        next_command="phalanx run --plan tp=4,pp=2,fsdp=4,accumulate=256,sp=1 -- python train.py",
    )


def offloaded():
    """One layout with its optimizer on the host, beside itself without it."""
    one = replace(figures("fsdp=8,accumulate=16,zero=2", 9.61, room=20e9), host_bytes=1.13e12)
    plain = figures("fsdp=8,accumulate=16,zero=2", 8.1, room=-37e9)
    effect = ShownEffect(option="offload optimizer", without=plain, without_fits=False, saved_bytes=57e9, added_s=1.51)
    faster = ShownEffect(
        option="optimizer adamw8bit", without=figures("fsdp=8", 9.7), without_fits=True, saved_bytes=-1e9, added_s=-0.09
    )
    return replace(fitting(), layouts=(one,), losers=(), effects=(effect, faster), offload="optimizer", formulas=())


def refusing():
    one = LayoutFigures(
        layout=parse_layout("fsdp=8,recompute=full"),
        memory_bytes=(("optimizer states", 105.8e9), ("activations", 9.2e9)),
        used_bytes=115.0e9,
        usable_bytes=84.6e9,
        step_items_s=(),
        step_s=Estimate(mid=0.0, low=0.0, high=0.0),
        tokens_per_s=0.0,
        mfu=0.0,
        why="optimizer states alone are 105.8 GB a GPU",
    )
    return PlanAnswer(
        request="llama-2-70b (69B parameters), full training: 1 node x 8 = 8 a100-sxm4-80gb, sequence 4096, global batch 1024",
        model="llama-2-70b",
        layers=80,
        nodes=1,
        gpus_per_node=8,
        gpu="a100-sxm4-80gb",
        seq=4096,
        global_batch=1024,
        tokens=None,
        method="full",
        stack="fsdp2-compile",
        price="",
        fits=False,
        reason="weights, gradients and Adam states are 1.12 TB, and 8 GPUs have 677 GB",
        losers=(one,),
        alternatives=("2xa100-80gb:8 for all weights", "--method lora on these 8: tp=4,dp=2"),
        next_command="phalanx plan llama-2-70b --gpus 2xa100-80gb:8",
    )
