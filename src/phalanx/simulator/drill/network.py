"""The network between head and nodes: a link for each node with two directions, each of which may lose, delay, double, or be cut.

A message is a function that is called when it arrives, perhaps twice, perhaps never. What was sent arrives also when its sender has
died meanwhile, as what lies in a socket's buffer does. Delays differ from message to message, and so messages overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from phalanx.simulator.drill.clock import Clock

LATENCY_S: Final = 0.01
LOSS_NOTICED_S: Final = 1.0  # a caller gives up on an answer after so long; shorter than a lease, as in node.shell.link


@dataclass(slots=True)
class Way:
    """One direction. `loss` and `double` are probabilities, `spread_s` the most by which a message is late beyond `latency_s`."""

    latency_s: float = LATENCY_S
    spread_s: float = 0.0
    loss: float = 0.0
    double: float = 0.0
    cut: bool = False

    @property
    def well(self) -> bool:
        """Whether nothing is wrong with it but its latency."""
        return not (self.cut or self.loss or self.double or self.spread_s)


@dataclass(slots=True)
class Link:
    """Both directions of a node's only cable."""

    up: Way = field(default_factory=Way)
    down: Way = field(default_factory=Way)

    @property
    def cut(self) -> bool:
        """Whether nothing comes through at all."""
        return self.up.cut and self.down.cut


class Network:
    """Sends messages. `dice` decides what is lost and late."""

    def __init__(self, clock: Clock, dice: Random) -> None:
        self._clock, self._dice = clock, dice

    def send(self, way: Way, arrive: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Send one message. `lost` is called once where nothing of it will arrive, when its sender notices."""
        if way.well:
            self._clock.after(way.latency_s, lambda: self._end(way, arrive, lost))
            return
        if way.cut or self._dice.random() < way.loss:
            if lost is not None:
                self._clock.after(way.latency_s if way.cut else LOSS_NOTICED_S, lost)
            return
        self._clock.after(self._late_s(way), lambda: self._end(way, arrive, lost))
        if self._dice.random() < way.double:
            self._clock.after(self._late_s(way), lambda: self._end(way, arrive, None))

    def _late_s(self, way: Way) -> float:
        return way.latency_s + self._dice.random() * way.spread_s

    @staticmethod
    def _end(way: Way, arrive: Callable[[], None], lost: Callable[[], None] | None) -> None:
        """What is on a cable that is cut meanwhile is lost."""
        if not way.cut:
            arrive()
        elif lost is not None:
            lost()
