"""Phalanx on real NVIDIA GPUs, end to end.

`python -m benchmarks.gpu --out FOLDER [--only nvml,jobs,...]` starts a head on this machine with its GPUs and runs jobs on the first one. It
compares what Phalanx says with what an independent reader of the driver's counter saw, and what the planner promises with what a training
took. It changes no setting of a GPU. `docs/gpu.md` has the figures of the runs so far. Needs torch with CUDA, and for `train` transformers,
for `fault` CuPy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster import ROOT, free_port

RANK = os.path.join(ROOT, "benchmarks", "gpu_rank.py")
TRAININGS = (
    ("llama-3.2-1b", 2, 4096, "eager"),
    ("llama-3.2-1b", 2, 4096, "compile"),
    ("llama-3.2-3b", 1, 4096, "eager"),
)


@dataclass(slots=True)
class Meter:
    """Reads power and the counter of energy of the first GPU 20 times a second, apart from Phalanx."""

    rows: list[tuple[float, int, int]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Read until `ended`; seconds of the epoch, milliwatts, millijoules."""
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self.ended.wait(0.05):
            self.rows.append(
                (time.time(), pynvml.nvmlDeviceGetPowerUsage(gpu), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
            )

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """What the counter grew, and the integral of the power, in joules."""
        rows = [row for row in self.rows if begin_s <= row[0] <= end_s]
        integral = sum((b[0] - a[0]) * (a[1] + b[1]) / 2e3 for a, b in itertools.pairwise(rows))
        return {
            "seconds": rows[-1][0] - rows[0][0],
            "counter_j": (rows[-1][2] - rows[0][2]) / 1e3,
            "integral_j": integral,
            "updates": len({row[2] for row in rows}) - 1,
        }


@dataclass(slots=True)
class Bench:
    """A head on this machine, and what was found so far."""

    out: str
    port: int = field(default_factory=free_port)
    found: dict[str, Any] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    environment: dict[str, str] = field(default_factory=dict)

    def phalanx(self, *arguments: str, limit_s: float = 120.0, quiet: bool = False) -> str:
        """Run one command; return what it prints."""
        command = [sys.executable, "-m", "phalanx.app.cli", *arguments]
        began_s = time.monotonic()
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False, cwd=self.out
        )
        text = ("" if quiet else done.stdout) + (f"\n[stderr]\n{done.stderr}" if done.stderr else "")
        self.log(
            f"$ phalanx {' '.join(arguments)}   # exit {done.returncode}, {time.monotonic() - began_s:.1f} s\n{text}"
        )
        return done.stdout

    def job(self, *command: str, options: tuple[str, ...] = ("--gpus", "1"), limit_s: float = 180.0) -> Any:
        """Run one job to its end; return the line of JSON that it printed, or all that it printed."""
        printed = self.phalanx(
            "run", *options, "-e", "PYTHONPATH", "--", sys.executable, RANK, *command, limit_s=limit_s
        )
        for line in reversed(printed.splitlines()):
            _, brace, rest = line.partition("{")
            if brace:
                try:
                    return json.loads(brace + rest)
                except ValueError:
                    continue
        return printed[-2000:]

    def json(self, *arguments: str) -> Any:
        """Run one command with --json."""
        printed = self.phalanx(*arguments, "--json", quiet=True)
        return json.loads(printed) if printed.strip() else None

    @property
    def node(self) -> str:
        """The name of this machine's node."""
        return str(self.json("nodes")[0]["id"])

    def log(self, text: str) -> None:
        """Append to the log, and print."""
        print(text, flush=True)
        with open(os.path.join(self.out, "gpu.log"), "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def section(self, name: str, run: Callable[[Bench], Any]) -> None:
        """Run one part; an error ends only that part."""
        self.log(f"=== {name}")
        began_s = time.monotonic()
        try:
            self.found[name] = run(self)
        except Exception:
            self.found[name] = {"error": traceback.format_exc()}
        self.log(
            f"--- {name}: {time.monotonic() - began_s:.1f} s\n{json.dumps(self.found[name], indent=1, default=str)}"
        )
        with open(os.path.join(self.out, "gpu.json"), "w", encoding="utf-8") as file:
            json.dump(self.found, file, indent=1, default=str)


def nvml(_bench: Bench) -> Any:
    """Read the probe that the supervisor uses, idle and under load."""
    from phalanx.node.probes.nvml import open_nvml

    probe = open_nvml()
    assert probe is not None, "no GPU"
    facts = [str(one) for one in probe.devices()]
    samples = []
    time.sleep(1)
    samples.append(("idle", str(probe.sample()[0])))
    worker = subprocess.Popen([sys.executable, RANK, "busy", "4"], stdout=subprocess.PIPE, text=True)
    until_s, took_s = time.monotonic() + 60, []
    while worker.poll() is None and time.monotonic() < until_s:
        began_s = time.monotonic()
        reading = probe.sample()[0]
        took_s.append(time.monotonic() - began_s)
        samples.append((f"pid {worker.pid}", str(reading)))
        time.sleep(1)
    time.sleep(1)
    samples.append(("after", str(probe.sample()[0])))
    probe.close()
    return {"facts": facts, "samples": samples, "sample_ms": [round(one * 1e3, 2) for one in took_s]}


def jobs(bench: Bench) -> Any:
    """Run jobs whose behaviour is known, and read the ledger and the energy."""
    start_s = time.time()
    found = {
        "busy": bench.job("busy", "15"),
        "hold": bench.job("hold", "15"),
        "starve": bench.job("starve", "20"),
    }
    time.sleep(12)
    end_s = time.time()
    found["meter"] = bench.meter.between(start_s, end_s)
    found["ps"] = bench.json("ps", "--all")
    found["energy"] = bench.json("report", "energy", "--by", "job", "--since", "1h")
    found["usage"] = bench.json("report", "usage", "--by", "job", "--since", "1h")
    for job in ("1", "2", "3"):
        bench.phalanx("usage", job)
    bench.phalanx("nodes")
    bench.phalanx("waste")
    bench.phalanx("report", "states", bench.node)
    return found


def shares(bench: Bench) -> Any:
    """Run quarters of a GPU by MPS and halves by time, side by side."""
    found: dict[str, Any] = {}

    def run(key: str, options: tuple[str, ...]) -> None:
        found[key] = bench.job("share", "6", options=options)

    for kind, part, count in (("mps", "1/4", 1), ("mps", "1/4", 4), ("time", "1/2", 2)):
        threads = [
            threading.Thread(target=run, args=(f"{kind} {part} {index} of {count}", ("--gpus", part, "--share", kind)))
            for index in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def fault(bench: Bench) -> Any:
    """A job that writes outside of its memory, and whether node and next job are unharmed."""
    first = bench.job("fault")
    bench.phalanx("ps", "--all")
    job = bench.json("ps", "--all")[-1]
    bench.phalanx("show", str(job["id"]), "--story")
    bench.phalanx("nodes")
    return {"first": first, "next": bench.job("hello")}


def collectives(bench: Bench) -> Any:
    """NCCL with one rank, and two ranks on one GPU, which NCCL refuses."""
    return {
        "one": bench.job("nccl"),
        "two on one": bench.job("nccl", options=("--gpus", "1", "--tasks-per-node", "2"), limit_s=90),
    }


def calibrate(bench: Bench) -> Any:
    """Measure the fleet, and plan with what was measured."""
    bench.phalanx("calibrate", "--quick", "--python", sys.executable, limit_s=200)
    bench.phalanx("plan", "llama-3.2-1b", "--fleet", "here", "--seq", "4096", "--global-batch", "2")
    return bench.json("calibrate", "--show")


def train(bench: Bench) -> Any:
    """Train real models, beside the plan for them: by the tables, and by the calibrated fleet if there is one."""
    found = []
    for model, batch, seq, mode in TRAININGS:
        got = bench.job("train", "0", model, str(batch), str(seq), mode, limit_s=240)
        for machine in (("--gpus", "1xh100:1"), ("--fleet", "here")):
            plan = bench.json(
                "plan", model, *machine, "--seq", str(seq), "--global-batch", str(batch),
                "--stack", f"fsdp2-{mode}", "--layout", f"mbs={batch}",
            )  # fmt: skip
            best = plan["layouts"][0] if plan and plan.get("layouts") else None
            found.append(
                {
                    "asked": [model, batch, seq, mode, *machine],
                    "got": got,
                    "plan": best and {key: best[key] for key in ("step", "memory", "mfu")},
                }
            )
    return found


def recover(bench: Bench) -> Any:
    """Train with checkpoints, kill the rank, and see it resume."""
    script = os.path.join(ROOT, "examples", "train_gpt", "train.py")
    options = ["--d-model", "768", "--layers", "8", "--heads", "12", "--batch", "32", "--seq", "512"]
    bench.phalanx(
        "submit", "--gpus", "1", "--name", "gpt", "--retry", "2", "-e", "PYTHONPATH", "--",
        sys.executable, script, *options, "--steps", "160", "--save-every-steps", "40",
    )  # fmt: skip
    time.sleep(18)
    job = str(bench.json("ps", "--all")[-1]["id"])
    bench.phalanx("exec", job, "--", "sh", "-c", "kill -9 $(pgrep -f '[t]rain_gpt/train.py')")
    bench.phalanx("attach", job, limit_s=150)
    return bench.phalanx("show", job, "--story")


SECTIONS = {one.__name__: one for one in (nvml, jobs, fault, calibrate, collectives, train, shares, recover)}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="folder for gpu.log and gpu.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help="the parts to run")
    options = parser.parse_args()
    bench = Bench(out=os.path.abspath(options.out))
    home = os.path.join(bench.out, "home") if not os.environ.get("PHALANX_HOME") else os.environ["PHALANX_HOME"]
    path = os.pathsep.join([os.path.join(ROOT, "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    bench.environment = {**os.environ, "PHALANX_HOME": home, "PYTHONPATH": path}
    os.environ["PYTHONPATH"] = path
    reader = threading.Thread(target=bench.meter.run, daemon=True)
    reader.start()
    try:
        bench.section("up", lambda it: [it.phalanx("up", "--port", str(it.port)), it.phalanx("doctor")])
        for name in options.only.split(","):
            bench.section(name, SECTIONS[name])
    finally:
        bench.phalanx("down", "--cancel-jobs")
        bench.meter.ended.set()


if __name__ == "__main__":
    main()
