"""The files of ssh that Phalanx keeps for this user: a key, the known host keys of jobs, and settings for `*.phalanx`."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import subprocess
import sys
from typing import Final

from phalanx.client.connection.clusters import config_folder
from phalanx.core.errors import BadFile, BadRequest
from phalanx.node.files.private_files import write_private

DOMAIN: Final = ".phalanx"
_HOSTS_MAX: Final = 1000  # entries that are kept
_INCLUDE: Final = "# Jobs of Phalanx, as 17.phalanx\nInclude {}\n\n"


def ssh_folder() -> str:
    """Return the folder of these files."""
    return os.path.join(config_folder(), "ssh")


def settings_file() -> str:
    """Write the settings, and the key if it does not exist yet; return the path of the settings.

    Raises:
        BadRequest: there is no ssh on this machine.
    """
    folder = ssh_folder()
    key, hosts = os.path.join(folder, "id_ed25519"), os.path.join(folder, "known_hosts")
    for path in (folder, sys.executable):
        if any(letter in path for letter in '"%\n'):
            raise BadFile(f"{path!r}: ssh cannot name this path", hint="use one without quotes and percent signs")
    text = (
        f"# Written by phalanx config ssh; changes are lost.\n"
        f"Host *{DOMAIN}\n"
        f'    ProxyCommand "{sys.executable}" -m phalanx.app.cli proxy --user %r %h\n'
        f'    IdentityFile "{key}"\n'
        f"    IdentitiesOnly yes\n"
        f'    UserKnownHostsFile "{hosts}"\n'
        f"    GlobalKnownHostsFile /dev/null\n"
        f"    StrictHostKeyChecking yes\n"
        f"    UpdateHostKeys no\n"
        f"    LogLevel ERROR\n"
    )
    path = write_private(folder, "config", text)
    public_key()
    return path


def public_key() -> str:
    """Return this user's public key for jobs; made at first. It opens no session by itself: the head authorises each.

    Raises:
        BadRequest: there is no ssh-keygen on this machine.
        BadFile: no key can be made.
    """
    folder = ssh_folder()
    key = os.path.join(folder, "id_ed25519")
    keygen = shutil.which("ssh-keygen")
    if keygen is None or shutil.which("ssh") is None:
        raise BadRequest("there is no ssh on this machine", hint="install the package openssh-client")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{key}.pub"):
            made = subprocess.run(
                [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "phalanx", "-f", key],
                capture_output=True,
                check=False,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            if made.returncode:
                raise BadFile(f"{key}: {made.stderr.strip()}", hint="remove it, and try again")
        with open(f"{key}.pub", encoding="utf-8") as file:
            return file.read().strip()


def know_host(host: str, key: str) -> None:
    """Keep the host key of a job, instead of the one of its attempt before."""
    folder = ssh_folder()
    path = os.path.join(folder, "known_hosts")
    with open(os.path.join(folder, "lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            lines = []
        line = f"{host} {key}"
        if line not in lines:
            others = [one for one in lines if one.split(" ", 1)[0] != host]
            write_private(folder, "known_hosts", "\n".join([*others[-_HOSTS_MAX:], line]) + "\n")


def is_read_by_ssh(path: str) -> bool:
    """Return whether ssh reads this file by itself: it looks in the account's home, whatever HOME is (ssh_config(5))."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    return os.path.realpath(path) == os.path.realpath(os.path.join(home, ".ssh", "config"))


def include_settings(settings: str) -> tuple[str, bool]:
    """Include the settings in ~/.ssh/config; return its path and whether it was changed."""
    path = os.path.expanduser("~/.ssh/config")
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # a comment in Latin-1
            before = file.read()
    except FileNotFoundError:
        before = ""
    include = _INCLUDE.format(f'"{settings}"')
    if include.splitlines()[1] in before.splitlines():
        return path, False
    real = os.path.realpath(path)  # it may be a link into a folder of dot files
    write_private(os.path.dirname(real), os.path.basename(real), include + before)
    return path, True
