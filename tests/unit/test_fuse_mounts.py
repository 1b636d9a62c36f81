"""Whether this machine can mount: what is missing is said before a job is placed here."""

import os
import shutil
import subprocess
import sys

import pytest

from phalanx.node.data import fuse_mounts

ASK = "from phalanx.node.data import fuse_mounts; print(fuse_mounts.why_not())"


def test_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(fuse_mounts, "DEVICE", "/dev/no-such-device")
    assert fuse_mounts.why_not() == "/dev/no-such-device does not exist; load the kernel's module fuse"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv of util-linux")
@pytest.mark.skipif(not os.path.exists(fuse_mounts.DEVICE), reason="there is no /dev/fuse here")
def test_root_without_the_right_to_mount_is_told():
    def asked(*words):
        done = subprocess.run(
            [*words, sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    assert "CAP_SYS_ADMIN" in asked("setpriv", "--bounding-set", "-sys_admin")
    assert "CAP_SYS_ADMIN" not in asked()
