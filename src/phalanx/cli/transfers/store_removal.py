"""Files of ended jobs in object stores: the head lists them, and this shell removes them with its own credentials.

The head has none, so it neither counts nor removes them. Only folders are touched whose names have the random key of a job, and in them
only objects that the job stored. The reasons are in decision 0113.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import BadRequest, Unreachable
from phalanx.core.work.retention import RetainedFiles
from phalanx.core.work.states import JobState
from phalanx.node.data import checkpoint_objects, output_objects
from phalanx.node.data.sources import ObjectsRefused, SourceUnavailable
from phalanx.node.logic.dataset import DatasetInvalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from phalanx.client import Client

_PAGE: Final = 1000
_ENDED: Final = [state.value for state in JobState if state.terminal]
_DELETED_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFolder:
    """Files of one kind of one job in an object store.

    Attributes:
        kind: outputs or checkpoints.
        job, user: whose they are.
        archived: whether the job's records are in an archive.
        ended_s: when the job ended, in Unix seconds.
        url: the folder of the job's outputs, or of one checkpoint.
        newer: for a checkpoint, the folder of the newest one, without which it stays.
        objects: what can be removed, by name in the order of removal, with bytes; None before `measure_folders`.
        stays: why nothing is removed; "" otherwise.
    """

    kind: str
    job: str
    user: str
    ended_s: float
    url: str
    archived: bool = False
    newer: str = ""
    objects: dict[str, int] | None = field(default=None)
    stays: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects that can be removed."""
        return sum((self.objects or {}).values())


def stored_folders(head: Client, older_than_s: float, kinds: Collection[str], now_s: float) -> list[StoredFolder]:
    """Return the folders of jobs that ended at least `older_than_s` ago, oldest job first, archived ones before all others.

    The newest checkpoint of a job stays, as on the head. `kinds`: as in `clean`; none means all.
    """
    wanted = [kind for kind in (RetainedFiles.OUTPUTS, RetainedFiles.CHECKPOINTS) if not kinds or kind in kinds]
    found: list[StoredFolder] = []
    before: int | None = None
    while wanted:
        page = head.jobs(state=_ENDED, before_seq=before, limit=_PAGE)
        for job in page.jobs:
            if job.ended_s is not None and now_s - job.ended_s >= older_than_s:
                paths = [one.path for one in job.checkpoints]
                found += [
                    one
                    for kind in wanted
                    for one in _folders_of(job.id, job.user, job.ended_s, kind, job.output_dir, paths)
                ]
        before = page.next
        if before is None:
            break
    return (_archived_folders(head, now_s - older_than_s, wanted) if wanted else []) + found[::-1]


def measure_folders(folders: list[StoredFolder]) -> list[StoredFolder]:
    """Look into the store what of each folder the job stored.

    Raises:
        BadRequest: this machine has no client for the store.
    """
    silent: dict[
        str, str
    ] = {}  # buckets that do not answer: each is asked once, since an answer is awaited for half a minute
    return [_measured(one, silent) for one in folders]


def remove_folder(folder: StoredFolder) -> None:
    """Remove the objects of a folder. After an interruption the same command continues.

    Raises:
        BadRequest: the store refuses it.
        Unreachable: the store does not answer.
    """
    from phalanx.node.data.object_store import ObjectFolder

    names = list(folder.objects or ())
    try:
        store = ObjectFolder(folder.url)
        for begin in range(0, len(names), _DELETED_AT_ONCE):
            store.delete(names[begin : begin + _DELETED_AT_ONCE])
    except ObjectsRefused as error:
        raise BadRequest(str(error), hint="give this shell the right to delete there") from None
    except SourceUnavailable as error:
        raise Unreachable(str(error), hint="run the same command again: it continues") from None


def _archived_folders(head: Client, before_s: float, kinds: Collection[str]) -> list[StoredFolder]:
    """The folders of archived jobs that ended before a time, month by month."""
    found: list[StoredFolder] = []
    newest = time.strftime("%Y-%m", time.gmtime(before_s))
    for month in sorted(one.month for one in head.archives().months if one.month <= newest):
        after: int | None = 0
        while after is not None:
            page = head.archived_jobs(month, after=after, stored=True)
            for job in page.jobs:
                if job.ended_s <= before_s:
                    found += [
                        replace(one, archived=True)
                        for kind in kinds
                        for one in _folders_of(job.id, job.user, job.ended_s, kind, job.output_dir, job.checkpoints)
                    ]
            after = page.next
    return found


def _folders_of(
    job: str, user: str, ended_s: float, kind: str, output_dir: str, checkpoints: Sequence[str]
) -> Iterator[StoredFolder]:
    """Folders of one kind. `checkpoints`: oldest first."""
    if kind == RetainedFiles.OUTPUTS:
        newest, urls = "", [output_dir]
    else:
        newest, urls = checkpoints[-1] if checkpoints else "", list(checkpoints[:-1])
    for url in urls:
        if "://" in url:
            yield StoredFolder(kind=kind, job=job, user=user, ended_s=ended_s, url=url, newer=newest)


def _measured(folder: StoredFolder, silent: dict[str, str]) -> StoredFolder:
    bucket = "/".join(folder.url.split("/")[:3])
    if bucket in silent:
        return replace(folder, objects={}, stays=silent[bucket])
    try:
        from phalanx.node.data.object_store import ObjectFolder

        if folder.newer and not checkpoint_objects.is_whole(ObjectFolder(folder.newer)):
            return replace(folder, objects={}, stays="the newer checkpoint is not complete in the store")
        store = ObjectFolder(folder.url)
        written = output_objects.written if folder.kind == RetainedFiles.OUTPUTS else checkpoint_objects.written
        return replace(folder, objects=written(store))
    except DatasetInvalid as error:
        raise BadRequest(str(error), hint="pip install '.[data]'") from None
    except SourceUnavailable as error:
        silent[bucket] = str(error)
        return replace(folder, objects={}, stays=str(error))
    except ObjectsRefused as error:
        return replace(folder, objects={}, stays=str(error))
