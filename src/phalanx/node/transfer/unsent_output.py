"""Output that an earlier supervisor of this node had not sent when it ended: kept at the start of the next one, which sends the rest.

    <node folder>/unsent/<job>.<epoch>/<stream>.log

The head knows how much it has, so nothing is sent twice. The ranks that wrote it are dead.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from functools import partial
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.node.transfer.spool import Spool
from phalanx.node.transfer.stream_upload import StreamName, StreamUploader

UNSENT_FOLDER: Final = "unsent"
_LOG: Final = ".log"
_STREAM: Final = re.compile(r"(rank|stacks|steps|supervisor)-[0-9]{1,9}\.log")
_ATTEMPT: Final = re.compile(r"([0-9]{1,19}(?:_[0-9]{1,9})?)\.([0-9]{1,10})")


def keep_unsent_output(node_folder: str, attempts_folder: str) -> None:
    """Move the spool files of an earlier supervisor aside, before the folders of its attempts are removed. Never raises."""
    for attempt in _names(attempts_folder):
        source, target = os.path.join(attempts_folder, attempt), os.path.join(node_folder, UNSENT_FOLDER, attempt)
        for name in _names(source):
            path = os.path.join(source, name)
            with contextlib.suppress(OSError):
                if not _STREAM.fullmatch(name) or os.path.islink(path) or not os.path.getsize(path):
                    continue
                os.makedirs(target, mode=0o700, exist_ok=True)
                os.replace(path, os.path.join(target, name))


def send_unsent_output(node_folder: str, spool: Spool, uploader: StreamUploader) -> None:
    """Send what was kept; each file is removed once the head has it, or does not take it any more."""
    root = os.path.join(node_folder, UNSENT_FOLDER)
    for attempt in _names(root):
        found = _ATTEMPT.fullmatch(attempt)
        for file in _names(os.path.join(root, attempt)):
            path = os.path.join(root, attempt, file)
            if found is None or not _STREAM.fullmatch(file):
                continue
            name = StreamName(JobId(found[1]), Epoch(int(found[2])), file.removesuffix(_LOG))
            try:
                sent = _sent_bytes(path)
                spool.add(name.key, path)
            except OSError:
                continue
            uploader.add(name, sent)
            uploader.mark_grown(name.key)
            uploader.notify_when_uploaded([name.key], math.inf, partial(_end, name.key, path, spool, uploader))


def _end(key: str, path: str, spool: Spool, uploader: StreamUploader) -> None:
    uploader.remove([key])
    spool.remove(key)
    with contextlib.suppress(OSError):
        os.remove(path)
        os.rmdir(os.path.dirname(path))


def _sent_bytes(path: str) -> int:
    """How much of the file the head has for certain: the spool frees only what the head has stored (`Spool.acknowledge`).

    Raises:
        OSError: the file cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.lseek(file, 0, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(file).st_size  # it has no data left: all of it was freed
    finally:
        os.close(file)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
