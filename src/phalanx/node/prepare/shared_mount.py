"""One mount of an object store on this node, with the jobs that use it: their logs get its messages, and the last one ends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from phalanx.node.data import fuse_mounts
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.files.rmtree import remove_tree
from phalanx.node.processes.file_limits import wait_readable

_MAIN: Final = (sys.executable, "-I", "-m", "phalanx.node.data.mount_main")
_POLL_S: Final = 0.2
_END_LIMIT_S: Final = 10.0
_REFRESH_LIMIT_S: Final = 5.0  # a hang guard
_ANSWER_CHARACTERS_MAX: Final = 1 << 16
_LINE_CHARACTERS_MAX: Final = 4096


class SharedMount:
    """See the module. Called by many threads; `users` is the caller's to count, under a lock of its own.

    Attributes:
        users: the members that use it or wait for it.
        path: where it is mounted; "" until it is.
        broken: whether its files can be read no longer.
        tried: set once it is mounted, or is known not to be.
    """

    def __init__(self, folder: str, cache: str) -> None:
        """Start nothing yet. `folder`: of the mount; `cache`: of what it has read. Both are new."""
        self.users = 0
        self.path = ""
        self.broken = False
        self.tried = threading.Event()
        self._folder = folder
        self._cache = cache
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._logs: list[tuple[str, int]] = []
        self._answered = threading.Condition()
        self._asked = self._refreshed = 0

    def start(self, order: dict[str, Any], cancelled: threading.Event) -> float:
        """Mount it as the order says (see `mount_main`); returns the seconds that it took.

        Raises:
            PreparationFailed: it cannot be mounted, or the member was stopped.
            OSError: the program does not start.
        """
        process = self._process = subprocess.Popen(
            _MAIN,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=self._pass_on, name="mount-log", daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**order, "folder": self._folder, "cache": self._cache}) + "\n")
            process.stdin.flush()
        while not wait_readable(process.stdout.fileno(), _POLL_S):
            if cancelled.is_set():
                raise PreparationFailed("the job was stopped during preparation", charge=False)
        try:
            found = json.loads(process.stdout.readline(_ANSWER_CHARACTERS_MAX))
        except ValueError:
            raise PreparationFailed(
                "the program that mounts the job's data was ended on this node", charge=False
            ) from None
        if "path" not in found:
            raise PreparationFailed(str(found["why"]), charge=found["charge"] is True)
        self.path = str(found["path"])
        threading.Thread(target=self._watch, name="mount-watch", daemon=True).start()
        return float(found["seconds"])

    @contextlib.contextmanager
    def logging_to(self, name: str, output: int) -> Iterator[None]:
        """Write its messages also to this descriptor, with the dataset's name there; closes it at the end."""
        entry = (name, output)
        with self._lock:
            self._logs.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._logs.remove(entry)
            os.close(output)

    def refresh(self) -> None:
        """Let it show what the store has now, and not what it had when the job before looked. One that has ended is left as it is."""
        until_s = time.monotonic() + _REFRESH_LIMIT_S
        with self._answered:
            wanted = (
                self._asked + 1
            )  # one on its way may have come before what this job must see; many jobs share the next
            while self._refreshed < wanted and not self.broken and (left_s := until_s - time.monotonic()) > 0:
                if self._asked == self._refreshed:
                    self._asked += 1
                    self._ask_refresh()
                self._answered.wait(left_s)

    def _ask_refresh(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Close the program's input, upon which it unmounts and ends; kill it if it does not. Idempotent."""
        process = self._process
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        fuse_mounts.remove_mount_folders(self._folder)
        remove_tree(self._cache)

    def _watch(self) -> None:
        """Take its answers, until the line that says that rclone ended, or the program's end."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            while answers.readline(_ANSWER_CHARACTERS_MAX).startswith('{"refreshed"'):
                with self._answered:
                    self._refreshed = self._asked
                    self._answered.notify_all()
        with self._answered:
            self.broken = True
            self._answered.notify_all()

    def _pass_on(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            while line := lines.readline(_LINE_CHARACTERS_MAX):
                with self._lock:
                    for name, output in self._logs:
                        with contextlib.suppress(OSError):
                            os.write(output, f"phalanx: data {name}: {line.rstrip()}\n".encode())
