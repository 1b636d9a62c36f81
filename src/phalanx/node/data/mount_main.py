"""Mounts one object store: `python -I -m phalanx.node.data.mount_main`, one process for each mount of a node.

Started by `prepare.shared_mount` as the supervisor's account. It reads one line of JSON from its input, mounts the source by a program `rclone`
that runs under the job's account, and writes one line: {"path": path, "seconds": time} or {"why": text, "charge": bool}. Each further line of its
input lets rclone forget what it has listed, for a job that joins, and is answered by {"refreshed": true}. If rclone ends later, it writes a last
line, {"ended": code}. Errors of rclone go to its error output, for the logs of the jobs. It unmounts, removes the cache and ends when its input
ends, so no mount outlives its supervisor. If it is killed itself, the kernel kills rclone.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Final

from phalanx.node.data import fuse_mounts
from phalanx.node.data.rclone_remote import REMOTE, only_file, parent_with_file, remote_variables
from phalanx.node.files.rmtree import remove_tree

_PROBE_LIMIT_S: Final = 90.0
_MOUNT_LIMIT_S: Final = 30.0
_POLL_S: Final = 0.02
_SAID_WAIT_S: Final = 2.0  # rclone's line on an error comes after the error itself
_END_LIMIT_S: Final = 5.0
_HANDLES_SIGNALS_S: Final = 1.0  # after its mount is up: rclone would die of an earlier SIGHUP
_FORGETS_S: Final = 0.1  # after the signal, to which it gives no answer
_LINE_MAX: Final = 300
_MOUNTED: Final = "data"  # the folder of the mount
_NOT_FOUND: Final = frozenset({3, 4})  # exit codes of rclone: no such folder, no such file
_DENIED: Final = re.compile(
    r"AccessDenied|Access ?Denied|Forbidden|Unauthorized|StatusCode: 40[13]|\b40[13]\b|InvalidAccessKeyId|SignatureDoesNotMatch"
    r"|AuthenticationFailed|AuthorizationFailure|no EC2 IMDS role|could not find default credentials"
)
_MISSING: Final = re.compile(
    r"NoSuchBucket|ContainerNotFound|bucket does not exist|directory not found|StatusCode: 404"
)
_STAMP: Final = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d [A-Z]+ *: ")
_PREFIX: Final = re.compile(r"^Failed to lsjson: (?:error listing \"\": )?")
# Of rclone, beside those of the remote: no file of settings, few and short retries while a rank waits, and the cache's bounds.
_OPTIONS: Final = {
    "RCLONE_CONFIG": os.devnull,
    "RCLONE_CONTIMEOUT": "15s",
    "RCLONE_TIMEOUT": "60s",
    "RCLONE_LOW_LEVEL_RETRIES": "5",
    "RCLONE_LOG_LEVEL": "NOTICE",
    "RCLONE_USE_SERVER_MODTIME": "true",  # else one more request for each file of S3
    "RCLONE_BUFFER_SIZE": "4M",  # of memory for each open file; the cache on the disk reads ahead
    "RCLONE_VFS_CACHE_MODE": "full",
    "RCLONE_VFS_CACHE_POLL_INTERVAL": "10s",
    "GOMEMLIMIT": "512MiB",  # from there on Go collects garbage more often
}
_libc: Final = ctypes.CDLL(None)


class _Failed(Exception):
    """A source cannot be mounted. `charge`: by the job's own fault."""

    def __init__(self, why: str, *, charge: bool) -> None:
        super().__init__(why)
        self.charge = charge


class _Programs:
    """The rclone programs that run now. `kill` ends them all, and none starts afterwards."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []
        self._over = False
        self._serving: tuple[subprocess.Popen[str], float] | None = None

    def start(
        self, words: list[str], variables: dict[str, str], *, output: int, inherit: tuple[int, ...] = ()
    ) -> subprocess.Popen[str]:
        """Start rclone under the job's account, with its error output as a pipe. `inherit`: descriptors that it gets.

        Raises:
            OSError: it does not start, or all were killed.
        """
        with self._lock:
            if self._over:
                raise OSError("the job was stopped")
            process = subprocess.Popen(
                [self._order["rclone"], *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd="/",
                env={"PATH": os.defpath, **variables, **_OPTIONS},
                pass_fds=inherit,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  the other threads hold no lock: they wait for input
                **self._order["account"],
            )
            self._running.append(process)
            return process

    def serves(self, process: subprocess.Popen[str]) -> None:
        """The mount of this one is up now."""
        self._serving = process, time.monotonic()

    def refresh(self) -> None:
        """Let the one that serves forget what it has listed, as it does on SIGHUP (https://rclone.org/commands/rclone_mount/#vfs-directory-cache)."""
        if self._serving is not None:
            process, up_s = self._serving
            time.sleep(max(0.0, up_s + _HANDLES_SIGNALS_S - time.monotonic()))
            process.send_signal(signal.SIGHUP)
            time.sleep(_FORGETS_S)

    def kill(self) -> None:
        """End all of them."""
        with self._lock:
            self._over = True
            for process in self._running:
                process.kill()

    def wait(self) -> None:
        """Wait until they are gone."""
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)


class _Log:
    """The lines that rclone writes: kept until the mount is up, then passed on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._last = ""
        self._came = threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._passed_on = False
        self._code: int | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def last(self) -> str:
        """Its last line; waits a little for one."""
        self._came.wait(_SAID_WAIT_S)
        return self._last or "rclone ended without a message"

    def pass_on(self) -> None:
        """The mount is up: pass on what comes from here on, and the end, also if it has come already."""
        with self._lock:
            self._passed_on = True
            code = self._code
        if code is not None:
            self._tell_end(code)

    def end(self) -> None:
        """Its end is wanted from here on."""
        self._ended = True

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if text := _plain(line):
                self._last = text
                self._came.set()
                if self._passed_on and not self._ended:
                    _say(text)
        code = self._process.wait()
        self._came.set()
        with self._lock:
            self._code = code
            passed_on = self._passed_on
        if passed_on:
            self._tell_end(code)

    def _tell_end(self, code: int) -> None:
        if not self._ended:
            _say(f"rclone ended with code {code}; its files cannot be read from here on")
            _answer({"ended": code})  # the next job gets a mount of its own


def main() -> int:
    """Serve one order; returns 0 if it was mounted."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    programs, ended, logs = _Programs(order), threading.Event(), list[_Log]()

    def watch_input() -> None:
        while sys.stdin.readline():
            programs.refresh()
            _answer({"refreshed": True})
        for log in logs:
            log.end()
        ended.set()
        programs.kill()

    threading.Thread(target=watch_input, daemon=True).start()
    mounted = False
    try:
        began_s = time.monotonic()
        path = _mount(order, programs, logs)
        mounted = True
        _answer({"path": path, "seconds": time.monotonic() - began_s})
        for log in logs:
            log.pass_on()
    except _Failed as error:
        _answer({"why": str(error), "charge": error.charge})
    except (OSError, fuse_mounts.MountUnavailable) as error:
        _answer({"why": f"data cannot be mounted on this node: {error}", "charge": False})
    if mounted:
        ended.wait()
    for log in logs:
        log.end()
    fuse_mounts.remove_mount_folders(order["folder"])
    programs.kill()
    programs.wait()
    remove_tree(order["cache"])
    return 0 if mounted else 1


def _mount(order: dict[str, Any], programs: _Programs, logs: list[_Log]) -> str:
    """Mount the source; returns the path that ranks get."""
    source, given = order["source"], order["variables"]
    variables, file = remote_variables(source, given), ""
    if _is_file(programs, source, variables):
        parent, file = parent_with_file(source)
        variables = remote_variables(parent, given) | only_file(file)
    path = os.path.join(order["folder"], _MOUNTED)
    os.mkdir(path)
    process = _serve(order, programs, path, variables)
    log = _Log(process)
    logs.append(log)
    try:
        _wait_until_mounted(path, process)
        _read_first(path, file, source)
    except OSError as error:
        raise _failure(source, log.last()) from error
    programs.serves(process)
    return os.path.join(path, file) if file else path


def _serve(order: dict[str, Any], programs: _Programs, path: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start the rclone that serves a mount: one that we make, or without root one that it makes."""
    own = [fuse_mounts.open_mount(path, order["uid"], order["gid"])] if fuse_mounts.mounts_itself() else []
    target = [f"/dev/fd/{own[0]}", "--allow-non-empty"] if own else [path]  # it cannot list a descriptor
    words = ["mount2", REMOTE, *target, "--read-only", "--dir-perms", "0500", "--file-perms", "0400"]
    words += ["--uid", str(order["uid"]), "--gid", str(order["gid"])]
    words += ["--cache-dir", order["cache"]]
    words += [  # with a unit: rclone reads a bare number as KiB
        "--vfs-cache-max-size",
        f"{order['cache_bytes']}B",
        "--vfs-cache-min-free-space",
        f"{order['free_bytes']}B",
    ]
    try:
        return programs.start(words, variables, output=subprocess.DEVNULL, inherit=tuple(own))
    finally:
        for descriptor in own:
            os.close(descriptor)  # rclone alone has it: if it ends, reads fail and do not wait


def _wait_until_mounted(path: str, process: subprocess.Popen[str]) -> None:
    """Raises OSError if rclone has not mounted after a while. A mount of ours is there already."""
    until_s = time.monotonic() + _MOUNT_LIMIT_S
    while os.path.realpath(path) not in fuse_mounts.mounts_below(os.path.dirname(path)):
        if process.poll() is not None or time.monotonic() > until_s:
            raise OSError(f"{path} is not mounted")
        time.sleep(_POLL_S)


def _is_file(programs: _Programs, source: str, variables: dict[str, str]) -> bool:
    """Whether the source is one object; False for a folder.

    Raises:
        _Failed: it does not exist, the job may not read it, or the store does not answer.
    """
    words = ["lsjson", "--stat", REMOTE, "--retries", "1", "--low-level-retries", "3"]
    process = programs.start(words, variables, output=subprocess.PIPE)
    try:
        output, said = process.communicate(timeout=_PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise _Failed(f"data: {source}: the store did not answer for {_PROBE_LIMIT_S:.0f}s", charge=False) from None
    if process.returncode != 0:
        line = next((text for text in map(_plain, reversed(said.splitlines())) if text), f"code {process.returncode}")
        raise _failure(source, line, missing=process.returncode in _NOT_FOUND)
    return output.strip() == "null"  # the remote's root is the folder of the object


def _read_first(path: str, file: str, source: str) -> None:
    """Read as a rank will: the folder, and one byte of a file. Listing and reading are two rights.

    Raises:
        OSError: it fails. _Failed: there is nothing.
    """
    if not file:
        with os.scandir(path) as entries:
            found = list(itertools.islice(entries, 100))
        if not found:
            raise _Failed(f"data: {source}: no files there", charge=True)
        file = next((entry.name for entry in found if entry.is_file(follow_symlinks=False)), "")
    if file:
        with open(os.path.join(path, file), "rb", buffering=0) as one:
            one.read(1)


def _failure(source: str, line: str, *, missing: bool = False) -> _Failed:
    if missing or _MISSING.search(line):
        if source.startswith(("http://", "https://")):
            return _Failed(
                f"data: {source}: no index of files there; mode: stage copies, and mode: stream passes on, a single file",
                charge=True,
            )
        return _Failed(f"data: {source}: no such bucket or folder", charge=True)
    if _DENIED.search(line):
        return _Failed(f"data: {source}: the job may not read it: {line}", charge=True)
    return _Failed(f"data cannot be mounted on this node: {source}: {line}", charge=False)


def _plain(line: str) -> str:
    """A line of rclone without its time, level and command."""
    return _PREFIX.sub("", _STAMP.sub("", line.strip()))[:_LINE_MAX]


def _end_with_parent() -> None:
    """In the child: be killed if this process dies. The main thread starts every program, and lives as long as the process."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _answer(words: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone
        os.write(1, f"{json.dumps(words)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
