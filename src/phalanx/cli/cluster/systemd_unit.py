"""The systemd unit that `phalanx up --systemd` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def systemd_unit(*, python: str, home: str, arguments: Sequence[str]) -> str:
    """Return a unit for `systemctl --user` (or a system unit, with a User= line) that runs the head and restarts it after a failure."""
    command = " ".join(_quoted(word) for word in (python, "-P", "-m", "phalanx.app.head", *arguments))
    return f"""[Unit]
Description=Phalanx head
After=network.target

[Service]
Environment={_quoted("PHALANX_HOME=" + home)}
ExecStart={command}
Restart=on-failure
RestartSec=1
# Jobs continue without the head: only the head is stopped, after it has granted long leases.
KillMode=process
TimeoutStopSec=30
# Ranks run in their own cgroups below the cgroup of this unit.
Delegate=yes
LimitNOFILE=65536
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """Quote a word for systemd; see systemd.syntax(7) and systemd.service(5)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(char.isspace() or char in "';" for char in word) else word
