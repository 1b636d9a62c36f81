"""The subset of the node's devices that an engine assigned to one attempt, numbered from 0 as LOCAL_RANK selects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.node.probes.devices import DeviceFacts, DeviceProbe, DeviceReading


class DeviceSubsetProbe:
    """A DeviceProbe that shows some devices of another probe.

    Args:
        whole: the probe of the node.
        places: positions in its inventory, in the order of local ranks. Positions that do not exist are skipped.
    """

    def __init__(self, probe: DeviceProbe, positions: Sequence[int]) -> None:
        self._whole = probe
        found = probe.devices()
        chosen = [found[place] for place in positions if 0 <= place < len(found)]
        self._facts = tuple(replace(facts, index=number) for number, facts in enumerate(chosen))
        self._numbers = {facts.uuid: facts.index for facts in self._facts}

    def devices(self) -> tuple[DeviceFacts, ...]:
        """The selected devices."""
        return self._facts

    def sample(self) -> tuple[DeviceReading, ...]:
        """Current samples of the selected devices."""
        taken = [sample for sample in self._whole.sample() if sample.uuid in self._numbers]
        return tuple(replace(sample, index=self._numbers[sample.uuid]) for sample in taken)

    def close(self) -> None:
        """Close the node's probe."""
        self._whole.close()
