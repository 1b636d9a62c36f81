"""`phalanx get` of a job whose outputs are in an object store: read from there, with the credentials of this shell."""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

from phalanx.cli.errors import warn
from phalanx.cli.terminal import strip_control
from phalanx.cli.transfers.transfer_progress import ProgressReader
from phalanx.core.errors import BadFile, BadRequest, NotFound, Unreachable
from phalanx.node.data import output_objects
from phalanx.node.data.output_objects import StoredFileList
from phalanx.node.data.sources import ObjectMissing, ObjectsRefused, SourceUnavailable
from phalanx.node.data.store_access import credential_variable
from phalanx.node.logic.dataset import DatasetInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.node.data.object_store import ObjectFolder

Found = TypeVar("Found")
_FAILURES_MAX: Final = 5  # in a row without a byte
_PAUSE_S: Final = 1.0


def fetch_stored_outputs(url: str, path: str, folder: str, *, label: str) -> tuple[int, int]:
    """Download the outputs below an address into a folder; what an earlier command brought stays.

    Args:
        url: of the job's folder in the store.
        path: only this file or folder of them; "" for all.
        folder: of the download.
        label: before the progress.

    Returns:
        The number of files, and their bytes.

    Raises:
        NotFound: there are none.
        BadRequest: this shell may not read them, or lacks the client of the store.
        BadFile: a file has other bytes than its list says, or cannot be written.
        Unreachable: the store does not answer.
    """
    try:
        from phalanx.node.data.object_store import ObjectFolder

        store = ObjectFolder(url)
        lists = _patiently(url, lambda: output_objects.read_lists(store))
        wanted = [
            (one, name)
            for one in lists
            for name in sorted(one.files)
            if not path or one.object_of(name) == path or one.object_of(name).startswith(f"{path.rstrip('/')}/")
        ]
        if not wanted:
            raise NotFound(f"{path or 'outputs'}: nothing is stored in {url} yet", hint="try again later")
        return _fetch_all(store, wanted, folder, label)
    except DatasetInvalid as error:
        raise BadRequest(
            str(error), hint="pip install '.[data]', or read the address with a client of your own"
        ) from None
    except ObjectsRefused as error:
        raise BadRequest(
            f"outputs: {error}",
            hint=f"set the variables with which the job reaches the store, such as {credential_variable(url)}",
        ) from None
    except OSError as error:
        raise BadFile(f"{error.filename or folder}: {error.strerror}", hint="give another folder") from None


def _fetch_all(
    store: ObjectFolder, wanted: list[tuple[StoredFileList, str]], folder: str, label: str
) -> tuple[int, int]:
    progress = ProgressReader(io.BytesIO(), label=label)
    progress.expect(sum(int(one.files[name]["size"]) for one, name in wanted))
    files = size = 0
    try:
        for one, name in wanted:
            entry, target = one.files[name], one.object_of(name)
            place = output_objects.inside(folder, target)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            place = output_objects.inside(folder, target)  # again: its folder exists now, and may be a link

            def fetch(target: str = target, place: str = place, one: StoredFileList = one, name: str = name) -> None:
                output_objects.fetch(store, target, one.files[name], place, progress.add)

            try:
                _patiently(store.url, fetch, lambda: progress.received)
            except ObjectMissing:
                warn(f"left out: {strip_control(target)} (removed from the store)")
                continue
            os.utime(place, ns=(entry["mtime_ns"], entry["mtime_ns"]))
            files, size = files + 1, size + int(entry["size"])
    finally:
        progress.clear()
    return files, size


def _patiently(url: str, what: Callable[[], Found], received: Callable[[], int] = lambda: 0) -> Found:
    """Do it again while the store does not answer, as long as bytes arrive.

    Raises:
        Unreachable: it did not answer five times in a row.
    """
    failures, before = 0, received()
    while True:
        try:
            return what()
        except SourceUnavailable as error:
            failures = failures + 1 if received() == before else 1
            before = received()
            if failures >= _FAILURES_MAX:
                raise Unreachable(
                    str(error),
                    hint=f"run it again: it goes on; this shell needs the variables of the store, such as {credential_variable(url)}",
                ) from None
            time.sleep(_PAUSE_S)
