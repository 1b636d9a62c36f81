"""The start script of a rented machine on a machine without Phalanx: run by a shell with a plain Python, against a head that serves over TLS."""

import http.server
import os
import ssl
import subprocess
import sys
import threading

import pytest

from phalanx.app.certificates import CertificateAuthority
from phalanx.app.machine_files import MachineFiles
from phalanx.app.state_folder import StateFolder
from phalanx.core.ids import NodeId
from phalanx.ports.engine import MachineJoin
from phalanx.providers.clouds.pool_settings import MachineSettings
from phalanx.providers.clouds.start_script import start_script
from phalanx.wire.head_http import fingerprint

TOKEN = "phxm.burst-0.secret"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return MachineFiles(path=str(tmp_path_factory.mktemp("files") / "machine-files.tar.gz"))


@pytest.fixture
def head(tmp_path, files):
    """A server that answers as the head does: its CA to all, the files to the holder of the token."""
    authority = CertificateAuthority(StateFolder.open(str(tmp_path / "home")))
    certificate, key = authority.write("head", authority.sign(["127.0.0.1"]))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # the name that http.server calls
            if self.path == "/v1/ca":
                body = authority.ca_pem.encode()
            elif self.path == "/v1/join/files" and self.headers.get("Authorization") == f"Bearer {TOKEN}":
                with open(files.prepare(), "rb") as file:
                    body = file.read()
            else:
                self.send_error(401)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", fingerprint(authority.ca_pem)
    server.shutdown()
    server.server_close()


def machine(tmp_path, script):
    """Run the script where `python3` has no Phalanx; return the console."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    python = os.path.realpath(sys.executable)
    (bin_folder / "python3").symlink_to(python)
    (bin_folder / "shutdown").write_text("#!/bin/sh\necho off\n")
    (bin_folder / "shutdown").chmod(0o755)
    start = tmp_path / "start"
    start.write_text(script)
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["/bin/sh", str(start)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout + done.stderr


def script_for(address, known):
    join = MachineJoin(address=address, token=TOKEN, fingerprint=known)
    return start_script(NodeId("burst-0"), join, MachineSettings(silence_s=0.1), notices="aws")


def test_the_machine_gets_its_program_from_the_head_and_runs_it(tmp_path, head):
    said = machine(tmp_path, script_for(*head))
    # It ran: a lease of 0.1 s without an answer has ended it, since this head lets nobody join.
    assert "switching off: the head has been silent for 0.1 s" in said, said
    assert "off\n" in said
    assert os.path.exists(tmp_path / ".phalanx-files/start.py")


def test_a_head_with_another_certificate_gets_no_token(tmp_path, head):
    said = machine(tmp_path, script_for(head[0], "sha256:" + "ab" * 32))
    assert "a certificate with another fingerprint" in said
    assert "off" in said
    assert not os.path.exists(tmp_path / ".phalanx-files")


def test_the_same_order_gives_the_same_text():
    assert script_for("10.0.0.1:7600", "sha256:aa") == script_for("10.0.0.1:7600", "sha256:aa")
