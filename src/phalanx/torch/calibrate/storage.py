"""Measure the storage of checkpoints: one file per node, written and fsynced by all nodes at once."""

from __future__ import annotations

import os
import shutil
from typing import Final

from phalanx.durable_files import time_durable_write
from phalanx.planner.calibration.samples import WriteSample
from phalanx.torch.calibrate.gang import CalibrationGang

_FILE_BYTES: Final = {True: 64 << 20, False: 1 << 30}
"""By `quick`. A gigabyte is larger than the cache of a disk controller."""
_CHUNK_BYTES: Final = 8 << 20
_FREE_SHARE: Final = 8
"""Writes at most this fraction (1/8) of the free space, because other jobs use it too."""


def measure_writes(gang: CalibrationGang, folder: str) -> list[WriteSample]:
    """Let the first rank of each node write a file, at once, and delete it. Collective.

    Raises:
        OSError: the folder is not writable.
    """
    samples = []
    gang.barrier()
    if gang.is_leader:
        os.makedirs(folder, exist_ok=True)
        wanted = min(_FILE_BYTES[gang.quick], shutil.disk_usage(folder).free // _FREE_SHARE // len(gang.devices))
        chunks = wanted // _CHUNK_BYTES
        if chunks:
            path = os.path.join(folder, f".calibrate-{gang.node_rank}")
            # Random bytes, which a file system cannot compress.
            seconds = time_durable_write(path, os.urandom(_CHUNK_BYTES), chunks)
            samples.append(WriteSample(node_rank=gang.node_rank, bytes=chunks * _CHUNK_BYTES, seconds=seconds))
    gang.barrier()
    return samples
