"""Measure the history: bytes for each GPU, CPU of writing, and time of reading, beside other ways to store the same values.

python -m benchmarks.history [--json] [--nodes 1000] [--hours 24] [--only day,years,jobs,others] [--keep FOLDER]

`day` records samples of all nodes every 10 s through the head's own recorder, in virtual time. `years` records few nodes for 60 days, from
which the bytes of the longer levels follow. `others` writes the values of `day` as one chunk for each device, as rows in SQLite and, with
`pip install duckdb pyarrow` in this environment, as Parquet read by DuckDB: each for --compare-nodes of the nodes, scaled to all.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import apsw
import msgspec
import numpy as np

from benchmarks.figures import Figure, argument_parser, plain_figure, print_progress, print_report
from phalanx.core.ids import JobId, NodeId, SupervisorId
from phalanx.core.work.pace import TimedStep
from phalanx.ports.history import ChunkKind
from phalanx.store.history.levels import DAY_S, HOUR_S, LEVELS, STEP_S
from phalanx.store.history.metrics import DEVICE_METRICS, NODE_METRICS
from phalanx.store.history.packing import pack_values, unpack
from phalanx.store.history.recorder import HistoryRecorder
from phalanx.store.history.rollups import MAXIMUM, Rollups
from phalanx.store.sql.sqlite.history_file import HistoryFile
from phalanx.wire.supervisor import DeviceSample, SamplesRequest

BEGIN = 1_800_000_000 // (30 * DAY_S) * 30 * DAY_S
DEVICES = 8
POOL = 997  # samples of each kind of node before they repeat: longer than an hour, and no multiple of anything
KINDS = ("idle", "train", "train", "train", "serve")  # three of five nodes train, one serves, one is idle
YEARS_NODES, YEARS_DAYS, YEARS_EVERY_S = 2, 60, 20
READS = 20


class Clock:
    """Virtual time."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def now_s(self) -> float:
        """Unix seconds."""
        return self.at_s

    def boottime_s(self) -> float:
        """The same."""
        return self.at_s


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--compare-nodes", type=int, default=50)
    parser.add_argument("--keep", default="", help="folder that keeps the files")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or scratch
        os.makedirs(folder, exist_ok=True)
        figures: list[Figure] = []
        if not only or only & {"day", "others"}:
            path = os.path.join(folder, "day.db")
            figures += measure_day(path, given.nodes, given.hours)
            if not only or "others" in only:
                figures += measure_others(path, folder, given.nodes, min(given.compare_nodes, given.nodes), given.hours)
        if not only or "years" in only:
            figures += measure_years(os.path.join(folder, "years.db"))
        if not only or "jobs" in only:
            figures += measure_jobs(os.path.join(folder, "jobs.db"))
    print_report("history", figures, as_json=given.json)


# ---- what the head does ------------------------------------------------------------------------------------------------


def measure_day(path: str, nodes: int, hours: int) -> list[Figure]:
    """Record all nodes for some hours, then ask."""
    clock = Clock(float(BEGIN))
    recorder = HistoryRecorder(HistoryFile(path), clock)
    names = [NodeId(f"gpu{number:04}") for number in range(nodes)]
    pools = {kind: pool_of(kind) for kind in set(KINDS)}
    ticks = hours * HOUR_S // STEP_S
    spent_s, worst_s = 0.0, 0.0
    for tick in range(ticks):
        requests = [
            msgspec.structs.replace(pools[KINDS[number % len(KINDS)]][(number * 7919 + tick) % POOL], node_id=name)
            for number, name in enumerate(names)
        ]
        before = time.process_time()
        for request in requests:
            recorder.add_samples(request)
        worst = 0.0
        for second in range(STEP_S):  # as its thread does, each second
            clock.at_s = BEGIN + tick * STEP_S + second + 1.0
            turned = time.process_time()
            recorder.turn()
            worst = max(worst, time.process_time() - turned)
        spent_s += time.process_time() - before
        worst_s = max(worst_s, worst)
        if tick % 360 == 359:
            print_progress(f"hour {(tick + 1) // 360}: {1000 * spent_s / (tick + 1):.0f} ms of CPU each 10 s")
    recorder.turn(everything=True)
    for _ in range(nodes // 5 + 20):  # rolls the last hour up
        recorder.turn()
    stored = recorder.health()
    gpus = nodes * DEVICES
    one = names[nodes // 2 + 1]
    until = clock.at_s
    return [
        plain_figure(f"{hours} h of {gpus:,} GPUs in SQLite", [stored.size_bytes / 1e6], "MB"),
        plain_figure("bytes for each GPU", [stored.size_bytes / gpus], "B"),
        plain_figure("CPU of writing, each 10 s", [1000 * spent_s / ticks], "ms"),
        plain_figure("longest turn of its thread", [1000 * worst_s], "ms"),
        plain_figure(
            "read one device, one day",
            timed(lambda: recorder.rollups(one, until - DAY_S, until, None, devices=1)),
            "ms",
        ),
        plain_figure(
            "read one node, one hour at 10 s",
            timed(lambda: recorder.rollups(one, until - HOUR_S, until, 10, devices=8)),
            "ms",
        ),
        plain_figure(
            "read the fleet's mean, one day",
            timed(lambda: recorder.rollups(None, until - DAY_S, until, None, devices=1)),
            "ms",
        ),
    ]


def measure_years(path: str) -> list[Figure]:
    """Record few nodes for 60 days; count the bytes of each level."""
    clock = Clock(float(BEGIN))
    store = HistoryFile(path)
    recorder = HistoryRecorder(store, clock)
    names = [NodeId(f"gpu{number}") for number in range(YEARS_NODES)]
    pools = [pool_of(kind) for kind in ("train", "serve")]
    for tick in range(YEARS_DAYS * DAY_S // YEARS_EVERY_S):
        clock.at_s = BEGIN + tick * YEARS_EVERY_S + 1.0
        for number, name in enumerate(names):
            recorder.add_samples(msgspec.structs.replace(pools[number % 2][tick % POOL], node_id=name))
        if tick % 15 == 14:
            recorder.turn()
        if tick % (10 * DAY_S // YEARS_EVERY_S) == 0:
            print_progress(f"day {tick * YEARS_EVERY_S // DAY_S} of {YEARS_DAYS}")
    clock.at_s += DAY_S
    for _ in range(20):
        recorder.turn()
    gpus = YEARS_NODES * DEVICES
    sizes = {level.kind: 0 for level in LEVELS}
    for kind in sizes:
        for name in names:
            sizes[kind] += sum(len(chunk.data) for chunk in store.read(kind, name, 0, 1 << 40))
    five, hours = sizes[ChunkKind.FIVE_MINUTES] / gpus, sizes[ChunkKind.HOURS] / gpus * 1095 / YEARS_DAYS
    until = clock.at_s
    since = until - 60 * DAY_S
    return [
        plain_figure("5 min for 60 days, each GPU", [five / 1000], "kB"),
        plain_figure("1 h for 3 years, each GPU", [hours / 1000], "kB"),
        plain_figure(
            "read the fleet's mean, 60 days", timed(lambda: recorder.rollups(None, since, until, None, devices=1)), "ms"
        ),
        plain_figure(
            "read one device, 60 days", timed(lambda: recorder.rollups(names[0], since, until, None, devices=1)), "ms"
        ),
    ]


def measure_jobs(path: str) -> list[Figure]:
    """Curves of jobs with a million steps."""
    clock = Clock(float(BEGIN))
    store = HistoryFile(path)
    recorder = HistoryRecorder(store, clock)
    noise = np.random.default_rng(3).normal(0, 0.02, 1_000_000)
    steps = [
        TimedStep(step, BEGIN + 0.5 * step, 0.4 + 0.01 * (step % 7), 10 / (1 + step / 1000) + float(noise[step]))
        for step in range(noise.size)
    ]
    before = time.process_time()
    for first in range(0, len(steps), 1000):
        recorder.add_steps(JobId("1"), steps[first : first + 1000])
        recorder.job_curve(JobId("0"))  # takes what waits
    spent_s = time.process_time() - before
    recorder.turn(everything=True)
    (chunk,) = store.read(ChunkKind.JOB_CURVE, "1", 0, 1 << 40)
    fresh = HistoryRecorder(store, clock)
    return [
        plain_figure("curve of a job of 1,000,000 steps", [len(chunk.data) / 1000], "kB"),
        plain_figure("CPU of a step", [1e6 * spent_s / len(steps)], "µs"),
        plain_figure("read one job's curve", timed(lambda: fresh.job_curve(JobId("1"))), "ms"),
    ]


def pool_of(kind: str) -> list[SamplesRequest]:
    """Samples of one kind of node in the order of time; each device has its own noise."""
    dice = np.random.default_rng(sum(map(ord, kind)))
    phase = np.arange(POOL)
    devices: list[list[DeviceSample]] = [[] for _ in range(POOL)]
    for index in range(DEVICES):
        drift = np.cumsum(dice.normal(0, 0.15, POOL))
        if kind == "idle":
            busy, power, memory = np.zeros(POOL), 70 + dice.normal(0, 1, POOL), np.full(POOL, 500.0)
        elif kind == "train":  # a checkpoint each five minutes
            saving = phase % 30 == index % 3
            busy = np.where(saving, 0.2, 0.95 + dice.normal(0, 0.02, POOL))
            power = np.where(saving, 220.0, 620 + dice.normal(0, 15, POOL))
            memory = np.full(POOL, 72_000.0)
        else:
            busy = 0.5 + 0.2 * np.sin(phase / 50) + dice.normal(0, 0.1, POOL)
            power = 200 + 350 * busy + dice.normal(0, 20, POOL)
            memory = 60_000 + np.cumsum(dice.normal(0, 30, POOL))
        for at in range(POOL):
            devices[at].append(
                DeviceSample(
                    index=index,
                    uuid="",
                    counter="gpm_sm",
                    utilization=float(np.clip(busy[at], 0, 1)),
                    memory_used_bytes=int(memory[at]) << 20,
                    power_w=float(power[at]),
                    temperature_c=float(np.clip(55 + drift[at], 25, 90)),
                    throttle=("sw_power_cap",) if kind == "train" and dice.random() < 0.02 else (),
                )
            )
    cpu, network = dice.uniform(0.05, 0.2, POOL), dice.normal(2e10, 2e9, (2, POOL))
    return [
        SamplesRequest(
            supervisor_id=SupervisorId("s"),
            node_id=NodeId(""),
            at_s=0.0,
            devices=devices[at],
            cpu_utilization=float(cpu[at]),
            memory_total_bytes=2 << 40,
            memory_available_bytes=(1 << 40) + (int(at) << 24),
            network_received_bytes_per_s=float(network[0, at]),
            network_sent_bytes_per_s=float(network[1, at]),
            every_s=10.0,
        )
        for at in range(POOL)
    ]


def timed(work: Callable[[], object]) -> list[float]:
    """Milliseconds of some runs."""
    found = []
    for _ in range(READS):
        began = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - began))
    return found


# ---- the same values, stored in other ways -------------------------------------------------------------------------------


def measure_others(path: str, folder: str, all_nodes: int, nodes: int, hours: int) -> list[Figure]:
    """Write the values of some nodes of the day in other ways."""
    store = HistoryFile(path)
    names = [f"gpu{number:04}" for number in range(nodes)]
    found: list[list[Rollups]] = []
    for name in names:
        chunks = store.read(ChunkKind.TEN_SECONDS, name, 0, 1 << 40)
        found.append([unpack(chunk.data) for chunk in chunks][-hours:])
    own = sum(len(chunk.data) for name in names for chunk in store.read(ChunkKind.TEN_SECONDS, name, 0, 1 << 40))
    figures = [plain_figure("10 s values: chunk per node and hour", [own / (nodes * DEVICES)], "B/GPU")]
    figures += measure_device_chunks(os.path.join(folder, "devices.db"), found)
    figures += measure_rows(os.path.join(folder, "rows.db"), found, all_nodes)
    try:
        import duckdb  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from pyarrow import parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return figures
    return figures + measure_parquet(folder, found, all_nodes, duckdb, pyarrow, parquet)


def device_rows(part: Rollups, device: int) -> Any:
    """The codes of one device of a chunk."""
    first = len(NODE_METRICS) + device * len(DEVICE_METRICS)
    return part.cells_FRT[MAXIMUM, first : first + len(DEVICE_METRICS)]


def measure_device_chunks(path: str, found: list[list[Rollups]]) -> list[Figure]:
    """One chunk for each device and hour."""
    database = apsw.Connection(path)
    database.pragma("journal_mode", "wal")
    database.execute("CREATE TABLE chunks (series TEXT, begin_s INT, data BLOB, PRIMARY KEY (series, begin_s))")
    before, blank = time.process_time(), np.full((len(NODE_METRICS), HOUR_S // STEP_S), -1, np.int16)
    with database:
        for number, parts in enumerate(found):
            for part in parts:
                for device in range(DEVICES):
                    codes = np.vstack([blank, device_rows(part, device)])
                    data = pack_values(part.begin_s, STEP_S, (device,), codes)
                    database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (f"{number}/{device}", part.begin_s, data))
    spent_s = time.process_time() - before
    gpus, ticks = len(found) * DEVICES, len(found[0]) * HOUR_S / STEP_S

    def read() -> list[Rollups]:
        rows = database.execute("SELECT data FROM chunks WHERE series = '1/3' ORDER BY begin_s").fetchall()
        return [unpack(bytes(data)) for (data,) in rows if isinstance(data, bytes)]

    note = "chunk per device and hour"
    return [
        plain_figure(f"10 s values: {note}", [size_of(path) / gpus], "B/GPU"),
        plain_figure(f"CPU each 10 s of 8,000 GPUs: {note}", [1000 * spent_s / ticks * 8000 / gpus], "ms"),
        plain_figure(f"read one device, one day: {note}", timed(read), "ms"),
    ]


def measure_rows(path: str, found: list[list[Rollups]], all_nodes: int) -> list[Figure]:
    """One row for each device and ten seconds."""
    database = apsw.Connection(path)
    database.pragma("journal_mode", "wal")
    database.pragma("synchronous", 1)
    database.execute(
        "CREATE TABLE samples (device INT, at INT, u INT, m INT, p INT, t INT, x INT, PRIMARY KEY (device, at)) WITHOUT ROWID"
    )
    before = time.process_time()
    for hour in range(len(found[0])):
        tables = [device_rows(parts[hour], device) for parts in found for device in range(DEVICES)]
        begin = found[0][hour].begin_s
        for time_of in range(HOUR_S // STEP_S):  # a tick is a transaction, as samples arrive
            rows = [
                (number, begin + time_of * STEP_S, *map(int, table[:, time_of])) for number, table in enumerate(tables)
            ]
            with database:
                database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    spent_s = time.process_time() - before
    gpus, ticks = len(found) * DEVICES, len(found[0]) * HOUR_S / STEP_S
    fleet = "SELECT at / 300, avg(u) FROM samples GROUP BY 1"
    scale = all_nodes / len(found)
    return [
        plain_figure("10 s values: rows", [size_of(path) / gpus], "B/GPU"),
        plain_figure("CPU each 10 s of 8,000 GPUs: rows", [1000 * spent_s / ticks * 8000 / gpus], "ms"),
        plain_figure(
            "read one device, one day: rows",
            timed(lambda: database.execute("SELECT at, u, m, p, t, x FROM samples WHERE device = 11").fetchall()),
            "ms",
        ),
        plain_figure(
            "read the fleet's mean, one day, of all rows",
            [scale * timed_once(lambda: database.execute(fleet).fetchall())],
            "ms",
        ),
    ]


def measure_parquet(
    folder: str, found: list[list[Rollups]], all_nodes: int, duckdb: Any, pyarrow: Any, parquet: Any
) -> list[Figure]:
    """One Parquet file for each hour, sorted by device, with zstd."""
    place = os.path.join(folder, "parquet")
    os.makedirs(place, exist_ok=True)
    before = time.process_time()
    for hour in range(len(found[0])):
        tables = [device_rows(parts[hour], device) for parts in found for device in range(DEVICES)]
        times = HOUR_S // STEP_S
        columns = {
            "device": np.repeat(np.arange(len(tables), dtype=np.int32), times),
            "time": np.tile(found[0][hour].begin_s + STEP_S * np.arange(times, dtype=np.int64), len(tables)),
        }
        for row, name in enumerate("umptx"):
            columns[name] = np.concatenate([table[row] for table in tables])
        parquet.write_table(
            pyarrow.table(columns),
            os.path.join(place, f"{hour:03}.parquet"),
            compression="zstd",
            row_group_size=times * DEVICES * 16,
            column_encoding=dict.fromkeys(columns, "DELTA_BINARY_PACKED"),
            use_dictionary=False,
        )
    spent_s = time.process_time() - before
    gpus, ticks = len(found) * DEVICES, len(found[0]) * HOUR_S / STEP_S
    size = sum(os.path.getsize(os.path.join(place, name)) for name in os.listdir(place))
    query = f"SELECT time, u, m, p, t, x FROM '{place}/*.parquet' WHERE device = 11 ORDER BY time"
    fleet = f"SELECT time // 300, avg(u) FROM '{place}/*.parquet' GROUP BY 1"
    connection = duckdb.connect()
    scale = all_nodes / len(found)
    return [
        plain_figure("10 s values: Parquet", [size / gpus], "B/GPU"),
        plain_figure("CPU each 10 s of 8,000 GPUs: Parquet", [1000 * spent_s / ticks * 8000 / gpus], "ms"),
        plain_figure("read one device, one day: Parquet", timed(lambda: connection.execute(query).fetchall()), "ms"),
        plain_figure(
            "read the fleet's mean, one day, of all values: Parquet",
            [scale * timed_once(lambda: connection.execute(fleet).fetchall())],
            "ms",
        ),
    ]


def timed_once(work: Callable[[], object]) -> float:
    """Milliseconds, the median of three."""
    return statistics.median(timed(work)[:3])


def size_of(path: str) -> int:
    """Bytes of a database with its WAL."""
    return sum(os.path.getsize(path + ending) for ending in ("", "-wal") if os.path.exists(path + ending))


if __name__ == "__main__":
    main()
