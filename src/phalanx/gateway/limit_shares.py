"""Reports the demand for limits to the head, which divides them between the gateways. Without the head, the last shares hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

import msgspec

from phalanx.gateway.head_link import HeadAway, HeadLink, refusal_text
from phalanx.gateway.rate_limits import RateLimiter
from phalanx.wire.api.gateways import DemandReport, LimitShares

REPORT_S: Final = 1.0
_log: Final = logging.getLogger("phalanx.gateway")


class LimitShareLink:
    """Keeps the shares of a limiter up to date. `gateway_id`: names this process to the head."""

    def __init__(self, link: HeadLink, limiter: RateLimiter, gateway_id: str) -> None:
        self._link, self._limiter, self._id = link, limiter, gateway_id
        self._refused = 0

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            with contextlib.suppress(HeadAway):
                await self._report()
            await asyncio.sleep(REPORT_S)

    async def _report(self) -> None:
        body = msgspec.json.encode(DemandReport(demand=self._limiter.demands(time.monotonic())))
        status, payload = await self._link.ask_own("POST", f"/v1/gateways/{self._id}/demand", body)
        if status != 200:
            if status != self._refused:
                _log.warning(
                    "The head refuses reports of the demand for limits: %s. The gateway's token needs the role operator. Until then, this gateway "
                    "enforces its last shares, or whole limits if it has none.",
                    refusal_text(status, payload),
                )
            self._refused = status
            return
        self._refused = 0
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(payload, type=LimitShares)
            if found.even is not None:
                self._limiter.set_shares(found.shares, found.even)
