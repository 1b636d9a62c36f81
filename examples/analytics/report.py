"""Aggregate the access logs of a service, a file for each day, with Polars in the workers of a `phalanx.Executor`.

Each worker writes and reads its own days; only the small aggregates travel. `--make` writes the files first, from a seed for each day.
Counts and sums are whole numbers, so the report does not depend on the order in which days end.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import as_completed
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl

import phalanx

mpl.use("Agg")
import matplotlib.pyplot as plt

FIRST = date(2026, 7, 1)
REGIONS = ("asia", "europe", "north-america", "south-america")
BUCKETS = 190  # of latency; each is 5 % wider than the one before, the first begins at 1 ms
GROWTH = 1.05


def make_day(folder: str, day: int, rows: int) -> str:
    """Write the requests of one day: more by day than by night, slower at the end of the period, with one bad day."""
    path = Path(folder) / f"{FIRST + timedelta(days=day)}.parquet"
    draw = np.random.default_rng([18, day])
    hours = np.clip(draw.normal(14, 5, rows), 0, 23.99)
    latency_ms = draw.lognormal(3.6 + day / 200, 0.7, rows)
    failed = draw.random(rows) < (0.08 if day == 40 else 0.004)
    columns = {
        "second": (hours * 3600).astype(np.int32),
        "region": draw.choice(REGIONS, rows, p=(0.3, 0.35, 0.25, 0.1)),
        "status": np.where(failed, 500, 200).astype(np.int16),
        "sent_bytes": draw.integers(200, 90_000, rows),
        "latency_us": (latency_ms * 1000).astype(np.int64),
    }
    part = path.with_suffix(f".{draw.integers(1 << 62)}.part")
    pl.DataFrame(columns).write_parquet(part)
    part.replace(path)  # a killed worker leaves no half file under the name
    return str(path)


def aggregate(path: str) -> dict[str, list[Any]]:
    """Return one day's requests, failures, bytes and latency histogram, for each region and hour."""
    bucket = (pl.col("latency_us") / 1000).log(GROWTH).floor().clip(0, BUCKETS - 1).cast(pl.Int32)
    frame = (
        pl.scan_parquet(path)
        .with_columns(hour=pl.col("second") // 3600, bucket=bucket, day=pl.lit(Path(path).stem))
        .group_by("day", "region", "hour", "bucket")
        .agg(
            requests=pl.len().cast(pl.Int64),
            failures=(pl.col("status") >= 500).sum().cast(pl.Int64),
            sent=pl.col("sent_bytes").sum(),
        )
        .collect()
    )
    return frame.to_dict(as_series=False)


def percentile_ms(counts: pl.DataFrame, share: float) -> float:
    """Return the upper edge of the bucket in which this share of the requests has ended."""
    ordered = counts.group_by("bucket").agg(pl.col("requests").sum()).sort("bucket")
    reached = ordered["requests"].cum_sum() >= share * ordered["requests"].sum()
    return float(GROWTH ** (ordered.filter(reached)["bucket"][0] + 1))


def report(parts: list[dict[str, list[Any]]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows by region, and rows by day."""
    cube = pl.concat([pl.DataFrame(part) for part in parts])
    tables: list[list[dict[str, Any]]] = []
    for key in ("region", "day"):
        rows = []
        for value in cube[key].unique().sort():
            part = cube.filter(pl.col(key) == value)
            rows.append(
                {
                    key: value,
                    "requests": int(part["requests"].sum()),
                    "failures": int(part["failures"].sum()),
                    "sent_bytes": int(part["sent"].sum()),
                    "p50_ms": percentile_ms(part, 0.5),
                    "p99_ms": percentile_ms(part, 0.99),
                }
            )
        tables.append(rows)
    return tables[0], tables[1]


def picture(days: list[dict[str, Any]], file: Path) -> None:
    """Draw latency and failures by day."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 4.5), sharex=True, layout="constrained")
    dates = [date.fromisoformat(row["day"]) for row in days]
    for name, colour in (("p50_ms", "#00539c"), ("p99_ms", "#b8860b")):
        above.plot(dates, [row[name] for row in days], color=colour, label=name[:3])
    above.set(ylabel="latency (ms)", yscale="log", title=f"{len(days)} days of requests: latency and failures")
    above.legend()
    below.bar(dates, [100 * row["failures"] / row["requests"] for row in days], color="#b00020")
    below.set(ylabel="failures (%)")
    figure.autofmt_xdate()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Make the files if asked, aggregate, print, and write `result.json` and `picture.png`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the .parquet files")
    parser.add_argument("--make", type=int, default=0, metavar="DAYS", help="write the files of so many days first")
    parser.add_argument("--rows", type=int, default=200_000, help="of each day")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("output"))
    options = parser.parse_args()
    with phalanx.Executor(gpus=1, max_workers=options.workers, name="analytics") as pool:
        if options.make:
            options.data.mkdir(parents=True, exist_ok=True)
            folder = str(options.data.resolve())
            paths: list[Any] = [pool.submit(make_day, folder, day, options.rows) for day in range(options.make)]
        else:
            paths = sorted(str(path.resolve()) for path in options.data.glob("*.parquet"))
        futures = [pool.submit(aggregate, path) for path in paths]  # a path may be a future: its file is written first
        for done, _ in enumerate(as_completed(futures), 1):
            print(f"job {pool.job_id}: {done} of {len(futures)} days", flush=True)
        regions, days = report([future.result() for future in futures])
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "result.json").write_text(
        json.dumps({"regions": regions, "days": days}, indent=1), encoding="utf-8"
    )
    picture(days, options.output / "picture.png")
    print(pl.DataFrame(regions))


if __name__ == "__main__":
    main()
