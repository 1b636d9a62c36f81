"""A real PostgreSQL on this machine, under one folder, on a free port of loopback and a socket of its own.

`server()` starts one for this process (each xdist worker has its own) and stops it with it; it does not wait for disks, so tests about
durability start one with `fsync=True`. As root it runs under an account without rights, for PostgreSQL refuses root.

    python -m tests.postgres_here            starts one and prints an address, until Ctrl-C
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import itertools
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.cluster import free_port

PROGRAMS = ("initdb", "postgres")
USER = "phalanx"
TEMPLATE = "phalanx_template"
START_MAX_S = 60.0
# Small and quiet: many servers may run on two cores.
SETTINGS = {
    "shared_buffers": "32MB",
    "max_connections": "80",
    "jit": "off",
    "max_wal_size": "512MB",
    "log_destination": "stderr",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
    "lc_messages": "C",
}
_names = itertools.count(1)


def program(name: str) -> str | None:
    """Where a program of PostgreSQL is: in PATH, or where Debian keeps the newest version's."""
    places = [shutil.which(name), *sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)]
    return next((place for place in places if place), None)


def why_not() -> str:
    """One line that says what is missing; empty where it can run."""
    try:
        import psycopg  # noqa: F401  # the extra may not be installed
    except ImportError:
        return "psycopg is not installed: pip install '.[postgres]'"
    missing = [name for name in PROGRAMS if program(name) is None]
    return f"{' and '.join(missing)} of PostgreSQL are not here: make postgres-tools" if missing else ""


@dataclass(slots=True)
class PostgresHere:
    """One server. Everything it writes lies in `folder`."""

    folder: str
    fsync: bool = False
    port: int = 0
    password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    postmaster: subprocess.Popen[bytes] | None = None
    made: set[str] = field(default_factory=set)

    @property
    def data(self) -> str:
        """Its data folder."""
        return f"{self.folder}/data"

    @property
    def log(self) -> str:
        """What it said."""
        with open(f"{self.folder}/log", encoding="utf-8", errors="replace") as file:
            return file.read()

    def dsn(self, database: str = "postgres", *, user: str = USER, password: str | None = None) -> str:
        """The address of a database, over TCP and with the password."""
        return f"postgresql://{user}:{password or self.password}@127.0.0.1:{self.port}/{database}"

    def make(self) -> None:
        """Lay out an empty cluster."""
        os.makedirs(self.folder, exist_ok=True)
        pwfile = f"{self.folder}/password"
        with open(pwfile, "w", encoding="ascii") as file:
            file.write(self.password)
        account = _account()
        if account is not None:
            for path in (self.folder, pwfile):
                os.chown(path, account.pw_uid, account.pw_gid)
        _run(
            _as_nobody(
                [
                    str(program("initdb")),
                    "-D",
                    self.data,
                    "-U",
                    USER,
                    "-E",
                    "UTF8",
                    "--locale=C",
                    "--auth-local=trust",
                    "--auth-host=scram-sha-256",
                    f"--pwfile={pwfile}",
                    "--no-sync",
                    "--no-instructions",
                ]
            )
        )

    def start(self, **settings: str) -> None:
        """Start, also again after `kill` or `stop`, and wait until it lets us in."""
        self.port = self.port or free_port()
        wanted = {
            **SETTINGS,
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            **({} if self.fsync else {"fsync": "off", "full_page_writes": "off"}),
            **({"recovery_init_sync_method": "syncfs"} if self.version >= 14 else {}),
            **settings,
        }
        words = [word for name, value in wanted.items() for word in ("-c", f"{name}={value}")]
        with open(f"{self.folder}/log", "ab") as log:
            self.postmaster = subprocess.Popen(
                _as_nobody([str(program("postgres")), "-D", self.data, *words], dies_with_us=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self.wait()

    def wait(self) -> None:
        """Until it lets us in."""
        import psycopg

        end_s = time.monotonic() + START_MAX_S
        while True:
            try:
                psycopg.connect(self.dsn(), connect_timeout=2).close()
                return
            except psycopg.OperationalError as error:
                assert self.postmaster is not None
                if self.postmaster.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"PostgreSQL did not start ({error}):\n{self.log[-2000:]}") from None
            time.sleep(0.02)

    def execute(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run something as its superuser, without the product's code."""
        import psycopg

        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description is not None else []

    def empty(self, **options: str) -> str:
        """The address of a new database with nothing in it."""
        name = f"t{next(_names)}"
        self.execute(f"CREATE DATABASE {name} " + " ".join(f"{key} {value}" for key, value in options.items()))
        return self.dsn(name)

    def fresh(self) -> str:
        """The address of a new database that has today's schema; a copy of one that was upgraded once."""
        if TEMPLATE not in self.made:
            from phalanx.store.sql.postgres.store import PostgresStore

            self.execute(f"CREATE DATABASE {TEMPLATE}")
            PostgresStore(self.dsn(TEMPLATE)).close()
            self.made.add(TEMPLATE)
        return (
            self.empty(TEMPLATE=TEMPLATE, STRATEGY="file_copy") if self.version >= 15 else self.empty(TEMPLATE=TEMPLATE)
        )

    @property
    def version(self) -> int:
        """Its major version."""
        with open(f"{self.data}/PG_VERSION", encoding="ascii") as file:
            return int(file.read().split(".")[0])

    def drop(self, dsn: str) -> None:
        """Remove a database, whoever is in it."""
        self.execute(f"DROP DATABASE IF EXISTS {dsn.rpartition('/')[2]} WITH (FORCE)")

    def kill(self) -> None:
        """SIGKILL to the postmaster and all of its processes at once, as the kernel or a loose cable would."""
        assert self.postmaster is not None
        ours = self.processes()
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.postmaster.wait(timeout=30)
        while [pid for pid in ours[1:] if _state(pid) not in ("", "Z")]:
            time.sleep(0.005)

    def processes(self) -> list[int]:
        """The postmaster and its children."""
        assert self.postmaster is not None
        with open(f"/proc/{self.postmaster.pid}/task/{self.postmaster.pid}/children", encoding="ascii") as file:
            return [self.postmaster.pid, *map(int, file.read().split())]

    def stop(self) -> None:
        """End it in good order; harmless twice."""
        if self.postmaster is None or self.postmaster.poll() is not None:
            return
        self.postmaster.send_signal(signal.SIGINT)  # "fast": clients are thrown out
        try:
            self.postmaster.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def running(*, fsync: bool = False, **settings: str) -> Iterator[PostgresHere]:
    """A server of one's own, gone with its folder afterwards."""
    here = PostgresHere(tempfile.mkdtemp(prefix="phalanx-pg-"), fsync=fsync)
    try:
        here.make()
        here.start(**settings)
        yield here
    finally:
        here.stop()
        shutil.rmtree(here.folder, ignore_errors=True)


@cache
def server() -> PostgresHere:
    """The server that the tests of this process share; databases in it are their own."""
    kept = contextlib.ExitStack()
    here = kept.enter_context(running())
    atexit.register(kept.close)
    return here


def _account() -> pwd.struct_passwd | None:
    """Under whose account it runs where we are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def _as_nobody(command: Sequence[str], *, dies_with_us: bool = False) -> list[str]:
    account = _account()
    words = (
        ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--clear-groups"]
        if account is not None
        else []
    )
    if dies_with_us:
        words += ["--pdeathsig", "INT"]
    return ["setpriv", *words, *command] if words else list(command)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


if __name__ == "__main__":
    with running(fsync=True) as mine:
        print(mine.dsn(mine.fresh().rpartition("/")[2]), flush=True)  # its output
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
