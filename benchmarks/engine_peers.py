"""The native ways of the engines to start a job, for comparison: plain `srun` and `sbatch` on the same Slurm, and `ray job submit` on a
separate Ray cluster with three nodes, because Phalanx runs Ray without its dashboard, which accepts such jobs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from benchmarks.cluster import wait_until
from tests.lab.lab import Lab

LINE: Final = "ready"
SLURM_JOBS: Final = 100
RAY_JOBS: Final = 12
RAY_PORT: Final = 6399
DASHBOARD: Final = "http://127.0.0.1:8265"
# Ray without a token, because it runs in the network of the lab. Otherwise Ray writes a token to the folder of the user.
RAY_SET: Final = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
_HANG_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWays:
    """Ways to start a job or a node without Phalanx, by name: each measures once and returns seconds, or jobs per second."""

    lines: dict[str, Callable[[], float]] = field(default_factory=dict)
    jobs: dict[str, Callable[[], float]] = field(default_factory=dict)
    joins: dict[str, Callable[[], float]] = field(default_factory=dict)


@contextlib.contextmanager
def native_ways(name: str, lab: Lab) -> Iterator[NativeWays]:
    """Return the native ways of an engine."""
    if name == "slurm":
        yield NativeWays(
            lines={"srun": lambda: _srun(lab), "sbatch and srun": lambda: _sbatch_line(lab)},
            jobs={"sbatch": lambda: _sbatch_rate(lab)},
        )
    elif name == "ray":
        with _plain_ray(lab) as environment:
            yield NativeWays(
                lines={"ray job submit": lambda: _ray_line(lab, environment)},
                jobs={"ray job submit": lambda: _ray_rate(lab, environment)},
                joins={"ray start": lambda: _ray_start(lab, environment)},
            )
    else:
        yield NativeWays()


def seconds_to_line(
    command: list[str], *, environment: Mapping[str, str] | None = None, folder: str | None = None
) -> float:
    """Return the seconds from the exec of a command until it prints the line of the job.

    Raises:
        RuntimeError: it ended without that line.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=folder, text=True
    )
    assert process.stdout is not None
    found = any(line.strip().endswith(LINE) for line in process.stdout)
    seconds = time.monotonic() - began
    _, errors = process.communicate(timeout=_HANG_S)
    if not found:
        raise RuntimeError(f"{command} did not print {LINE!r}, exit code {process.returncode}: {errors[-500:]}")
    return seconds


# ---- Slurm --------------------------------------------------------------------------------------------------------------


def _srun(lab: Lab) -> float:
    return seconds_to_line(lab.command("h0", ["srun", "--gres=gpu:1", "echo", LINE]))


def _sbatch_line(lab: Lab) -> float:
    """Run a batch script that starts its task with srun, on the host whose disk is visible here."""
    path = "/var/tmp/line"
    output = lab.host("h0").path(path)
    script = f"srun echo {LINE}"
    began = time.monotonic()
    lab.run("h0", ["sbatch", "--nodelist=h0", "--gres=gpu:1", f"--output={path}", f"--wrap={script}"])
    wait_until(
        lambda: output.exists() and LINE in output.read_text(encoding="utf-8"), "the line is there", every_s=0.005
    )
    seconds = time.monotonic() - began
    output.unlink()
    return seconds


def _sbatch_rate(lab: Lab) -> float:
    submit = "sbatch --quiet --gres=gpu:1 --output=/dev/null --wrap=true"
    began = time.monotonic()
    lab.run("h0", ["sh", "-c", f"for i in $(seq {SLURM_JOBS}); do {submit}; done"], timeout_s=_HANG_S)
    wait_until(
        lambda: not lab.run("h0", ["squeue", "--noheader"]).strip(), "all have ended", every_s=0.1, limit_s=300.0
    )
    return SLURM_JOBS / (time.monotonic() - began)


# ---- Ray ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _plain_ray(lab: Lab) -> Iterator[dict[str, str]]:
    environment = {**os.environ, **RAY_SET}
    head = [
        "--head",
        f"--port={RAY_PORT}",
        f"--node-ip-address={lab.host('h0').address}",
        "--include-dashboard=true",
        "--dashboard-port=8265",
        "--ray-client-server-port=20111",
        "--temp-dir=/var/tmp/plain-ray",
    ]
    nodes = [_ray_node(lab, "h0", head, environment)]
    try:
        ask = lab.command("h0", [*_ray("job"), "list", "--address", DASHBOARD])
        wait_until(lambda: _succeeds(ask, environment), "the dashboard answers", every_s=0.5)
        nodes += [_ray_node(lab, name, _address(lab, name), environment) for name in list(lab.hosts)[1:]]
        yield environment
    finally:
        for process in nodes:
            process.terminate()
        for process in nodes:
            process.wait()


def _ray_node(lab: Lab, name: str, words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Run `ray start --block`, and wait until it reports that the node runs."""
    start = [*_ray("start"), "--block", "--num-gpus=2", "--object-store-memory=80000000", *words]
    node = lab.start(name, start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert node.stdout is not None
    lines = []
    for line in node.stdout:
        lines.append(line)
        if "Ray runtime started" in line:
            return node
    raise RuntimeError(f"plain Ray did not start on {name}: {''.join(lines)[-500:]}")


def _address(lab: Lab, name: str) -> list[str]:
    return [f"--address={lab.host('h0').address}:{RAY_PORT}", f"--node-ip-address={lab.host(name).address}"]


def _ray_start(lab: Lab, environment: Mapping[str, str]) -> float:
    """Add a node: return the seconds from the exec of `ray start` until it runs. Stop the node again."""
    began = time.monotonic()
    node = _ray_node(lab, "h1", _address(lab, "h1"), environment)
    seconds = time.monotonic() - began
    node.terminate()
    node.wait()
    return seconds


def _ray_line(lab: Lab, environment: Mapping[str, str]) -> float:
    words = [*_ray("job"), "submit", "--address", DASHBOARD, "--entrypoint-num-gpus", "1", "--", "echo", LINE]
    return seconds_to_line(lab.command("h0", words), environment=environment)


def _ray_rate(lab: Lab, environment: Mapping[str, str]) -> float:
    """Submit with the client library of Ray in one program, so that the start of a command is not counted for each job."""
    program = (
        "import time\nfrom ray.job_submission import JobSubmissionClient\n"
        f"client = JobSubmissionClient({DASHBOARD!r})\nbegan = time.monotonic()\n"
        f"jobs = [client.submit_job(entrypoint='true', entrypoint_num_gpus=1) for _ in range({RAY_JOBS})]\n"
        "while not all(client.get_job_status(job).is_terminal() for job in jobs):\n    time.sleep(0.05)\n"
        f"print({RAY_JOBS} / (time.monotonic() - began))\n"
    )
    done = subprocess.run(
        lab.command("h0", [sys.executable, "-c", program]),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return float(done.stdout.split()[-1])


def _ray(verb: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", verb]


def _succeeds(command: list[str], environment: Mapping[str, str]) -> bool:
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0
