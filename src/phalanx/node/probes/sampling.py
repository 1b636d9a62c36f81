"""Samples the devices and reports to the head: each second while ranks run, less often when idle. Only this thread uses the probe."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import msgspec

from phalanx.core.ids import JobId, NodeId, SupervisorId
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.energy_meters import EnergyMeters, EnergySample
from phalanx.node.probes.devices import DeviceProbe, DeviceReading, node_facts
from phalanx.node.probes.host_load import HostLoad
from phalanx.node.probes.virtual_devices import SlotTenant, VirtualProbe
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import boottime_ns

BUSY_S: Final = 1.0
IDLE_S: Final = 5.0
_SMALL_S: Final = 2.0  # a fleet that renews as often as this is small enough for a sample of every node each second
_SOON_S: Final = 0.25  # at least, between two reports at the end of attempts: short jobs may end many times a second
# Between two samples, however many attempts begin and end: a sample costs milliseconds, and so late a reading errs by 70 J at 700 W.
APART_S: Final = 0.1
_ASK_S: Final = 3.0
_READINGS_MAX: Final = 4096  # of energy that wait for a head that does not answer; 256 attempts on 8 devices
_READINGS_SENT_MAX: Final = 1024  # of those, in one request: 0.3 MB; the head takes at most 1 MiB
_log = logging.getLogger(__name__)


class Sampler:
    """See the module.

    Args:
        job_by_device: the job on each device index now.
        tenants_by_device: whose processes are on each device index now.
        head_index: the head's index of a device.
        job_samples: what the processes of each member used.
        staging: how far the members are that stage data now.
        on_xids: receives errors of the GPU driver: the device's index here, and the XIDs.
        renew_interval_s: the head's renewal interval in seconds; it grows with the fleet, and samples follow it.
        indices_known: whether `head_index` knows them; no energy is reported before that.
    """

    def __init__(
        self,
        access: HeadAccess,
        probe: DeviceProbe,
        *,
        node_id: NodeId,
        supervisor_id: SupervisorId,
        folder: str,
        job_by_device: Callable[[], Mapping[int, JobId]],
        tenants_by_device: Callable[[], Mapping[int, tuple[SlotTenant, ...]]],
        ended: threading.Event,
        head_index: Callable[[int], int] = lambda index: index,
        indices_known: Callable[[], bool] = lambda: True,
        renew_interval_s: Callable[[], float] = lambda: 0.0,
        job_samples: Callable[[], list[wire.JobSample]] = list,
        staging: Callable[[], list[wire.StagingSample]] = list,
        on_xids: Callable[[int, tuple[int, ...]], None] = lambda _index, _xids: None,
    ) -> None:
        self._on_xids = on_xids
        self._job_samples = job_samples
        self._staging = staging
        self._number = head_index
        self._indices_known = indices_known
        self._meters = EnergyMeters(supervisor_id)
        self._readings: deque[wire.EnergyReading] = deque(maxlen=_READINGS_MAX)  # not answered yet
        self._pace = renew_interval_s
        self._reported_s = -math.inf
        self._send_soon = False  # the sample that was asked for is not to wait for the next report
        self._connection = HeadConnection(access)
        self._probe = probe
        self._host = HostLoad(time.monotonic)
        self._node_id = node_id
        self._supervisor_id = supervisor_id
        self._folder = folder
        self._busy = job_by_device
        self._tenants = tenants_by_device
        self._ended = ended
        self._wake = threading.Event()
        self._hurry = threading.Event()  # a thread waits for a fresh sample
        self._fresh = threading.Condition()
        self._asked = 0  # number of requests for a fresh sample
        self._answered = 0  # number of those made before the newest sample began
        self._latest: dict[int, DeviceReading] = {}
        self._bound: dict[int, tuple[SlotTenant, ...]] = {}

    def latest_samples(self) -> dict[int, DeviceReading]:
        """The latest samples, by index; while jobs run they are about a second old at most."""
        return self._latest

    def fresh_samples(self, timeout_s: float) -> dict[int, DeviceReading]:
        """Samples taken after this call, by index; the latest ones on timeout."""
        with self._fresh:
            self._asked += 1
            asked = self._asked
            self._wake.set()
            self._hurry.set()
            self._fresh.wait_for(lambda: self._answered >= asked or self._ended.is_set(), timeout_s)
            return self._latest

    def sample_now(self, *, send: bool = False) -> None:
        """Take a sample within `APART_S`, so that the energy is read at about this moment; does not wait.

        Args:
            send: report it at once too, so that it is not lost if this supervisor dies.
        """
        with self._fresh:
            self._asked += 1
            self._send_soon |= send
            self._wake.set()

    def run(self) -> None:
        """Run until the supervisor ends."""
        sampled_s, send_soon = -IDLE_S, False
        while not self._ended.is_set():
            self._hurry.wait(max(0.0, sampled_s + APART_S - time.monotonic()))
            self._hurry.clear()
            with self._fresh:
                asked, send_soon = self._asked, send_soon or self._send_soon
                self._send_soon = False
                self._wake.clear()
            jobs = self._busy()
            if not (jobs or send_soon) and asked == self._answered and time.monotonic() - sampled_s < IDLE_S:
                # Each new member ends this wait, by `sample_now`.
                self._wake.wait(max(0.0, IDLE_S - (time.monotonic() - sampled_s)))
                continue
            sampled_s = time.monotonic()
            try:
                self._bind()
                at_ns = boottime_ns()
                taken = self._probe.sample()
            except OSError as error:  # out of descriptors: no fault of the devices, so nothing is reported
                _log.warning("cannot sample the devices now: %s", error)
                self._wake.wait(BUSY_S)
                continue
            for one in taken:
                if one.xids:
                    self._on_xids(one.index, one.xids)
            with self._fresh:
                self._latest = {sample.index: sample for sample in taken}
                at_boundary = asked > self._answered
                self._answered = asked
                self._fresh.notify_all()
            read = self._energy(taken, at_ns)
            if at_boundary:
                self._readings.extend(read)
            every_s = report_every_s(self._pace(), busy=bool(jobs))
            # The loop runs about once a second while jobs run.
            if sampled_s - self._reported_s > (_SOON_S if send_soon else every_s - BUSY_S / 2):
                send_soon = False
                self._reported_s = sampled_s
                waiting = list(islice(self._readings, _READINGS_SENT_MAX))
                # In the order of time: the head drops a reading that is older than the newest.
                is_whole = len(waiting) == len(self._readings)
                readings = waiting + (read if is_whole and not at_boundary else [])
                if self._report(taken, jobs, every_s, readings):
                    for _ in waiting:
                        self._readings.popleft()
            self._wake.wait(_SOON_S if send_soon else BUSY_S if jobs else IDLE_S)

    def _bind(self) -> None:
        if not isinstance(self._probe, VirtualProbe):
            return
        tenants = dict(self._tenants())
        for slot in self._bound.keys() - tenants.keys():
            self._probe.unbind(slot)
        for slot, now in tenants.items():
            if self._bound.get(slot) != now:
                self._probe.bind(slot, now)
        self._bound = tenants

    def _energy(self, taken: tuple[DeviceReading, ...], at_ns: int) -> list[wire.EnergyReading]:
        if not self._indices_known():
            return []
        samples = (
            EnergySample(
                index=self._number(one.index),
                uuid=one.uuid,
                energy_mj=one.energy_mj,
                power_w=one.power_w,
                throttle=one.throttle,
            )
            for one in taken
        )
        return self._meters.read(samples, at_ns)

    def _report(
        self,
        taken: tuple[DeviceReading, ...],
        jobs: Mapping[int, JobId],
        every_s: float,
        energy: list[wire.EnergyReading],
    ) -> bool:
        """Report samples, and return whether the head has taken them."""
        devices = [
            wire.DeviceSample(
                index=self._number(sample.index),
                uuid=sample.uuid,
                counter=sample.counter,
                utilization=sample.utilization,
                memory_used_bytes=sample.memory_used_bytes,
                memory_total_bytes=sample.memory_total_bytes,
                power_w=sample.power_w,
                temperature_c=sample.temperature_c,
                throttle=sample.throttle,
                virtual=sample.virtual,
                job_id=jobs.get(sample.index),
                processes=sample.processes,
            )
            for sample in taken
        ]
        host = self._host.read()
        try:
            request = wire.SamplesRequest(
                supervisor_id=self._supervisor_id,
                node_id=self._node_id,
                at_s=time.time(),
                devices=devices,
                load_1m=os.getloadavg()[0],
                cpu_utilization=host.cpu_utilization,
                memory_available_bytes=host.memory_available_bytes,
                memory_total_bytes=host.memory_total_bytes,
                network_received_bytes_per_s=host.network_received_bytes_per_s,
                network_sent_bytes_per_s=host.network_sent_bytes_per_s,
                disk_free_bytes=node_facts(self._folder).disk_free_bytes,
                every_s=every_s,
                jobs=self._job_samples(),
                staging=self._staging(),
                energy=energy,
                sent_ns=boottime_ns(),
            )
            self._connection.call("POST", "/v1/node/samples", wire.encode(request), timeout_s=_ASK_S)
        except (OSError, HeadUnavailable, RegistrationRequired, RequestRejected, msgspec.MsgspecError) as error:
            _log.debug("samples: %s", error)  # the next sample follows in a second
            return False
        return True


def report_every_s(renew_in_s: float, *, busy: bool) -> float:
    """The interval between samples sent to the head, if it requests a renewal every `renew_in_s`."""
    least_s = BUSY_S if busy else IDLE_S
    return least_s if renew_in_s <= _SMALL_S else max(least_s, renew_in_s)
