"""Run a calibration: one measurement after the other, on all ranks at once, and write one file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import phalanx.torch
from phalanx.core.work.layouts.layout import Layout
from phalanx.durable_files import replace_file
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.planner.calibration.samples import Collective, CollectiveScope, Samples
from phalanx.torch.calibrate.devices import measure_memory, measure_products
from phalanx.torch.calibrate.gang import CalibrationGang
from phalanx.torch.calibrate.links import measure_collective, measure_pairs
from phalanx.torch.calibrate.storage import measure_writes
from phalanx.torch.calibrate.trainings import layouts_for, train

SAMPLES_FILE: Final = "calibration.json"  # in PHALANX_OUTPUT_DIR; `phalanx calibrate` fetches it
PROGRESS_PREFIX: Final = "calibrate: "  # prefix of progress lines for `phalanx calibrate`: "calibrate: 3/11 memory"

PAIR_SAMPLES: Final = "pairs"
_TWICE: Final = (
    "products",
    "copies",
    "collectives",
    PAIR_SAMPLES,
)  # the measurements that identify slow nodes and links
Measurement = tuple[str, str, Callable[[], Sequence[Any]]]  # field of Samples, title, work


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the samples."""
    parser = argparse.ArgumentParser(prog="phalanx.torch.calibrate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use fewer sizes and repeats")
    parser.add_argument("--links", action="store_true", help="measure only the links between all pairs of nodes")
    parser.add_argument("--parts", action="store_true", help="measure only devices, memory and links, twice")
    options = parser.parse_args(arguments)
    me = phalanx.torch.init()
    gang = CalibrationGang.join(me, quick=options.quick)
    stages = measurements_for(gang, os.environ.get("PHALANX_CHECKPOINT_DIR") or ".")
    if options.links:
        stages = [stage for stage in stages if stage[0] == PAIR_SAMPLES]
    if options.parts:
        stages = [stage for stage in stages if stage[0] in _TWICE]
        stages += [(kind, f"{title}, again", work) for kind, title, work in stages] if gang.quick else []
    phalanx.torch.plan(steps_total=len(stages))
    found: dict[str, list[Any]] = {}
    stopped = False
    for number, (kind, title, work) in enumerate(stages, start=1):
        if gang.rank == 0:
            print(f"{PROGRESS_PREFIX}{number}/{len(stages)} {title}", flush=True)
        found.setdefault(kind, []).extend(gang.gather(work()))
        phalanx.torch.report(step=number)
        if stopped := bool(phalanx.torch.should_stop()):
            break
    if gang.rank == 0 and not stopped:
        _write(found, gang, me.output_dir or ".")
    phalanx.torch.finish()


def measurements_for(gang: CalibrationGang, folder: str) -> list[Measurement]:
    """Return the measurements for this fleet; one node has no pairs, one device no collectives."""
    stages: list[Measurement] = [
        ("products", "matrix products", partial(measure_products, gang)),
        ("copies", "memory", partial(measure_memory, gang)),
    ]
    scopes = [CollectiveScope.WITHIN] * (max(gang.devices) > 1) + [CollectiveScope.BETWEEN] * (len(gang.devices) > 1)
    stages += [
        ("collectives", f"{collective} {scope} nodes", partial(measure_collective, gang, collective, scope))
        for scope in scopes
        for collective in Collective
    ]
    if len(gang.devices) > 1:
        stages.append((PAIR_SAMPLES, "every pair of nodes", partial(measure_pairs, gang)))
    stages.append(("writes", "storage", partial(measure_writes, gang, folder)))
    stages += [
        ("runs", f"training with {_describe(layout)}", partial(train, gang, layout)) for layout in layouts_for(gang)
    ]
    if not gang.quick:  # repeat later: a temporary disturbance slows a part in one pass only
        stages += [(kind, f"{title}, again", work) for kind, title, work in stages if kind in _TWICE]
    return stages


def _describe(layout: Layout) -> str:
    """Return the degrees of parallelism in words."""
    degrees = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    return ", ".join(f"{degree} {kind} parallel" for kind, degree in degrees.items() if degree > 1) or "one rank"


def _write(found: dict[str, list[Any]], gang: CalibrationGang, folder: str) -> None:
    """Write the samples atomically, because another process may read the file at any time."""
    now_s = time.time()
    at = datetime.datetime.fromtimestamp(now_s, tz=datetime.UTC).isoformat(timespec="seconds")
    samples = Samples(
        at=at.replace("+00:00", "Z"),
        at_s=now_s,
        quick=gang.quick,
        devices=gang.devices,
        **{kind: tuple(samples) for kind, samples in found.items()},
    )
    replace_file("", os.path.join(folder, SAMPLES_FILE), json.dumps(encode_record(samples)).encode(), mode=0o666)
