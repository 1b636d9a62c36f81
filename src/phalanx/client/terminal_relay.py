"""Connects the terminal of a session to the terminal of a job's first rank: sent to the job's node as text. Standard library only.

The exit code is that of the rank's program. DETACH typed three times within a second leaves the program running. One or two of them
reach the program, but only when another key or the end of the second shows that no third one follows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import struct
import sys
import termios
import time
import tty

INPUT, SIZE, OUTPUT, EXIT = range(4)
DETACH = b"\x1d"  # Ctrl-]
DETACHED_CODE = 254  # of this program; with it comes the word DETACHED as its last output
DETACHED = b"\x1b]phalanx-detached\x07"
LOST_CODE = 253
_NAME = "terminal"
_HEADER = struct.Struct(">BI")
_SIZE = struct.Struct(">HH")
_PIECE = 1 << 16
_CONNECT_S = 10.0
_TYPED_WITHIN_S = 1.0
_TIMES = 3


def connect(folder: str) -> socket.socket:
    """Connect to the host, which may just be starting.

    Raises:
        OSError: no host listens there.
    """
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    until_s = time.monotonic() + _CONNECT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"/proc/self/fd/{fd}/{_NAME}")
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
        else:
            return connection


class Relay:
    """One terminal here, and one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unread = bytearray()
        self.held: list[float] = []  # when the DETACH keys were typed that the program has not got yet
        self.size = -1, -1  # that was sent last

    def run(self) -> int:
        """Copy until the program ends, or the user detaches."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGWINCH, lambda *_: None)
        self.send_size()
        selector = selectors.DefaultSelector()
        for fd in (0, woken, self.connection.fileno()):
            selector.register(fd, selectors.EVENT_READ)
        while True:
            left_s = max(0.0, self.held[0] + _TYPED_WITHIN_S - time.monotonic()) if self.held else None
            ready = {key.fd for key, _ in selector.select(left_s)}
            if woken in ready:
                os.read(woken, _PIECE)
                self.send_size()
            if self.connection.fileno() in ready:
                code = self.receive()
                if code is not None:
                    return code
            if 0 in ready:
                data = os.read(0, _PIECE)
                if not data:
                    return LOST_CODE
                self.send_size()  # a change of it may have come before this input, and be seen after it
                if self.detaches(data):
                    os.write(1, DETACHED)
                    return DETACHED_CODE
            elif self.held:
                self.detaches(b"")

    def detaches(self, data: bytes) -> bool:
        """Send input, without DETACH keys that others may follow; True for the third one."""
        now_s, passed = time.monotonic(), bytearray()
        while self.held and now_s - self.held[0] >= _TYPED_WITHIN_S:
            self.held.pop(0)
            passed += DETACH
        for byte in data:
            if byte == DETACH[0]:
                self.held.append(now_s)
                if len(self.held) == _TIMES:
                    break
            else:
                passed += DETACH * len(self.held)
                passed.append(byte)
                self.held.clear()
        if passed:
            self.send(INPUT, bytes(passed))
        return len(self.held) == _TIMES

    def receive(self) -> int | None:
        """Write output; return the exit code once the program has ended."""
        data = self.connection.recv(_PIECE)
        if not data:
            return LOST_CODE
        self.unread += data
        while len(self.unread) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self.unread)
            if len(self.unread) < _HEADER.size + size:
                return None
            body = bytes(self.unread[_HEADER.size : _HEADER.size + size])
            del self.unread[: _HEADER.size + size]
            if kind == EXIT:
                code: int = struct.unpack(">i", body)[0]
                return code if code >= 0 else 128 - code
            view = memoryview(body)
            while view:
                view = view[os.write(1, view) :]
        return None

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame."""
        self.connection.sendall(_HEADER.pack(kind, len(body)) + body)

    def send_size(self) -> None:
        """Send the size of the terminal here, if it has changed."""
        rows, cols, _, _ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
        if (rows, cols) != self.size:
            self.size = rows, cols
            self.send(SIZE, _SIZE.pack(rows or 24, cols or 80))


def main() -> int:
    """Connect the terminals; return the program's exit code."""
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        return Relay(connect(os.path.dirname(os.environ["PHALANX_HOSTFILE"]))).run()
    except (OSError, KeyError) as error:
        os.write(2, f"this job has no terminal: {error}\r\n".encode())
        return LOST_CODE
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())
