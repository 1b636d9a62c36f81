"""A program on a terminal, typed at by a test."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

HANG_S = 60.0


class PtyClient:
    """A program on a terminal of 30 x 100. `seen` has all its output."""

    def __init__(self, *argv, env=None):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(argv[0], argv, os.environ if env is None else env)
        self.seen, self._from = bytearray(), 0
        self.resize(30, 100)

    def resize(self, rows, cols):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def until(self, text):
        """Wait until this comes, after what was waited for before."""
        until_s = time.monotonic() + HANG_S
        word, look = text.encode(), self._from
        while (at := self.seen.find(word, look)) < 0:
            look = max(self._from, len(self.seen) - len(word))
            assert self._read(until_s), f"{text!r} does not come after {bytes(self.seen[self._from :][-500:])!r}"
        self._from = at + len(word)

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """The exit code, once it has ended."""
        until_s = time.monotonic() + HANG_S
        while self._read(until_s):
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def ends_within(self, seconds):
        """Whether it closes its terminal so soon."""
        until_s = time.monotonic() + seconds
        while self._read(until_s):
            pass
        return time.monotonic() < until_s

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def _read(self, until_s):
        ready, _, _ = select.select([self.fd], [], [], max(0.0, until_s - time.monotonic()))
        data = b""
        with contextlib.suppress(OSError):  # EIO: it has ended
            data = os.read(self.fd, 1 << 16) if ready else b""
        self.seen += data
        return bool(data)
