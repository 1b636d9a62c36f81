"""The answer of `phalanx plan --serve` as plain records, for page and `--json`. Units are in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.plans.records import Estimate, Formula


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEstimates:
    """Percentiles of the time to the first token and of the time per output token, and output tokens per second of all replicas."""

    ttft_p50_s: Estimate
    ttft_p95_s: Estimate
    tpot_p50_s: Estimate
    tpot_p95_s: Estimate
    tokens_per_s: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLayout:
    """One way to serve the model, or why it does not do.

    Attributes:
        gpu, weights, cache: model of GPU, precision of weights and of keys and values.
        tensor, stages: of one replica.
        replicas, readers: that answer, and that only read prompts.
        gpus, gpus_low, gpus_high: of all replicas, with the 80 % interval; `gpus_high` None if no number is sure to meet the bounds.
        estimates: None if it does not meet the target.
        running, batch_max: mean requests in one replica, and the most that have room.
        usd_per_million_output, usd_per_million_tokens: for output tokens, and for tokens read and written.
        weight_bytes, cache_bytes_per_token: of the whole model.
        why_not: "" if it meets the target.
    """

    gpu: str
    weights: str
    cache: str
    tensor: int
    stages: int
    replicas: int
    readers: int
    gpus: int
    gpus_low: int
    gpus_high: int | None
    estimates: ServiceEstimates | None
    running: float
    batch_max: int
    usd_per_million_output: float | None
    usd_per_million_tokens: float | None
    price: str
    weight_bytes: float
    cache_bytes_per_token: float
    why_not: str = ""

    @property
    def replica_text(self) -> str:
        """The layout of one replica: `tp=4`, `tp=8,pp=2`."""
        return f"tp={self.tensor}" + (f",pp={self.stages}" if self.stages > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """The whole answer.

    Attributes:
        request: the request in one line.
        reason: the answer in one sentence.
        layouts: that meet the target, best first; `rejected` do not.
        split: prompts read in replicas of their own, where that needs fewer GPUs or is the only way.
        other_precisions: the best with weights of other precisions, one sentence each.
        next_command: that can be run as it stands, but for the folder of the weights.
    """

    fits: bool
    reason: str
    request: str
    model: str
    target: Mapping[str, float]
    layouts: tuple[ServedLayout, ...] = ()
    rejected: tuple[ServedLayout, ...] = ()
    split: ServedLayout | None = None
    other_precisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    formulas: tuple[Formula, ...] = ()
    next_command: str = ""


def serving_as_json(answer: ServingAnswer) -> dict[str, Any]:
    """Build the document of `--json`: `fits`, `reason` and `layouts` first."""
    best = answer.layouts[0] if answer.layouts else answer.split
    return {
        "fits": answer.fits,
        "reason": answer.reason,
        "gpus": None if best is None else best.gpus,
        "layouts": [_layout(one) for one in answer.layouts],
        "split": None if answer.split is None else _layout(answer.split),
        "rejected": [_layout(one) for one in answer.rejected],
        "other_precisions": list(answer.other_precisions),
        "model": {"name": answer.model},
        "asked": {**answer.target, "text": answer.request},
        "notes": list(answer.notes),
        "formulas": [
            {"name": one.name, "formula": one.symbols, "numbers": one.numbers, "source": one.source}
            for one in answer.formulas
        ],
        "next": answer.next_command,
    }


def _layout(one: ServedLayout) -> dict[str, Any]:
    return {
        "gpu": one.gpu,
        "weights": one.weights,
        "kv_cache": one.cache,
        "tensor": one.tensor,
        "pipeline": one.stages,
        "replicas": one.replicas,
        "prefill_replicas": one.readers,
        "gpus": one.gpus,
        "gpus_low": one.gpus_low,
        "gpus_high": one.gpus_high,
        **(
            {}
            if one.estimates is None
            else {
                "ttft_p50_s": _range(one.estimates.ttft_p50_s),
                "ttft_p95_s": _range(one.estimates.ttft_p95_s),
                "tpot_p50_s": _range(one.estimates.tpot_p50_s),
                "tpot_p95_s": _range(one.estimates.tpot_p95_s),
                "output_tokens_per_s": _range(one.estimates.tokens_per_s),
            }
        ),
        "running_per_replica": one.running,
        "batch_max": one.batch_max,
        "usd_per_million_output_tokens": one.usd_per_million_output,
        "usd_per_million_tokens": one.usd_per_million_tokens,
        "price": one.price,
        "weight_bytes": one.weight_bytes,
        "kv_bytes_per_token": one.cache_bytes_per_token,
        "why_not": one.why_not,
    }


def _range(one: Estimate) -> dict[str, float]:
    return {"mid": one.mid, "low": one.low, "high": one.high}
