"""`phalanx backup FILE` and `phalanx restore FILE`: all records of the head in one file, from SQLite or PostgreSQL."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from phalanx.cli.cells import count
from phalanx.cli.cluster.state_folder import files_folder, home_folder
from phalanx.cli.errors import warn
from phalanx.cli.terminal import strip_control, terminal
from phalanx.client.input_files import read_database_url
from phalanx.core.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from phalanx.store.sql.archive import BackupManifest
    from phalanx.store.sql.backups import DatabaseLocation

_NOT_INCLUDED = "logs, outputs, checkpoints and uploaded folders"
_STORE = click.option(
    "--store", metavar="URL", help="PostgreSQL database, or @FILE with its URL. Default: the database of this head."
)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@_STORE
def backup(file: str, store: str | None) -> None:
    """Write all records of the head to FILE: jobs, their history, users, tokens, queues, nodes. The head may be running."""
    from phalanx.store.sql import backups

    place = _place(store)
    manifest = backups.backup(place, file, _progress("saved"))
    print(f"{strip_control(file)}: {_content(manifest)}, {_bytes(os.path.getsize(file))}")
    print(f"not included: {_NOT_INCLUDED}, which are in {strip_control(files_folder(home_folder()))}")
    print(f"next: phalanx restore {strip_control(shlex.quote(file))} --dry-run")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@_STORE
@click.option("--replace", is_flag=True, help="Move existing records aside.")
@click.option("--dry-run", is_flag=True, help="Verify FILE, change nothing.")
def restore(file: str, store: str | None, replace: bool, dry_run: bool) -> None:
    """Restore the head's database from FILE. Stop the head first."""
    from phalanx.store.sql import backups
    from phalanx.store.unknown_files import describe_unknown

    if dry_run:
        manifest = backups.check(file, _progress("checked"))
        print(f"{strip_control(file)} is valid: {_content(manifest)}; nothing was changed")
        return
    place = _place(store)
    done = backups.restore(file, place, _progress("restored"), replace=replace)
    print(f"restored: {_content(done.manifest)}")
    if done.aside:
        print(f"the previous records were moved to {strip_control(done.aside)}")
    for text in describe_unknown(files_folder(home_folder()), done.manifest.last_job_seq):
        print(strip_control(text))
    print("next: phalanx up" + (" --store @FILE, with the URL of the database in FILE" if place.dsn else ""))


def _place(store: str | None) -> DatabaseLocation:
    """Return where the records are: `store`, else as for `phalanx up`: PHALANX_STORE, the URL stored in the folder, the SQLite file.

    Raises:
        BadRequest: the URL is not one of PostgreSQL, or has a password on the command line.
        BadFile: the file with the URL cannot be read.
        Conflict: psycopg is not installed.
    """
    from phalanx.store.sql.backups import DatabaseLocation

    home = home_folder()
    own = DatabaseLocation(path=os.path.join(home, "phalanx.db"))
    if store is not None and not store.startswith("@"):
        return _postgres(store, typed=True)
    stored = os.path.join(home, "store")
    if store is None and os.environ.get("PHALANX_STORE"):
        url = os.environ["PHALANX_STORE"]
    elif store is not None or os.path.exists(stored):
        url = read_database_url(store[1:] if store is not None else stored)
    else:
        return own
    return own if url in ("", "off") else _postgres(url, typed=False)


def _postgres(url: str, *, typed: bool) -> DatabaseLocation:
    from phalanx.store.sql.backups import DatabaseLocation

    try:
        from phalanx.store.sql.postgres.address import has_password, without_password
    except ImportError:
        raise Conflict(
            "PostgreSQL needs psycopg, which is not installed", hint="pip install '.[postgres]' in the checkout"
        ) from None
    if not url.startswith(("postgresql://", "postgres://")):
        raise BadRequest(
            f"--store {without_password(url)!r} is not a PostgreSQL URL",
            hint="write postgresql://USER@HOST/DATABASE",
        )
    if typed and has_password(url):
        raise BadRequest(
            "--store contains a password, which every user of this machine can read in the process list",
            hint="put the URL into a file (mode 0600) and use --store @FILE, or set PHALANX_STORE",
        )
    return DatabaseLocation(dsn=url)


def _content(manifest: BackupManifest) -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.made_s))
    counts = manifest.counts
    return (
        f"{count(counts.get('job', 0), 'job')}, {count(counts.get('history line', 0), 'history line')}, {count(counts.get('user', 0), 'user')}, "
        f"{count(manifest.records, 'record')} in total; created {made} from {manifest.database}, schema {manifest.migration}"
    )


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def _progress(done: str) -> Callable[[int, int], None]:
    """Return a callback that prints the progress once a second on a terminal."""
    begun_s = printed_s = time.monotonic()
    interactive = terminal(sys.stderr).interactive

    def report(number: int, of: int) -> None:
        nonlocal printed_s
        now_s = time.monotonic()
        if interactive and now_s - printed_s > 1.0:
            printed_s = now_s
            warn(f"{done} {number:,} of {of:,} records, {now_s - begun_s:.0f} s")

    return report
