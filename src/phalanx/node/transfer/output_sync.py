"""Uploads a job's outputs if its nodes do not share the head's folders: changes in PHALANX_OUTPUT_DIR go to the head every minute and at the end.

A new attempt starts with the outputs of earlier ones. A file that only grew is sent from its old end; any other change sends all of it, and
the head replaces its copy when it is complete. Files deleted here are deleted there. Links, pipes and sockets are not followed and not sent.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

import msgspec

from phalanx.core.ids import Epoch, JobId
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.head_link.channels import Backoff, start_thread
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.local_copies import outputs_in_object_store
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.transfer import object_outputs
from phalanx.node.transfer.object_outputs import STORE_STALL_S, FileTimes
from phalanx.node.transfer.object_program import AttemptSuperseded, ObjectStoreUnavailable
from phalanx.wire.manifest import require_regular
from phalanx.wire.stored_files import (
    OUTPUT_FILES_MAX,
    PIECE_BYTES_MAX,
    FileEndReply,
    OutputsReply,
)

UPLOAD_EVERY_S: Final = 60.0  # a power cut loses the output since the last upload; a minute is acceptable
STALL_S: Final = 30.0  # at the end of a member: give up after this time without progress while the head answers
SHORT_WAIT_S: Final = 2.0
_LOOK_S: Final = 0.05
_ASK_S: Final = 60.0  # for a piece that is synced on a busy disk
_READ_BYTES: Final = 1 << 20
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_log = logging.getLogger(__name__)
WriteNote = Callable[[MemberRuntime, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """The head's state of a file: its size and time here when it was sent, and the CRC-32 of its bytes."""

    size_bytes: int
    changed_ns: int
    crc32: int


@dataclass(slots=True, kw_only=True)
class _Tree:
    """The outputs of one attempt here. `refused`: files whose rejection was reported, once each. `stored`: what an object store has."""

    member: MemberRuntime
    sent: dict[str, _Sent] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    progress_s: float = field(default_factory=time.monotonic)
    stored: FileTimes | None = None
    over: bool = False

    @property
    def in_store(self) -> bool:
        """Whether an object store has them, not the head."""
        return outputs_in_object_store(self.member.prepare)

    def moved(self) -> None:
        """Note progress."""
        self.progress_s = time.monotonic()


class OutputSync:
    """Uploads of all outputs of one supervisor. Thread-safe. `shutting_down`: true once the supervisor must end, and is killed if it takes long."""

    def __init__(
        self,
        access: HeadAccess,
        ended: threading.Event,
        *,
        note: WriteNote,
        shutting_down: Callable[[], bool] = lambda: False,
    ) -> None:
        self._access = access
        self._hurried = shutting_down
        self._ended = ended
        self._note = note
        self._lock = threading.Lock()
        self._trees: dict[tuple[JobId, Epoch], _Tree] = {}

    def download_earlier(self, member: MemberRuntime) -> None:
        """Download the outputs of earlier attempts, once per attempt. Retries while the head is unreachable, until the member is stopped.

        Raises:
            RequestRejected: the head no longer accepts this attempt.
            OSError: this node's disk.
        """
        tree = _Tree(member=member)
        with self._lock:
            known = self._trees.get((member.key.job_id, member.key.epoch))
            if known is not None:  # a restart in place: the files are here
                known.member = member
                return
        backoff = Backoff(member.cancelled)
        while not member.cancelled.is_set():
            try:
                if member.key.epoch > 1:  # before the first attempt there are none
                    _OutputUpload(tree, self._access).fetch_all()
            except (HeadUnavailable, RegistrationRequired, msgspec.MsgspecError):
                backoff.pause()
            else:
                with self._lock:
                    self._trees[member.key.job_id, member.key.epoch] = tree
                return

    def begin_in_store(self, member: MemberRuntime) -> None:
        """The same for a job whose outputs are in an object store; proves that it may write there.

        Raises:
            PreparationFailed: it may not, or the store does not answer.
        """
        with self._lock:
            known = self._trees.get((member.key.job_id, member.key.epoch))
        if known is not None:
            known.member = member
            return
        object_outputs.begin(member, lambda text: self._note(member, text))
        tree = _Tree(member=member, stored=object_outputs.file_times(member))
        with self._lock:
            self._trees[member.key.job_id, member.key.epoch] = tree

    def stop_attempt(self, job_id: JobId, epoch: Epoch) -> None:
        """The attempt is over: stop sending its outputs."""
        with self._lock:
            tree = self._trees.pop((job_id, epoch), None)
        if tree is not None:
            tree.over = True

    def run(self) -> None:
        """Send changes every EVERY_S until the supervisor ends."""
        while not self._ended.wait(UPLOAD_EVERY_S):
            with self._lock:
                trees = list(self._trees.values())
            for tree in trees:
                self.send_changes(tree.member)

    def send_changes(self, member: MemberRuntime) -> None:
        """Send changes, if the head is reachable; otherwise the next round does."""
        with self._lock:
            tree = self._trees.get((member.key.job_id, member.key.epoch))
        if tree is not None:
            try:
                self._send(tree)
            except (HeadUnavailable, RegistrationRequired, ObjectStoreUnavailable, msgspec.MsgspecError) as error:
                _log.debug("outputs of job %s: %s", member.key.job_id, error)

    def notify_when_sent(self, member: MemberRuntime, done: Callable[[], None], *, patient: bool) -> None:
        """Call `done` once the head has all outputs, or after waiting for `STALL_S` without progress.

        Not `patient`: wait for `SHORT_WAIT_S` only; the member crashed and soon restarts here with the same folder, or a node is gone.
        """
        with self._lock:
            tree = self._trees.get((member.key.job_id, member.key.epoch))
        if tree is None:
            done()
            return

        def wait() -> None:
            sent = start_thread("outputs-send", lambda: self._send_until_done(tree))
            since_s = time.monotonic()
            while sent.is_alive() and not (
                time.monotonic() - since_s > SHORT_WAIT_S and (self._hurried() or not patient or self._ended.is_set())
            ):
                sent.join(_LOOK_S)
            done()

        start_thread("outputs-wait", wait)

    def _send_until_done(self, tree: _Tree) -> None:
        tree.progress_s = time.monotonic()
        backoff = Backoff(self._ended)
        while not (tree.over or self._ended.is_set()):
            try:
                self._send(tree, final=True)
            except ObjectStoreUnavailable as error:
                if time.monotonic() - tree.progress_s > STORE_STALL_S:
                    self._note(tree.member, f"outputs are not all in {tree.member.prepare.output_dir}: {error}")
                    return
                backoff.pause()
            except (HeadUnavailable, RegistrationRequired, msgspec.MsgspecError) as error:
                if getattr(error, "answered", False) and time.monotonic() - tree.progress_s > STALL_S:
                    self._note(tree.member, f"outputs have not reached the head: {error}")
                    return
                if not getattr(error, "answered", False):
                    tree.progress_s = (
                        time.monotonic()
                    )  # wait for an unreachable head: it could not receive the end either
                backoff.pause()
            else:
                return

    def _send(self, tree: _Tree, *, final: bool = False) -> None:
        with tree.lock:
            if tree.in_store:
                self._store(tree, final=final)
                return
            upload = _OutputUpload(tree, self._access)
            try:
                for path, why in upload.send_changed():
                    if path not in tree.refused:
                        tree.refused.add(path)
                        self._note(tree.member, f"output {path!r} is not stored: {why}")
            finally:
                upload.close()

    def _store(self, tree: _Tree, *, final: bool) -> None:
        found = object_outputs.file_times(tree.member)
        if tree.over or (found == tree.stored and not (final and found)):
            return
        try:
            refused = object_outputs.send(
                tree.member, final=final, on_bytes=tree.moved, dropped=lambda: tree.over or self._ended.is_set()
            )
        except AttemptSuperseded:
            tree.over = True
            return
        tree.stored = found if final else object_outputs.settled(found)
        for path, why in refused:
            if path not in tree.refused:
                tree.refused.add(path)
                self._note(tree.member, f"output {path!r} is not stored: {why}")


class _OutputUpload:
    """One pass over the outputs of an attempt."""

    def __init__(self, tree: _Tree, access: HeadAccess) -> None:
        self._tree = tree
        self._root = tree.member.outputs
        self._account = tree.member.account
        self._connection = HeadConnection(access)
        self._about = {"job_id": tree.member.key.job_id, "epoch": tree.member.key.epoch}

    def close(self) -> None:
        self._connection.close()

    def fetch_all(self) -> None:
        """Download the head's outputs into an empty folder."""
        try:
            body = self._connection.call("GET", f"/v1/node/outputs?{urlencode(self._about)}", timeout_s=_ASK_S)
            for file in msgspec.json.decode(body, type=OutputsReply).files:
                path = os.path.join(self._root, *file.name.split("/"))
                if not os.path.normpath(path).startswith(self._root + os.sep):
                    continue
                with acting_as(self._account):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                require_regular(fd, path)
                try:
                    words = urlencode({**self._about, "path": file.path})
                    self._connection.download(f"/v1/node/outputs/file?{words}", fd, timeout_s=_ASK_S)
                    seen = os.fstat(fd)
                    self._tree.sent[file.name] = _Sent(
                        size_bytes=seen.st_size, changed_ns=seen.st_mtime_ns, crc32=_crc(fd, seen.st_size)
                    )
                finally:
                    os.close(fd)
        finally:
            self.close()

    def send_changed(self) -> Iterator[tuple[str, str]]:
        """Send changed files; yields the files that cannot be sent, and why."""
        with acting_as(self._account):
            files, whole = _files(self._root)
        for path, seen in files:
            known = self._tree.sent.get(path)
            if known is not None and (known.size_bytes, known.changed_ns) == (seen.st_size, seen.st_mtime_ns):
                continue
            if self._tree.over:
                return
            if (
                not path.isprintable()
            ):  # surrogates of non-UTF-8 bytes, line ends: unsafe in a request and in the job's log
                yield ascii(path), "its name is not printable text"
                continue
            try:
                self._tree.sent[path] = self._send(path, seen, known)
            except FileNotFoundError:  # removed since it was listed
                continue
            except RequestRejected as error:
                if error.code == "attempt_over":
                    self._tree.over = True
                    return
                if error.code == "outputs_full":
                    yield path, f"{error}; no further output is sent until there is space"
                    break  # removed files are still reported, since that makes space
                yield path, str(error)
            except OSError as error:
                yield path, error.strerror or str(error)
        if not whole:
            yield "*", f"at most {OUTPUT_FILES_MAX} files are uploaded, and only from readable folders"
            return
        for path in self._tree.sent.keys() - {path for path, _ in files}:
            words = urlencode({**self._about, "path": path})
            try:
                self._connection.call("DELETE", f"/v1/node/outputs/file?{words}", timeout_s=_ASK_S)
            except RequestRejected as error:
                if error.code == "attempt_over":
                    self._tree.over = True
                    return
                yield path, str(error)
            del self._tree.sent[path]

    def _send(self, path: str, seen: os.stat_result, known: _Sent | None) -> _Sent:
        with acting_as(self._account):
            fd = os.open(os.path.join(self._root, path), _OPEN)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # replaced since it was listed
                raise FileNotFoundError(path)
            if known is not None and 0 < known.size_bytes < seen.st_size:
                crc = _crc(fd, known.size_bytes)
                if crc == known.crc32:
                    sent = self._pieces(fd, path, known.size_bytes, seen, crc)
                    if sent is not None:
                        return sent
            return self._pieces(fd, path, 0, seen, 0) or _Sent(size_bytes=-1, changed_ns=0, crc32=0)
        finally:
            os.close(fd)

    def _pieces(self, fd: int, path: str, begin: int, seen: os.stat_result, crc: int) -> _Sent | None:
        """Send a file from `begin` on, after bytes with this CRC-32; None if the head's file does not end there, or the file shrank.

        From begin > 0 the head appends to its file; from 0 the last piece renames the new file into place.
        """
        append = begin > 0
        while True:
            piece = os.pread(fd, min(PIECE_BYTES_MAX, seen.st_size - begin), begin)
            end, crc = begin + len(piece), zlib.crc32(piece, crc)
            if not piece and end < seen.st_size:
                return None
            last = end == seen.st_size
            words: dict[str, object] = {
                **self._about,
                "path": path,
                "offset": begin,
                "more": "true" if append else "false",
            }
            if last:
                words |= {"crc32": crc, "size": end, "mode": stat.S_IMODE(seen.st_mode)}
            body = self._connection.call("PUT", f"/v1/node/outputs/file?{urlencode(words)}", piece, timeout_s=_ASK_S)
            self._tree.progress_s = time.monotonic()
            if msgspec.json.decode(body, type=FileEndReply).end != end:
                return None
            if last:
                return _Sent(size_bytes=end, changed_ns=seen.st_mtime_ns, crc32=crc)
            begin = end


def _files(root: str) -> tuple[list[tuple[str, os.stat_result]], bool]:
    """Regular files below a folder, by path, and whether the list is complete: at most OUTPUT_FILES_MAX; links are not followed."""
    found: list[tuple[str, os.stat_result]] = []
    waiting, whole = [root], True  # a list: recursion would fail at the thousandth level
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            whole = False
            continue
        below = []
        for entry in listed:
            try:
                seen = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed since it was listed
                continue
            except OSError:  # for example a path that is too long
                whole = False
                continue
            if stat.S_ISDIR(seen.st_mode):
                below.append(entry.path)
            if not stat.S_ISREG(seen.st_mode):
                continue
            if len(found) >= OUTPUT_FILES_MAX:
                return found, False
            found.append((os.path.relpath(entry.path, root), seen))
        waiting += reversed(below)
    return found, whole


def _crc(fd: int, size_bytes: int) -> int:
    """CRC-32 of the first bytes. Cost: one pass over them."""
    crc = begin = 0
    while begin < size_bytes and (piece := os.pread(fd, min(_READ_BYTES, size_bytes - begin), begin)):
        crc, begin = zlib.crc32(piece, crc), begin + len(piece)
    return crc
