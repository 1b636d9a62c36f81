"""The systemd unit that `phalanx up --systemd` prints: pure, from a few paths to a text."""

from __future__ import annotations

from collections.abc import Sequence


def unit(*, python: str, home: str, arguments: Sequence[str]) -> str:
    """A unit for `systemctl --user` (or the system's, with a User= line) that runs the head and brings it back when it dies."""
    command = " ".join(_quoted(word) for word in (python, "-P", "-m", "phalanx.app.head", *arguments))
    return f"""[Unit]
Description=Phalanx head
After=network.target

[Service]
Environment={_quoted("PHALANX_HOME=" + home)}
ExecStart={command}
Restart=on-failure
RestartSec=1
# Jobs outlive their head: only the head itself is stopped, and it grants long leases first.
KillMode=process
TimeoutStopSec=30
# Ranks are kept in cgroups of their own below this unit's.
Delegate=yes
LimitNOFILE=65536
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """As systemd reads a word; see systemd.syntax(7) and systemd.service(5)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(char.isspace() or char in "';" for char in word) else word
