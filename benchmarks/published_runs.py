"""Read published training runs: each row of a file of measured runs becomes a task, a layout, a machine and a stack.

The columns are those of `training_measured.csv` (see docs/planner.md). Missing values get the defaults of the stack.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.work.layouts.layout import Layout, Recompute
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.model_shape import LatentAttention, MixtureOfExperts, ModelShape
from phalanx.planner.cost.optimizers import Offload, OptimizerKind
from phalanx.planner.cost.sequence_lengths import SequenceBatching
from phalanx.planner.cost.training_task import TrainingMethod, TrainingTask
from phalanx.planner.facts.coefficient_table import find_stack_name
from phalanx.planner.facts.gpus import (
    GBIT,
    GpuEntry,
    find_gpu,
    gpu_in_node,
)
from phalanx.planner.facts.models import find_model
from phalanx.planner.search.sample_batches import SampleBatches

LATENT: Final = LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, value_dim=128)
"""The shape for a row with only "mla". Source: DeepSeek-AI, "DeepSeek-V3", 2024, section 4.2."""

UNSTATED: Final = frozenset({"", "?", "unknown", "not stated", "unstated"})
"""What the column `recompute` says where the source does not."""

EAGER: Final = {"fsdp2-compile": "fsdp2-eager", "torchtitan": "fsdp2-eager", "kempnerforge": "kempnerforge-eager"}
"""The stack of a program without torch.compile."""

ABSENT: Final = frozenset({"", "-", "n/a", "na", "nan", "none", "null"})
TRUTH: Final = {"true": "1", "yes": "1", "false": "0", "no": "0", "oom": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One measured run.

    Attributes:
        step_s: None where only memory was published.
        memory_bytes, peers: optional; `peers` are predictions of other tools, in seconds.
        failed: it ran out of memory.
        states_recompute: the row says what is computed again in the backward pass. Otherwise `layout` has nothing of it.
        samples: lengths of the samples, where they are not all of the sequence.
        states_zero: the row says what data parallel ranks shard. Otherwise `layout` shards nothing.
    """

    row: str
    source: str
    stack: str
    task: TrainingTask
    layout: Layout
    machine: Machine
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str
    peers: Mapping[str, float]
    group: tuple[str, ...]
    failed: bool = False
    states_recompute: bool = True
    states_zero: bool = True
    samples: SampleBatches | None = None

    @property
    def measured_s(self) -> float:
        """The step time; not a number where only memory was published."""
        return math.nan if self.step_s is None else self.step_s

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.task.model.mixture is not None

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.task.method is not TrainingMethod.FULL


def read_runs(path: Path) -> tuple[list[PublishedRun], list[str]]:
    """Return the valid rows of the file in its order, and an error with the line for each other row."""
    runs: list[PublishedRun] = []
    wrong: list[str] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                runs.append(_run(row))
            except (ValueError, KeyError, ZeroDivisionError, PhalanxError) as error:
                wrong.append(f"{path.name} line {line}: {error}")
    return runs, wrong


def _run(row: Mapping[str, str]) -> PublishedRun:
    zero, tensor, pipeline = _whole(row, "zero", 0), _whole(row, "tp", 1), _whole(row, "pp", 1)
    context, gpus, per_node = _whole(row, "cp", 1), _whole(row, "n_gpus", 1), _whole(row, "gpus_per_node", 8)
    data = _whole(row, "dp", 0) or max(1, gpus // (tensor * pipeline * context))
    micro = max(1, _whole(row, "mbs", 1))
    flash = bool(_whole(row, "flash", 1))
    layout = Layout(
        tensor=tensor,
        sequence=bool(_whole(row, "sp", 0)) and tensor > 1,
        pipeline=pipeline,
        interleave=max(1, _whole(row, "vpp", 1)) if pipeline > 1 else 1,
        context=context,
        expert=max(1, _whole(row, "ep", 1)),
        shard=data if zero else 1,
        replicate=1 if zero else data,
        zero=zero,
        micro_batch=micro,
        micro_batches=max(1, round(_whole(row, "gbs", 1) / (micro * data))),
        recompute=_recompute(_text(row, "recompute")),
        precision=_precision(_text(row, "precision")),
    )
    machine = Machine(
        gpu=gpu_in_node(_gpu(_text(row, "gpu")), min(gpus, per_node)),
        nodes=max(1, -(-gpus // per_node)),
        gpus_per_node=min(gpus, per_node),
        network_bytes_per_s=_network(row, gpus > per_node),
    )
    memory, seconds, failed = _number(row, "mem_gb"), _number(row, "iter_time_s"), bool(_whole(row, "oom", 0))
    if not (memory or seconds or _text(row, "oom")):
        raise ValueError("neither iter_time_s nor mem_gb nor oom is given")
    return PublishedRun(
        row=row.get("row_id", ""),
        source=_text(row, "source") or "not named",
        stack=_stack(_text(row, "framework"), _text(row, "notes"), flash=flash),
        task=_task(row, flash=flash),
        layout=layout,
        machine=machine,
        step_s=seconds if seconds and not failed else None,
        memory_bytes=memory * 2**30 if memory else None,
        memory_kind=_text(row, "mem_kind"),
        peers={
            name: float(row[column])
            for name, column in (("calculon", "calculon_iter_s"), ("llm-analysis", "llm_analysis_eff50_iter_s"))
            if row.get(column)
        },
        group=tuple(
            _text(row, name)
            for name in ("source", "model", "seq", "gbs", "gpu", "n_gpus", "precision", "framework", "method")
        ),
        failed=failed,
        samples=_samples(row),
        states_recompute=_text(row, "recompute").lower() not in UNSTATED,
        states_zero=_text(row, "zero").lower() not in UNSTATED,
    )


def _samples(row: Mapping[str, str]) -> SampleBatches | None:
    mean = _whole(row, "mean_length", 0)
    batching = SequenceBatching(_text(row, "packing").lower() or SequenceBatching.PADDED)
    return SampleBatches(mean, _whole(row, "seq", 1), batching) if mean else None


def _network(row: Mapping[str, str], needed: bool) -> float:
    """Return the bytes per second of the network for each GPU; of the usual server where the row needs it and does not say."""
    given = _number(row, "nic_gbps_per_gpu") or 0.0
    return given * GBIT or (_gpu(_text(row, "gpu")).network_bytes_per_s if needed else 1.0)


def _task(row: Mapping[str, str], *, flash: bool) -> TrainingTask:
    model, seq = _model(row), _whole(row, "seq", 1)
    named = _text(row, "method").lower()
    method = TrainingMethod.FULL if named in ABSENT or named.startswith("full") else TrainingMethod(named)
    rank = _whole(row, "rank", 0)
    optimizer = OptimizerKind(_text(row, "optimizer").lower() or OptimizerKind.ADAMW)
    offload = Offload(_text(row, "offload").lower() or Offload.NONE)
    if method is TrainingMethod.FULL or not rank:
        return TrainingTask(model=model, seq=seq, method=method, flash=flash, optimizer=optimizer, offload=offload)
    names = tuple((row.get("adapters") or "").split()) or tuple(model.layer_matrices)
    return TrainingTask(
        model=model,
        seq=seq,
        method=method,
        flash=flash,
        optimizer=optimizer,
        offload=offload,
        adapters=names,
        adapter_share=model.adapter_parameters(rank, names) / model.parameters,
    )


def _model(row: Mapping[str, str]) -> ModelShape:
    experts, latent = _whole(row, "experts", 0), bool(_whole(row, "mla", 0))
    head_dim = _whole(row, "head_dim", 0) or _whole(row, "hidden", 1) // _whole(row, "heads", 1)
    mixture = None
    if experts:
        mixture = MixtureOfExperts(
            experts=experts,
            per_token=max(1, _whole(row, "topk", 1)),
            ffn=_whole(row, "moe_ffn", 0) or _whole(row, "ffn", 1),
            shared_ffn=_whole(row, "shared_ffn", 0),
            dense_layers=_whole(row, "dense_layers", 0),
        )
        mixture = _with_groups(mixture, row.get("model") or "")
    if latent and head_dim > LATENT.value_dim:
        head_dim -= LATENT.rope_dim  # the row includes the features for the position
    return ModelShape(
        name=row.get("model", ""),
        layers=_whole(row, "layers", 1),
        hidden=_whole(row, "hidden", 1),
        heads=_whole(row, "heads", 1),
        kv_heads=_whole(row, "kv_heads", 0) or _whole(row, "heads", 1),
        head_dim=head_dim,
        ffn=_whole(row, "ffn", 0),
        vocab=_whole(row, "vocab", 1),
        gated=bool(_whole(row, "gated", 1)),
        tied=bool(_whole(row, "tied", 0)),
        mixture=mixture,
        latent=LATENT if latent else None,
    )


def _with_groups(mixture: MixtureOfExperts, name: str) -> MixtureOfExperts:
    """Return the mixture with the limits of the router that the named model is known for: no column has them."""
    try:
        known = find_model(name).mixture
    except BadRequest:
        return mixture
    if known is None or (known.experts, known.per_token) != (mixture.experts, mixture.per_token):
        return mixture
    return replace(mixture, groups=known.groups, group_limit=known.group_limit)


@cache
def _gpu(text: str) -> GpuEntry:
    return find_gpu(text)


def _stack(framework: str, notes: str, *, flash: bool) -> str:
    """Return the stack of a row: by its framework, older than flash attention or not, and compiled or not."""
    if "megatron" in framework.lower() and not flash:
        return "megatron-2022"
    name = find_stack_name(framework) or "generic"
    return EAGER.get(name, name) if "eager" in notes.lower() else name


def _recompute(text: str) -> Recompute:
    low = text.lower()
    if low.startswith("full"):
        return Recompute.FULL
    return Recompute.NONE if low in {*UNSTATED, "none", "no", "0"} else Recompute.SELECTIVE


def _precision(text: str) -> str:
    low = text.strip().lower()
    return next((name for name in ("fp8", "bf16", "fp16", "fp32") if name in low), "nvfp4" if "fp4" in low else "bf16")


def _whole(row: Mapping[str, str], name: str, absent: int) -> int:
    text = _text(row, name).lower()
    return absent if text in ABSENT else int(float(TRUTH.get(text, text)))


def _number(row: Mapping[str, str], name: str) -> float | None:
    text = _text(row, name).lower()
    return None if text in ABSENT else float(text)


def _text(row: Mapping[str, str], name: str) -> str:
    return (row.get(name) or "").strip()
