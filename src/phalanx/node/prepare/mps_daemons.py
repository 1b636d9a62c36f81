"""NVIDIA MPS on this node: one control daemon for each shared device and owner of jobs on it, while jobs use it.

The daemon sees one device, runs under the account of its jobs and has its own pipe folder, so jobs of another account cannot reach it. It is
controlled by commands over that folder, so a supervisor that starts again can stop what an earlier one left (`stop_leftovers`).
Source of commands and variables: nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.node.files.job_accounts import make_owned_folder
from phalanx.node.logic.accounts import NodeAccount

PROGRAM: Final = "nvidia-cuda-mps-control"
_START_S: Final = 60.0  # guards: it takes a second to start, and to end without clients
_QUIT_S: Final = 20.0
_OUTPUT_MAX: Final = 300  # bytes of an error
_log = logging.getLogger(__name__)


class MpsUnavailable(Exception):
    """No daemon can be had here; the text says why, and what to do. `installed`: the program is here, but does not start."""

    def __init__(self, why: str, *, installed: bool) -> None:
        super().__init__(why)
        self.installed = installed


@dataclass(slots=True)
class _Daemon:
    """A daemon. `users`: members that hold it."""

    folder: str
    environment: Mapping[str, str]
    account: NodeAccount | None
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, program: str) -> None:
        """Start it, and see that it answers.

        Raises:
            MpsUnavailable: it does not.
            OSError: its folder cannot be created.
        """
        make_owned_folder(self.folder, self.account)
        why = _run([program, "-d"], "", self.environment, self.account, _START_S)
        why = why or _command(program, "get_server_list", self.environment, self.account)
        if why:
            raise MpsUnavailable(
                f"{PROGRAM} does not start on this node: {why}; its logs are in {self.folder}", installed=True
            )

    def stop(self, program: str) -> None:
        """Stop it. If it does not answer, its folder stays, and the next supervisor tries again."""
        why = _command(program, "quit", self.environment, self.account)
        if why:
            _log.warning("the MPS daemon of %s did not end: %s", self.folder, why)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


class MpsDaemons:
    """The daemons of this node. Called by many threads."""

    def __init__(self, folder: str, path: str) -> None:
        """Prepare; nothing is started.

        Args:
            folder: for pipes and logs; each account gets its own below it, which only it can enter.
            path: PATH, where the program is searched.
        """
        self._folder = folder
        self._path = path
        self._daemons: dict[tuple[str, str, int], _Daemon] = {}
        self._lock = threading.Lock()

    def stop_leftovers(self) -> None:
        """Stop the daemons of an earlier supervisor, whose jobs have ended by now."""
        program = shutil.which(PROGRAM, path=self._path)
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folder)):
                folder = os.path.join(self._folder, name)
                if program is not None:
                    _command(program, "quit", self._environment(folder), None)
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def hold(self, device: str, group: str, account: NodeAccount | None) -> Iterator[str]:
        """A running daemon for the device (its UUID) while in the context; yields its pipe folder. The last holder stops it.

        Raises:
            MpsUnavailable: the program is missing, or does not start.
            OSError: its folder cannot be created.
        """
        program = shutil.which(PROGRAM, path=self._path)
        if program is None:
            raise MpsUnavailable(
                f"{PROGRAM} is not installed on this node, so jobs cannot share its GPUs by MPS: "
                "install it with the driver's utilities, or submit with --share time",
                installed=False,
            )
        daemon = self._daemon(device, group, account)
        with daemon.lock:
            if not daemon.users:
                daemon.start(program)
            daemon.users += 1
        try:
            yield daemon.folder
        finally:
            with daemon.lock:
                daemon.users -= 1
                if not daemon.users:
                    daemon.stop(program)

    def _daemon(self, device: str, group: str, account: NodeAccount | None) -> _Daemon:
        uid = os.getuid() if account is None else account.uid
        with self._lock:
            daemon = self._daemons.get((device, group, uid))
            if daemon is None:
                # Short: the path of a socket in it has at most 107 bytes.
                folder = os.path.join(self._folder, hashlib.sha256(f"{device} {group} {uid}".encode()).hexdigest()[:12])
                environment = {**self._environment(folder), "CUDA_VISIBLE_DEVICES": device}
                daemon = self._daemons[device, group, uid] = _Daemon(folder, environment, account)
            return daemon

    def _environment(self, folder: str) -> dict[str, str]:
        return {"PATH": self._path, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}


def _command(program: str, command: str, environment: Mapping[str, str], account: NodeAccount | None) -> str:
    """Send a command to a daemon; returns why it failed, or ""."""
    return _run([program], f"{command}\n", environment, account, _QUIT_S)


def _run(
    argv: list[str], text: str, environment: Mapping[str, str], account: NodeAccount | None, limit_s: float
) -> str:
    who: dict[str, Any] = (
        {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
    )
    with tempfile.TemporaryFile() as output:  # not a pipe, which a daemon might keep open
        try:
            done = subprocess.run(
                argv,
                input=text.encode(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                timeout=limit_s,
                check=False,
                start_new_session=True,
                cwd="/",
                **who,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0:
            return ""
        output.seek(0)
        words = output.read(_OUTPUT_MAX).decode(errors="replace").strip()
        return words or f"exit code {done.returncode}"
