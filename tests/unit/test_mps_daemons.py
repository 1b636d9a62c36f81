"""MPS daemons of a node: one for each shared device and account, while jobs hold it. The program is a stand-in with its own processes."""

import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.node.prepare.mps_daemons import PROGRAM, MpsDaemons, MpsUnavailable

# As nvidia-cuda-mps-control(1) has it: -d leaves a daemon behind, without it commands are read from stdin, and the exit code says whether
# a daemon took them. It answers over a socket in the pipe folder, and writes the device that it sees.
STAND_IN = f"""#!{sys.executable}
import os, socket, sys
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
place = os.path.join(folder, "control")
if sys.argv[1:] == ["-d"]:
    if os.path.exists(os.path.join(os.path.dirname(folder), "broken")):
        sys.exit("no device")
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    with open(os.path.join(folder, "starts"), "a") as starts:
        starts.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    if os.fork():
        os._exit(0)
    while True:
        asked, _ = server.accept()
        word = asked.recv(100).decode().strip()
        if word == "quit":
            os.unlink(place)
        asked.send(b"ok")
        asked.close()
        if word == "quit":
            os._exit(0)
asked = socket.socket(socket.AF_UNIX)
try:
    asked.connect(place)
except OSError:
    print("Cannot find MPS control daemon process")
    sys.exit(1)
asked.send(sys.stdin.read().encode())
asked.recv(10)
"""


@pytest.fixture
def bin_folder(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / PROGRAM).write_text(textwrap.dedent(STAND_IN))
    (folder / PROGRAM).chmod(0o755)
    return str(folder)


@pytest.fixture
def daemons(tmp_path, bin_folder):
    made = MpsDaemons(str(tmp_path / "mps"), bin_folder)
    yield made
    MpsDaemons(str(tmp_path / "mps"), bin_folder).stop_leftovers()


def starts(folder):
    return Path(folder, "starts").read_text().split()


def runs(folder):
    return os.path.exists(os.path.join(folder, "control"))


def test_jobs_of_one_device_and_group_have_one_daemon_and_the_last_stops_it(daemons):
    with ExitStack() as first, ExitStack() as second:
        folder = first.enter_context(daemons.hold("GPU-1", "mps:gpt", None))
        assert second.enter_context(daemons.hold("GPU-1", "mps:gpt", None)) == folder
        assert starts(folder) == ["GPU-1"]
        first.close()
        assert runs(folder)
        second.close()
        assert not os.path.exists(folder)
    with daemons.hold("GPU-1", "mps:gpt", None) as again:
        assert runs(again)


def test_devices_and_groups_have_their_own(daemons):
    with (
        daemons.hold("GPU-1", "mps:gpt", None) as one,
        daemons.hold("GPU-2", "mps:gpt", None) as two,
        daemons.hold("GPU-2", "mps:vision", None) as three,
    ):
        assert len({one, two, three}) == 3
        assert [starts(folder) for folder in (one, two, three)] == [["GPU-1"], ["GPU-2"], ["GPU-2"]]


def test_members_that_come_and_go_at_once_leave_none(daemons, tmp_path):
    def job(_):
        with daemons.hold("GPU-1", "mps:gpt", None) as folder:
            return runs(folder)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(job, range(12)))
    assert os.listdir(tmp_path / "mps") == []


def test_what_a_killed_supervisor_left_is_stopped(tmp_path, bin_folder):
    killed = MpsDaemons(str(tmp_path / "mps"), bin_folder).hold("GPU-1", "mps:gpt", None)
    folder = killed.__enter__()  # and nothing after it: its process is gone, the daemon is not
    assert runs(folder)
    MpsDaemons(str(tmp_path / "mps"), bin_folder).stop_leftovers()
    assert not os.path.exists(folder)


def test_a_node_without_the_program_says_what_to_do(tmp_path):
    with pytest.raises(MpsUnavailable, match=r"not installed on this node.*--share time"):
        MpsDaemons(str(tmp_path / "mps"), str(tmp_path)).hold("GPU-1", "mps:gpt", None).__enter__()


def test_a_daemon_that_does_not_start_is_an_error_with_its_words(daemons, tmp_path):
    os.makedirs(tmp_path / "mps", exist_ok=True)
    Path(tmp_path, "mps", "broken").touch()
    with pytest.raises(MpsUnavailable, match="does not start on this node: no device; its logs are in"):
        daemons.hold("GPU-1", "mps:gpt", None).__enter__()
    Path(tmp_path, "mps", "broken").unlink()
