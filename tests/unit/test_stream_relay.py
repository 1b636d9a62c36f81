"""The relay of ports: what it does with bytes that no relay sends. `tests/e2e/test_sessions.py` has the rest, with real connections."""

import socket
import struct

from phalanx.wire.stream_relay import DATA, WINDOW_BYTES, StreamRelay


def test_frame_larger_than_a_window_ends_the_channel_before_its_bytes_are_collected():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(struct.pack(">IBI", 1, DATA, WINDOW_BYTES + 1))
        StreamRelay(here.fileno(), here.fileno()).run()
