"""The lab itself: what engines will be tried on must first be true by itself. Real namespaces; skipped with its reason elsewhere."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.lab.lab import ROOT, Lab, alive
from tests.lab.needs import why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
STREAM = str(ROOT / "tests" / "lab" / "stream.py")
HANG_S = 20.0


@pytest.fixture(scope="module")
def lab():
    with Lab(gpus=2) as built:
        yield built


@pytest.fixture(autouse=True)
def whole(lab):
    yield
    for name, host in lab.hosts.items():
        lab.mend(name)
        if not host.pid:
            lab.restart(name)
        if host.rate_mbit != lab.rate_mbit:
            lab.shape(name, lab.rate_mbit)


def reaches(lab, name, other):
    """Whether a small message goes from one host to another and back."""
    sink = lab.start(other, [sys.executable, "-S", STREAM, "sink"], stdout=subprocess.PIPE)
    try:
        port = sink.stdout.readline().strip()
        code = f"import socket; socket.create_connection(({lab.host(other).address!r}, {port}), timeout=1.0).send(b'x')"
        done = subprocess.run(lab.command(name, [sys.executable, "-S", "-c", code]), capture_output=True, check=False)
        return done.returncode == 0
    finally:
        sink.kill()
        sink.wait()
        sink.stdout.close()


def mbit(lab, name, other, size_bytes):
    sink = lab.start(other, [sys.executable, "-S", STREAM, "sink"], stdout=subprocess.PIPE)
    port = sink.stdout.readline().strip()
    said = lab.run(name, [sys.executable, "-S", STREAM, "send", lab.host(other).address, port, str(size_bytes)])
    sink.wait(timeout=HANG_S)
    sink.stdout.close()
    return float(said) / 1e6


def until(what, *, sentence):
    end = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < end, f"never: {sentence}"
        time.sleep(0.02)


def test_three_hosts_have_their_own_names_and_addresses_and_reach_each_other(lab):
    assert [lab.run(name, ["hostname"]).strip() for name in lab.hosts] == ["h0", "h1", "h2"]
    for name, other in (("h0", "h1"), ("h1", "h2"), ("h2", "h0")):
        assert reaches(lab, name, other)
        assert lab.run(name, ["getent", "hosts", other]).split()[0] == lab.host(other).address


def test_nothing_leaves_the_lab(lab):
    assert lab.run("h0", ["ls", "/sys/class/net"]).split() == ["eth0", "lo"]
    assert "default" not in lab.run("h0", ["ip", "route"])
    assert "phalanx" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout


def test_a_link_carries_what_it_was_shaped_to_and_no_more(lab):
    lab.shape("h1", 80.0)
    shaped = mbit(lab, "h0", "h1", 4_000_000)
    assert 40.0 < shaped < 88.0, f"{shaped:.0f} Mbit/s over a link of 80"
    back = mbit(lab, "h1", "h0", 4_000_000)
    assert 40.0 < back < 88.0, f"{back:.0f} Mbit/s over a link of 80, the other way"
    assert mbit(lab, "h1", "h1", 4_000_000) > 160.0  # inside the host nothing is shaped


def test_links_are_shaped_to_one_gigabit_when_nothing_is_asked(lab):
    rate = mbit(lab, "h0", "h2", 60_000_000)
    assert 100.0 < rate < 1100.0, f"{rate:.0f} Mbit/s over a link of 1000"


def test_a_cut_cable_stops_traffic_and_a_mended_one_carries_it_again(lab):
    lab.cut("h1")
    assert not reaches(lab, "h0", "h1")
    assert reaches(lab, "h0", "h2")
    assert lab.run("h1", ["cat", "/sys/class/net/eth0/carrier"]).strip() == "0"
    lab.mend("h1")
    until(lambda: reaches(lab, "h0", "h1"), sentence="h1 answers again")


def test_a_link_that_loses_every_packet_is_silent_and_one_that_loses_some_still_carries(lab):
    lab.drop("h2", 1.0)
    assert not reaches(lab, "h0", "h2")
    assert reaches(lab, "h0", "h1")
    assert reaches(lab, "h2", "h2")
    lab.drop("h2", 0.02)
    mbit(lab, "h0", "h2", 200_000)  # arrives whole, or it raises
    rules = lab.run("h0", ["iptables", "-S", "INPUT"])
    assert f"-s {lab.host('h2').address}/32" in rules
    lab.mend("h2")
    assert "DROP" not in lab.run("h0", ["iptables", "-S", "INPUT"])


def test_a_killed_host_loses_all_its_processes_also_those_that_fled_their_session(lab):
    flee = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(600)\n"
    started = lab.start("h1", [sys.executable, "-S", "-c", flee + "time.sleep(600)"])
    until(lambda: len(lab.processes("h1")) == 4, sentence="the three of them and process 1 run in h1")
    there = lab.processes("h1")
    lab.kill("h1")
    assert not [pid for pid in there if alive(pid)]
    assert started.wait(timeout=HANG_S) != 0
    assert not reaches_dead(lab, "h0", "h1")
    lab.restart("h1")
    assert reaches(lab, "h0", "h1")
    until(
        lambda: len(lab.processes("h1")) == 1,
        sentence="process 1 is alone again, once what the message went to has gone",
    )


def reaches_dead(lab, name, other):
    code = f"import socket; socket.create_connection(({lab.host(other).address!r}, 9), timeout=1.0)"
    done = subprocess.run(lab.command(name, ["python3", "-c", code]), capture_output=True, text=True, check=False)
    return "refused" in done.stderr  # a living host would refuse, a dead one is silent


def test_a_power_cut_tells_no_peer(lab):
    sink = lab.start("h1", [sys.executable, "-S", STREAM, "sink"], stdout=subprocess.PIPE)
    port = int(sink.stdout.readline())
    hold = (
        "import socket, sys\n"
        f"s = socket.create_connection(({lab.host('h1').address!r}, {port}))\nprint('held', flush=True)\n"
        "s.settimeout(1.5)\n"
        "try:\n    print(repr(s.recv(1)))\n"
        "except TimeoutError:\n    print('silence')\n"
    )
    holder = lab.start("h0", [sys.executable, "-S", "-c", hold], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    lab.kill("h1")
    assert holder.stdout.read() == "silence\n"
    for process in (sink, holder):
        process.wait(timeout=HANG_S)
        process.stdout.close()


def test_each_host_has_its_own_tmp_shm_run_and_home_and_sees_the_code(lab, tmp_path):
    for folder in ("/tmp", "/dev/shm", "/run", "/home/lab", "/var/tmp"):
        lab.run("h0", ["touch", f"{folder}/of-h0"])
        assert "of-h0" not in lab.run("h1", ["ls", folder])
        assert not os.path.exists(f"{folder}/of-h0")
        assert lab.host("h0").path(f"{folder}/of-h0").exists()
    assert lab.run("h1", ["cat", str(ROOT / "pyproject.toml")]).startswith("[build-system]")
    assert lab.run("h1", [sys.executable, "-c", "import phalanx; print(phalanx.__name__)"]) == "phalanx\n"


def test_a_disk_outlives_a_power_cut_and_memory_does_not(lab):
    lab.run("h2", ["sh", "-c", "echo kept > /home/lab/checkpoint; echo lost > /tmp/scratch"])
    lab.restart("h2")
    assert lab.run("h2", ["cat", "/home/lab/checkpoint"]) == "kept\n"
    assert "scratch" not in lab.run("h2", ["ls", "/tmp"])  # the checkout may lie there, and is shown to every host


def test_fake_gpus_are_character_devices_of_the_host_alone(lab):
    assert lab.run("h0", ["stat", "-c", "%F %t", "/dev/nvidia0", "/dev/nvidia1"]) == "character special file 78\n" * 2
    assert "nvidia2" not in lab.run("h0", ["ls", "/dev"])
    lab.run("h0", ["rm", "/dev/nvidia1"])
    assert "nvidia1" in lab.run("h1", ["ls", "/dev"])


def test_control_groups_are_seen_inside(lab):
    assert lab.run("h0", ["ls", "/sys/fs/cgroup"]).split() == sorted(os.listdir("/sys/fs/cgroup"))


def named(pid: int) -> str:
    """What a process runs by its own name, "" of one that has gone: between nsenter and the command stand env and setpriv."""
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_command_ends_with_its_own_code_and_dies_with_whoever_started_it(lab):
    assert subprocess.run(lab.command("h0", ["sh", "-c", "exit 7"]), check=False).returncode == 7
    started = lab.start("h0", ["sleep", "600"])
    until(lambda: "sleep" in map(named, lab.processes("h0")), sentence="sleep runs in h0, bound to whoever started it")
    started.kill()
    started.wait()
    until(lambda: len(lab.processes("h0")) == 1, sentence="sleep is gone")


def test_two_labs_stand_side_by_side(lab):
    with Lab(size=2, gpus=1) as second:
        assert second.host("h0").address == lab.host("h0").address
        second.run("h0", ["touch", "/tmp/of-the-second"])
        assert "of-the-second" not in lab.run("h0", ["ls", "/tmp"])
        second.cut("h1")
        assert reaches(lab, "h0", "h1")
        pids = [second.pid, *(host.pid for host in second.hosts.values())]
    assert not [pid for pid in pids if alive(pid)]
    assert reaches(lab, "h0", "h1")


def test_a_crash_of_whoever_built_the_lab_leaves_nothing():
    code = (
        "import time\nfrom tests.lab.lab import Lab\nlab = Lab(size=2, gpus=1)\nlab.up()\nlab.start('h1', ['sleep', '600'])\n"
        "time.sleep(0.2)\nprint(lab.pid, *lab.processes('h0'), *lab.processes('h1'), flush=True)\ntime.sleep(600)\n"
    )
    builder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert builder.stdout is not None
    pids = [int(word) for word in builder.stdout.readline().split()]
    builder.stdout.close()
    assert len(pids) == 4
    assert all(alive(pid) for pid in pids)
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    until(lambda: not [pid for pid in pids if alive(pid)], sentence="all of the lab is gone")


def test_the_lab_by_hand_stays_between_commands_and_says_what_is_wrong():
    def lab_command(*words):
        command = [sys.executable, "-m", "tests.lab", "--name", f"test-{os.getpid()}", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    try:
        code, said = lab_command("up", "--hosts", "2", "--gpus", "1", "--rate", "100")
        assert code == 0, said
        assert "10.77.0.2" in said
        assert lab_command("exec", "h1", "--", "sh", "-c", "hostname; exit 3") == (3, "h1\n")
        assert lab_command("kill", "h1") == (0, "")
        assert "dead" in lab_command("show")[1]
        assert lab_command("exec", "h1", "--", "true") == (64, "error: host h1 is dead: restart it first\n")
        assert lab_command("restart", "h1") == (0, "")
        assert lab_command("exec", "h1", "--", "hostname") == (0, "h1\n")
        assert lab_command("cut", "h9") == (64, "error: no host 'h9' in the lab; it has h0, h1\n")
        assert "is up" in lab_command("up")[1]
    finally:
        assert lab_command("down") == (0, "")
    assert lab_command("show")[0] == 69
