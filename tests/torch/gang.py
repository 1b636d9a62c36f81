"""A gang of real processes with a supervisor made of this test: lease page, report pipe, environment. No head, no engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from phalanx.wire.rank import LeasePage, boottime_ns

ROOT = Path(__file__).parents[2]
LOOP = Path(__file__).parent / "loop.py"
HANG_S = 60.0
"""A guard, never an assertion."""

# Ranks fork from one clean process that has imported torch, as warm ranks do: a second of import is paid once, and that
# phalanx.torch leaves its importer single-threaded and fit to fork is tested on the way.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    ["torch", "phalanx.torch", "phalanx.torch.checkpointer", "torch.distributed.fsdp", "phalanx.torch.assembly"]
)


class Gang:
    """`world_size` ranks of one script. Use as a context: leaving it kills every rank and closes the pipe."""

    def __init__(
        self,
        tmp_path,
        *argv,
        world_size=1,
        epoch=1,
        generation=0,
        lease_s=3600.0,
        supervised=True,
        checkpoints=None,
        apart=(),
        resume=None,
        **variables,
    ):
        self.folder = Path(tmp_path)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.reports: list[dict] = []
        self.page: LeasePage | None = None
        self._torn = b""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PHALANX_", "SLURM_", "TORCHELASTIC_"))
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PHALANX_VIRTUAL": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        if checkpoints is not None:
            environment["PHALANX_CHECKPOINT_DIR"] = str(checkpoints)
        if supervised:
            environment |= self._supervise(epoch, generation, lease_s)
        environment |= {name: str(value) for name, value in variables.items()}
        self._apart, self._resume = [Path(folder) for folder in apart], resume
        self.ranks = [self._spawn(rank, world_size, argv, environment) for rank in range(world_size)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        if self.page is not None:
            os.close(self._pipe)

    def renew(self, lease_s=3600.0):
        assert self.page is not None
        self.page.write(deadline_ns=boottime_ns() + int(lease_s * 1e9))

    def expire(self):
        assert self.page is not None
        self.page.write(deadline_ns=boottime_ns() - 1)

    def log(self, rank=0):
        return (self.folder / f"rank-{rank}.log").read_text()

    def of(self, kind, rank=None):
        """Reports of one kind so far, in order."""
        self._drain(0.0)
        return [report for report in self.reports if report["k"] == kind and rank in {None, report["rank"]}]

    def until(self, condition, what):
        """Read reports until `condition(self)`; fail with the ranks' logs when it never comes."""
        until_s = time.monotonic() + HANG_S
        while not condition(self):
            self._drain(0.05)
            if time.monotonic() > until_s:
                logs = "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in range(len(self.ranks)))
                raise AssertionError(f"never happened: {what}; reports {self.reports[-5:]}\n{logs}")

    def until_step(self, step):
        self.until(lambda gang: any(report["step"] >= step for report in gang.of("step", rank=0)), f"step {step}")

    def ended(self):
        return all(rank.exitcode is not None for rank in self.ranks)

    def finish(self):
        """Wait for all ranks; their exit codes."""
        self.until(Gang.ended, "the end of all ranks")
        self._drain(0.0)
        return [rank.exitcode for rank in self.ranks]

    def kill(self):
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def send(self, number, rank=None):
        for process in self.ranks if rank is None else [self.ranks[rank]]:
            os.kill(process.pid, number)

    def _supervise(self, epoch, generation, lease_s):
        page, pipe = self.folder / "lease", self.folder / "reports"
        self.page = LeasePage.create(
            str(page), epoch=epoch, generation=generation, deadline_ns=boottime_ns() + int(lease_s * 1e9)
        )
        with suppress(FileExistsError):
            os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        return {
            "PHALANX_LEASE_PAGE": str(page),
            "PHALANX_REPORT_PIPE": str(pipe),
            "PHALANX_EPOCH": str(epoch),
            "PHALANX_GENERATION": str(generation),
        }

    def _spawn(self, rank, world_size, argv, environment):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        if self._apart:
            own |= self._on_its_node(rank, world_size // len(self._apart))
        log = str(self.folder / f"rank-{rank}.log")
        process = _FORKSERVER.Process(target=_run, args=([str(a) for a in argv], environment | own, log), daemon=True)
        process.start()
        return process

    def _on_its_node(self, rank, per_node):
        """Nodes that share nothing: each folder of `node_local_checkpoints` is one; `resume` names a checkpoint in each."""
        folder = self._apart[rank // per_node]
        own = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
        own |= {"PHALANX_CHECKPOINT_DIR": str(folder), "PHALANX_CHECKPOINT_APART": "1"}
        return own | ({"PHALANX_RESUME_FROM": str(folder / self._resume)} if self._resume else {})

    def _drain(self, patience_s):
        if self.page is None:
            time.sleep(patience_s)
            return
        while select.select([self._pipe], [], [], patience_s)[0]:
            patience_s = 0.0
            *lines, self._torn = (self._torn + os.read(self._pipe, 65536)).split(b"\n")
            self.reports += [json.loads(line) for line in lines]


def _run(argv, environment, log):
    """A rank: its environment, its output, and the script as __main__."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except Exception:  # noqa: BLE001 - as the interpreter ends a script; multiprocessing would not ask the hook
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
