"""The network between head and nodes: one link per node with two directions that can drop, delay or duplicate messages, or be cut.

A message is a function that is called on arrival: once, twice or never. It arrives even if its sender has died meanwhile, like data in a
socket buffer. Random delays reorder messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from phalanx.simulator.drill.clock import VirtualClock

LATENCY_S: Final = 0.01
LOSS_NOTICED_S: Final = 1.0  # timeout of a request; shorter than a lease, as in node.shell.link


@dataclass(slots=True)
class NetworkDirection:
    """One direction. `loss` and `double` are probabilities; `spread_s` is the maximum delay beyond `latency_s`."""

    latency_s: float = LATENCY_S
    spread_s: float = 0.0
    loss: float = 0.0
    double: float = 0.0
    cut: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the direction only has latency."""
        return not (self.cut or self.loss or self.double or self.spread_s)


@dataclass(slots=True)
class NodeLink:
    """Both directions of a node's link."""

    up: NetworkDirection = field(default_factory=NetworkDirection)
    down: NetworkDirection = field(default_factory=NetworkDirection)

    @property
    def cut(self) -> bool:
        """Whether both directions are cut."""
        return self.up.cut and self.down.cut


class VirtualNetwork:
    """Sends messages. `rng` is the source of randomness."""

    def __init__(self, clock: VirtualClock, dice: Random) -> None:
        self._clock, self._dice = clock, dice

    def send(self, way: NetworkDirection, arrive: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Send one message. If it is lost, `lost` is called once when the sender notices."""
        if way.healthy:
            self._clock.call_after(way.latency_s, lambda: self._deliver(way, arrive, lost))
            return
        if way.cut or self._dice.random() < way.loss:
            if lost is not None:
                self._clock.call_after(way.latency_s if way.cut else LOSS_NOTICED_S, lost)
            return
        self._clock.call_after(self._late_s(way), lambda: self._deliver(way, arrive, lost))
        if self._dice.random() < way.double:
            self._clock.call_after(self._late_s(way), lambda: self._deliver(way, arrive, None))

    def _late_s(self, way: NetworkDirection) -> float:
        return way.latency_s + self._dice.random() * way.spread_s

    @staticmethod
    def _deliver(way: NetworkDirection, arrive: Callable[[], None], lost: Callable[[], None] | None) -> None:
        """Deliver a message, unless the link was cut meanwhile."""
        if not way.cut:
            arrive()
        elif lost is not None:
            lost()
