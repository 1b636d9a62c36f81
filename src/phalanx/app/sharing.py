"""What several heads share, as one of them was told: the database, and the directory for what jobs wrote.

The address of the database holds a password, so it never stands in an argument of the head: `phalanx up` hands it on in PHALANX_STORE,
and the state folder remembers it in a file for its owner alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.app.home import Home
from phalanx.core.errors import BadRequest, Conflict
from phalanx.failpoints import around

VARIABLE: Final = "PHALANX_STORE"
OFF: Final = "off"
_SCHEMES: Final = ("postgresql://", "postgres://")
_FILE: Final = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """`address` of the shared database, empty for none; as it was `before`; `files`: the shared directory."""

    address: str = ""
    before: str = ""
    files: str = ""


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """The options as `phalanx up` passes them on."""
    parser.add_argument("--files", default=None, metavar="DIR", help="that the heads share; off: each has its own")


def store_options(given: argparse.Namespace, home: Home, before: Mapping[str, Any]) -> StoreOptions:
    """What was given, else what the head before remembered.

    Raises:
        BadRequest: the address is none of a database that heads can share.
        Conflict: the directory cannot be written, or nothing is shared that it would go with.
    """
    remembered = _remembered(home)
    said = os.environ.pop(VARIABLE, "") or remembered  # no supervisor or rank inherits it
    address = "" if said == OFF else said
    if address and not address.startswith(_SCHEMES):
        scheme = address.partition("://")[0] if "://" in address else "that"
        raise BadRequest(
            f"--store: {scheme[:20]} is no database that heads can share",
            hint="--store postgresql://USER@HOST/DATABASE",
        )
    if address and importlib.util.find_spec("psycopg") is None:
        raise Conflict("--store: psycopg is not installed", hint="pip install '.[postgres]' in the checkout")
    files = given.files if given.files is not None else str(before.get("files") or "")
    return StoreOptions(address=address, before=remembered, files=_writable(files) if address and files != OFF else "")


def check_store(store: StoreOptions, home: Home, *, own_ray: bool) -> None:
    """Nothing, if a head may run so.

    Raises:
        Conflict: the state folder has a database of its own, or Ray's head would die with this one.
    """
    if store.address and own_ray:
        raise Conflict(
            "--engine ray with --store: our own Ray ends with the head that began it",
            hint="--ray-address HOST:PORT names a Ray cluster that every head reaches",
        )
    path = home.at("phalanx.db")
    if store.address and not store.before and os.path.exists(path) and os.path.getsize(path):
        raise Conflict(
            f"{home.path} has a database of its own, whose jobs would be out of sight",
            hint="docs/high-availability.md moves them; or move phalanx.db* away, or set PHALANX_HOME to another folder",
        )


def _remembered(home: Home) -> str:
    try:
        with open(home.at(_FILE), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _writable(folder: str) -> str:
    if not folder:
        return ""
    path = os.path.abspath(folder)
    try:
        with around("files.open.directory"):
            os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise Conflict(
            f"--files {path}: {error.strerror}", hint="name a directory that every head can write"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise Conflict(
            f"--files {path}: this user cannot write there", hint="name a directory that every head can write"
        )
    return path
