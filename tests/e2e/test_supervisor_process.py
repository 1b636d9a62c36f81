"""A real supervisor process against a head that does what the test says: what a job's processes see, do, and leave behind."""

import contextlib
import functools
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state import commands, reports
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.spec import JobSpec, LaunchMode, Role
from phalanx.wire import manifest
from phalanx.wire import supervisor as wire

pytestmark = pytest.mark.serial

NODE = NodeId("n0")
GUARD_S = 20.0  # a hang guard, no measurement


class Head:
    """Grants leases, hands out commands, keeps events and streams. `deaf`: drops every connection as a dead head does."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lease_s, self.renew_in_s = 6.0, 0.2
        self.superseded: list[tuple[JobId, Epoch]] = []
        self.hellos: list[wire.HelloRequest] = []
        self.renewals = 0
        self.framed: list[wire.Envelope] = []
        self.events: list[reports.Report] = []
        self.event_seqs: list[int] = []
        self.streams: dict[tuple[str, int, str], bytes] = defaultdict(bytes)
        self.samples: list[wire.SamplesRequest] = []
        self.blobs: dict[str, bytes] = {}
        self.typed: dict[str, wire.ExecInput] = {}
        self.printed: dict[str, bytes] = defaultdict(bytes)
        self.exec_ends: dict[str, wire.ExecOutput] = {}
        self.deaf = False
        self.unknown = False  # answers "say hello" until somebody does
        self.server = self._serve(0)

    def _serve(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.deaf = True
        self.server.shutdown()
        self.server.server_close()

    def say(self, *told: commands.Command | wire.OpenExec) -> None:
        with self.changed:
            for command in told:
                self.framed.append(wire.encode_envelope(len(self.framed) + 1, command))
            self.changed.notify_all()

    def wait(self, condition, timeout_s: float = GUARD_S):
        """What `condition` gives once it gives something."""
        with self.changed:
            found = self.changed.wait_for(condition, timeout_s)
        assert found, f"not in {timeout_s} s; events: {self.events}"
        return found

    def heard(self, kind, job: str = "1", *, count: int = 1, generation: int | None = None):
        def look():
            found = [
                e for e in self.events if isinstance(e, kind) and e.job_id == job and generation in (None, e.generation)
            ]
            return found if len(found) >= count else None

        return self.wait(look)

    def answer(self, path, query, body):
        with self.changed:
            try:
                return self._answer(path, query, body)
            finally:
                self.changed.notify_all()

    def _answer(self, path, query, body):
        if path == "storage":  # as a head of an earlier release
            return 404, json.dumps(
                {"error": {"code": "not_found", "message": "?", "hint": "", "retry": False}}
            ).encode()
        if path == "hello":
            self.hellos.append(wire.decode(body, wire.HelloRequest))
            self.unknown = False
            return 200, wire.encode(
                wire.HelloReply(version=1, head_id="h", lease_s=self.lease_s, renew_in_s=self.renew_in_s, after=0)
            )
        if self.unknown:
            return 409, json.dumps(
                {"error": {"code": "say_hello", "message": "who?", "hint": "", "retry": True}}
            ).encode()
        if path == "lease":
            self.renewals += 1
            return 200, wire.encode(
                wire.LeaseReply(
                    head_id="h", lease_s=self.lease_s, renew_in_s=self.renew_in_s, superseded=self.superseded
                )
            )
        if path == "commands":
            after, until = int(query["after"]), time.monotonic() + 2.0
            while len(self.framed) <= after and time.monotonic() < until and not (self.deaf or self.unknown):
                self.changed.wait(0.1)
            return 200, wire.encode(
                wire.CommandsReply(head_id="h", commands=self.framed[after:], last=len(self.framed))
            )
        if path == "events":
            request = wire.decode(body, wire.EventsRequest)
            for framed in request.events:
                if framed.seq > (self.event_seqs[-1] if self.event_seqs else 0):
                    self.event_seqs.append(framed.seq)
                    self.events.append(wire.decode_event(framed))
            return 200, wire.encode(wire.EventsReply(acked=request.events[-1].seq))
        if path == "streams":
            ends = []
            for chunk in wire.decode(body, wire.StreamsRequest).chunks:
                key = (chunk.job_id, chunk.epoch, chunk.stream)
                assert chunk.offset <= len(self.streams[key]), "a gap"
                self.streams[key] += chunk.data[len(self.streams[key]) - chunk.offset :]
                ends.append(
                    wire.StreamEnd(
                        job_id=chunk.job_id, epoch=chunk.epoch, stream=chunk.stream, end=len(self.streams[key])
                    )
                )
            return 200, wire.encode(wire.StreamsReply(ends=ends))
        if path == "samples":
            self.samples.append(wire.decode(body, wire.SamplesRequest))
            return 204, b""
        kind, _, name = path.partition("/")
        if kind == "blobs":
            return 200, self.blobs[name]
        session, _, direction = name.partition("/")
        if direction == "input":
            typed, after = self.typed.get(session), int(query["after"])
            if typed is None:  # its user has left
                return 404, b'{"error": {"code": "not_found", "message": "no such exec session"}}'
            data, signals = typed.data[after:][: int(query["limit"])], typed.signals[int(query["signals"]) :]
            if not (data or signals or (typed.closed and query["closed"] == "0")):
                self.changed.wait(0.2)
            closed = typed.closed and after + len(data) == len(typed.data)
            return 200, wire.pack(msgspec.structs.replace(typed, data=data, signals=signals, closed=closed))
        output = wire.unpack(body, wire.ExecOutput)
        self.printed[session] = self.printed[session][: output.offset] + output.data
        if output.exit_code is not None:
            self.exec_ends[session] = output
        return 204, b""


def _handler(head: Head):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            self._do()

        def do_POST(self):
            self._do()

        def _do(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            assert self.headers["Authorization"] == "Bearer secret-token"
            path, _, query = self.path.removeprefix("/v1/node/").partition("?")
            asked = dict(pair.partition("=")[::2] for pair in query.split("&"))
            status, answer = (0, b"") if head.deaf else head.answer(path, asked, body)
            if head.deaf:
                self.close_connection = True
                return
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_):
            pass

    return Handler


class Node:
    """The supervisor process."""

    def __init__(self, head: Head, folder: Path, *, devices: int = 4, **variables: str) -> None:
        self.folder = folder / "node"
        self.key = f"n0-{os.getpid()}-{time.monotonic_ns()}"
        head_file = folder / "head.json"
        head_file.write_text(json.dumps({"url": head.url}))
        environment = {
            **os.environ,
            "PHALANX_HEAD_URL": head.url,
            "PHALANX_HEAD_FILE": str(head_file),
            "PHALANX_NODE_TOKEN": "secret-token",
            "PHALANX_NODE_ID": NODE,
            "PHALANX_NODE_ENGINE": "local",
            "PHALANX_NODE_DIR": str(self.folder),
            "PHALANX_NODE_VIRTUAL": str(devices),
            "PHALANX_NODE_KEY": self.key,
            "PHALANX_NODE_ADDRESS": "127.0.0.1",
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.app.node"], env=environment, cwd=folder, start_new_session=True
        )

    def processes(self) -> list[int]:
        """Everything that carries this node's key."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if (
                    entry.isdigit()
                    and f"PHALANX_NODE_KEY={self.key}".encode() in Path(f"/proc/{entry}/environ").read_bytes()
                ):
                    found.append(int(entry))
        return found

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(GUARD_S)
        until = time.monotonic() + GUARD_S
        # Twice, because a process in the middle of its exec shows no environment.
        while (self.processes() or self.processes()) and time.monotonic() < until:
            time.sleep(0.02)
        assert time.monotonic() < until, f"something outlived its supervisor: {self.processes()}"


@pytest.fixture
def head():
    head = Head()
    yield head
    head.close()


@pytest.fixture
def node(head, tmp_path):
    node = Node(head, tmp_path)
    yield node
    node.close()


def prepare(tmp_path: Path, *argv: str, job="1", epoch=1, generation=0, tasks=1, devices=(0,), script="", **given):
    spec_fields: dict[str, Any] = {
        name: given.pop(name)
        for name in ("env", "setup", "upload", "workdir", "grace_s", "collective_timeout_s", "image", "warm")
        if name in given
    }
    role = Role(argv=argv, script=script, launch=given.pop("launch", LaunchMode.FIXED), tasks_per_node=tasks)
    spec = JobSpec(**{"name": "j", "role": role, "workdir": str(tmp_path), "grace_s": 5.0, **spec_fields})
    grant = NodeGrant(
        node_id=NODE, node_rank=0, devices=tuple(devices), cpus=1, memory_bytes=0, tasks=tasks, first_rank=0
    )
    return commands.PrepareTasks(
        **{
            "node_id": NODE,
            "job_id": JobId(job),
            "epoch": Epoch(epoch),
            "generation": Generation(generation),
            "spec": spec,
            "allocation": Allocation(grants=(grant,)),
            "addresses": ("127.0.0.1",),
            "candidates": (),
            "checkpoint_dir": str(tmp_path / f"ckpt/{job}-k/epoch-{epoch}-k"),
            "output_dir": str(tmp_path / f"out/{job}-k"),
            "deadline_s": None,
            "restarts": 0,
            "mtbf_s": 1e6,
            **given,
        }
    )


def start_of(order: commands.PrepareTasks, head: Head) -> commands.StartTasks:
    ready = head.heard(reports.MemberReady, order.job_id, generation=order.generation)[-1]
    return commands.StartTasks(
        node_id=NODE,
        job_id=order.job_id,
        epoch=order.epoch,
        generation=order.generation,
        port=ready.port or 0,
        resume=ready.resume,
    )


def run(head: Head, order: commands.PrepareTasks):
    """Let the job run to its end by itself."""
    head.say(order)
    head.say(start_of(order, head))
    return head.heard(reports.MemberStopped, order.job_id, generation=order.generation)[-1]


def stop_of(order: commands.PrepareTasks, *, grace_s=5.0, reason="cancelled") -> commands.StopTasks:
    return commands.StopTasks(
        node_id=NODE,
        job_id=order.job_id,
        epoch=order.epoch,
        generation=order.generation,
        reason=reason,
        grace_s=grace_s,
    )


def forget_of(order: commands.PrepareTasks) -> commands.CleanUpAttempt:
    return commands.CleanUpAttempt(node_id=NODE, job_id=order.job_id, epoch=order.epoch)


def text(head: Head, stream="rank-0", job="1", epoch=1) -> str:
    return head.streams[job, epoch, stream].decode()


# ------------------------------------------------------------------------------------------------------------ a plain job


def test_hello_presents_the_node_and_its_virtual_devices(head, node):
    head.wait(lambda: head.renewals)
    hello = head.hellos[0]
    assert (hello.node.id, len(hello.node.devices), hello.node.virtual, hello.members) == (NODE, 4, True, [])


def test_job_runs_prints_and_ends(head, node, tmp_path):
    stopped = run(head, prepare(tmp_path, "sh", "-c", "echo hello from $RANK; exit 3"))
    assert text(head) == "hello from 0\n", "its output is at the head before its end is"
    kinds = [type(event).__name__ for event in head.events]
    assert kinds == ["MemberReady", "MemberStarted", "TaskExited", "MemberStopped"]
    exit = head.heard(reports.TaskExited)[0].exit
    assert (exit.rank, exit.code, exit.requested_by_phalanx) == (0, 3, False)
    assert not stopped.port_in_use


def test_every_rank_sees_its_own_place(head, node, tmp_path):
    order = prepare(
        tmp_path,
        "sh",
        "-c",
        "env",
        tasks=2,
        devices=(1, 3),
        env=(("MINE", "yes"), ("RANK", "7"), ("PHALANX_HEAD_URL", "x")),
    )
    run(head, order)
    seen = [
        dict(line.split("=", 1) for line in text(head, f"rank-{rank}").splitlines() if "=" in line) for rank in (0, 1)
    ]
    assert [s["RANK"] for s in seen] == ["0", "1"]
    assert [s["LOCAL_RANK"] for s in seen] == ["0", "1"]
    assert {s["WORLD_SIZE"] for s in seen} == {"2"}
    assert seen[0]["MINE"] == "yes"
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == ""
    assert len(seen[0]["PHALANX_DEVICES"].split(",")) == 2
    assert not {"PHALANX_NODE_TOKEN", "PHALANX_HEAD_URL", "PHALANX_HEAD_FILE"} & seen[0].keys()
    assert "secret-token" not in text(head)
    assert "RANK is set by Phalanx" in text(head, "supervisor-0")


def test_forget_leaves_no_scratch_folder(head, node, tmp_path):
    order = prepare(tmp_path, "true")
    run(head, order)
    assert os.listdir(node.folder / "attempts") == ["1.1"]
    head.say(forget_of(order))
    until = time.monotonic() + GUARD_S
    while os.listdir(node.folder / "attempts") and time.monotonic() < until:
        time.sleep(0.01)
    assert os.listdir(node.folder / "attempts") == []


def test_upload_is_unpacked_and_used(head, node, tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        body = b"print('from the upload')\n"
        entry = tarfile.TarInfo("pkg/main.py")
        entry.size = len(body)
        archive.addfile(entry, io.BytesIO(body))
    name = hashlib.sha256(packed.getvalue()).hexdigest()
    head.blobs[name] = packed.getvalue()
    run(head, prepare(tmp_path, sys.executable, "pkg/main.py", upload=name, workdir="/nowhere"))
    assert text(head) == "from the upload\n"


def test_setup_runs_once_for_an_attempt(head, node, tmp_path):
    order = prepare(tmp_path, "sh", "-c", "cat made", setup="echo setting up; echo x >> made")
    run(head, order)
    second = prepare(tmp_path, "sh", "-c", "cat made", setup="echo setting up; echo x >> made", generation=1)
    run(head, second)
    assert text(head) == "x\nx\n"
    assert text(head, "supervisor-0") == "setting up\n"


@pytest.mark.torch
def test_warm_ranks_fork_from_a_parent_that_has_torch(head, node, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "warm.py").write_text("import sys, os\nprint('torch' in sys.modules, os.environ['RANK'], __name__)\n")
    run(head, prepare(tmp_path, sys.executable, "warm.py", warm=True, tasks=2, devices=(0, 1)))
    assert [text(head, f"rank-{rank}") for rank in (0, 1)] == ["True 0 __main__\n", "True 1 __main__\n"]


def test_the_supervisor_has_all_descriptors_it_may_and_ranks_have_what_their_user_had(head, tmp_path, monkeypatch):
    """Found by reading: a supervisor that joined kept the soft limit of 1,024, and each rank takes two of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(512, soft)
    monkeypatch.setattr(subprocess, "Popen", functools.partial(subprocess.Popen, preexec_fn=lambda: _limit(few, hard)))
    node = Node(head, tmp_path)
    monkeypatch.undo()
    try:
        run(head, prepare(tmp_path, "sh", "-c", "ulimit -Sn; ulimit -Hn"))
        assert text(head).split() == [str(few), str(hard)]
        assert resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        node.close()


def _limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_report_that_is_no_checkpoint_ends_neither_reports_nor_the_supervisor(head, node, tmp_path):
    """Found by reading: the first line stopped all output of the node, the second ended its supervisor."""
    begin = '{"k":"checkpoint","rank":0,"epoch":1,"generation":0,"digest":"d"'
    lines = [
        f'{begin},"step":Infinity,"path":"x"}}',
        f'{begin},"step":1,"path":"\\udc80"}}',
        f'{begin},"step":2,"path":"/x"}}',
    ]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    run(head, prepare(tmp_path, "sh", "-c", "cat lines > $PHALANX_REPORT_PIPE; echo still heard"))
    assert text(head) == "still heard\n"
    assert [event.resume.step for event in head.heard(reports.CheckpointSaved)] == [2]
    assert text(head, "supervisor-0").count("is invalid and skipped") == 2
    assert node.process.poll() is None


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("argv", "given", "words", "code"),
    [
        (("no-such-program",), {}, "no-such-program: command not found", 127),
        (("./nccl.py",), {}, "./nccl.py: is not executable", 126),
        (("python3", "missing.py"), {}, "missing.py: no such file in", 1),
        (("true",), {"workdir": "/no/such/dir"}, "working directory /no/such/dir does not exist on this node", 1),
        (("true",), {"setup": "exit 4"}, "setup ended with code 4", 4),
        (("true",), {"image": "no-such-file.sif"}, "image ", 1),
        ((sys.executable, "nccl.py"), {}, 'nccl.py, line 2: backend "nccl" needs GPUs', 1),
    ],
)
def test_what_cannot_run_is_refused_with_its_name(head, node, tmp_path, argv, given, words, code):
    (tmp_path / "nccl.py").write_text("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    head.say(prepare(tmp_path, *argv, **given))
    refused = head.heard(reports.MemberRefused)[0]
    assert refused.job_at_fault
    assert words in refused.why
    assert refused.exit_code == code


def test_device_that_is_not_there_is_the_nodes_fault(head, node, tmp_path):
    head.say(prepare(tmp_path, "true", devices=(9,)))
    assert not head.heard(reports.MemberRefused)[0].job_at_fault


# ---------------------------------------------------------------------------------------------------------------- ending


def test_stop_ends_gently_then_hard_and_leaves_nothing(head, node, tmp_path):
    # One that ignores SIGTERM, and a grandchild that forked twice.
    script = "trap '' TERM; (setsid sleep 987 &) ; echo up; sleep 986 & wait; sleep 985"
    order = prepare(tmp_path, script=script, tasks=1)
    head.say(order)
    head.say(start_of(order, head))
    head.wait(lambda: text(head) == "up\n")
    head.say(stop_of(order, grace_s=0.3))
    head.heard(reports.MemberStopped)
    exit = head.heard(reports.TaskExited)[0].exit
    assert (exit.requested_by_phalanx, exit.signal) == (True, 9)
    mine = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in node.processes()]
    assert not [line for line in mine if b"sleep" in line]


def test_bare_script_ends_by_sigterm(head, node, tmp_path):
    order = prepare(tmp_path, "sleep", "600")
    head.say(order)
    head.say(start_of(order, head))
    head.heard(reports.MemberStarted)
    head.say(stop_of(order))
    head.heard(reports.MemberStopped)
    assert head.heard(reports.TaskExited)[0].exit.signal == 15


def test_sigterm_of_the_supervisor_ends_its_ranks_and_itself(head, node, tmp_path):
    order = prepare(tmp_path, "sleep", "600")
    head.say(order)
    head.say(start_of(order, head))
    head.heard(reports.MemberStarted)
    node.process.terminate()
    assert node.process.wait(GUARD_S) == 0
    assert head.heard(reports.TaskExited)[0].exit.requested_by_phalanx
    head.heard(reports.MemberStopped)
    assert node.processes() == []
    assert not os.path.exists(node.folder / "attempts/1.1")


def test_a_supervisor_that_leaves_says_so_last_and_does_not_renew_again(head, tmp_path):
    node = Node(head, tmp_path, PHALANX_NODE_UNWATCHED="1")
    try:
        order = prepare(tmp_path, "sleep", "600")
        head.say(order)
        head.say(start_of(order, head))
        head.heard(reports.MemberStarted)
        node.process.terminate()
        left = head.wait(lambda: [event for event in head.events if isinstance(event, reports.NodeDied)])[0]
        assert isinstance(head.events[-2], reports.MemberStopped)
        assert (left, left.confirmed) == (head.events[-1], True)
        assert left.supervisor_id == head.hellos[0].supervisor_id
        head.unknown = True  # as a head that has marked the node down: a renewal would register it again
        assert node.process.wait(GUARD_S) == 0
        assert len(head.hellos) == 1
    finally:
        node.close()


def test_sigkill_of_the_supervisor_takes_its_ranks_along(head, node, tmp_path):
    order = prepare(tmp_path, script="(setsid sleep 600 &); sleep 601")
    head.say(order)
    head.say(start_of(order, head))
    head.heard(reports.MemberStarted)
    node.close()  # asserts that nothing is left


def test_port_in_use_is_told(head, node, tmp_path):
    order = prepare(
        tmp_path, "sh", "-c", 'echo "bind to [::]:$MASTER_PORT (errno: 98 - Address already in use)"; exit 1'
    )
    assert run(head, order).port_in_use


# ----------------------------------------------------------------------------------------------------- lease and restarts


def test_lost_lease_freezes_and_a_short_freeze_thaws(head, node, tmp_path):
    head.lease_s, head.renew_in_s = 1.0, 0.1
    order = prepare(tmp_path, "sh", "-c", "while :; do echo tick; sleep 0.02; done")
    head.say(order)
    head.say(start_of(order, head))
    head.wait(lambda: "tick" in text(head))
    head.deaf = True
    frozen = _wait_until_still(node)
    assert frozen, "its ranks stand still without a lease"
    head.deaf = False
    assert head.heard(reports.MemberFrozen)[0].thawed
    ticks = len(text(head))
    head.wait(lambda: len(text(head)) > ticks)
    head.say(stop_of(order))
    head.heard(reports.MemberStopped)


def test_superseded_epoch_is_killed_and_forgotten(head, node, tmp_path):
    order = prepare(tmp_path, "sleep", "600")
    head.say(order)
    head.say(start_of(order, head))
    head.heard(reports.MemberStarted)
    head.superseded = [(JobId("1"), Epoch(1))]
    head.heard(reports.MemberStopped)
    until = time.monotonic() + GUARD_S
    while os.listdir(node.folder / "attempts") and time.monotonic() < until:
        time.sleep(0.01)
    assert os.listdir(node.folder / "attempts") == []


def test_head_on_another_port_is_found_and_nothing_is_lost(head, node, tmp_path):
    order = prepare(tmp_path, "sh", "-c", "echo one; sleep 1; echo two")
    head.say(order)
    head.say(start_of(order, head))
    head.wait(lambda: text(head) == "one\n")
    head.close()
    head.deaf, head.unknown, head.framed = False, True, []
    head.server = head._serve(0)
    (tmp_path / "head.json").write_text(json.dumps({"url": head.url}))
    head.heard(reports.MemberStopped)
    assert len(head.hellos) == 2
    assert head.hellos[1].members == [("1", 1, 0)]
    assert text(head) == "one\ntwo\n"
    assert head.event_seqs == sorted(set(head.event_seqs)), "each event once, in order"


def test_next_generation_starts_after_the_last_one_is_gone(head, node, tmp_path):
    order = prepare(tmp_path, "sh", "-c", "echo generation $PHALANX_GENERATION; sleep 600")
    head.say(order)
    head.say(start_of(order, head))
    head.wait(lambda: text(head) == "generation 0\n")
    second = prepare(tmp_path, "sh", "-c", "echo generation $PHALANX_GENERATION; sleep 600", generation=1)
    head.say(second)
    head.heard(reports.MemberStopped, generation=0)
    head.say(start_of(second, head))
    head.wait(lambda: text(head) == "generation 0\ngeneration 1\n")


def test_checkpoint_is_verified_newest_first(head, node, tmp_path):
    def checkpoint(step: int) -> PublishedCheckpoint:
        folder = tmp_path / f"ckpt/1-k/epoch-1-k/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "w").write_bytes(b"weights")
        size, crc = manifest.checksum(str(folder / "w"))
        encoded = manifest.encode(
            manifest.CheckpointManifest(
                format=1,
                step=step,
                epoch=1,
                world_size=1,
                files=(manifest.ManifestFile(path="w", size_bytes=size, crc32=crc),),
            )
        )
        (folder / "manifest.json").write_bytes(encoded)
        return PublishedCheckpoint(epoch=Epoch(1), step=step, path=str(folder), digest=manifest.digest(encoded))

    old, new = checkpoint(10), checkpoint(20)
    Path(new.path, "w").write_bytes(b"torn!!!")
    order = prepare(tmp_path, "sh", "-c", "echo $PHALANX_RESUME_FROM", candidates=(new, old), epoch=2)
    run(head, order)
    assert head.heard(reports.MemberReady)[0].resume == old
    assert text(head, epoch=2) == f"{old.path}\n"
    assert "checkpoint of step 20 is rejected" in text(head, "supervisor-0", epoch=2)
    head.say(commands.DeleteCheckpoints(node_id=NODE, job_id=JobId("1"), paths=(new.path, "/etc", str(tmp_path))))
    until, saved = time.monotonic() + GUARD_S, tmp_path / "ckpt/1-k/epoch-1-k"
    while len(os.listdir(saved)) > 1 and time.monotonic() < until:  # the other is renamed before it is removed
        time.sleep(0.01)
    assert os.listdir(saved) == ["step-00000010"]


def test_reports_reach_the_steps_stream_and_checkpoints_the_head(head, node, tmp_path):
    script = tmp_path / "reports.py"
    script.write_text(
        "import os\nfrom phalanx.wire.rank import *\n"
        "fd = os.open(os.environ['PHALANX_REPORT_PIPE'], os.O_WRONLY)\n"
        "page = LeasePage.attach(os.environ['PHALANX_LEASE_PAGE'])\n"
        "assert page.read('deadline_ns') > boottime_ns(), 'the lease holds'\n"
        "who = dict(rank=0, epoch=int(os.environ['PHALANX_EPOCH']), generation=0)\n"
        "os.write(fd, encode_report(ReportKind.STEP, **who, step=1, begin_ns=1, end_ns=2, at_s=0.0, loss=2.5))\n"
        "os.write(fd, encode_report(ReportKind.CHECKPOINT, **who, step=1, path='/c', digest='d', bytes=5, stall_s=.1, write_s=.2))\n"
    )
    run(head, prepare(tmp_path, sys.executable, "reports.py"))
    saved = head.heard(reports.CheckpointSaved)[0]
    assert (saved.resume.step, saved.resume.path, saved.resume.bytes) == (1, "/c", 5)
    assert [json.loads(line)["k"] for line in text(head, "steps-0").splitlines()] == ["step", "checkpoint"]


# ------------------------------------------------------------------------------------------------------------------ exec


def running(head, tmp_path, **more):
    order = prepare(tmp_path, "sleep", "600", **more)
    head.say(order)
    head.say(start_of(order, head))
    head.heard(reports.MemberStarted)
    return order


def open_exec(head: Head, order: commands.PrepareTasks, *argv: str, tty: bool = False, typed: bytes = b""):
    head.typed["s"] = wire.ExecInput(data=typed, closed=True, rows=30, cols=100)
    head.say(
        wire.OpenExec(session="s", job_id=order.job_id, epoch=order.epoch, argv=list(argv), tty=tty, rows=30, cols=100)
    )


def exec_in(head: Head, order: commands.PrepareTasks, *argv: str, tty: bool, typed: bytes = b""):
    open_exec(head, order, *argv, tty=tty, typed=typed)
    return head.wait(lambda: head.exec_ends.get("s"))


@pytest.mark.parametrize("tty", [False, True])
def test_exec_runs_beside_the_ranks_and_gives_its_code(head, node, tmp_path, tty):
    order = running(head, tmp_path, env=(("MINE", "yes"),))
    end = exec_in(
        head,
        order,
        "sh",
        "-c",
        "read line; echo got $line $MINE; test -t 0 && stty size; exit 5",
        tty=tty,
        typed=b"hi\n",
    )
    assert end.exit_code == 5
    assert b"got hi yes" in head.printed["s"]
    assert (b"30 100" in head.printed["s"]) is tty


@pytest.mark.parametrize("typed", [b"", b"x" * 200_000])
def test_signal_reaches_a_command_that_reads_no_input(head, node, tmp_path, typed):
    order = running(head, tmp_path)
    open_exec(head, order, "sh", "-c", "trap 'echo stopped; exit 3' INT; echo ready; sleep 600 & wait", typed=typed)
    head.wait(lambda: b"ready" in head.printed["s"])
    head.typed["s"] = msgspec.structs.replace(head.typed["s"], signals=[signal.SIGINT])
    assert head.wait(lambda: head.exec_ends.get("s")).exit_code == 3
    assert b"stopped" in head.printed["s"]


@pytest.mark.parametrize("typed", [b"", b"x" * 200_000])
def test_command_is_hung_up_on_when_its_user_leaves(head, node, tmp_path, typed):
    order = running(head, tmp_path)
    open_exec(head, order, "sh", "-c", "echo $$; sleep 600", typed=typed)
    pid = int(head.wait(lambda: bytes(head.printed["s"]).strip()))
    del head.typed["s"]
    head.wait(lambda: not os.path.exists(f"/proc/{pid}"))


def test_all_input_reaches_a_command_that_is_slow_to_read_it(head, node, tmp_path):
    order = running(head, tmp_path)
    open_exec(head, order, "sh", "-c", "sleep 2; wc -c", typed=b"x" * 500_000)
    assert head.wait(lambda: head.exec_ends.get("s")).exit_code == 0
    assert head.printed["s"].strip() == b"500000"


def test_exec_without_ranks_is_refused(head, node, tmp_path):
    end = exec_in(head, prepare(tmp_path, "true"), "true", tty=False)
    assert "has no running ranks" in end.error


# ---------------------------------------------------------------------------------------------------------------- samples


def test_busy_devices_name_their_job(head, node, tmp_path):
    order = prepare(tmp_path, "sh", "-c", "while :; do :; done", devices=(2,))
    head.say(order)
    head.say(start_of(order, head))
    busy = head.wait(
        lambda: next(
            (s for s in head.samples if s.devices[2].job_id == "1" and (s.devices[2].utilization or 0) > 0), None
        )
    )
    assert [d.job_id for d in busy.devices] == [None, None, "1", None]
    assert all(d.virtual and d.counter == "rank_cpu" for d in busy.devices)


def _wait_until_still(node: Node) -> bool:
    """Whether what rank 0 prints every 20 ms stops coming: frozen by cgroup or by signal alike."""
    log, until = node.folder / "attempts/1.1/rank-0.log", time.monotonic() + GUARD_S
    while time.monotonic() < until:
        before = log.stat().st_size
        time.sleep(0.5)
        if log.stat().st_size == before:
            return True
    return False
