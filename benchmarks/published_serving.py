"""Read published serving rows (`serving_measured.csv`) and predict them with the simulated engine of the planner.

`kind`: `batch` is a fixed batch whose prompts are read together; `users` keeps so many requests in flight, each user asking again;
`queue` has all requests at once. `weights` and `cache` are precisions; where a source does not name the cache's, it is that of the weights.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from phalanx.planner.cost.machine import Gpu
from phalanx.planner.facts.gpus import find_gpu, gpu_in_node
from phalanx.planner.facts.models import find_model
from phalanx.planner.serving.batch_simulation import BatchSimulation, RequestLoad
from phalanx.planner.serving.iteration_time import IterationTimer, ServingSpeed
from phalanx.planner.serving.replica import ReplicaLayout, ServedModel, cache_room_bytes, cache_tokens

MEASURED: Final = Path(__file__).parent / "serving_measured.csv"
METRICS: Final = ("throughput", "tpot", "ttft")
_COLUMNS: Final = {"throughput": "output_tokens_per_s", "tpot": "tpot_ms", "ttft": "ttft_ms"}
_QUEUE_MAX: Final = 4000  # requests of a queue that are simulated: longer ones only repeat themselves
_ROUNDS: Final = 3  # answers per user


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One published row. `measured`: throughput in tokens per second, times in seconds."""

    source: str
    engine: str
    model: ServedModel
    gpu: Gpu
    layout: ReplicaLayout
    kind: str
    requests: int
    prompt: int
    answer: int
    measured: Mapping[str, float]


def read_serving_rows(path: Path = MEASURED) -> list[ServingRow]:
    """Return the rows of a file, in its order.

    Raises:
        PhalanxError: an unknown model or GPU.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(one) for one in csv.DictReader(file)]


def _row(one: Mapping[str, str]) -> ServingRow:
    shape = find_model(one["model"])
    scale = {"throughput": 1.0, "tpot": 1e-3, "ttft": 1e-3}
    layout = ReplicaLayout(tensor=int(one["tp"]), stages=int(one["pp"]))
    return ServingRow(
        source=one["run"],
        engine=one["engine"],
        model=ServedModel(shape=shape, weights=one["weights"], cache=one["kv"]),
        gpu=gpu_in_node(find_gpu(one["gpu"]), 8),
        layout=layout,
        kind=one["kind"],
        requests=int(one["requests"]),
        prompt=int(one["in_tokens"]),
        answer=int(one["out_tokens"]),
        measured={name: float(one[key]) * scale[name] for name, key in _COLUMNS.items() if one[key]},
    )


def predict_row(row: ServingRow, speed: ServingSpeed) -> dict[str, float]:
    """Return the predicted figures of a row, by metric; empty if the model does not fit."""
    batch = row.kind == "batch"
    if batch:
        speed = replace(speed, chunk=math.inf, requests_max=math.inf)
    timer = IterationTimer(row.model, row.gpu, row.layout, speed)
    room = cache_room_bytes(
        row.model,
        row.layout,
        row.gpu.memory_bytes,
        share=1.0 if batch else speed.memory_taken,
        overhead_bytes=0.0 if batch else speed.overhead_bytes,
    )
    users = row.requests if row.kind != "queue" else min(row.requests, _QUEUE_MAX)
    load = RequestLoad(
        users=users,
        prompt=row.prompt,
        answer=row.answer,
        requests=users * (_ROUNDS if row.kind == "users" and users > 1 else 1),
        again=row.kind == "users",
    )
    # A fixed batch ran, so it had room.
    tokens = math.inf if batch else cache_tokens(row.model, row.layout, room, row.prompt + row.answer)
    outcome = BatchSimulation(timer, load, cache_tokens=tokens).run()
    if not outcome.ttft_s:
        return {}
    found = {"throughput": outcome.tokens_per_s, "ttft": sum(outcome.ttft_s) / len(outcome.ttft_s)}
    if row.answer > 1:
        found["tpot"] = sum(outcome.tpot_s) / len(outcome.tpot_s)
    return found
