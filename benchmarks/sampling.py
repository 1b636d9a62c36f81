"""How long a resume of `phalanx.torch.sampler` takes: from the position to the first indices. Prints a table, or JSON with --json."""

from __future__ import annotations

import argparse
import json
import statistics
import time

from phalanx.torch.sampling import ElasticSampler


def resume_ms(samples: int, global_batch: int, position: int) -> float:
    """Return the milliseconds from nothing to the first batch at a position, on one of 64 ranks."""
    began = time.perf_counter()
    order = ElasticSampler(samples, seed=1, global_batch=global_batch, rank=3, world_size=64)
    order.position = position
    next(iter(order))
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampling", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000_000)
    parser.add_argument("--global-batch", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    taken = [
        resume_ms(given.samples, given.global_batch, given.samples * 2 // given.global_batch + at) for at in range(30)
    ]
    order = ElasticSampler(given.samples, seed=1, global_batch=given.global_batch, rank=0, world_size=1)
    began = time.perf_counter()
    for batch in range(100):
        order.indices(batch)
    per_s = 100 * given.global_batch / (time.perf_counter() - began)
    figures = {
        "samples": given.samples,
        "resume_ms": round(statistics.median(taken), 3),
        "resume_ms_max": round(max(taken), 3),
        "indices_per_s": round(per_s),
    }
    print(json.dumps(figures) if given.json else "\n".join(f"{name:16} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
