"""Zygotes of this node: warm parents of Python ranks, one per interpreter and import-relevant environment.

The loop requests one at Prepare, so that it imports while the gang gathers, and uses it at Start if it is ready. An unsuitable zygote
(several threads after `import torch`, no torch, CUDA initialised) is REFUSED with a reason, and the rank starts cold.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Mapping
from typing import Final

from phalanx.node.logic.warm_start import WarmCommand, startup_environment
from phalanx.node.processes.spawner import Spawner
from phalanx.node.processes.sweeps import TASK_KEY_VARIABLE

ZYGOTE_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote_main.py")
PRELOAD: Final = "torch,?phalanx.torch"
START_LIMIT_S: Final = 120.0  # `import torch` from a cold network file system takes a minute; from warm pages 1.5 s
_TASK_KEY_ROOM: Final = 255  # longest marker a warm rank can show; node keys and job ids stay far below
_WORDS_ROOM: Final = 1024  # bytes of its command that a warm rank can show in /proc/<pid>/cmdline


class ZygoteState(enum.StrEnum):
    """The states of a zygote."""

    STARTING = "starting"
    READY = "ready"
    REFUSED = "refused"
    DEAD = "dead"


class Zygote:
    """One zygote. `reason` explains REFUSED or DEAD. Calls may come from any thread."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self.reason = ""
        self.used_s = time.monotonic()
        self._known = threading.Event()
        self._ready = False
        threading.Thread(target=self._listen, name=f"phalanx-zygote-{spawner.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.spawner.pid

    @property
    def state(self) -> ZygoteState:
        """The current state."""
        if not self._known.is_set():
            return ZygoteState.STARTING
        if not self._ready:
            return ZygoteState.REFUSED
        return ZygoteState.READY if self.spawner.alive() else ZygoteState.DEAD

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has started or failed; True if it is READY. With 0 it does not wait."""
        self._known.wait(timeout_s)
        return self.state is ZygoteState.READY

    def memory_bytes(self) -> int:
        """Its proportional share of memory (Pss): shared pages are divided over its ranks."""
        try:
            with open(f"/proc/{self.pid}/smaps_rollup") as rollup:
                for line in rollup:
                    if line.startswith("Pss:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass
        return 0

    def _listen(self) -> None:
        message = self.spawner.receive(START_LIMIT_S)
        if message is None:
            self.reason = f"it died or did not start within {START_LIMIT_S:.0f} s; see the supervisor's log"
        elif message["op"] == "ready":
            self._ready = True
        else:
            self.reason = message["reason"]
        self._known.set()


class Zygotes:
    """The zygotes of one supervisor: at most `limit`; each is retired after `idle_s` without a request."""

    def __init__(self, *, node_key: str, limit: int = 2, idle_s: float = 900.0) -> None:
        self._node_key = node_key
        self._limit = limit
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._by_need: dict[tuple[object, ...], Zygote] = {}
        self._retired: list[Zygote] = []

    def request(self, command: WarmCommand, *, env: Mapping[str, str], cwd: str) -> Zygote | None:
        """The zygote for such ranks, started on demand; returns at once, see `Zygote.wait`.

        Args:
            command: the rank's command.
            env: the rank's environment.
            cwd: the rank's working directory, against which a relative interpreter or PYTHONPATH is resolved.

        Returns:
            None when the interpreter is not found or cannot be executed; the cold start reports it.
        """
        interpreter = find_interpreter(command.interpreter, env=env, cwd=cwd)
        if interpreter is None:
            return None
        early = startup_environment(env)
        folder = cwd if _reads_working_directory(early) else "/"
        need = (interpreter, command.unbuffered, folder, tuple(early.items()))
        with self._lock:
            zygote = self._by_need.get(need)
            if zygote is not None and zygote.state is ZygoteState.DEAD:
                self._retire(need)
                zygote = None
            if zygote is None:
                while len(self._by_need) >= self._limit:
                    self._retire(min(self._by_need, key=lambda known: self._by_need[known].used_s))
                try:
                    zygote = self._start(interpreter, unbuffered=command.unbuffered, early=early, cwd=folder)
                except OSError:
                    return None
                self._by_need[need] = zygote
            zygote.used_s = time.monotonic()
            return zygote

    def reap(self, now_s: float | None = None) -> None:
        """Retire zygotes unused for `idle_s` (`now_s` is of time.monotonic()) and drop those that have ended."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            for need in [need for need, zygote in self._by_need.items() if now_s - zygote.used_s > self._idle_s]:
                self._retire(need)
            self._retired = [zygote for zygote in self._retired if zygote.spawner.alive()]

    def close(self) -> None:
        """End all. Running ranks belong to their keepers and do not need a zygote."""
        with self._lock:
            for need in list(self._by_need):
                self._retire(need)
            for zygote in self._retired:
                zygote.spawner.close()
            self._retired.clear()

    def _retire(self, need: tuple[object, ...]) -> None:
        """Make it end once its keepers have; `reap` drops it."""
        zygote = self._by_need.pop(need)
        zygote.spawner.disconnect()
        self._retired.append(zygote)

    def _start(self, interpreter: str, *, unbuffered: bool, early: Mapping[str, str], cwd: str) -> Zygote:
        # One BLAS thread, otherwise NumPy's OpenBLAS starts its pool during the import of torch; each rank restores its own number.
        env = {**early, "OPENBLAS_NUM_THREADS": "1", TASK_KEY_VARIABLE: " " * _TASK_KEY_ROOM}
        command = [interpreter, *(["-u"] if unbuffered else []), ZYGOTE_PROGRAM, PRELOAD, "." * _WORDS_ROOM]
        return Zygote(Spawner(command, node_key=self._node_key, env=env, cwd=cwd))


def find_interpreter(name: str, *, env: Mapping[str, str], cwd: str) -> str | None:
    """The path that exec would use in a rank: along the rank's PATH, relative to its working directory. Links are not resolved (venvs)."""
    if "/" in name:
        candidates = [os.path.join(cwd, name)]
    else:
        candidates = [os.path.join(cwd, part, name) for part in env.get("PATH", os.defpath).split(":")]
    for candidate in candidates:
        with contextlib.suppress(OSError):
            if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                return os.path.normpath(candidate)
    return None


def _reads_working_directory(early: Mapping[str, str]) -> bool:
    path = early.get("PYTHONPATH", "")
    return path != "" and any(not part.startswith("/") for part in path.split(":"))
