"""The terminal of a rank, with real processes: clients come, go and return, and it ends as its program does."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from phalanx.client import terminal_relay
from phalanx.node.terminal import host_main
from tests.pty_client import PtyClient

PYTHON = (sys.executable, "-I", "-q", "-u")


@pytest.fixture
def start(tmp_path):
    """Starts a host; its output goes to the file `log`."""
    hosts = []

    def run(*command):
        words = [sys.executable, "-I", host_main.__file__, str(tmp_path / "terminal"), *command]
        with open(tmp_path / "log", "wb") as log:
            hosts.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, cwd=tmp_path))
        return hosts[0]

    yield run
    for host in hosts:
        host.kill()
        host.wait()


def attach(tmp_path):
    environment = {**os.environ, "PHALANX_HOSTFILE": str(tmp_path / "hostfile")}
    return PtyClient(sys.executable, "-S", "-E", terminal_relay.__file__, env=environment)


def test_a_program_keeps_its_state_while_clients_leave_break_and_return(start, tmp_path):
    host = start(*PYTHON)
    first = attach(tmp_path)
    first.until(">>> ")
    first.type("x = 41; import os; print(os.get_terminal_size())\r")
    first.until("columns=100, lines=30")
    first.resize(20, 60)
    first.type("print(os.get_terminal_size())\r")
    first.until("columns=60, lines=20")
    first.type("\x1d\x1d")
    first.type("\x1d")
    assert first.end() == terminal_relay.DETACHED_CODE
    assert first.seen.endswith(terminal_relay.DETACHED)
    second = attach(tmp_path)
    second.until("columns=60, lines=20")
    second.kill()
    third, fourth = attach(tmp_path), attach(tmp_path)
    for one in (third, fourth):
        one.until("columns=60, lines=20")
    third.type("x + 1\r")
    for one in (third, fourth):
        one.until("42")
    third.type("import time; time.sleep(1000)\r")
    fourth.until("sleep(1000)")
    while b"KeyboardInterrupt" not in third.seen[-200:]:
        third.type("\x03")
        third.until("\n")
    while b"calm" not in third.seen[-200:]:
        third.type("print('ca' + 'lm')\r")  # after every ^C: one that came late would kill Python while it exits
        third.until("\n")
    fourth.type("exit(7)\r")
    while not third.ends_within(5.0):
        fourth.type("exit(7)\r")
    assert (third.end(), fourth.end(), host.wait()) == (7, 7, 7)
    assert b"42" in (tmp_path / "log").read_bytes(), "the log of the rank has the output too"


def test_a_program_that_is_asked_to_stop_may_save_and_a_shell_at_its_prompt_is_hung_up(start, tmp_path):
    saves = (
        "import os, signal, time; signal.signal(15, lambda *_: (time.sleep(0.5), os.write(1, b'saved'), os._exit(0)))"
    )
    host = start("bash", "--norc", "-i")
    client = attach(tmp_path)
    client.until("$ " if os.getuid() else "# ")
    client.type(f"{sys.executable} -I -c \"{saves}; os.write(1, b'ru' + b'ns'); time.sleep(1000)\"\r")
    client.until("runs")
    for pid in descendants(host.pid):  # as a supervisor does
        os.kill(pid, signal.SIGTERM)
    client.until("saved")
    client.end()
    assert host.wait() != 0


def test_a_signal_that_ends_the_program_ends_the_host(start, tmp_path):
    host = start("sh", "-c", "echo up; kill -9 $$")
    client = attach(tmp_path)
    client.until("up")
    assert (client.end(), host.wait()) == (137, -9)


def test_a_command_that_does_not_exist_is_told(start, tmp_path):
    host = start("/no/such/program")
    client = attach(tmp_path)
    client.until("/no/such/program: No such file or directory")
    assert (client.end(), host.wait()) == (127, 127)


def test_nonsense_from_a_client_ends_its_connection_alone(start, tmp_path):
    host = start(*PYTHON)
    good = attach(tmp_path)
    good.until(">>> ")
    for nonsense in (b"\xff" * 50, struct.pack(">BI", 0, 1 << 30), struct.pack(">BI", 1, 3) + b"abc"):
        with terminal_relay.connect(str(tmp_path)) as bad:
            bad.sendall(nonsense)
            bad.settimeout(30)
            assert bad.recv(1) == b""
    good.type("exit()\r")
    assert (good.end(), host.wait()) == (0, 0)


def test_a_client_that_reads_nothing_delays_nobody(start, tmp_path):
    start(*PYTHON)
    good = attach(tmp_path)
    good.until(">>> ")
    with terminal_relay.connect(str(tmp_path)) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(struct.pack(">BIHH", terminal_relay.SIZE, 4, 30, 100))
        good.type("for i in range(30000): print('x' * 90)\r\rprint('e' + 'nd')\r")
        good.until(">>> end")


def test_detach_keys_reach_the_program_only_when_they_are_not_three(monkeypatch):
    here, there = socket.socketpair()
    relay, now_s = terminal_relay.Relay(here), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])

    def got():
        there.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return there.recv(1000)[host_main.HEADER.size :]
        return b""

    assert [relay.detaches(b"\x1d"), relay.detaches(b"\x1d"), got()] == [False, False, b""]
    assert [relay.detaches(b"a\x1d"), got()] == [False, b"\x1d\x1da"]
    now_s[0] = 0.9
    assert [relay.detaches(b"\x1d"), got()] == [False, b""]
    now_s[0] = 1.1
    assert [relay.detaches(b"\x1d"), got()] == [False, b"\x1d"], "the first one is too long ago"
    assert [relay.detaches(b"\x1dlost"), got()] == [True, b""]
    relay.held.clear()
    relay.detaches(b"\x1d")
    now_s[0] = 2.2
    assert [relay.detaches(b""), got()] == [False, b"\x1d"], "the second is over"


def descendants(pid):
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        with open(f"/proc/{one}/task/{one}/children", encoding="ascii") as file:
            waiting += map(int, file.read().split())
    return found


def test_input_that_a_program_does_not_read_waits_and_arrives_whole(start, tmp_path):
    reads = (
        "import os, sys, tty; tty.setraw(0); os.write(1, b'ready'); open('go').read(); n = 0\n"
        f"while n < {8 << 20}: n += len(os.read(0, 1 << 16))\n"
        "sys.exit(9)"
    )
    os.mkfifo(tmp_path / "go")
    host = start(*PYTHON, "-c", reads)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(120)
    while connection.connect_ex(str(tmp_path / "terminal")):
        pass
    connection.sendall(host_main.HEADER.pack(host_main.SIZE, 4) + struct.pack(">HH", 24, 80))
    seen = b""
    while b"ready" not in seen:
        seen += connection.recv(1 << 16)
    connection.setblocking(False)
    left = memoryview(b"".join(host_main.HEADER.pack(host_main.INPUT, 1 << 16) + bytes(1 << 16) for _ in range(8 << 4)))
    with contextlib.suppress(BlockingIOError):
        while left:
            left = left[connection.send(left) :]
            time.sleep(0.01)  # for the host to read what it will
    assert len(left) > 4 << 20, "the host holds a bounded part of it"
    used = cpu_ticks(host.pid)
    time.sleep(0.5)
    assert cpu_ticks(host.pid) - used < 20, "it waits without a loop"
    (tmp_path / "go").write_text("")
    connection.settimeout(120)
    connection.sendall(left)
    assert host.wait(timeout=120) == 9


def cpu_ticks(pid):
    """Hundredths of a second of CPU that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
