"""Step time and memory of LoRA, QLoRA and full tuning of random-weight models on one NVIDIA GPU.

`PYTHONPATH=src python benchmarks/adapters_gpu.py OUT.jsonl [LIMIT_S]` runs every group below, each in a process of its own with a time limit, and
appends one line of JSON a case. A case that runs out of memory is a line too. Models are built from their shapes, nothing is
downloaded. Needs torch with CUDA, transformers and peft; the QLoRA groups need bitsandbytes. `--tiny` runs small shapes on
the CPU, to try the script. `python -m benchmarks.adapters_gpu --rows OUT.jsonl ROWS.csv` turns the lines into rows that `benchmarks.planner`
scores; those of other models than decoders, other weights than peft's and Trainer's, and compiled ones have none.
"""

from __future__ import annotations

import csv
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

STEP_BUDGET_S = 1.2
"""Timed steps of one case stop after this, but not before three."""

NO_DEVICE_AFTER_FORK = 77
"""Exit status of a child whose parent had already opened the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cases that share one model in one process.

    Attributes:
        shapes: sequences per step and tokens of each, from small to large.
        weights: `bfloat16` or `float32` of what is not in 4 bits.
        autocast: products in bf16 by autocast.
        recompute: gradient checkpointing of every layer.
        dropout: of the adapters.
        modules: what gets adapters.
        kbit_float32: the 16-bit parameters of a 4-bit model turned to float32, as peft's `prepare_model_for_kbit_training` does.
    """

    model: str
    method: str
    shapes: tuple[tuple[int, int], ...]
    weights: str = "bfloat16"
    autocast: bool = True
    recompute: bool = False
    compiled: bool = False
    dropout: float = 0.0
    rank: int = 16
    modules: str = "all-linear"
    kbit_float32: bool = False
    limit_s: float = 40.0


FEW = ((1, 512), (1, 2048), (4, 2048))
GROUPS = (
    Group(
        model="llama-3.1-8b",
        method="lora",
        shapes=((1, 256), (1, 512), (1, 1024), (1, 2048), (8, 256), (2, 2048), (1, 4096)),
        limit_s=45,
    ),
    Group(
        model="llama-3.1-8b",
        method="lora",
        recompute=True,
        shapes=((1, 256), (1, 1024), (4, 512), (1, 4096), (4, 2048), (8, 2048)),
        limit_s=45,
    ),
    Group(
        model="llama-3.1-8b",
        method="qlora",
        shapes=((1, 256), (1, 512), (1, 1024), (1, 2048), (2, 2048), (1, 4096)),
        limit_s=45,
    ),
    Group(
        model="llama-3.1-8b",
        method="qlora",
        recompute=True,
        shapes=((1, 256), (1, 1024), (4, 512), (1, 4096), (4, 2048)),
        limit_s=45,
    ),
    Group(
        model="llama-3.2-1b",
        method="full",
        weights="float32",
        shapes=((1, 256), (1, 512), (1, 1024), (1, 2048), (4, 512), (1, 4096), (4, 2048)),
    ),
    Group(
        model="llama-3.2-1b",
        method="full",
        weights="float32",
        recompute=True,
        shapes=((1, 256), (1, 1024), (4, 512), (4, 2048), (8, 2048)),
    ),
    Group(
        model="llama-3.2-1b",
        method="lora",
        shapes=(
            (1, 256),
            (2, 256),
            (4, 256),
            (8, 256),
            (1, 512),
            (1, 1024),
            (1, 2048),
            (4, 1024),
            (8, 1024),
            (2, 4096),
        ),
    ),
    Group(model="llama-3.2-1b", method="lora", recompute=True, shapes=((1, 256), (1, 1024), (4, 1024), (2, 4096))),
    Group(model="llama-3.2-1b", method="qlora", shapes=((1, 256), (1, 1024), (4, 1024), (2, 4096))),
    Group(model="llama-3.2-3b", method="full", weights="float32", shapes=((1, 256), (1, 1024), (1, 2048), (1, 4096))),
    Group(
        model="llama-3.2-3b",
        method="full",
        weights="float32",
        recompute=True,
        shapes=((1, 512), (2, 2048), (1, 4096), (4, 2048)),
    ),
    Group(model="llama-3.2-3b", method="lora", shapes=((1, 256), (1, 1024), (4, 1024), (1, 4096))),
    Group(model="llama-3.2-3b", method="qlora", recompute=True, shapes=((1, 512), (4, 512), (4, 2048))),
    Group(model="qwen-2.5-7b", method="lora", shapes=((1, 512), (1, 2048), (2, 2048)), limit_s=45),
    Group(
        model="qwen-2.5-7b",
        method="lora",
        recompute=True,
        shapes=((1, 512), (2, 2048), (1, 4096), (4, 4096)),
        limit_s=45,
    ),
    Group(model="qwen-2.5-7b", method="qlora", recompute=True, shapes=((1, 512), (2, 2048), (1, 4096)), limit_s=45),
    Group(model="llama-3.1-8b", method="lora", dropout=0.05, shapes=((1, 1024), (1, 2048)), limit_s=30),
    Group(model="llama-3.1-8b", method="lora", rank=64, shapes=((1, 2048),), limit_s=30),
    Group(model="llama-3.1-8b", method="lora", modules="attention", shapes=((1, 2048),), limit_s=30),
    Group(
        model="llama-3.1-8b", method="qlora", kbit_float32=True, recompute=True, shapes=((1, 512), (4, 512)), limit_s=30
    ),
    Group(
        model="llama-3.2-1b", method="full", weights="bfloat16", autocast=False, shapes=((1, 512), (1, 2048), (4, 2048))
    ),
    Group(model="llama-3.2-1b", method="full", weights="float32", autocast=False, shapes=((1, 512), (2, 1024))),
    Group(model="llama-3.2-1b", method="lora", compiled=True, shapes=((4, 1024),), limit_s=60),
    Group(model="llama-3.2-1b", method="full", weights="float32", compiled=True, shapes=((4, 1024),), limit_s=60),
    Group(model="bert-large", method="full", weights="float32", shapes=((8, 128), (32, 128), (16, 512))),
    Group(model="vit-large", method="full", weights="float32", shapes=((8, 197), (64, 197))),
    Group(model="llama-3.1-8b", method="lora", compiled=True, shapes=((1, 2048),), limit_s=60),
)
TINY = (
    Group(model="tiny", method="lora", shapes=((1, 32), (2, 32))),
    Group(model="tiny", method="lora", recompute=True, dropout=0.05, modules="attention", shapes=((1, 32),)),
    Group(model="tiny", method="full", weights="float32", recompute=True, shapes=((1, 32),)),
    Group(model="tiny", method="qlora", shapes=((1, 32),)),
    Group(model="bert-large", method="full", weights="float32", shapes=((1, 16),)),
    Group(model="vit-large", method="full", weights="float32", shapes=((1, 197),)),
)


def _network(name: str, device: str, weights: Any) -> tuple[Any, int]:
    """Return a model with random weights, and its vocabulary (0 for pictures)."""
    import torch
    import transformers

    if name == "vit-large":
        vit = transformers.ViTConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
        )
        with torch.device(device):
            return transformers.ViTForImageClassification(vit), 0
    if name == "bert-large":
        bert = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        with torch.device(device):
            return transformers.BertForMaskedLM(bert), bert.vocab_size
    if name == "tiny":
        keys: dict[str, Any] = {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    else:
        from phalanx.planner.facts.models import find_model

        shape = find_model(name)
        keys = {
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "tie_word_embeddings": shape.tied,
        }
    kind = transformers.Qwen2Config if name.startswith("qwen") else transformers.LlamaConfig
    config = kind(**keys, max_position_embeddings=8192, attn_implementation="sdpa", use_cache=False)
    build = transformers.Qwen2ForCausalLM if name.startswith("qwen") else transformers.LlamaForCausalLM
    torch.set_default_dtype(weights)
    with torch.device(device):
        network = build(config)
    torch.set_default_dtype(torch.float32)
    return network, keys["vocab_size"]


def _pack(network: Any, device: str) -> None:
    """Turn each matrix of the layers into NF4 with double quantisation; embeddings and head stay as they are."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    import torch

    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                packed = bitsandbytes.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    child.bias is not None,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                packed.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                ).to(device)
                packed.bias = child.bias
                setattr(module, name, packed)
                child.weight = None
    network.is_loaded_in_4bit = True


def _kernels(run: Any) -> dict[str, Any]:
    """Count what one step runs on the device, and its time, by the profiler."""
    import torch

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
        found = [one for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
        return {"kernels": len(found), "kernels_s": sum(one.time_range.elapsed_us() for one in found) / 1e6}
    except Exception as error:
        return {"profiler": f"{type(error).__name__}: {error}"[:200]}


def _prepared(group: Group, device: str) -> tuple[Any, int]:
    """Return the model of a group, ready to train, and its vocabulary."""
    import torch

    network, vocab = _network(group.model, device, getattr(torch, group.weights))
    if group.method == "qlora":
        _pack(network, device)
        if group.kbit_float32:
            for parameter in network.parameters():
                parameter.requires_grad = False
                if parameter.dtype == torch.bfloat16:
                    parameter.data = parameter.data.float()
    if group.method != "full":
        import peft

        every = group.modules == "all-linear"
        settings = peft.LoraConfig(
            r=group.rank,
            lora_alpha=2 * group.rank,
            lora_dropout=group.dropout,
            target_modules="all-linear" if every else ["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        )
        network = peft.get_peft_model(network, settings)
    network.train()
    if group.recompute:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if group.method != "full":
            network.enable_input_require_grads()
    if group.compiled:
        base = network.get_base_model() if group.method != "full" else network
        for layer in base.model.layers:
            layer.compile()
    return network, vocab


class _Trainer:
    """Steps of one model, and what they took."""

    def __init__(self, group: Group, device: str) -> None:
        import torch

        self.group, self.device, self.on_gpu = group, device, device == "cuda"
        began_s, idle_bytes = time.monotonic(), self._used()
        self.network, self.vocab = _prepared(group, device)
        trained = [one for one in self.network.parameters() if one.requires_grad]
        self._settle()
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=self.on_gpu)
        self.about = {
            **{name: value for name, value in asdict(group).items() if name not in ("shapes", "limit_s")},
            "gpu": torch.cuda.get_device_name() if self.on_gpu else "cpu",
            "torch": torch.__version__,
            "trained": sum(one.numel() for one in trained),
            "build_s": round(time.monotonic() - began_s, 2),
            "idle_bytes": idle_bytes,
            "weights_bytes": torch.cuda.memory_allocated() if self.on_gpu else 0,
        }

    def measure(self, mbs: int, seq: int, *, profiled: bool) -> dict[str, Any]:
        """Time the steps of one shape, after two to warm up."""
        import torch

        self._settle()
        batch = self._batch(mbs, seq)
        from_s = time.monotonic()
        self._step(batch)
        first_s = time.monotonic() - from_s
        for _ in range(2):
            if time.monotonic() - from_s < 2.0:
                self._step(batch)
        steps_s: list[float] = []
        given_s: list[float] = []
        parts_ms: list[list[float]] = []
        until_s = time.monotonic() + STEP_BUDGET_S
        while len(steps_s) < 3 or (len(steps_s) < 20 and time.monotonic() < until_s):
            from_s = time.perf_counter()
            given, parts = self._step(batch)
            steps_s.append(time.perf_counter() - from_s)
            given_s.append(given)
            parts_ms.append(parts)
        line: dict[str, Any] = {
            "first_s": round(first_s, 4),
            "steps": len(steps_s),
            "step_s": statistics.median(steps_s),
            "least_s": min(steps_s),
            "most_s": max(steps_s),
            "host_s": statistics.median(given_s),
            "parts_ms": [round(statistics.median(column), 3) for column in zip(*parts_ms, strict=True)],
        }
        if self.on_gpu:
            line |= {
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "used_bytes": self._used(),
                "resting_bytes": torch.cuda.memory_allocated(),
            }
            if profiled and not self.group.compiled:
                line |= _kernels(lambda: self._step(batch))
        return line

    def _settle(self) -> None:
        import torch

        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _used(self) -> int:
        import torch

        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def _batch(self, mbs: int, seq: int) -> dict[str, Any]:
        import torch

        if self.vocab:
            tokens = torch.randint(self.vocab, (mbs, seq), device=self.device)
            return {"input_ids": tokens, "labels": tokens}
        return {
            "pixel_values": torch.randn(mbs, 3, 224, 224, device=self.device),
            "labels": torch.randint(1000, (mbs,), device=self.device),
        }

    def _step(self, batch: dict[str, Any]) -> tuple[float, list[float]]:
        """One step: seconds until the host has given all of it away, and milliseconds on the device forward, backward, optimizer."""
        import torch

        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)] if self.on_gpu else []

        def mark(number: int) -> None:
            if marks:
                marks[number].record()

        from_s = time.perf_counter()
        mark(0)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.group.autocast):
            loss = self.network(**batch).loss
        mark(1)
        loss.backward()
        mark(2)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark(3)
        given_s = time.perf_counter() - from_s
        if self.on_gpu:
            torch.cuda.synchronize()
        return given_s, [marks[i].elapsed_time(marks[i + 1]) for i in range(3)] if marks else []


def run_group(group: Group, device: str, out: str) -> None:
    """Run all shapes of one group and append their lines to `out`."""
    import torch

    torch.manual_seed(0)
    if device == "cuda":
        try:
            torch.cuda.init()
        except RuntimeError as error:
            print(error, flush=True)
            sys.exit(NO_DEVICE_AFTER_FORK)
    trainer = _Trainer(group, device)
    for number, (mbs, seq) in enumerate(group.shapes):
        line: dict[str, Any] = {**trainer.about, "mbs": mbs, "seq": seq}
        try:
            line |= trainer.measure(mbs, seq, profiled=number == 0)
        except torch.OutOfMemoryError as error:
            line |= {"oom": True, "error": str(error)[:200]}
        except Exception as error:
            line |= {"error": f"{type(error).__name__}: {error}"[:500]}
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if "error" in line:
            return


def _child(start: str, group: Group, device: str, out: str, limit_s: float) -> Any:
    """Run one group in a process of its own, killed after `limit_s`; return the ended process."""
    child = multiprocessing.get_context(start).Process(target=run_group, args=(group, device, out))  # type: ignore[attr-defined]
    child.start()
    child.join(limit_s)
    if child.is_alive():
        child.kill()
        child.join()
        with open(out, "a") as file:
            file.write(json.dumps({**asdict(group), "error": "time"}) + "\n")
    return child


def planner_row(line: dict[str, Any], number: int) -> dict[str, Any] | None:
    """Return the row of one case for `benchmarks.planner`; None if the planner has no such program."""
    from phalanx.planner.facts.models import find_model

    usual = "float32" if line["method"] == "full" else "bfloat16"
    known = line["autocast"] and line["weights"] == usual and not (line["compiled"] or line["kbit_float32"])
    if not known or "mbs" not in line or line["model"].startswith(("bert", "vit", "tiny")):
        return None
    if "error" in line and not line.get("oom"):
        return None
    shape = find_model(line["model"])
    names = "q k v o gate up down" if line["modules"] == "all-linear" else "q k v o"
    adapted = line["method"] != "full"
    return {
        "row_id": number,
        "source": "phalanx-adapters",
        "framework": "transformers",
        "model": shape.name,
        **{
            name: getattr(shape, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        },
        "gated": int(shape.gated),
        "tied": int(shape.tied),
        "seq": line["seq"],
        "gbs": line["mbs"],
        "mbs": line["mbs"],
        "gpu": line["gpu"].removeprefix("NVIDIA "),
        "n_gpus": 1,
        "recompute": "full" if line["recompute"] else "none",
        "flash": 1,
        "precision": "bf16",
        "method": line["method"],
        "adapters": names if adapted else "",
        "rank": line["rank"] if adapted else "",
        "iter_time_s": line.get("step_s", ""),
        "mem_gb": line["used_bytes"] / 2**30 if "used_bytes" in line else "",
        "mem_kind": "device",
        "oom": int(bool(line.get("oom"))),
        "notes": f"dropout {line['dropout']:g}" if line["dropout"] else "",
    }


def write_rows(lines_path: str, csv_path: str) -> int:
    """Write the rows of all cases that the planner can score; return their number."""
    with open(lines_path) as file:
        cases = [json.loads(text) for text in file]
    rows = [row for number, case in enumerate(cases, 1) if (row := planner_row(case, number)) is not None]
    if not rows:
        return 0
    with open(csv_path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def main(arguments: list[str]) -> int:
    """Run the groups one after the other, for `LIMIT_S` at most."""
    if arguments[:1] == ["--rows"]:
        print(f"{write_rows(arguments[1], arguments[2])} rows")
        return 0
    tiny = "--tiny" in arguments
    positional = [one for one in arguments if not one.startswith("--")]
    out, limit_s = positional[0], float(positional[1]) if len(positional) > 1 else 1e9
    import transformers  # imported once, before any child, without a context on the device

    _ = (
        transformers.LlamaForCausalLM,
        transformers.Qwen2ForCausalLM,
        transformers.BertForMaskedLM,
        transformers.ViTForImageClassification,
    )
    device = "cpu" if tiny else "cuda"
    start = "fork"
    began_s = time.monotonic()
    for group in TINY if tiny else GROUPS:
        left_s = limit_s - (time.monotonic() - began_s)
        if left_s < 8:
            print("no time left for", group, flush=True)
            continue
        from_s = time.monotonic()
        child = _child(start, group, device, out, min(group.limit_s, left_s))
        if child.exitcode == NO_DEVICE_AFTER_FORK:
            start = "spawn"
            child = _child(start, group, device, out, min(group.limit_s, left_s))
        took = f"{time.monotonic() - from_s:.1f} s, exit {child.exitcode}"
        print(
            group.model,
            group.method,
            "recompute" if group.recompute else "",
            "compiled" if group.compiled else "",
            took,
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
