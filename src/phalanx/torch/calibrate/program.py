"""The order of a calibration: each measurement in turn, in all ranks at once, and at the end one file."""

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
from phalanx.core.performance.plain import to_plain
from phalanx.core.performance.samples import Collective, Samples, Scope
from phalanx.core.work.layout import Layout
from phalanx.torch.calibrate.devices import measure_memory, measure_products
from phalanx.torch.calibrate.gang import Gang
from phalanx.torch.calibrate.links import measure_collective, measure_pairs
from phalanx.torch.calibrate.storage import measure_writes
from phalanx.torch.calibrate.trainings import layouts_for, train

SAMPLES_FILE: Final = "calibration.json"  # in PHALANX_OUTPUT_DIR; `phalanx calibrate` fetches it
STAGE_LINE: Final = "calibrate: "  # begins the lines that it draws its bar from: "calibrate: 3/11 memory"

LINKS: Final = "pairs"
_TWICE: Final = ("products", "copies", "collectives", LINKS)  # what slow nodes and links are told by
Stage = tuple[str, str, Callable[[], Sequence[Any]]]  # field of Samples, words, work


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the samples."""
    parser = argparse.ArgumentParser(prog="phalanx.torch.calibrate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats: a first look")
    parser.add_argument("--links", action="store_true", help="every pair of nodes, and nothing else")
    options = parser.parse_args(arguments)
    me = phalanx.torch.init()
    gang = Gang.join(me, quick=options.quick)
    stages = stages_of(gang, os.environ.get("PHALANX_CHECKPOINT_DIR") or ".")
    if options.links:
        stages = [stage for stage in stages if stage[0] == LINKS]
    phalanx.torch.plan(steps_total=len(stages))
    found: dict[str, list[Any]] = {}
    stopped = False
    for number, (kind, words, work) in enumerate(stages, start=1):
        if gang.rank == 0:
            print(f"{STAGE_LINE}{number}/{len(stages)} {words}", flush=True)
        found.setdefault(kind, []).extend(gang.gathered(work()))
        phalanx.torch.report(step=number)
        if stopped := bool(phalanx.torch.should_stop()):
            break
    if gang.rank == 0 and not stopped:
        _write(found, gang, me.output_dir or ".")
    phalanx.torch.finish()


def stages_of(gang: Gang, folder: str) -> list[Stage]:
    """What there is to measure on this fleet: a node alone has no other, a device alone no neighbour."""
    stages: list[Stage] = [
        ("products", "matrix products", partial(measure_products, gang)),
        ("copies", "memory", partial(measure_memory, gang)),
    ]
    scopes = [Scope.WITHIN] * (max(gang.devices) > 1) + [Scope.BETWEEN] * (len(gang.devices) > 1)
    stages += [
        ("collectives", f"{collective} {scope} nodes", partial(measure_collective, gang, collective, scope))
        for scope in scopes
        for collective in Collective
    ]
    if len(gang.devices) > 1:
        stages.append((LINKS, "every pair of nodes", partial(measure_pairs, gang)))
    stages.append(("writes", "storage", partial(measure_writes, gang, folder)))
    stages += [
        ("runs", f"training with {_words(layout)}", partial(train, gang, layout)) for layout in layouts_for(gang)
    ]
    if not gang.quick:  # some way from the first time: what slowed a part then and not now was not the part
        stages += [(kind, f"{words}, again", work) for kind, words, work in stages if kind in _TWICE]
    return stages


def _words(layout: Layout) -> str:
    """The degrees alone; the rest is the calibration's own affair."""
    degrees = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    return ", ".join(f"{degree} {kind} parallel" for kind, degree in degrees.items() if degree > 1) or "one rank"


def _write(found: dict[str, list[Any]], gang: Gang, folder: str) -> None:
    """Whole or not at all: whoever fetches it may come at any time."""
    now_s = time.time()
    at = datetime.datetime.fromtimestamp(now_s, tz=datetime.UTC).isoformat(timespec="seconds")
    samples = Samples(
        at=at.replace("+00:00", "Z"),
        at_s=now_s,
        quick=gang.quick,
        devices=gang.devices,
        **{kind: tuple(samples) for kind, samples in found.items()},
    )
    path = os.path.join(folder, SAMPLES_FILE)
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(to_plain(samples), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)
