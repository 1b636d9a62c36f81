"""The supervisor of a seat asks its head before it starts, and says by its exit code what is wrong."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest

from phalanx.app.certificates import CertificateAuthority
from phalanx.app.state_folder import StateFolder
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.wire.seat import (
    SEAT_CERTIFICATE_REJECTED,
    SEAT_VARIABLE,
    SeatAssignment,
    SeatNode,
    encode_assignment,
)


@pytest.fixture
def port(tmp_path):
    """Of a server with a certificate of a CA that no seat knows."""
    authority = CertificateAuthority(StateFolder.open(str(tmp_path / "theirs")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.write("head", authority.sign(["127.0.0.1"])))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):  # the test has closed the server
                while True:
                    with contextlib.suppress(ssl.SSLError), server.accept()[0] as connection:
                        context.wrap_socket(connection, server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_head_with_another_certificate_is_rejected_and_nothing_is_started(tmp_path, port):
    order = SeatAssignment(
        job_id=JobId("1"),
        epoch=Epoch(1),
        key="k",
        engine="kubernetes",
        head_url=f"https://127.0.0.1:{port}",
        ca_pem=CertificateAuthority(StateFolder.open(str(tmp_path / "ours"))).ca_pem,
        nodes={NodeId("n0"): SeatNode(address="127.0.0.1", devices=0)},
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    variables = {SEAT_VARIABLE: encode_assignment(order), "PHALANX_NODE_ID": "n0", "TMPDIR": str(folder)}
    words = [sys.executable, "-P", "-m", "phalanx.app.seat_supervisor"]
    done = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (SEAT_CERTIFICATE_REJECTED, "")
    assert not list(folder.iterdir())
