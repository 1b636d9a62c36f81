"""Recent faults that the kernel and the GPU driver reported on this node: XIDs and OOM kills. From /dev/kmsg where readable, and from NVML.

Entries are kept in memory with the time of their arrival, so that a failure is attributed to faults of its own time. Reading the kernel
log needs root or `kernel.dmesg_restrict=0`; otherwise only NVML and the OOM counters report.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.failure import XIDS_MAX
from phalanx.node.logic.evidence import (
    OomKill,
    XidError,
    is_same_pci_address,
    parse_kernel_log,
)
from phalanx.node.probes.devices import DeviceFacts
from phalanx.wire.rank import boottime_ns

_RECORD_BYTES: Final = 8192  # one record a read; the kernel's own bound (CONSOLE_EXT_LOG_MAX)
_RECORDS_MAX: Final = 20_000  # in one poll; the ring buffer holds some thousands
_KEPT: Final = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Xid:
    at_ns: int
    xid: int
    bus: str  # "" where the index is known
    index: int | None


class KernelLog:
    """Faults on this node, stored as they arrive. Thread-safe.

    Args:
        devices: the node's GPUs, to attribute errors.
        path: of the kernel log; "" for none.
    """

    def __init__(self, devices: Iterable[DeviceFacts], path: str = "/dev/kmsg") -> None:
        self._buses = {device.index: device.pci_bus for device in devices}
        self._lock = threading.Lock()
        self._xids: deque[_Xid] = deque(maxlen=_KEPT)
        self._killed: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # when, pid
        self._file = _open_at_end(path)

    def poll(self) -> None:
        """Read new records."""
        with self._lock:
            for sign in parse_kernel_log(self._read()):
                match sign:
                    case XidError(bus=bus, xid=xid):
                        self._xids.append(_Xid(at_ns=boottime_ns(), xid=xid, bus=bus, index=None))
                    case OomKill(pid=pid):
                        self._killed.append((boottime_ns(), pid))

    def add_xids(self, index: int, xids: Iterable[int]) -> None:
        """Add XIDs that NVML reported for a device."""
        with self._lock:
            self._xids.extend(_Xid(at_ns=boottime_ns(), xid=xid, bus="", index=index) for xid in xids)

    def xids(self, since_ns: int, indices: Iterable[int]) -> tuple[int, ...]:
        """Distinct XIDs on these devices since then, in order of arrival."""
        wanted = set(indices)
        buses = [self._buses.get(index, "") for index in wanted]
        with self._lock:
            found = [one for one in self._xids if one.at_ns >= since_ns]
        mine = (
            one.xid
            for one in found
            if one.index in wanted or any(bus and is_same_pci_address(one.bus, bus) for bus in buses)
        )
        return tuple(dict.fromkeys(mine))[:XIDS_MAX]

    def oom_killed(self, since_ns: int, pids: Iterable[int]) -> bool:
        """Whether the kernel reported that it killed one of these."""
        wanted = set(pids)
        with self._lock:
            return any(at_ns >= since_ns and pid in wanted for at_ns, pid in self._killed)

    def close(self) -> None:
        """Close the log."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _read(self) -> str:
        records: list[str] = []
        while self._file is not None and len(records) < _RECORDS_MAX:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before the read: continue with the oldest
                    continue
                _log.warning("the kernel log can no longer be read: %s", error)
                os.close(self._file)
                self._file = None
                break
            if not record:
                break
            records.append(record.decode("utf-8", "replace"))
        return "\n".join(records)


def _open_at_end(path: str) -> int | None:
    """Open the log at its end; None if it cannot be read."""
    if not path:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        _log.info("no kernel log (%s): only NVML reports XIDs", error.strerror)
        return None
    try:
        os.lseek(file, 0, os.SEEK_END)
    except OSError:
        os.close(file)
        return None
    return file
