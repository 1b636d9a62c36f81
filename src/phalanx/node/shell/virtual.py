"""Virtual devices: slots on a machine without GPUs, whose "utilisation" is the CPU of the ranks bound to them, marked as such."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from phalanx.node.shell.probes import DeviceFacts, DeviceSample
from phalanx.node.shell.proctable import TICKS_PER_S, ProcessIdentity, descendants, identity, read_table

COUNTER = "rank_cpu"


class VirtualProbe:
    """The slots of one virtual node; a DeviceProbe. Bind a slot when its rank is started."""

    def __init__(
        self, node_key: str, slots: int, memory_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._facts = tuple(
            DeviceFacts(
                index=index,
                uuid=f"VIRTUAL-{node_key}-{index}",
                model="virtual",
                memory_bytes=memory_bytes,
                pci_bus="",
                virtual=True,
            )
            for index in range(slots)
        )
        self._clock = clock
        self._bound: dict[int, tuple[ProcessIdentity, ...]] = {}
        self._ticks: dict[int, tuple[float, int]] = {}  # by slot: when, and how much CPU its ranks had used by then

    def bind(self, slot: int, pids: Iterable[int]) -> None:
        """These ranks (with all they start) are what runs on the slot."""
        found = (identity(pid) for pid in pids)
        self._bound[slot] = tuple(process for process in found if process is not None)
        self._ticks.pop(slot, None)

    def unbind(self, slot: int) -> None:
        """Nothing runs on the slot any more."""
        self._bound.pop(slot, None)
        self._ticks.pop(slot, None)

    def devices(self) -> tuple[DeviceFacts, ...]:
        """The slots."""
        return self._facts

    def sample(self) -> tuple[DeviceSample, ...]:
        """CPU since the sample before as a share of one core (more counts as 1), and resident memory; idle slots show 0."""
        table = read_table()
        now = self._clock()
        samples = []
        for facts in self._facts:
            roots = {
                process.pid
                for process in self._bound.get(facts.index, ())
                if process.pid in table and table[process.pid].identity == process
            }
            rows = [table[pid] for pid in roots | descendants(table, roots)]
            samples.append(
                DeviceSample(
                    index=facts.index,
                    uuid=facts.uuid,
                    utilization=self._utilization(facts.index, now, sum(row.cpu_ticks for row in rows)),
                    counter=COUNTER,
                    memory_used_bytes=sum(row.resident_bytes for row in rows),
                    memory_total_bytes=facts.memory_bytes,
                    virtual=True,
                )
            )
        return tuple(samples)

    def close(self) -> None:
        """Nothing is held."""

    def _utilization(self, slot: int, now: float, ticks: int) -> float:
        before, ticks_before = self._ticks.get(slot, (now, ticks))
        self._ticks[slot] = (now, ticks)
        if now <= before:
            return 0.0
        # A child that nobody waited for takes its ticks with it: the sum may fall, use may not be negative.
        return min(1.0, max(0, ticks - ticks_before) / TICKS_PER_S / (now - before))
