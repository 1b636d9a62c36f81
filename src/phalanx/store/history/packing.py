"""Chunks of history as bytes: differences along the time, split into low and high bytes, compressed by zlib as runs.

Differences of a steady value are zero, and those of a noisy one small, so the high bytes are runs of zeros. zlib's strategy RLE is within a
few percent of its best, for a tenth of the time (docs/decisions/0066). zlib's checksum covers everything.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np

from phalanx.store.history.metrics import DEVICE_METRICS, NODE_METRICS, Codes
from phalanx.store.history.rollups import Rollups, of_values

VERSION: Final = 1
_HEAD: Final = struct.Struct("<BBHHqI")  # version, fields, devices, times, begin, step
_PACKED_MAX: Final = 64 << 20  # of one chunk, unpacked: a node of 1,000 devices


class DamagedChunk(ValueError):
    """The bytes are not a chunk of this release."""


def pack(found: Rollups) -> bytes:
    """Pack rollups."""
    return _packed(found.begin_s, found.step_s, found.devices, found.cells_FRT)


def pack_values(begin_s: int, step_s: int, devices: tuple[int, ...], codes_RT: Codes) -> bytes:  # noqa: N803  # axes
    """Pack single values, of which count, minimum and maximum follow."""
    return _packed(begin_s, step_s, devices, codes_RT[np.newaxis])


def unpack(data: bytes) -> Rollups:
    """Unpack a chunk.

    Raises:
        DamagedChunk: it is damaged, or of another release.
    """
    try:
        unpacker = zlib.decompressobj()
        whole = unpacker.decompress(data, _PACKED_MAX)
        if not unpacker.eof:
            raise DamagedChunk("a chunk that is cut off")
        version, fields, devices, times, begin_s, step_s = _HEAD.unpack_from(whole)
        if version != VERSION:
            raise DamagedChunk(f"a chunk of version {version}")
        names = struct.unpack_from(f"<{devices}H", whole, _HEAD.size)
        rows = len(NODE_METRICS) + devices * len(DEVICE_METRICS)
        planes = np.frombuffer(whole, np.uint8, offset=_HEAD.size + 2 * devices)
        low, high = planes.reshape(2, fields, rows, times).astype(np.uint16)
    except (zlib.error, struct.error, ValueError) as error:
        raise DamagedChunk(str(error)) from error
    zigzag = low | high << 8
    differences = (zigzag >> 1).astype(np.int16) ^ -(zigzag & 1).astype(np.int16)
    cells = np.cumsum(differences, axis=2, dtype=np.int16)
    if fields == 1:
        return of_values(begin_s, step_s, names, cells[0])
    return Rollups(begin_s, step_s, names, cells)


def _packed(begin_s: int, step_s: int, devices: tuple[int, ...], cells_FRT: Codes) -> bytes:  # noqa: N803  # axes
    fields, _, times = cells_FRT.shape
    differences = np.diff(cells_FRT, axis=2, prepend=np.int16(0))
    zigzag = ((differences << 1) ^ (differences >> 15)).astype(np.uint16)
    head = _HEAD.pack(VERSION, fields, len(devices), times, begin_s, step_s) + struct.pack(
        f"<{len(devices)}H", *devices
    )
    planes = (zigzag & 0xFF).astype(np.uint8).tobytes() + (zigzag >> 8).astype(np.uint8).tobytes()
    packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return packer.compress(head + planes) + packer.flush()
