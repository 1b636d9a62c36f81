"""User-mode Linux: a second kernel as a process of this machine, for tests of what this machine's own kernel lacks.

It sees this machine's files, has a /tmp and /run of its own, one CPU, and a cgroup2 mount with all controllers. Debian: user-mode-linux (11 MB).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

PROGRAM = "linux.uml"
BOOT_MAX_S = 100.0  # a hang guard: it boots in two seconds
_INIT = """#!/bin/sh
export PATH={path} HOME=/tmp
for kind in proc:/proc sysfs:/sys tmpfs:/tmp tmpfs:/run cgroup2:/sys/fs/cgroup; do
  mount -t "${{kind%%:*}}" none "${{kind#*:}}" || echo "no ${{kind#*:}}"
done
[ -d {folder} ] || {{ mkdir -p {folder}; mount -t hostfs none {folder} -o {folder}; }}  # a checkout below /tmp
ip link set lo up
cd {folder} && {command}
echo "exit code $?"
echo o > /proc/sysrq-trigger
sleep 60
"""


def why_not() -> str:
    """One line that says what is missing; empty where it can run."""
    if os.geteuid() != 0:
        return "user-mode Linux mounts this machine's files as root"
    return "" if shutil.which(PROGRAM) else f"{PROGRAM} is not installed: apt-get install user-mode-linux"


def run(command: list[str], scratch: Path) -> tuple[int, str]:
    """Run a command there, in this folder, as root; returns its exit code and what the console showed. `scratch`: an empty folder."""
    init = scratch / "init"
    init.write_text(
        _INIT.format(path=shlex.quote(os.environ["PATH"]), folder=shlex.quote(os.getcwd()), command=shlex.join(command))
    )
    init.chmod(0o755)
    arguments = ["mem=768M", "quiet", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}"]
    console = ["con=null", "con0=fd:0,fd:1"]
    booted = subprocess.run(
        [PROGRAM, *arguments, *console],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HOME": str(scratch)},  # its control socket lies in ~/.uml
        timeout=BOOT_MAX_S,
        check=False,
    )
    text = booted.stdout.decode(errors="replace")
    ended = [line for line in text.splitlines() if line.startswith("exit code ")]
    assert ended, f"the command did not end: {text}"
    return int(ended[-1].removeprefix("exit code ")), text
