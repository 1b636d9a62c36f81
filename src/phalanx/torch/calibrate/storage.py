"""What the checkpoints' storage takes: one file per node, written and fsynced, all nodes at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from typing import Final

from phalanx.core.performance.samples import WriteSample
from phalanx.torch.calibrate.gang import Gang

_FILE_BYTES: Final = {True: 64 << 20, False: 1 << 30}
"""By `quick`. A gigabyte is past what a controller's cache takes at once."""
_CHUNK_BYTES: Final = 8 << 20
_FREE_SHARE: Final = 8
"""Of the free space, at most one part in so many is written: others save there as well."""


def measure_writes(gang: Gang, folder: str) -> list[WriteSample]:
    """The leaders of all nodes write at once; nothing of it is left. Collective.

    Raises:
        OSError: the folder cannot be written.
    """
    samples = []
    gang.barrier()
    if gang.leads:
        os.makedirs(folder, exist_ok=True)
        wanted = min(_FILE_BYTES[gang.quick], shutil.disk_usage(folder).free // _FREE_SHARE // len(gang.devices))
        chunks = wanted // _CHUNK_BYTES
        if chunks:
            path = os.path.join(folder, f".calibrate-{gang.node_rank}")
            seconds = _write(path, chunks)
            samples.append(WriteSample(node_rank=gang.node_rank, bytes=chunks * _CHUNK_BYTES, seconds=seconds))
    gang.barrier()
    return samples


def _write(path: str, chunks: int) -> float:
    """Seconds until the file is durable. Random bytes: a file system that compresses would do well at zeros."""
    chunk = os.urandom(_CHUNK_BYTES)
    try:
        with open(path, "wb", buffering=0) as file:
            began_s = time.perf_counter()
            file.writelines(itertools.repeat(chunk, chunks))
            os.fsync(file.fileno())
            return time.perf_counter() - began_s
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
