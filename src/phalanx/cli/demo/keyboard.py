"""Single keys from a terminal, without Enter and without echo."""

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
    """Keys while it is open; the terminal is as before afterwards, however it ends. Not a terminal: no key ever comes."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[object] | None = None

    @property
    def works(self) -> bool:
        """Whether there is a keyboard at all."""
        return self._fd >= 0

    def __enter__(self) -> Self:
        if self.works:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)  # Ctrl-C still interrupts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]  # as tcgetattr gave it

    def key(self, wait_s: float) -> str:
        """The next key, or nothing after `wait_s`. Arrows and other sequences count as nothing."""
        if not self.works:
            time.sleep(wait_s)
            return ""
        ready, _, _ = select.select([self._fd], [], [], wait_s)
        if not ready:
            return ""
        typed = os.read(self._fd, 64).decode(errors="replace")
        return typed if len(typed) == 1 else ""
