"""Keeps the scheduler's facts of device speeds in step with the fleet and its calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.documents import CALIBRATION_ID, FleetDocument
from phalanx.core.fleet.node import Node
from phalanx.core.scheduling.estimates.device_speeds import NO_FACTS, SpeedFacts
from phalanx.core.state.records import CALIBRATIONS
from phalanx.core.state.world import World

DeviceFacts = Callable[[Sequence[str], Mapping[str, Any] | None], SpeedFacts]  # of models, with the fleet's profile


class SpeedFactsKeeper:
    """The facts of one world; read again only for new models or another calibration. Models that left stay: they do no harm."""

    def __init__(self, world: World, read: DeviceFacts) -> None:
        self._world, self._read = world, read
        self._models: set[str] | None = None  # None before the first look
        self._facts = NO_FACTS

    def facts(self, changed: Iterable[object]) -> SpeedFacts:
        """The facts after these records changed. Cost: one look at the devices of nodes among them."""
        if self._models is None:
            self._models = set()
            changed = (*self._world.nodes.values(), *self._world.table(CALIBRATIONS).values())
        models = {device.model for node in changed if isinstance(node, Node) for device in node.devices} - self._models
        calibrated = any(isinstance(record, FleetDocument) for record in changed)
        if models or calibrated:
            self._models |= models
            self._facts = self._read_again(sorted(self._models))
        return self._facts

    def _read_again(self, models: Sequence[str]) -> SpeedFacts:
        stored = self._world.table(CALIBRATIONS).get(CALIBRATION_ID)
        if len(models) < 2:
            return NO_FACTS
        try:
            return self._read(models, None if stored is None else json.loads(stored.text))
        except (PhalanxError, ValueError):  # a profile of another release: its ratios are left out
            return self._read(models, None)
