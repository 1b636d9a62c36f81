"""The Debian package in a Debian of its own: installed, upgraded while a job runs, removed and purged."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.serial,
    pytest.mark.prove,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("mmdebstrap", "dpkg-deb"))),
        reason="needs root and mmdebstrap: make deb-tools",
    ),
]

IMPORTS_LATE = """
import pkgutil, sys
import phalanx
sys.stdin.readline()
for module in pkgutil.walk_packages([*phalanx.__path__], "phalanx."):
    if module.name.startswith(("phalanx.node.shell", "phalanx.node.logic", "phalanx.wire", "phalanx.core")):
        __import__(module.name)
print(*{module.__file__.partition("/python3")[0] for name, module in sys.modules.items() if name.startswith("phalanx")})
"""


class Tree:
    """A Debian without a running systemd."""

    def __init__(self, folder):
        self.folder = folder
        subprocess.run(
            [
                "mmdebstrap",
                "--variant=minbase",
                "--include=python3,adduser,systemd,man-db,iproute2",
                "bookworm",
                folder,
            ],
            check=True,
            capture_output=True,
            timeout=600,
        )
        for kernel in ("proc", "dev"):
            subprocess.run(["mount", "--bind", f"/{kernel}", folder / kernel], check=True)

    def close(self):
        for kernel in ("proc", "dev"):
            subprocess.run(["umount", self.folder / kernel], check=True)

    def run(self, *words, code=0):
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            ["chroot", self.folder, *words], capture_output=True, text=True, check=False, env=environment, timeout=300
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def json(self, *words):
        return json.loads(self.run("phalanx", *words, "--json"))

    def start(self, *words):
        pipe = subprocess.PIPE
        return subprocess.Popen(["chroot", self.folder, *words], text=True, stdin=pipe, stdout=pipe, stderr=pipe)

    def builds(self):
        """The folders from which programs of the package run."""
        return sorted(path.name for path in (self.folder / "usr/lib/phalanx").glob("*-*"))

    def install(self, package):
        shutil.copy(package, self.folder / "tmp" / "phalanx.deb")
        return self.run("dpkg", "-i", "/tmp/phalanx.deb")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The package of this checkout, and the same as a later release."""
    out = tmp_path_factory.mktemp("deb")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = out.glob("*.whl")
    build = [ROOT / "packaging/deb/build.sh", sys.executable, wheel, out]
    made: list[Path] = []
    for version in ((), ("99.0",)):
        environment = {**os.environ, "PHALANX_DEB_COMPRESSION": "none"}
        done = subprocess.run(
            [*build, *version], capture_output=True, text=True, check=False, env=environment, timeout=600
        )
        assert done.returncode == 0, done.stderr
        (newest,) = set(out.glob("*.deb")) - set(made)
        made.append(newest)
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "debian"
    found = Tree(folder)
    yield found
    found.close()


def until(condition, within_s=60.0):
    limit_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.5)


def test_the_package_is_installed_upgraded_with_a_job_removed_and_purged(packages, tree):
    first, second = packages
    assert "enable --now phalanx-head" in tree.install(first)
    assert "phalanx:" in tree.run("getent", "passwd", "phalanx")
    assert (
        tree.run(
            "systemd-analyze", "verify", *(f"/lib/systemd/system/phalanx-{unit}.service" for unit in ("head", "node"))
        )
        == ""
    )
    assert "phalanx-run" in tree.run("man", "-w", "phalanx-run")
    for completion in ("bash-completion/completions/phalanx", "zsh/vendor-completions/_phalanx"):
        assert "_phalanx" in (tree.folder / "usr/share" / completion).read_text()
    assert "phalanx" in (tree.folder / "usr/share/fish/vendor_completions.d/phalanx.fish").read_text()
    assert "ExecStart=/usr/lib/phalanx/python -P" in tree.run("phalanx", "up", "--systemd")
    assert str(ROOT) not in tree.run("grep", "-rIl", str(ROOT), "/usr/lib/phalanx", "/lib/systemd/system", code=1)

    tree.run("phalanx", "up", "--virtual", "1x2", "--port", "0", "--jobs-as", "head")
    tree.run("phalanx", "submit", "--gpus", "1", "--", "sleep", "600")
    until(lambda: tree.json("ps")[0]["state"] == "running")
    before = tree.json("show", "1")["job"]
    (old,) = tree.builds()
    late = tree.start("/usr/lib/phalanx/python", "-P", "-c", IMPORTS_LATE)
    tree.run("phalanx", "down", "--keep-jobs")
    assert "Unpacking phalanx (99.0) over (0" in tree.install(second)
    assert len(tree.builds()) == 2, "the supervisor of the job runs from the old one"
    said, errors = late.communicate("go\n", timeout=120)
    assert (said.split(), errors) == ([f"/usr/lib/phalanx/{old}/lib"], "")
    tree.run("phalanx", "up")
    until(lambda: tree.json("ps")[0]["state"] == "running")
    after = tree.json("show", "1")["job"]
    assert [before[key] for key in ("epoch", "generation", "started_s", "attempts")] == [
        after[key] for key in ("epoch", "generation", "started_s", "attempts")
    ]
    tree.run("phalanx", "cancel", "1")
    tree.run("phalanx", "down", "--cancel-jobs")
    tree.install(second)
    assert [name.partition("-")[0] for name in tree.builds()] == ["99.0"], "no process runs from the old one"

    (tree.folder / "var/lib/phalanx/outputs/7").mkdir(parents=True)
    (tree.folder / "var/lib/phalanx/secrets").mkdir()
    (tree.folder / "etc/phalanx/head.env").write_text("PHALANX_LOG=DEBUG\n")
    tree.run("dpkg", "-r", "phalanx")
    assert not (tree.folder / "usr/lib/phalanx").exists(), "no files of the running programs stay"
    assert (tree.folder / "etc/phalanx/head.env").read_text() == "PHALANX_LOG=DEBUG\n"
    assert (tree.folder / "var/lib/phalanx/secrets").exists()
    assert "/var/lib/phalanx/outputs" in tree.run("dpkg", "-P", "phalanx")
    assert not (tree.folder / "etc/phalanx").exists()
    assert [path.name for path in (tree.folder / "var/lib/phalanx").iterdir()] == ["outputs"]
