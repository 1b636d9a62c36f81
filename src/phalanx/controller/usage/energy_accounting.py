"""Counts the energy readings that supervisors send, each at the time at which the node took it."""

from __future__ import annotations

import logging
from typing import Final

from phalanx.core.accounting.energy_ledger import EnergyLedger, EnergySource, MeterReading, throttle_cause
from phalanx.core.accounting.state_ledger import HOUR_MS, StateLedger
from phalanx.wire.supervisor import SamplesRequest

NS_PER_MS: Final = 1_000_000
AGE_MAX_MS: Final = 30 * 24 * HOUR_MS  # an older reading counts as one of this age: each hour since then is one step
_log = logging.getLogger("phalanx.usage")


def count_energy(energy: EnergyLedger, ledger: StateLedger, request: SamplesRequest, now_ms: int) -> None:
    """Count the readings of a request that has just arrived, and add what they show to the hours of the ledger."""
    for one in request.energy:
        source = EnergySource.INTEGRATED if one.integrated else EnergySource.COUNTER
        reading = MeterReading(
            meter=one.meter,
            source=source,
            millijoules=max(0, one.millijoules),
            at_ms=now_ms - min(max(0, request.sent_ns - one.at_ns) // NS_PER_MS, AGE_MAX_MS),
            sender=(request.supervisor_id, one.at_ns),
            throttled=throttle_cause(one.throttle),
        )
        found = energy.read(request.node_id, one.index, reading)
        for hour in found.hours:
            ledger.add_energy(hour.hour_ms, source, hour.shares, hour.total, found.throttled or "")
        if found.restarted:
            _log.info(
                "node %s, device %d: energy since its last reading is unknown: %s",
                request.node_id,
                one.index,
                found.restarted,
            )
