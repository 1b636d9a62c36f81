"""The gateways that are compared, as processes on loopback: ours, the bare proxy, and peers as far as `build/peers` or the machine has them.

    python3 -m venv build/peers/litellm && build/peers/litellm/bin/pip install 'litellm[proxy]'      (smg, vllm-router, sglang-router likewise)

Their telemetry and look-ups of prices are off: nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import free_port

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "build" / "peers"
START_S = 180.0
QUIET = {
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
}
LITELLM = """
model_list:
{models}
general_settings: {{master_key: good-key}}
litellm_settings: {{telemetry: false, drop_params: false}}
"""
HAPROXY = """
global
  maxconn 20000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  balance leastconn
{servers}
"""


@dataclass(slots=True)
class ComparedGateway:
    """One gateway process: its name, URL, and the processes under it."""

    name: str
    url: str
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Seconds of processor time of the process, its threads and its children, by the scheduler's own account."""
        return sum(_cpu_ns(pid) for pid in _tree(self.process.pid)) / 1e9

    def memory_mib(self) -> float:
        """Resident memory, in MiB."""
        return sum(_resident_kib(pid) for pid in _tree(self.process.pid)) / 1024

    def stop(self) -> None:
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _tree(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    found += _tree(int(child))
    return found


def _cpu_ns(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


def _resident_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
    return 0


def start_gateway(name: str, words: list[str], port: int, folder: Path) -> ComparedGateway | None:
    """Start a gateway and wait until it answers; None if it does not, after printing the end of its log."""
    path = folder / f"{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **QUIET}, stdout=log, stderr=log, start_new_session=True
        )
    one = ComparedGateway(name, f"http://127.0.0.1:{port}", process)
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError):
            request = urllib.request.Request(
                one.url + "/v1/chat/completions",
                data=b'{"model": "chat", "messages": [{"role": "user", "content": "hi"}]}',
                headers={"Content-Type": "application/json", "Authorization": "Bearer good-key"},
            )
            with urllib.request.urlopen(request, timeout=20) as answer:
                if answer.status == 200:
                    return one
        time.sleep(0.25)
    one.stop()
    print(path.read_text(errors="replace")[-2000:], file=sys.stderr)
    return None


def commands(urls: list[str], head: str, folder: Path, only: set[str]) -> dict[str, tuple[list[str], int]]:
    """Return the command and port of each gateway that is installed."""
    found: dict[str, tuple[list[str], int]] = {}

    def add(name: str, words: list[str], port: int, program: Path | str | None) -> None:
        if program and Path(program).exists() and (not only or name in only):
            found[name] = (words, port)

    port = free_port()
    add(
        "phalanx",
        [sys.executable, "-m", "tests.gateway_rig", "--head", head, "--port", str(port)],
        port,
        sys.executable,
    )
    port = free_port()
    add("aiohttp", [sys.executable, "-m", "benchmarks.gateway_bare", str(port), *urls], port, sys.executable)
    for name, words in (
        ("vllm-router", ["vllm-router", "--policy", "cache_aware", "--prometheus-port", str(free_port())]),
        ("smg", ["smg", "launch", "--policy", "cache_aware", "--prometheus-port", str(free_port())]),
        (
            "sglang-router",
            ["sglang-router", "launch", "--policy", "cache_aware", "--prometheus-port", str(free_port())],
        ),
    ):
        port, program = free_port(), PEERS / name / "bin" / words[0]
        more = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--log-level", "error"]
        add(name, [str(program), *words[1:], *more], port, program)
    port, program = free_port(), PEERS / "litellm" / "bin" / "litellm"
    models = "\n".join(
        f"  - {{model_name: chat, litellm_params: {{model: openai/chat, api_base: '{one}/v1', api_key: none}}}}"
        for one in urls
    )
    (folder / "litellm.yaml").write_text(LITELLM.format(models=models))
    words = [str(program), "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    add("litellm", [*words, "--telemetry", "False"], port, program)
    port = free_port()
    servers = "\n".join(f"  server s{number} {one.removeprefix('http://')}" for number, one in enumerate(urls))
    (folder / "haproxy.cfg").write_text(HAPROXY.format(port=port, servers=servers))
    program_path = shutil.which("haproxy") or "/usr/sbin/haproxy"
    add("haproxy", [program_path, "-db", "-f", str(folder / "haproxy.cfg")], port, program_path)
    return found
