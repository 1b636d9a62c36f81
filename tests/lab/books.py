"""Slurm's accounting in the lab: MariaDB and slurmdbd on the first host, for it alone, gone with it. Debian's packages: slurmdbd mariadb-server-core mariadb-client-core."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.lab.lab import Lab

DISK = "/var/tmp/slurm"
"""Inside each host: logs, spool, state and books; it outlives a restart of the host, as Slurm wants."""

PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
"""Program -> the Debian package that brings it."""

DATABASE = """
umask 077
[ -d {disk}/db ] || mariadb-install-db --no-defaults --datadir={disk}/db --user=root --auth-root-authentication-method=normal \
  --skip-test-db --innodb-log-file-size=4M >{disk}/install-db.log 2>&1
setsid mariadbd --no-defaults --user=root --datadir={disk}/db --socket=/run/mariadb.socket --pid-file=/run/mariadb.pid \
  --bind-address=127.0.0.1 --port=3306 --skip-grant-tables --innodb-buffer-pool-size=24M --innodb-log-file-size=4M \
  </dev/null >{disk}/mariadb.log 2>&1 &
"""
"""On loopback of its own host, where nobody else is: no passwords."""

GREETING = """
import socket
with socket.create_connection(("127.0.0.1", 3306)) as database:
    print("there" if database.recv(1) else "")
"""
"""A server of that protocol speaks first."""

DAEMON = """AuthType=auth/munge
DbdHost={host}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=3306
StorageUser=root
StorageLoc=slurm_books
LogFile={disk}/slurmdbd.log
PidFile=/run/slurmdbd.pid
"""

CONFIGURATION = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={host}
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
AccountingStorageEnforce=associations,limits,qos
"""
"""`job_comment`: without it sacct shows no comment. Enforced: a job of an account that does not exist is refused."""


@functools.cache
def why_no_books() -> str:
    """One line that says what is missing; empty where Slurm's accounting is installed."""
    lacking = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    return f"Slurm's accounting needs {', '.join(lacking)}: `make lab-slurm` installs them on Debian" if lacking else ""


@dataclass(slots=True, kw_only=True)
class Books:
    """Accounting with these accounts: account -> its users. root is in all of them, its first the default."""

    lab: Lab
    accounts: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"physics": ()})

    def configuration(self, host: str) -> str:
        """Lines of slurm.conf."""
        return CONFIGURATION.format(host=host)

    def open(self, host: str, wait: Callable[[Callable[[], bool], str], None]) -> None:
        """Start both daemons and write the accounts; slurmctld comes after."""
        file = self.lab.host(host).path(f"{DISK}/conf/slurmdbd.conf")
        file.write_text(DAEMON.format(host=host, disk=DISK), encoding="ascii")
        file.chmod(0o600)  # slurmdbd refuses one that others can read
        self.lab.run(host, ["sh", "-c", DATABASE.format(disk=DISK)])
        greeting = [sys.executable, "-c", GREETING]
        wait(lambda: self.lab.run(host, greeting, check=False) == "there\n", "MariaDB answers")
        self.lab.run(host, ["slurmdbd"])
        self._say(host, wait, "add", "cluster", "lab")
        for account, users in self.accounts.items():
            self._say(host, wait, "add", "account", account)
            for user in ("root", *users):
                self._say(host, wait, "add", "user", user, f"account={account}")

    def rows(self, host: str, *fields: str, only: str = "") -> list[list[str]]:
        """Of sacct, each job one row (no steps), in the order of their numbers."""
        words = ["sacct", "--noheader", "--parsable2", "--allusers", "--allocations", f"--format={','.join(fields)}"]
        said = self.lab.run(host, [*words, *([f"--jobs={only}"] if only else [])])
        return [line.split("|") for line in said.splitlines()]

    def _say(self, host: str, wait: Callable[[Callable[[], bool], str], None], *words: str) -> None:
        command = [
            "sh",
            "-c",
            'sacctmgr -i "$@" 2>&1',
            "sacctmgr",
            *words,
        ]  # which fails where all of it is there already

        def done() -> bool:
            said = self.lab.run(host, command, check=False)
            return any(word in said for word in ("Adding", "already exist", "Nothing new"))

        wait(done, f"sacctmgr {' '.join(words)}")
