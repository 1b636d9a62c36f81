"""A head whose relay does not answer: `up` and `doctor` say so, with what to do, until there is a connection."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(120)]


def test_up_and_doctor_say_that_the_relay_does_not_answer_and_what_to_do(tmp_path):
    phalanx, port = Shell(tmp_path), free_port()
    key = tmp_path / "relay.key"
    key.write_text(f"phxr.{'5e' * 32}\n")
    key.chmod(0o600)
    relay = None
    try:
        up = phalanx(
            "up",
            "--virtual",
            "1x1",
            "--port",
            str(free_port()),
            "--relay",
            f"127.0.0.1:{port}",
            "--relay-key",
            str(key),
        )
        lines = up.stdout.splitlines()
        (said,) = [
            number for number, line in enumerate(lines) if f"no connection to the relay 127.0.0.1:{port}: " in line
        ]
        assert "refused" in lines[said]
        assert "no other server can join until there is one" in lines[said]
        assert f"phalanx relay --listen 0.0.0.0:{port}" in lines[said + 1]
        (found,) = [one for one in json.loads(phalanx("doctor", "--json", code=1).stdout) if one["what"] == "relay"]
        assert found["level"] == "fail"
        assert f"phalanx relay --listen 0.0.0.0:{port}" in found["mend"]
        relay = subprocess.Popen(
            [sys.executable, "-m", "phalanx.app.cli", "relay", "--listen", f"127.0.0.1:{port}", "--key", str(key)],
            env=phalanx.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until_s = time.monotonic() + 60.0
        while "no connection" in phalanx("up").stdout:  # the head tries again within 15 s
            assert time.monotonic() < until_s
        assert "relay" not in [one["what"] for one in json.loads(phalanx("doctor", "--json").stdout)]
    finally:
        phalanx("down", "--cancel-jobs")
        if relay is not None:
            relay.terminate()
            relay.wait(timeout=30)
