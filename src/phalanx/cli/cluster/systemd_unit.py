"""The systemd units that `phalanx up --systemd` and `phalanx join --systemd` print, and the unit of a process. Starts nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from phalanx.client.connection.discovery import SYSTEM_HEAD_FOLDER, SYSTEM_NODE_FOLDER

HEAD_UNIT: Final = "phalanx-head.service"
NODE_UNIT: Final = "phalanx-node.service"
_PROCESS_UNIT: Final = re.compile(r"/(phalanx[\w@.-]*\.service)(?:/|$)", re.MULTILINE)
_SYSTEMCTL_S: Final = 90.0  # systemd's own default limit for the start or stop of a unit


def lasting_python() -> str:
    """Return the interpreter to name in a unit: this one, or what a package that keeps a folder per release says instead."""
    try:
        with open(os.path.join(sys.prefix, "lasting-python"), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return sys.executable


def systemd_unit(*, python: str, home: str, arguments: Sequence[str]) -> str:
    """Return a unit for `systemctl --user` that runs the head and restarts it after a failure."""
    command = _command(python, "phalanx.app.head", arguments)
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


def system_head_unit(*, python: str, arguments: Sequence[str]) -> str:
    """Return the system unit of a head with an account of its own. It runs no job: nodes join it.

    Its sandbox leaves the head what it needs: the network, its state folder and the machine's files, read only. Source: systemd.exec(5).
    """
    command = _command(python, "phalanx.app.head", ["--virtual", "none", *arguments])
    return f"""[Unit]
Description=Phalanx head
Documentation=man:phalanx(1)
Wants=network-online.target
After=network-online.target postgresql.service
# After five failed starts in ten minutes, the unit stays failed.
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
User=phalanx
Group=phalanx
Environment=PHALANX_HOME={SYSTEM_HEAD_FOLDER}
# Optional: PHALANX_STORE, PHALANX_LOG and other settings.
EnvironmentFile=-/etc/phalanx/head.env
ExecStart={command} $PHALANX_HEAD_OPTIONS
# A planned stop exits with 0, so that `phalanx down` is final until the next boot. 64: wrong options, which a restart does not mend.
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=64
KillMode=mixed
TimeoutStopSec=60
StateDirectory=phalanx
StateDirectoryMode=0700
UMask=0077
LimitNOFILE=65536
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
"""


def system_node_unit(*, python: str) -> str:
    """Return the system unit of a joined server: the node keeper as root, whose jobs run as their owners.

    The keeper starts the supervisor in a scope of its own, outside the unit: a stop, restart or upgrade of the unit ends no job. A cgroup
    that passes controllers on to jobs cannot take a process itself, so the restarted keeper must not share the supervisor's cgroup.
    """
    return f"""[Unit]
Description=Phalanx node
Documentation=man:phalanx-join(1)
Wants=network-online.target
After=network-online.target remote-fs.target nss-user-lookup.target
ConditionPathExists={SYSTEM_NODE_FOLDER}/joined/joined.json
StartLimitIntervalSec=0

[Service]
Type=exec
Environment=PHALANX_HOME={SYSTEM_NODE_FOLDER} PHALANX_SUPERVISOR_SCOPE=1
EnvironmentFile=-/etc/phalanx/node.env
ExecStart={_command(python, "phalanx.app.server_keeper", ["--folder", SYSTEM_NODE_FOLDER + "/joined"])}
Restart=on-failure
RestartSec=3
# SIGTERM: an idle node ends; while jobs run, only the keeper ends, and the next one finds the supervisor.
KillMode=process
TimeoutStopSec=30
StateDirectory=phalanx-node
StateDirectoryMode=0700
LimitNOFILE=65536
OOMPolicy=continue

[Install]
WantedBy=multi-user.target
"""


def unit_of_process(pid: int) -> str:
    """Return the name of the Phalanx service that the process belongs to; empty if it belongs to none."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            found = _PROCESS_UNIT.search(file.read())
    except OSError:
        return ""
    return "" if found is None else found[1]


def system_service_of(home: str) -> str:
    """Return the system service that owns this state folder; empty for the folder of a user."""
    return {SYSTEM_HEAD_FOLDER: HEAD_UNIT, SYSTEM_NODE_FOLDER: NODE_UNIT}.get(home, "")


def unit_state(unit: str) -> tuple[str, str]:
    """Return whether systemd runs the unit (active, failed ...) and starts it at boot (enabled ...); empty if it does not know it."""
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property=ActiveState,UnitFileState,LoadState", unit],
            capture_output=True,
            text=True,
            timeout=_SYSTEMCTL_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    return ("", "") if values.get("LoadState") != "loaded" else (values["ActiveState"], values["UnitFileState"])


def start_unit(unit: str) -> str:
    """Enable and start the unit; return why it did not start, or an empty text."""
    try:
        done = subprocess.run(
            ["systemctl", "enable", "--now", unit],
            capture_output=True,
            text=True,
            timeout=_SYSTEMCTL_S,
            check=False,
            env={**os.environ, "SYSTEMD_LOG_LEVEL": "err"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _command(python: str, module: str, arguments: Sequence[str]) -> str:
    return " ".join(_quoted(word) for word in (python, "-P", "-m", module, *arguments))


def _quoted(word: str) -> str:
    """Quote a word for systemd; see systemd.syntax(7) and systemd.service(5)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or any(char.isspace() or char in "';" for char in word) else word
