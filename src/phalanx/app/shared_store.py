"""The options for what several heads share: the database, and the directory for the files of jobs.

The address of the database contains a password, so it is never an argument of the head: `phalanx up` passes it in PHALANX_STORE, and the
state folder stores it in a file that only its owner can read.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.app.state_folder import StateFolder
from phalanx.core.errors import BadRequest, Conflict
from phalanx.durable_files import make_directory

STORE_VARIABLE: Final = "PHALANX_STORE"
STORE_OFF: Final = "off"
_SCHEMES: Final = ("postgresql://", "postgres://")
_FILE: Final = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """`address`: of the shared database, empty for none; `previous_address`: the stored address; `files`: the shared directory."""

    address: str = ""
    previous_address: str = ""
    files: str = ""


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `phalanx up` passes on."""
    parser.add_argument(
        "--files", default=None, metavar="DIR", help="directory that all heads share; off: each head has its own"
    )


def store_options(given: argparse.Namespace, home: StateFolder, before: Mapping[str, Any]) -> StoreOptions:
    """Return the given options, else the stored ones.

    Raises:
        BadRequest: the address is not of a database that heads can share.
        Conflict: psycopg is not installed, or the directory cannot be written.
    """
    stored = _stored_address(home)
    text = os.environ.pop(STORE_VARIABLE, "") or stored  # removed, so that no supervisor or rank inherits it
    address = "" if text == STORE_OFF else text
    if address and not address.startswith(_SCHEMES):
        scheme = address.partition("://")[0] if "://" in address else "the address"
        raise BadRequest(
            f"--store: {scheme[:20]} is not a database that heads can share",
            hint="use --store postgresql://USER@HOST/DATABASE",
        )
    if address and importlib.util.find_spec("psycopg") is None:
        raise Conflict("--store: psycopg is not installed", hint="pip install '.[postgres]' in the checkout")
    files = given.files if given.files is not None else str(before.get("files") or "")
    return StoreOptions(
        address=address, previous_address=stored, files=_writable(files) if address and files != STORE_OFF else ""
    )


def check_store(store: StoreOptions, home: StateFolder) -> None:
    """Check that a head can run with this store.

    Raises:
        Conflict: the state folder has its own database.
    """
    path = home.path_of("phalanx.db")
    if store.address and not store.previous_address and os.path.exists(path) and os.path.getsize(path):
        raise Conflict(
            f"{home.path} has its own database, whose jobs would not be visible",
            hint="move its jobs (docs/high-availability.md), move phalanx.db* away, or set PHALANX_HOME to another folder",
        )


def _stored_address(home: StateFolder) -> str:
    try:
        with open(home.path_of(_FILE), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _writable(folder: str) -> str:
    if not folder:
        return ""
    path = os.path.abspath(folder)
    try:
        make_directory("files.open", path)
    except OSError as error:
        raise Conflict(f"--files {path}: {error.strerror}", hint="use a directory that every head can write") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise Conflict(
            f"--files {path}: this user cannot write there", hint="use a directory that every head can write"
        )
    return path
