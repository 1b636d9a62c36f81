"""Read single keys from a terminal, without Enter and echo."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Self


class Keyboard:
    """A context manager that restores the terminal on exit. Without a terminal it never returns a key."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[object] | None = None

    @property
    def available(self) -> bool:
        """Whether standard input is a terminal."""
        return self._fd >= 0

    def __enter__(self) -> Self:
        if self.available:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # Ctrl-C still interrupts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]  # the value returned by tcgetattr

    def read_key(self, wait_s: float) -> str:
        """Return the next key, or "" after `wait_s`. Escape sequences such as arrow keys are ignored."""
        if not self.available:
            time.sleep(wait_s)
            return ""
        ready, _, _ = select.select([self._fd], [], [], wait_s)
        if not ready:
            return ""
        typed = os.read(self._fd, 64).decode(errors="replace")
        return typed if len(typed) == 1 else ""
