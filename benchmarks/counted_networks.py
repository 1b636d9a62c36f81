"""Accuracy of `phalanx plan --module`: the predicted training throughput of networks beside published rows of one GPU. Nothing is fitted.

python -m benchmarks.counted_networks [--json]

Needs torch, on the CPU; a minute. All rows are with mixed precision and channels last, without input pipeline.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from typing import Final

from phalanx.cli.plan.module_counts import count_network
from phalanx.core.work.gpus import parse_gpus
from phalanx.planner.counted.data_parallel import plan_counted
from phalanx.planner.facts.coefficient_table import physics
from phalanx.planner.facts.machines import build_machine

_TIMM: Final = (
    "github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv, 2022"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRow:
    """One published row: samples per second at a batch on one GPU."""

    network: str
    gpu: str
    batch: int
    samples_per_s: float
    source: str


ROWS: Final = (
    NetworkRow(network="resnet101", gpu="rtx-3090", batch=256, samples_per_s=747.89, source=_TIMM),
    NetworkRow(network="resnet152", gpu="rtx-3090", batch=192, samples_per_s=501.44, source=_TIMM),
    NetworkRow(network="vit_small", gpu="rtx-3090", batch=384, samples_per_s=1057.92, source=_TIMM),
    NetworkRow(network="vit_base", gpu="rtx-3090", batch=192, samples_per_s=392.99, source=_TIMM),
    NetworkRow(
        network="resnet50",
        gpu="v100",
        batch=128,
        samples_per_s=128 / 0.11093,
        source="github.com/sandeepkumar-skb/pytorch_experiments, torchvision_exp/README.md",
    ),
    NetworkRow(
        network="resnet50",
        gpu="a100-40gb",
        batch=512,
        samples_per_s=2600.0,
        source="github.com/huggingface/pytorch-image-models issue 1491, 2022",
    ),
)


def main() -> None:
    """Print a line for each row, and the mean error."""
    errors, figures = [], []
    for row in ROWS:
        machine = build_machine(parse_gpus(f"{row.gpu}:1"))
        precision = "bf16" if machine.gpu.flops.get("bf16") else "fp16"
        inputs = [f"{row.batch}x3x224x224"]
        network = count_network(
            f"benchmarks.networks:{row.network}", inputs, precision=precision, python=sys.executable
        )
        found = plan_counted(network, machine, physics(), micro_batches=1, precision=precision)[0]
        error = found.samples_per_s / row.samples_per_s - 1.0
        errors.append(abs(error))
        inside = found.low_s <= row.batch / row.samples_per_s <= found.high_s
        figures.append(
            {
                "network": row.network,
                "gpu": row.gpu,
                "batch": row.batch,
                "measured": row.samples_per_s,
                "predicted": found.samples_per_s,
                "error": error,
                "in_interval": inside,
                "source": row.source,
            }
        )
        if "--json" not in sys.argv:
            print(
                f"{row.network:<10} {row.gpu:<10} batch {row.batch}: {found.samples_per_s:,.0f} samples/s, "
                f"measured {row.samples_per_s:,.0f}, {error:+.1%}"
            )
    mape = statistics.fmean(errors)
    print(json.dumps({"rows": figures, "mape": mape}, indent=2) if "--json" in sys.argv else f"mean error {mape:.1%}")


if __name__ == "__main__":
    main()
