"""A batch job's processes prove themselves to each other; whoever else finds the port is shown out."""

import socket
import struct
import threading

import pytest

from phalanx.node.gang.job_link import (
    FRAME_BYTES_MAX,
    LinkClosed,
    accept_link,
    open_link,
)


def framed(body):
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "said",
    [
        framed(b"abc"),
        framed(b"\xff\xfe"),
        framed(b"[]"),
        framed(b"{}"),
        b"GET / HTTP/1.1\r\n",
        struct.pack(">I", FRAME_BYTES_MAX + 1),
    ],
    ids=["no JSON", "no text", "no mapping", "no proof", "HTTP", "too long"],
)
def test_a_stranger_is_shown_out(said):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkClosed):
            accept_link(ours, "key")


@pytest.mark.parametrize("key", ["key", "another"])
def test_both_sides_must_have_the_key(key):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        met = []

        def serve():
            sock, _ = listener.accept()
            try:
                met.append(accept_link(sock, "key"))
            except LinkClosed:
                sock.close()

        server = threading.Thread(target=serve)
        server.start()
        try:
            link = open_link("127.0.0.1", listener.getsockname()[1], key, {"node": 1}, within_s=5.0)
        except LinkClosed:
            link = None
        server.join()
    assert (link is not None, [who for _, who in met]) == ((True, [{"node": 1}]) if key == "key" else (False, []))
    for end in (link, *(one for one, _ in met)):
        if end is not None:
            end.close()
