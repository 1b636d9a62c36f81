"""Where MIG slices are put: requests accepted by our rule, beside the most that any choice of positions accepts, and the time of a decision.

    python -m benchmarks.mig                 # some minutes
    python -m benchmarks.mig --streams 100 --json

For each GPU model of the fact table, random streams of requests come to one GPU, and to two. The most is found by trying all positions with
the knowledge of the whole future (`mig_streams.most_accepted`). The more a GPU is asked for, the more that knowledge is worth: then the
best rule that does not know the future is the fair comparison (`mig_streams.best_rule`), and the other figure has no target.

Models whose profiles have the same sizes and starts give the same figures, and are measured once.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.figures import Figure, at_least, at_most, plain_figure, print_progress, print_report
from benchmarks.mig_streams import (
    Profiles,
    RequestStream,
    accepted,
    best_rule,
    draw_stream,
    first_fit,
    most_accepted,
    our_rule,
)
from phalanx.core.scheduling.sharing.mig_placement import EMPTY, mig_geometry, place_slice
from phalanx.planner.facts.mig import read_mig_gpus

STREAMS: Final = 1_000  # per model and load
REQUESTS: Final = 40  # per stream to one GPU
LOADS: Final = (0.1, 0.2, 0.3)
"""Shares of the memory slices that would be in use if all requests were accepted, at which the target counts. At 0.3 the most is already only
85 % of all requests: a GPU is rarely asked for more, because requests of all sizes come and the largest needs the whole GPU."""
FULL_LOADS: Final = (0.5, 0.8)
PAIR_REQUESTS: Final = 10  # per stream to two GPUs: the states to try grow with each
PAIR_LOAD: Final = 0.3
SHARE: Final = 99.0  # per cent of the most
BEST_STREAMS: Final = 50  # the best rule takes half a second for each
DECISION_MS: Final = 1.0
GPUS: Final = 8  # of one server, for the time of a decision
SEED: Final = 20261123


def main() -> None:
    """Print all figures; exit with 1 if one misses its target."""
    parser = argparse.ArgumentParser(description="Positions of MIG slices beside the optimum.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on stdout")
    parser.add_argument("--streams", type=int, default=STREAMS, help="random streams per model and load")
    options = parser.parse_args()
    figures = [one for names, profiles in geometries() for one in measure(names, profiles, options.streams)]
    print_report("MIG positions", figures, as_json=options.json)
    sys.exit(any(figure.met is False for figure in figures))


def geometries() -> list[tuple[str, Profiles]]:
    """Return the first model of each geometry with the number of others, and its profiles."""
    alike: dict[tuple[object, ...], list[tuple[str, Profiles]]] = {}
    for gpu in read_mig_gpus():
        key = tuple((one.memory_slices, one.starts, one.has_media) for one in gpu.profiles)
        alike.setdefault(key, []).append((gpu.name, gpu.profiles))
    return [
        (models[0][0] + (f" and {len(models) - 1} alike" if len(models) > 1 else ""), models[0][1])
        for models in alike.values()
    ]


def measure(names: str, profiles: Profiles, streams: int) -> list[Figure]:
    """Return the figures of one geometry."""
    figures = []
    for load in (*LOADS, *FULL_LOADS):
        drawn = draw_streams(profiles, gpus=1, requests=REQUESTS, load=load, streams=streams)
        figures.append(_share(names, f"1 GPU, load {load:.0%}", profiles, 1, drawn, target=load in LOADS))
        print_progress(f"{figures[-1].name}: {figures[-1].value:.2f} %")
    pairs = draw_streams(profiles, gpus=2, requests=PAIR_REQUESTS, load=PAIR_LOAD, streams=streams)
    figures.append(_share(names, f"2 GPUs, load {PAIR_LOAD:.0%}", profiles, 2, pairs, target=True))
    print_progress(f"{figures[-1].name}: {figures[-1].value:.2f} %")
    for load in FULL_LOADS:
        drawn = draw_streams(profiles, gpus=1, requests=10 * REQUESTS, load=load, streams=min(streams, BEST_STREAMS))
        figures.append(_beside_best(names, load, profiles, drawn))
        print_progress(f"{figures[-1].name}: {figures[-1].value:.2f} %")
    return [*figures, _decision(names, profiles)]


def draw_streams(profiles: Profiles, *, gpus: int, requests: int, load: float, streams: int) -> list[RequestStream]:
    """Draw streams; the same arguments give the same ones."""
    rng = random.Random(f"{SEED} {gpus} {load}")
    return [draw_stream(rng, profiles, gpus=gpus, requests=requests, load=load) for _ in range(streams)]


def _share(
    names: str, case: str, profiles: Profiles, gpus: int, streams: Sequence[RequestStream], *, target: bool
) -> Figure:
    most = sum(most_accepted(stream, profiles, gpus) for stream in streams)
    ours = sum(accepted(stream, gpus, our_rule(profiles)) for stream in streams)
    first = sum(accepted(stream, gpus, first_fit(profiles)) for stream in streams)
    asked = sum(len(stream.requests) for stream in streams)
    note = f"{ours} of {most} that can be accepted of {asked}; first fit {100 * first / most:.2f} %"
    name = f"{names}: of the most, {case}"
    if target:
        return at_least(name, [100 * ours / most], "%", SHARE, note=note)
    return plain_figure(name, [100 * ours / most], "%", note=note)


def _beside_best(names: str, load: float, profiles: Profiles, streams: Sequence[RequestStream]) -> Figure:
    best = sum(accepted(stream, 1, best_rule(stream, profiles)) for stream in streams)
    ours = sum(accepted(stream, 1, our_rule(profiles)) for stream in streams)
    note = f"{ours} of {best} that the best rule without foresight accepts, which knows the mix"
    return at_least(f"{names}: of the best rule, 1 GPU, load {load:.0%}", [100 * ours / best], "%", SHARE, note=note)


def _decision(names: str, profiles: Profiles) -> Figure:
    """Return the processor time of the longest decision on a server whose GPUs fill up, each state met for the first time."""
    geometry = mig_geometry(profiles, {one.name: 1.0 + number for number, one in enumerate(profiles)})
    rng = random.Random(SEED)
    states, took_ms = [EMPTY] * GPUS, []
    while True:
        name = rng.choice(list(geometry.profiles))
        began = time.thread_time()
        found = place_slice(name, [(geometry, state) for state in states])
        took_ms.append(1000 * (time.thread_time() - began))
        if found is None:
            break
        states[found.device] = geometry.with_instance(name, found.start, states[found.device])
    return at_most(f"{names}: longest decision, {GPUS} GPUs", [max(took_ms)], "ms", DECISION_MS)


if __name__ == "__main__":
    main()
