"""How fast a port and a web page of a job are, reached through the head, and how soon `phalanx dev` shows its prompt. Prints a table, or JSON with --json.

Client, head, node and the job's program share this machine. The same program is also reached directly, for what is added.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import socket
import statistics
import sys
import threading
import time
from typing import Any

from benchmarks.cluster import ROOT, BenchmarkCluster, cluster, wait_until
from phalanx.client import Client
from phalanx.client.port_forward import ForwardedPort, PortForward

_MIB = 1 << 20
# Four ports: it echoes, sends, takes what comes and then answers one byte, and answers requests of HTTP with one large body.
_SERVER = """
import os, socket, sys, threading
size = int(sys.argv[1])
def echo(line):
    while data := line.recv(65536):
        line.sendall(data)
def send(line):
    left = size
    while left:
        left -= line.send(bytes(min(left, 1 << 18)))
def take(line):
    left = size
    while left and (data := line.recv(1 << 18)):
        left -= len(data)
    line.sendall(b"x")
def answer(line):
    if line.recv(65536):
        line.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n" % size)
        send(line)
listeners = []
def serve(listener, work):
    while True:
        line = listener.accept()[0]
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        def run(line=line):
            with line:
                work(line)
        threading.Thread(target=run).start()
for work in (echo, send, take, answer):
    listeners.append(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=serve, args=(listeners[-1], work)).start()
with open("ports.new", "w") as file:
    file.write(" ".join(str(one.getsockname()[1]) for one in listeners))
os.rename("ports.new", "ports")
"""


def measure(size_mib: int, trips: int, sessions: int) -> dict[str, Any]:
    """Run all measurements on one head; return the figures."""
    with cluster("1x1") as head:
        job_id = head.submit(name="ports", run=[sys.executable, "-c", _SERVER, str(size_mib * _MIB)], gpus=1)
        ports_file = os.path.join(head.home, "ports")
        wait_until(lambda: os.path.exists(ports_file), "the job serves")
        with open(ports_file, encoding="utf-8") as file:
            ports = [int(word) for word in file.read().split()]
        forward = PortForward(Client(home=head.home), job_id, [ForwardedPort(local=0, remote=port) for port in ports])
        ready = threading.Event()
        thread = threading.Thread(target=forward.run, args=(ready.set,))
        began = time.perf_counter()
        thread.start()
        ready.wait(30)
        opened_s = time.perf_counter() - began
        here = [local for local, _ in forward.bound()]
        trip, direct = _round_trip_ms(here[0], trips), _round_trip_ms(ports[0], trips)
        head_pid = head.head.pid if head.head is not None else 0
        began_cpu_s = _cpu_s(head_pid)
        down = _down_mib_per_s(here[1], size_mib)
        down_ms = 1000 * (_cpu_s(head_pid) - began_cpu_s)
        up = _up_mib_per_s(here[2], size_mib)
        forward.close()
        thread.join()
        before_s = _cpu_s(head_pid)
        page = _page_mib_per_s(head, f"/j/{job_id}/{ports[3]}/", size_mib)
        head_ms = 1000 * (_cpu_s(head_pid) - before_s)
        prompts = _prompts_s(head.home, sessions)
    prompt = (
        {"dev_prompt_s": round(statistics.median(prompts), 2), "dev_prompt_max_s": round(max(prompts), 2)}
        if prompts
        else {}
    )
    return {
        **prompt,
        "mib_per_s": round(min(down, up), 1),
        "down_mib_per_s": round(down, 1),
        "up_mib_per_s": round(up, 1),
        "down_head_cpu_ms_per_mib": round(down_ms / size_mib, 2),
        "page_mib_per_s": round(page, 1),
        "page_head_cpu_ms_per_mib": round(head_ms / size_mib, 2),
        "round_trip_ms": round(trip, 2),
        "direct_round_trip_ms": round(direct, 3),
        "open_ms": round(1000 * opened_s, 1),
    }


def _prompts_s(home: str, count: int) -> list[float]:
    """Return the times from the start of `phalanx dev` to the prompt of its shell, each in a session of its own, on a warm head."""
    took = []
    environment = {**os.environ, "PHALANX_HOME": home, "PYTHONPATH": os.path.join(ROOT, "src")}
    for number in range(count):
        began = time.perf_counter()
        words = [sys.executable, "-m", "phalanx.app.cli", "dev", "--name", f"dev{number}", "--", "bash", "--norc", "-i"]
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(words[0], words, environment)
        seen = b""
        while b"# " not in seen and b"$ " not in seen:
            seen += os.read(terminal, 4096)
        took.append(time.perf_counter() - began)
        os.write(terminal, b"exit 0\n")
        with contextlib.suppress(OSError):  # it has ended
            while os.read(terminal, 4096):
                pass
        os.waitpid(pid, 0)
        os.close(terminal)
    return took


def _round_trip_ms(port: int, trips: int) -> float:
    """Return the median over `trips` bytes that came back."""
    took = []
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(trips):
            began = time.perf_counter()
            line.sendall(b"x")
            line.recv(1)
            took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def _down_mib_per_s(port: int, size_mib: int) -> float:
    began, left = time.perf_counter(), size_mib * _MIB
    with socket.create_connection(("127.0.0.1", port)) as line:
        while left:
            left -= len(line.recv(1 << 18))
    return size_mib / (time.perf_counter() - began)


def _up_mib_per_s(port: int, size_mib: int) -> float:
    began, piece = time.perf_counter(), bytes(1 << 18)
    with socket.create_connection(("127.0.0.1", port)) as line:
        for _ in range(size_mib * 4):
            line.sendall(piece)
        line.recv(1)
    return size_mib / (time.perf_counter() - began)


def _page_mib_per_s(head: BenchmarkCluster, path: str, size_mib: int) -> float:
    """Download a page of the job's program through the head, without a browser."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{head.port}\r\nAuthorization: Bearer {head.token()}\r\n\r\n"
    began, seen = time.perf_counter(), b""
    with head.connect() as line:
        line.sendall(request.encode())
        while b"\r\n\r\n" not in seen:
            seen += line.recv(1 << 18)
        top, _, body = seen.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 200 "), top
        left = size_mib * _MIB - len(body)
        while left:
            left -= len(line.recv(1 << 18)) or left + 1
    return size_mib / (time.perf_counter() - began)


def _cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.sessions", description=__doc__)
    parser.add_argument("--mib", type=int, default=400, help="bytes of one stream, in each direction")
    parser.add_argument("--trips", type=int, default=500, help="round trips; their median counts")
    parser.add_argument(
        "--sessions", type=int, default=10, help="sessions of phalanx dev; their median counts; 0 leaves them out"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = measure(given.mib, given.trips, given.sessions)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:22} {value}")


if __name__ == "__main__":
    main()
