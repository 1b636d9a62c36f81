"""The command of the exec session: copies bytes between the session and the broker's socket on this node.

Sent to the node as text and run by `python -S -E -c`, so that it starts in milliseconds and needs nothing that is installed there.
`socket` and `selectors` would be half of its start (6 of 15 ms of CPU): it uses the modules in C below them.
"""

import _socket
import os
import select
import sys
import time

SOCKET = "executor.sock"
PAGE = "PHALANX_LEASE_PAGE"  # its folder is the attempt's own, which only the job's account can open


def main() -> int:
    """Connect, and copy until one side ends."""
    os.chdir(os.path.dirname(os.environ[PAGE]))  # a socket's path may have 107 bytes at most
    broker = _socket.socket(_socket.AF_UNIX)
    until = time.monotonic() + 60.0
    while True:
        try:
            broker.connect(SOCKET)
            break
        except OSError:  # the broker is starting
            if time.monotonic() > until:
                sys.stderr.write("no broker of an Executor listens on this node\n")
                return 1
            time.sleep(0.005)
    ready = select.poll()
    for fd in (0, broker.fileno()):
        ready.register(fd, select.POLLIN)
    while True:
        for fd, _ in ready.poll():
            data = os.read(0, 1 << 18) if fd == 0 else broker.recv(1 << 18)
            if not data:
                return 0
            if fd == 0:
                broker.sendall(data)
            else:
                while data:
                    data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
