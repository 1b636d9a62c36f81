"""Carries out the head's order to set or restore power limits."""

from __future__ import annotations

import logging

from phalanx.core.errors import PhalanxError
from phalanx.core.ids import NodeId
from phalanx.core.state.reports import PowerLimited
from phalanx.node.logic.actions import SetPowerLimits
from phalanx.node.power.limit_keeper import PowerLimitKeeper

_log = logging.getLogger(__name__)


def apply_power_limits(power: PowerLimitKeeper, order: SetPowerLimits, node_id: NodeId) -> PowerLimited:
    """Set or restore the limits, and return what they are now; never raises, the report says why a limit was refused."""
    why = ""
    try:
        if order.milliwatts is None:
            power.restore()
        else:
            power.cap(order.milliwatts, order.until_s)
    except (PhalanxError, OSError) as error:
        why = str(error)
        _log.warning("power limits: %s", why)
    return PowerLimited(node_id=node_id, milliwatts=order.milliwatts, limits=power.limits(), why=why)
