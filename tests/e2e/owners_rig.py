"""A cluster whose supervisor is root, on a machine that knows some accounts: made in a mount namespace of its own, for the tests' users only."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests import canaries

ACCOUNTS: Final = {"ada": 61001, "ben": 61002, "daemonlike": 412}
TEAM_GID: Final = 61010
LIMIT_S: Final = 120.0  # a hang guard
_PHALANX: Final = (sys.executable, "-P", "-m", "phalanx.app.cli")


def unfit() -> str:
    """Why these tests cannot run here; nothing where they can."""
    if os.geteuid() != 0:
        return "jobs of other accounts need root"
    tried = (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
        if shutil.which("unshare")
        else None
    )
    return "" if tried is not None and tried.returncode == 0 else "this machine makes no mount namespace"


class Cluster:
    """See the module. `run` and `phalanx` are what a user types; `home(name)` is an account's home."""

    def __init__(self) -> None:
        self.root = Path(
            tempfile.mkdtemp(prefix="phalanx-owners-")
        )  # not pytest's own, which is closed to other accounts
        self.root.chmod(0o711)
        for name, uid in ACCOUNTS.items():
            self.home(name).mkdir(mode=0o700)
            os.chown(self.home(name), uid, uid)
        self.state, self.jobs = self.root / "state", self.root / "jobs"
        self.secret = self.root / "of-root"
        self.secret.write_text("a secret of root\n")
        self.secret.chmod(0o600)
        passwd = "".join(f"{name}:x:{uid}:{uid}::{self.home(name)}:/bin/sh\n" for name, uid in ACCOUNTS.items())
        group = "".join(f"{name}:x:{uid}:\n" for name, uid in ACCOUNTS.items()) + f"team:x:{TEAM_GID}:ada\n"
        for file, more in (("passwd", passwd), ("group", group)):
            (self.root / file).write_text(Path("/etc", file).read_text() + more)
        self._tokens: dict[str, str] = {}

    def up(self) -> None:
        """Bring it up, of one node with two virtual devices, in a namespace where /etc/passwd has the accounts."""
        line = shlex.join([*_PHALANX, "up", "--virtual", "1x2", "--port", "0"])
        binds = "".join(f"mount --bind {self.root}/{file} /etc/{file}; " for file in ("passwd", "group"))
        said = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f"{binds}exec {line}"],
            env={**self._environment(), "OPERATORS_SECRET": "of the shell that started it"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert said.returncode == 0, said.stderr
        for name in (*ACCOUNTS, "nobodys"):
            self.phalanx("root", "users", "add", name)
            shown = self.phalanx("root", "tokens", "add", "--user", name).stdout
            self._tokens[name] = max(shown.split(), key=len)

    def down(self) -> None:
        """End it with all its jobs, and leave nothing."""
        self.phalanx("root", "down", "--cancel-jobs", check=False)
        shutil.rmtree(self.root)

    def home(self, name: str) -> Path:
        """Of an account; only that account may look into it."""
        return self.root / name

    def phalanx(
        self, user: str, *words: str, cwd: str | Path = "/", check: bool = True, typed: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """What a user types, with a token of their own."""
        environment = self._environment()
        if user != "root":
            url = json.loads((self.state / "head.json").read_text())["url"]
            environment |= {
                "PHALANX_HOME": str(self.root / "no-state"),
                "PHALANX_URL": url,
                "PHALANX_TOKEN": self._tokens[user],
            }
        done = subprocess.run(
            [*_PHALANX, *words],
            env=environment,
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=LIMIT_S,
            check=False,
            input=typed,
        )
        assert done.returncode == 0 or not check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def run(self, user: str, script: str, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a text for sh as this user's job, from their home, and wait for its end."""
        return self.phalanx(
            user, "run", "--gpus", "1", *options, "--", "sh", "-c", script, cwd=self._folder(user), check=check
        )

    def submit(self, user: str, script: str, *options: str) -> str:
        """Submit one; its number."""
        words = ("submit", "--gpus", "1", *options, "--", "sh", "-c", script)
        said = self.phalanx(user, *words, cwd=self._folder(user))
        found = re.search(r"job (\d+) submitted", said.stdout + said.stderr)
        assert found, said
        return found[1]

    def state_of(self, job: str) -> str:
        """The job's state."""
        return str(json.loads(self.phalanx("root", "show", job, "--json").stdout)["job"]["state"])

    def _folder(self, user: str) -> Path:
        return self.root if user in {"root", "nobodys"} else self.home(user)

    def _environment(self) -> dict[str, str]:
        kept = canaries.environment()
        return {**kept, "PHALANX_HOME": str(self.state), "PHALANX_JOBS_DIR": str(self.jobs), "PHALANX_JOBS_AS": "owner"}
