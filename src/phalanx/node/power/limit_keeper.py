"""Sets the power limits of this node's GPUs, and restores those of before.

The limit of before is on disk before it is changed. So a supervisor that died finds it at its next start, and restores it if the time of the cap is
over. Only root may change a limit. A cap on a node is on all of its GPUs or on none.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from phalanx.core.errors import Conflict, NotPermitted, PhalanxError
from phalanx.core.fleet.power_limits import PowerLimits, watts_text
from phalanx.node.files.private_files import write_private
from phalanx.node.probes.devices import DeviceFacts

T = TypeVar("T")
_FILE: Final = "power_limits.json"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    """What is capped. `original_mw`: by UUID, the limit of before; empty without a cap."""

    original_mw: dict[str, int] = field(default_factory=dict)
    milliwatts: int = 0
    until_s: float | None = None


class PowerLimitKeeper:
    """See the module. Calls may come from any thread.

    Args:
        nvml: the initialised library (`probes.nvml.load_nvml`).
        folder: the node's, for the record.
        devices: of the node.
    """

    def __init__(self, nvml: Any, folder: str, devices: Iterable[DeviceFacts]) -> None:
        self._nvml = nvml
        self._folder = folder
        self._devices = tuple(one for one in devices if not one.virtual)
        self._lock = threading.Lock()
        self._record = _read(os.path.join(folder, _FILE))

    def limits(self) -> tuple[PowerLimits, ...]:
        """The limits of each GPU; none of a GPU whose driver does not report them. Does not wait for a change that is under way."""
        return tuple(found for one in self._devices if (found := self._limits(one)) is not None)

    def cap(self, milliwatts: int, until_s: float | None) -> None:
        """Set the limit of each GPU, until a Unix time or without an end. Idempotent.

        Raises:
            PhalanxError: a limit cannot be set; then none is changed.
            OSError: the limits of before cannot be recorded; then none is changed.
        """
        with self._lock:
            before = {one.uuid: self._limit(one) for one in self._devices}
            known = self._record
            original = {uuid: known.original_mw.get(uuid, limit) for uuid, limit in before.items()}
            self._write(_Record(original, milliwatts, until_s))
            changed: list[DeviceFacts] = []
            try:
                for one in self._devices:
                    if before[one.uuid] != milliwatts:
                        self._set(one, milliwatts)
                        changed.append(one)
            except PhalanxError:
                for one in changed:  # if that fails too, the record stays, and a restore tries again
                    self._set(one, before[one.uuid])
                self._write(known)
                raise

    def restore(self) -> bool:
        """Set the limits of before the cap again; return whether there was one.

        Raises:
            PhalanxError: a limit cannot be set; the next call tries again.
            OSError: the record cannot be removed.
        """
        with self._lock:
            if not self._record.original_mw:
                return False
            for one in self._devices:  # a GPU that was replaced has the limit of its own driver
                original_mw = self._record.original_mw.get(one.uuid)
                if original_mw is not None and self._limit(one) != original_mw:
                    self._set(one, original_mw)
            self._write(_Record())
            return True

    def is_over(self, now_s: float) -> bool:
        """Whether there is a cap whose time is over. Does not wait."""
        until_s = self._record.until_s
        return until_s is not None and now_s >= until_s

    def recover(self, now_s: float) -> None:
        """At start: restore the limits of a cap whose time is over, and set one that still holds; a reboot has reset it."""
        try:
            if self.is_over(now_s):
                self.restore()
                _log.info("the power limits of before the cap are restored: its time is over")
            elif self._record.original_mw:
                self.cap(self._record.milliwatts, self._record.until_s)
        except (PhalanxError, OSError) as error:
            _log.warning("power limits: %s", error)

    def _limits(self, device: DeviceFacts) -> PowerLimits | None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(device.uuid)
            low, high = self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            return PowerLimits(
                index=device.index,
                min_mw=int(low),
                max_mw=int(high),
                default_mw=int(self._nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)),
                limit_mw=int(self._nvml.nvmlDeviceGetPowerManagementLimit(handle)),
                original_mw=self._record.original_mw.get(device.uuid),
            )
        except self._nvml.NVMLError:
            return None

    def _limit(self, device: DeviceFacts) -> int:
        handle = self._call(device, self._nvml.nvmlDeviceGetHandleByUUID, device.uuid)
        return int(self._call(device, self._nvml.nvmlDeviceGetPowerManagementLimit, handle))

    def _set(self, device: DeviceFacts, milliwatts: int) -> None:
        handle = self._call(device, self._nvml.nvmlDeviceGetHandleByUUID, device.uuid)
        self._call(device, self._nvml.nvmlDeviceSetPowerManagementLimit, handle, milliwatts)
        _log.info("GPU %d: power limit set to %s", device.index, watts_text(milliwatts))

    def _call(self, device: DeviceFacts, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except self._nvml.NVMLError_NoPermission as error:
            raise NotPermitted(
                f"only root may change the power limit of GPU {device.index}; this supervisor is user {os.geteuid()}"
            ) from error
        except self._nvml.NVMLError as error:
            raise Conflict(f"the driver refuses a power limit of GPU {device.index}: {error}") from error

    def _write(self, record: _Record) -> None:
        if record != self._record:
            content = {"original_mw": record.original_mw, "milliwatts": record.milliwatts, "until_s": record.until_s}
            write_private(self._folder, _FILE, json.dumps(content))
            self._record = record


def _read(path: str) -> _Record:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        original_mw = {str(uuid): int(limit) for uuid, limit in found["original_mw"].items()}
        until_s = None if found["until_s"] is None else float(found["until_s"])
        return _Record(original_mw, int(found["milliwatts"]), until_s)
    except FileNotFoundError:
        return _Record()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("the record of power limits cannot be read, so none is restored: %s", error)
        return _Record()
