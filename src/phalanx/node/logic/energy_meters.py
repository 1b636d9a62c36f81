"""Meters of the energy of this node's devices: the device's own counter, or samples of its power, added up where it has none. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import SupervisorId
from phalanx.node.logic.lease import NS_PER_S
from phalanx.wire.supervisor import EnergyReading

GAP_MAX_NS: Final = 15 * NS_PER_S  # between two samples whose mean power is taken: three samples of an idle node
_MILLI: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySample:
    """What a device shows at one moment: its counter, else its power; neither on a virtual device. `throttle`: why its clocks are held down."""

    index: int
    uuid: str
    energy_mj: int | None
    power_w: float | None
    throttle: tuple[str, ...] | None = None


@dataclass(slots=True)
class _Integral:
    """`microjoules`: so far. `run`: number of times that it began again."""

    at_ns: int
    power_w: float
    microjoules: int = 0
    run: int = 0


class EnergyMeters:
    """The meters of one incarnation of a supervisor."""

    def __init__(self, supervisor_id: SupervisorId) -> None:
        self._name = supervisor_id
        self._counted: set[str] = set()  # devices that have a counter, whether it answers now or not
        self._integrals: dict[str, _Integral] = {}

    def read(self, samples: Iterable[EnergySample], at_ns: int) -> list[EnergyReading]:
        """The readings of samples that were taken at `at_ns` (CLOCK_BOOTTIME). A device that shows nothing has none."""
        found = []
        for one in samples:
            if one.energy_mj is not None:
                self._counted.add(one.uuid)
                found.append(
                    EnergyReading(
                        index=one.index,
                        meter=one.uuid,
                        millijoules=one.energy_mj,
                        at_ns=at_ns,
                        throttle=one.throttle,
                    )
                )
            elif one.power_w is not None and one.uuid not in self._counted:
                found.append(self._integrated(one, one.power_w, at_ns))
        return found

    def _integrated(self, sample: EnergySample, power_w: float, at_ns: int) -> EnergyReading:
        uuid = sample.uuid
        known = self._integrals.get(uuid)
        if known is None:
            known = self._integrals[uuid] = _Integral(at_ns, power_w)
        elif at_ns - known.at_ns > GAP_MAX_NS:  # the power in between is unknown
            known = self._integrals[uuid] = _Integral(at_ns, power_w, run=known.run + 1)
        else:  # 1 W for 1 ns is 1 nJ
            known.microjoules += round((known.power_w + power_w) / 2 * (at_ns - known.at_ns) / _MILLI)
            known.at_ns, known.power_w = at_ns, power_w
        return EnergyReading(
            index=sample.index,
            meter=f"{uuid} {self._name} {known.run}",
            millijoules=known.microjoules // _MILLI,
            at_ns=at_ns,
            integrated=True,
            throttle=sample.throttle,
        )
