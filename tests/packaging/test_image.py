"""The image, built by a real podman from a Debian tree or from an image of one's own.

A head in a container runs jobs, and a later container goes on with its state. Pods find their supervisor in it.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.process_rig import until
from tests.e2e.test_images import WORLD

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.serial,
    pytest.mark.prove,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("mmdebstrap", "dpkg-deb", "podman"))),
        reason="needs root, mmdebstrap and podman: make deb-tools image-tools",
    ),
]
IMAGE = "phalanx:tested"


class Podman:
    """A podman with a storage of its own, in a mount namespace with cgroups of version 2."""

    def __init__(self, folder):
        storage = ("--root", f"{folder}/root", "--runroot", f"{folder}/run", "--storage-driver", "vfs")
        self.words = ("podman", *storage, "--cgroup-manager", "cgroupfs")
        self.keeper = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", WORLD])
        until(lambda: self.call("stat", "-fc", "%T", "/sys/fs/cgroup") == "cgroup2fs\n", "cgroups of version 2")

    def call(self, *words, code=0, **variables):
        done = subprocess.run(
            ["nsenter", "--mount", "--target", str(self.keeper.pid), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
            env={**os.environ, **variables},
        )
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def __call__(self, *words, code=0):
        return self.call(*self.words, *words, code=code)

    def build(self, package, tag, **variables):
        script = str(ROOT / "packaging/image/build.sh")
        self.call(script, str(package), tag, PHALANX_PODMAN=" ".join(self.words), **variables)

    def start(self, name, image, *words):
        """A container without a network of its own, and with limits that this machine may set."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = ("--cgroups=disabled", "--network=none", f"--ulimit=nofile={hard}:{hard}", "--ulimit=nproc=4096:4096")
        self("run", "--detach", "--name", name, *limits, "--volume", "state:/srv/phalanx", image, *words)
        asked = ("sh", "-c", '"$@" >/dev/null 2>&1 && echo up', "sh", *self.words, "exec", name, "phalanx", "ps")
        until(lambda: self.call(*asked, code=None) == "up\n", f"a head in {name}")

    def phalanx(self, name, *words, code=0):
        return self("exec", name, "phalanx", *words, code=code)


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    podman = Podman(tmp_path_factory.mktemp("podman"))
    yield podman
    podman("rm", "--all", "--force", "--volumes")
    podman.keeper.kill()
    podman.keeper.wait()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    out = tmp_path_factory.mktemp("deb")
    wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(wheel, check=True, capture_output=True, timeout=300)
    build = [ROOT / "packaging/deb/build.sh", sys.executable, next(out.glob("*.whl")), out]
    environment = {**os.environ, "PHALANX_DEB_COMPRESSION": "none"}
    subprocess.run(build, check=True, capture_output=True, timeout=600, env=environment)
    (made,) = out.glob("*.deb")
    return made


def test_a_head_in_a_container_runs_jobs_and_the_next_container_goes_on_with_its_state(podman, package):
    podman.build(package, IMAGE)
    podman.start("head", IMAGE, "up", "--foreground", "--virtual", "2x2")
    said = podman.phalanx("head", "run", "--gpus", "2x2", "--", "python3", "-c", "print('in the image')")
    assert said.count("in the image") == 4
    assert "uid=0" not in podman("exec", "head", "id")
    assert "phalanx: error:" not in podman.phalanx("head", "show", "1")
    podman("stop", "--time", "60", "head")
    assert podman("inspect", "--format", "{{.State.ExitCode}}", "head") == "0\n", "it stopped by itself"

    podman.start("next", IMAGE, "up", "--foreground", "--virtual", "2x2")
    (job,) = json.loads(podman.phalanx("next", "ps", "-a", "--json"))
    assert (job["id"], job["state"]) == ("1", "succeeded")
    assert podman.phalanx("next", "logs", "1").count("in the image") == 4


SEAT = ("python3", "-P", "-m", "phalanx.app.seat_supervisor")
BRING = "python3 -P -m phalanx.app.supervisor_files /tmp/own && python3 /tmp/own/start.py phalanx.app.seat_supervisor"


def run_as_pod(podman, image, *words):
    """What a pod of the engine would print: as its user, with its variables, without the entry point of the image."""
    limits = ("--cgroups=disabled", "--network=none", "--ulimit=nproc=4096:4096", "--user=1000:1000", "--env=HOME=/tmp")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    words = (*limits, f"--ulimit=nofile={hard}:{hard}", "--entrypoint", json.dumps(words), image)
    return podman.call("sh", "-c", '"$@" 2>&1; echo "code $?"', "sh", *podman.words, "run", "--rm", *words)


def test_a_pod_of_the_image_finds_its_supervisor_and_can_bring_it_to_another_image(podman, package):
    podman.build(package, IMAGE)
    for words in (SEAT, ("sh", "-c", BRING)):
        said = run_as_pod(podman, IMAGE, *words)
        assert "phalanx seat: PHALANX_SEAT is not a valid order" in said, said
        assert said.endswith("code 64\n")


def test_an_image_of_ones_own_with_python_gets_phalanx(podman, package, tmp_path):
    tree = tmp_path / "own.tar"
    podman.call("mmdebstrap", "--quiet", "--variant=minbase", "--include=python3", "bookworm", str(tree))
    podman("import", str(tree), "localhost/own:1")
    podman.build(package, "localhost/own-phalanx:1", BASE="localhost/own:1", BUILDAH_ISOLATION="chroot")
    for words in (SEAT, ("sh", "-c", BRING)):
        assert run_as_pod(podman, "localhost/own-phalanx:1", *words).endswith("code 64\n")
    assert run_as_pod(podman, "localhost/own-phalanx:1", "phalanx", "--version").endswith("\ncode 0\n")
