"""What the jobs of `benchmarks.gpu` run on the device: `python gpu_rank.py PROGRAM [SECONDS]`. Prints one line of JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def busy(seconds: float) -> dict[str, Any]:
    """Matrix products without a pause."""
    import torch

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(left, right)
    torch.cuda.synchronize()
    began_s, products = time.monotonic(), 0
    while time.monotonic() - began_s < seconds:
        for _ in range(20):
            torch.mm(left, right)
        torch.cuda.synchronize()
        products += 20
    taken_s = time.monotonic() - began_s
    return {"tflops": products * 2 * 8192**3 / taken_s / 1e12, "seconds": taken_s}


def hold(seconds: float) -> dict[str, Any]:
    """A context and 4 GiB of memory, and nothing else."""
    import torch

    kept = torch.ones(1 << 30, device="cuda")
    torch.cuda.synchronize()
    time.sleep(seconds)
    return {"bytes": kept.numel() * 4}


def starve(seconds: float) -> dict[str, Any]:
    """Steps of which four fifths wait for data, as the script itself reports."""
    import torch

    import phalanx.torch

    run = phalanx.torch.init()
    left = torch.randn(8192, 8192, device=run.device, dtype=torch.bfloat16)
    until_s, step = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        step += 1
        time.sleep(0.4)
        for _ in range(60):
            torch.mm(left, left)
        torch.cuda.synchronize()
        phalanx.torch.report(step=step, data_s=0.4)
    phalanx.torch.finish()
    return {"steps": step}


def hello(_seconds: float) -> dict[str, Any]:
    """The first value from the device."""
    began_s = time.monotonic()
    import torch

    imported_s = time.monotonic()
    value = float(torch.ones(4, device="cuda").sum())
    return {"value": value, "import_s": imported_s - began_s, "context_s": time.monotonic() - imported_s}


def share(seconds: float) -> dict[str, Any]:
    """What a part of a GPU gives: its rate, and how much memory it may take."""
    import torch

    found = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUDA_MPS_") or name == "CUDA_VISIBLE_DEVICES"
    }
    rate = busy(seconds)
    blocks: list[Any] = []
    try:
        while len(blocks) < 96:
            blocks.append(torch.empty(1 << 28, device="cuda"))  # 1 GiB
    except torch.OutOfMemoryError:
        pass
    return {**rate, "gib": len(blocks), "environment": found}


def fault(_seconds: float) -> dict[str, Any]:
    """Write far outside of any allocation: the driver's XID 31."""
    cupy = importlib.import_module("cupy")

    kernel = cupy.RawKernel(
        'extern "C" __global__ void wild(float* at) { at[(1ull << 44) + threadIdx.x] = 1.0f; }', "wild"
    )
    kernel((1,), (32,), (cupy.zeros(32, dtype=cupy.float32),))
    cupy.cuda.runtime.deviceSynchronize()
    return {"fault": False}


def nccl(_seconds: float) -> dict[str, Any]:
    """An all-reduce by NCCL among the ranks of the job, which starts as a script for torchrun does."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    values = torch.ones(1 << 26, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for _ in range(20):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    taken_s = (time.monotonic() - began_s) / 20
    world = dist.get_world_size()
    dist.destroy_process_group()
    return {"world": world, "ms": taken_s * 1e3, "version": torch.cuda.nccl.version()}


def train(_seconds: float) -> dict[str, Any]:
    """Steps of a real model by FSDP2: argv has its name, micro-batch, sequence and `eager` or `compile`."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import phalanx.torch
    from phalanx.planner.facts.models import find_model

    name, batch, seq, mode = sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
    run = phalanx.torch.init()
    shape = find_model(name)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=seq,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(run.device):
        network = transformers.LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in network.model.layers:
        if mode == "compile":
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(network, mp_policy=policy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocab, (batch, seq), device=run.device)
    steps_s = []
    for step in range(1, 16):
        torch.cuda.synchronize()
        began_s = time.monotonic()
        loss = network(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        steps_s.append(time.monotonic() - began_s)
        phalanx.torch.report(step=step, loss=float(loss), tokens=batch * seq)
    phalanx.torch.finish()
    steady = sorted(steps_s[5:])
    return {
        "model": name,
        "mode": mode,
        "parameters": sum(one.numel() for one in network.parameters()),
        "step_s": steady[len(steady) // 2],
        "first_s": steps_s[0],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
    }


if __name__ == "__main__":
    programs = {one.__name__: one for one in (busy, hold, starve, hello, share, fault, nccl, train)}
    print(json.dumps(programs[sys.argv[1]](float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)), flush=True)
