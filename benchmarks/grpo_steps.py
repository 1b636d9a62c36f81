"""Accuracy of planned steps of GRPO: the whole step, and its phases where they were published. Nothing is fitted to these rows.

python -m benchmarks.grpo_steps [--json] [--csv FILE]

`training` is forward and backward passes with the update; `scoring` the log-probabilities of the model and of its reference; `rollout` the
answers; `weights` what prepares the engine. A published step has parts that belong to none of them. Sources are in the file. The pairs of constants
of the hand-over (`planner.serving.rollout`) are from the source whose column `weights_s` is empty.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.planner.cost.step_time import StepItem
from phalanx.planner.cost.training_task import Objective
from phalanx.planner.facts.coefficient_table import find_stack, physics
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.facts.models import find_model
from phalanx.planner.facts.serving_facts import DEFAULT_ENGINE, find_serving_speed
from phalanx.planner.search.evaluation import complete_layout, evaluate_layout
from phalanx.planner.search.request import EvaluatedLayout, LayoutRequest
from phalanx.planner.serving.rollout import RolloutRequest

MEASURED: Final = Path(__file__).parent / "grpo_measured.csv"
PHASES: Final = ("step", "training", "scoring", "rollout", "weights")
_COLUMNS: Final = {
    "step": "step_s",
    "training": "train_s",
    "scoring": "scoring_s",
    "rollout": "rollout_s",
    "weights": "weights_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoScore:
    """One published step beside the planned one. Seconds by phase."""

    source: str
    name: str
    measured: Mapping[str, float]
    planned: Mapping[str, float]
    low_s: float
    high_s: float

    def error(self, phase: str) -> float:
        """Return planned / measured - 1."""
        return self.planned[phase] / self.measured[phase] - 1.0

    @property
    def inside(self) -> bool:
        """Whether the published step is in the 80 % interval."""
        return self.low_s <= self.measured["step"] <= self.high_s


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default=str(MEASURED), help="rows with the columns of benchmarks/grpo_measured.csv")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scores = grpo_scores(Path(options.csv))
    print(json.dumps(summary(scores), indent=2) if options.json else format_scores(scores))


def grpo_scores(path: Path = MEASURED) -> list[GrpoScore]:
    """Return the scores of all rows of a file, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_score(one) for one in csv.DictReader(file)]


def _score(row: Mapping[str, str]) -> GrpoScore:
    found = _evaluated(row)
    items = found.step.items
    planned = {
        "step": found.step.total_s,
        "scoring": items[StepItem.REFERENCE],
        "rollout": items[StepItem.ROLLOUT],
        "weights": items[StepItem.WEIGHTS],
    }
    planned["training"] = 2.0 * planned["step"] - sum(planned.values())
    return GrpoScore(
        source=row["run"],
        name=f"{row['model']}, {row['gpus']}, {row['stack']}",
        measured={phase: float(row[column]) for phase, column in _COLUMNS.items() if row[column]},
        planned=planned,
        low_s=found.low_s,
        high_s=found.high_s,
    )


def _evaluated(row: Mapping[str, str]) -> EvaluatedLayout:
    prompt, limit = int(row["prompt"]), int(row["limit"])
    request = LayoutRequest(
        model=find_model(row["model"]),
        machine=build_machine(parse_gpus(row["gpus"])),
        physics=physics(),
        stack=replace(find_stack(row["stack"]), scoring_passes=int(row["passes"])),
        seq=prompt + limit,
        global_batch=int(row["batch"]),
        objective=Objective.GRPO,
        rollout=RolloutRequest(
            prompt=prompt,
            answer=int(row["answer"]),
            longest=limit,
            group=int(row["group"]),
            updates=int(row["updates"]),
            tensor=int(row["engine_tp"]),
            speed=find_serving_speed(DEFAULT_ENGINE),
        ),
    )
    return evaluate_layout(request, complete_layout(request, parse_layout(row["layout"])))


def summary(scores: Sequence[GrpoScore]) -> dict[str, Any]:
    """Return the figures of `--json`: means of absolute errors and mean errors by source and phase, and the share of steps in their intervals."""
    sources = {
        source: _errors([one for one in scores if one.source == source])
        for source in dict.fromkeys(one.source for one in scores)
    }
    means = statistics.fmean(one["step"]["mape"] for one in sources.values())
    return {"rows": len(scores), "all": _errors(scores), "mape_mean_of_sources": means, "sources": sources}


def _errors(scores: Sequence[GrpoScore]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for phase in PHASES:
        errors = [one.error(phase) for one in scores if phase in one.measured]
        if errors:
            bias = math.expm1(statistics.fmean(math.log1p(error) for error in errors))
            found[phase] = {"rows": len(errors), "mape": statistics.fmean(map(abs, errors)), "bias": bias}
    found["coverage_80"] = statistics.fmean(one.inside for one in scores)
    return found


def format_scores(scores: Sequence[GrpoScore]) -> str:
    """Return the tables for a terminal."""
    lines = [f"{'planned/published, seconds':<48}" + "".join(f"{phase:>20}" for phase in PHASES)]
    source = ""
    for one in scores:
        if one.source != source:
            source = one.source
            lines += ["", source]
        cells = [
            f"{one.planned[phase]:.3g}/{one.measured[phase]:.3g} {one.error(phase):+.0%}"
            if phase in one.measured
            else ""
            for phase in PHASES
        ]
        lines.append(f"  {one.name[:45]:<46}" + "".join(f"{cell:>20}" for cell in cells))
    figures = summary(scores)
    lines += ["", "mean of absolute errors (mean error)"]
    for name, found in [*figures["sources"].items(), ("all rows", figures["all"])]:
        cells = [
            f"{found[phase]['mape']:.1%} ({found[phase]['bias']:+.0%})" if phase in found else "" for phase in PHASES
        ]
        lines.append(f"  {name[:45]:<46}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append(
        f"mean of sources {figures['mape_mean_of_sources']:.1%}; steps in their 80 % interval {figures['all']['coverage_80']:.0%}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
