"""`phalanx get`: downloads the files that a job wrote to PHALANX_OUTPUT_DIR. The archive is untrusted."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import tarfile
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

import click

from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.terminal import strip_control
from phalanx.cli.transfers.download_journal import JOURNAL, DownloadJournal
from phalanx.cli.transfers.transfer_progress import ProgressReader
from phalanx.core.errors import BadFile, NotFound, PhalanxError, Unreachable
from phalanx.core.units import format_bytes
from phalanx.core.work.array import parse_array
from phalanx.core.work.states import JobState
from phalanx.wire.api.output import ARCHIVE_OFFSET, ARCHIVE_SHA256

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobView

_CHUNK_BYTES: Final = 1 << 20
PART: Final = ".part"  # end of the name of a file that is not complete
_FAILURES_MAX: Final = 5  # broken downloads one after the other that brought nothing
_PAUSE_S: Final = 1.0


@click.command()
@JOB_ARGUMENT
@click.argument("dest", metavar="[DEST]", required=False, type=click.Path(file_okay=False))
@click.option("--path", default="", metavar="PATH", help="Only this file or folder of the outputs.")
def get(job: str, dest: str | None, path: str) -> None:
    """Download the outputs of a job into DEST (default: job-N). Replaces files of the same name.

    Run it again after an interruption: it goes on, and sends no byte twice. The SHA-256 of each file is checked.

    Of an array, every element that has started gets a folder of its own: DEST/17_0, DEST/17_1, ...
    """
    head = connect()
    job_id = resolve_job(head, job)
    folder = dest or f"job-{job_id}"
    found = head.job(job_id).job
    elements = _started_elements(found)
    files, size = 0, 0
    for place, element in enumerate(elements, start=1):
        label = f"element {place} of {len(elements)}: " if found.states else ""
        target = os.path.join(folder, element) if found.states else folder
        try:
            fetched = _fetch_outputs(head, found, element, path, target, label=label)
        except NotFound:
            if not found.states:  # not every element has that file, or any
                raise
            continue
        files, size = files + fetched[0], size + fetched[1]
    if not files:
        raise _no_files(found, path)
    print(f"{files} {'file' if files == 1 else 'files'}, {format_bytes(size)}, in {folder}")
    print(f"next: ls {shlex.quote(folder)}")


def _started_elements(job: JobView) -> list[str]:
    """Return the ids of the jobs that may have outputs: of an array the elements that run or have ended, else the job itself."""
    if not job.states:
        return [job.id]
    started = [numbers for state, numbers in job.state_elements.items() if state is not JobState.PENDING]
    return [f"{job.id}_{index}" for index in parse_array(",".join(started)).indices] if started else []


def _no_files(job: JobView, path: str) -> NotFound:
    where = f"{path} of its outputs" if path else "PHALANX_OUTPUT_DIR"
    what = "array" if job.states else "job"
    if not job.state.terminal:
        return NotFound(
            f"{what} {job.id} is {job.state} and has written no files to {where} yet", hint="try again later"
        )
    return NotFound(
        f"{what} {job.id} wrote no files to {where}", hint=f"its program must write there; phalanx logs {job.id}"
    )


def _fetch_outputs(head: Client, job: JobView, job_id: str, path: str, folder: str, *, label: str) -> tuple[int, int]:
    """Download from where the outputs are; return the number of files and of bytes."""
    place = (head.job(job_id).job if job.states else job).output_dir
    if "://" in place:
        from phalanx.cli.transfers.stored_outputs import fetch_stored_outputs

        return fetch_stored_outputs(place, path, folder, label=label)
    fetched = _fetch(head, job, job_id, path, folder, label=label)
    return fetched.files, fetched.bytes


def _fetch(head: Client, job: JobView, job_id: str, path: str, folder: str, *, label: str) -> DownloadJournal:
    """Download and unpack, on from where an earlier command or a broken connection stopped; return the totals."""
    journal = DownloadJournal(folder, f"{job_id} {job.submit_s} {path}")
    failures = 0
    try:
        while True:
            before = _progress_of(journal, folder)
            try:
                _fetch_rest(head, job_id, path, folder, journal, label=label)
            except NotFound:
                if not journal.after:
                    journal.discard()
                raise
            except (Unreachable, IncompleteDownload):
                failures = failures + 1 if _progress_of(journal, folder) == before else 0
                if failures >= _FAILURES_MAX:
                    raise
                time.sleep(_PAUSE_S)
            else:
                journal.finish()
                return journal
    finally:
        journal.close()


def _progress_of(journal: DownloadJournal, folder: str) -> tuple[str, int]:
    """Return the file that is received and how many bytes of it are here."""
    try:
        seen = os.lstat(os.path.join(folder, f"{os.path.normpath(journal.after)}{PART}")) if journal.after else None
    except OSError:
        seen = None
    return journal.after, seen.st_size if seen is not None and stat.S_ISREG(seen.st_mode) else 0


def _fetch_rest(head: Client, job_id: str, path: str, folder: str, journal: DownloadJournal, *, label: str) -> None:
    """Unpack during the download: a thread writes the archive into a pipe, and it is read from the other end."""
    read_end, write_end = os.pipe()
    errors: list[PhalanxError] = []
    _, offset = _progress_of(journal, folder)
    rest = journal.position(offset)
    with open(read_end, "rb", buffering=0) as source:
        progress = ProgressReader(source, label=label, had_bytes=journal.bytes + offset)

        def receive() -> None:
            with open(write_end, "wb", buffering=0) as out:
                try:
                    head.download_archive(
                        job_id, out, path, on_size=progress.expect, on_time=journal.set_time, rest=rest
                    )
                except PhalanxError as error:
                    errors.append(error)
                except BrokenPipeError:
                    pass  # the reader stopped, and reports why

        thread = threading.Thread(target=receive, name="fetch", daemon=True)
        thread.start()
        try:
            ArchiveExtractor(folder, progress, journal).run()
        except BadFile:
            if not errors:
                raise
    thread.join()
    if errors:
        raise errors[0]


class IncompleteDownload(BadFile):
    """The archive ended early, or a file of it has other bytes than at the head: what is missing can be downloaded again."""


@dataclass(frozen=True, slots=True)
class _ReceivedFile:
    """A file that is written under its temporary name."""

    place: str
    size: int
    sha256: str
    again: bool


class ArchiveExtractor:
    """Unpacks a tar stream into a folder. Nothing is written outside: no `..`, no absolute names, no links to the outside.

    Python 3.11.2 has no extraction filters yet, so they are implemented here: only folders, files and links within the folder. A file is
    written under a temporary name, and renamed when it is complete and, if the archive has its SHA-256, that matches.

    Args:
        folder: made if missing.
        source: of the archive.
        journal: of what is received, to go on after an interruption; None for an archive that is always whole.
    """

    def __init__(self, folder: str, source: ProgressReader, journal: DownloadJournal | None = None) -> None:
        self.files = 0 if journal is None else journal.files
        self.bytes = 0 if journal is None else journal.bytes
        self._journal = journal
        self._received: _ReceivedFile | None = None
        self._root = os.path.realpath(folder)
        self._source = source
        self._links: list[tuple[str, str]] = []

    def run(self) -> None:
        """Unpack the whole stream.

        Raises:
            BadFile: the stream is not a tar archive, or ended early.
        """
        try:
            with tarfile.open(fileobj=self._source, mode="r|") as archive:  # type: ignore[call-overload]  # has read(), all it needs
                for member in archive:
                    self._complete_file(member.pax_headers.get(ARCHIVE_SHA256, ""))
                    self._member(archive, member)
            self._complete_file("")
        except tarfile.ReadError as error:
            raise IncompleteDownload(
                f"the download is incomplete: {error}", hint="run the same command again"
            ) from None
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise BadFile(
                f"the download is not a valid archive: {strip_control(str(error))[:200]}",
                hint="run the command again; if it fails again, see the head's log",
            ) from None
        finally:
            self._source.clear()
        for name, target in self._links:  # last, so that no file is written through a link
            self._link(name, target)
        for name, target in self._links:  # a chain of links may lead further than the text of each
            place = os.path.join(self._root, name)
            if os.path.islink(place) and not (os.path.realpath(place) + os.sep).startswith(self._root + os.sep):
                _unlink(place)
                self.files -= 1
                warn(f"left out: {strip_control(name)} (a link to {strip_control(target)}, outside the folder)")
        if self._journal is not None:
            self._journal.files, self._journal.bytes = self.files, self.bytes

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = os.path.normpath(member.name)
        if name == ".":
            return
        if os.path.isabs(name) or name.split(os.sep)[0] == ".." or "\0" in name + member.linkname:
            warn(f"left out: {strip_control(member.name)} (a name outside the folder)")
        elif name.split(os.sep)[0] == JOURNAL and self._journal is not None:
            warn(f"left out: {strip_control(member.name)} (the name of this download's own note)")
        elif member.issparse():
            warn(f"left out: {strip_control(member.name)} (a sparse file, which a head never sends)")
        elif member.isdir():
            self._place(os.path.join(name, "any"))  # creates its folder
        elif member.isreg():
            self._file(archive, member, name)
        elif member.issym():
            self._links.append((name, member.linkname))
        else:
            warn(f"left out: {strip_control(member.name)} (neither file, folder nor link)")

    def _file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        place = self._place(name)
        source = archive.extractfile(member)
        assert source is not None  # it is a regular file
        part = f"{place}{PART}"
        offset = int(member.pax_headers.get(ARCHIVE_OFFSET, "0"))
        if not offset:
            _unlink(part)
        again = self._journal is not None and self._journal.is_past(member.name)  # it changed since it was received
        if self._journal is not None and not again:
            self._journal.note(member.name, member.size, self.files, self.bytes)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if offset else os.O_CREAT | os.O_EXCL)
        sha256 = hashlib.sha256()
        try:
            with open(os.open(part, flags, 0o666), "r+b") as file:
                _hash_start(file, offset, sha256)
                while chunk := source.read(_CHUNK_BYTES):
                    sha256.update(chunk)
                    if chunk.count(0) == len(chunk):
                        file.seek(len(chunk), os.SEEK_CUR)  # keep holes of sparse files
                    else:
                        file.write(chunk)
                file.truncate()
                if member.mode & 0o100:
                    os.fchmod(file.fileno(), 0o777 & ~_umask())
        except OSError as error:
            error.filename = error.filename or part  # a full disk does not say which file it is about
            raise
        os.utime(part, (member.mtime, member.mtime))
        self._received = _ReceivedFile(place, offset + member.size, sha256.hexdigest(), again)

    def _complete_file(self, sha256: str) -> None:
        """Give the last file its name. `sha256`: of the whole file at the head, "" if the archive does not have it.

        Raises:
            IncompleteDownload: the file has other bytes, or the archive ended before its SHA-256; or a folder has its name.
        """
        received, self._received = self._received, None
        if received is None:
            return
        part = f"{received.place}{PART}"
        if self._journal is not None and self._journal.since_s and not sha256:
            raise IncompleteDownload("the download is incomplete: it ended early", hint="run the same command again")
        if sha256 and sha256 != received.sha256:
            _unlink(part)
            raise IncompleteDownload(
                f"{strip_control(received.place)} has other bytes than at the head; it changed meanwhile, or here",
                hint="run the same command again",
            )
        try:
            os.replace(part, received.place)
        except IsADirectoryError:
            _unlink(part)
            raise BadFile(
                f"{strip_control(received.place)} is a folder here and a file in the outputs",
                hint="use an empty folder",
            ) from None
        if not received.again:
            self.files += 1
            self.bytes += received.size

    def _link(self, name: str, target: str) -> None:
        inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
        if os.path.isabs(target) or inside.split(os.sep)[0] == "..":
            warn(f"left out: {strip_control(name)} (a link to {strip_control(target)}, outside the folder)")
            return
        place = self._place(name)
        _unlink(place)
        os.symlink(target, place)
        self.files += 1

    def _place(self, name: str) -> str:
        """Return the path of a name, and create its folder.

        Raises:
            BadFile: the folder is a file, or an existing link leads outside.
        """
        place = os.path.join(self._root, name)
        parent = os.path.dirname(place)
        try:
            os.makedirs(parent, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BadFile(
                f"{strip_control(parent)} is a file here and a folder in the outputs", hint="use an empty folder"
            ) from None
        if os.path.realpath(parent) != parent:
            raise BadFile(f"{parent} contains a link", hint="use an empty folder")
        return place


def _hash_start(file: IO[bytes], offset: int, sha256: hashlib._Hash) -> None:
    """Hash the bytes that are here, and leave the file at their end."""
    left = offset
    while left and (piece := file.read(min(_CHUNK_BYTES, left))):
        sha256.update(piece)
        left -= len(piece)
    file.seek(offset)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise BadFile(
            f"{strip_control(path)} is a folder here and a link in the outputs", hint="use an empty folder"
        ) from None


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
