"""`phalanx backup FILE` and `phalanx restore FILE`: all records of the head in one file, whichever database holds them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from phalanx.cli.cells import count
from phalanx.cli.cluster.home import files_folder, home_folder
from phalanx.cli.faults import warn
from phalanx.cli.terminal import clean, terminal
from phalanx.client.given import address_in
from phalanx.core.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from phalanx.store.sql.archive import Manifest
    from phalanx.store.sql.backups import Place

_NOT_IN_IT = "logs, outputs, checkpoints and uploaded folders"


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--store", metavar="URL", help="Of a PostgreSQL database, or @FILE that holds its URL; else this head's own."
)
def backup(file: str, store: str | None) -> None:
    """Write all records of the head into FILE, while it runs or not: jobs, their stories, users, tokens, queues, nodes."""
    from phalanx.store.sql import backups

    place = _place(store)
    manifest = backups.backup(place, file, _progress("saved"))
    print(f"{clean(file)}: {_content(manifest)}, {_bytes(os.path.getsize(file))}")
    print(f"not in it: {_NOT_IN_IT}; they lie in {clean(files_folder(home_folder()))}")
    print(f"next: phalanx restore {clean(file)} --dry-run")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--store", metavar="URL", help="Of a PostgreSQL database, or @FILE that holds its URL; else this head's own."
)
@click.option("--replace", is_flag=True, help="Put the records that are there aside.")
@click.option("--dry-run", is_flag=True, help="Read FILE to its end, and change nothing.")
def restore(file: str, store: str | None, replace: bool, dry_run: bool) -> None:
    """Make the head's database hold what FILE holds. No head may run meanwhile."""
    from phalanx.store.later_files import set_aside
    from phalanx.store.sql import backups

    if dry_run:
        manifest = backups.check(file, _progress("checked"))
        print(f"{clean(file)} is whole: {_content(manifest)}; nothing was changed")
        return
    place = _place(store)
    done = backups.restore(file, place, _progress("restored"), replace=replace)
    folders = set_aside(files_folder(home_folder()), done.epochs, time.strftime("%Y%m%d-%H%M%S"))
    print(f"restored: {_content(done.manifest)}")
    if done.aside:
        print(f"what was there is kept: {clean(done.aside)}")
    for folder in folders:
        print(f"files of jobs that are not in the backup are kept: {clean(folder)}")
    print("next: phalanx up" + (" --store @FILE, with the address of the database in FILE" if place.dsn else ""))


def _place(store: str | None) -> Place:
    """Where the records are: as told, else as `phalanx up` takes it: PHALANX_STORE, what the folder remembers, its own file.

    Raises:
        BadRequest: a password on the command line, or an address of another kind.
        BadFile: the file with the address cannot be read.
        Conflict: psycopg is not installed.
    """
    from phalanx.store.sql.backups import Place

    home = home_folder()
    own = Place(path=os.path.join(home, "phalanx.db"))
    if store is not None and not store.startswith("@"):
        return _postgres(store, typed=True)
    remembered = os.path.join(home, "store")
    if store is None and os.environ.get("PHALANX_STORE"):
        said = os.environ["PHALANX_STORE"]
    elif store is not None or os.path.exists(remembered):
        said = address_in(store[1:] if store is not None else remembered)
    else:
        return own
    return own if said in ("", "off") else _postgres(said, typed=False)


def _postgres(said: str, *, typed: bool) -> Place:
    from phalanx.store.sql.backups import Place

    try:
        from phalanx.store.sql.postgres.address import has_password, without_password
    except ImportError:
        raise Conflict(
            "PostgreSQL needs psycopg, which is not installed", hint="pip install 'phalanx[postgres]'"
        ) from None
    if not said.startswith(("postgresql://", "postgres://")):
        raise BadRequest(
            f"--store {without_password(said)!r} is no address of PostgreSQL",
            hint="as in postgresql://USER@HOST/DATABASE",
        )
    if typed and has_password(said):
        raise BadRequest(
            "--store with a password: all of this machine can read the words of a command",
            hint="put the address into a file (mode 0600) and say --store @FILE, or into PHALANX_STORE",
        )
    return Place(dsn=said)


def _content(manifest: Manifest) -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.made_s))
    counts = manifest.counts
    return (
        f"{count(counts.get('job', 0), 'job')}, {count(counts.get('story', 0), 'story line')}, {count(counts.get('user', 0), 'user')}, "
        f"{count(manifest.records, 'record')} in all; of {made}, {manifest.database} with migration {manifest.migration}"
    )


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def _progress(done: str) -> Callable[[int, int], None]:
    """Says how far it is once a second, to a person."""
    begun_s, told_s = time.monotonic(), time.monotonic()
    shows = terminal(sys.stderr).interactive

    def say(number: int, of: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if shows and now_s - told_s > 1.0:
            told_s = now_s
            warn(f"{done} {number:,} of {of:,} records, {now_s - begun_s:.0f} s")

    return say
