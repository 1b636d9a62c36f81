"""Reports the use of services to the head: to the disk every few seconds, and from there to the head until it has counted it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from typing import Final

import msgspec

from phalanx.gateway.head_link import HeadAway, HeadLink, refusal_text
from phalanx.gateway.request_accounts import now_ms
from phalanx.gateway.services import ServiceTable
from phalanx.gateway.usage_meter import UsageMeter
from phalanx.gateway.usage_spool import UsageSpool, orphaned_spools
from phalanx.wire.api.gateways import UsageReceipt, UsageReport

STORE_S: Final = 2.0  # as much ended use as a gateway that is killed loses, besides that of requests under way
SEND_S: Final = 6.0
BEHIND: Final = 1000  # reports on the disk, from which on it
STORE_BEHIND_S: Final = 60.0  # stores more rarely: a day without the head is 1,440 reports
ADOPT_S: Final = 60.0
_log: Final = logging.getLogger("phalanx.gateway")


class UsageLink:
    """See the module.

    Args:
        folder: of the reports; "" for none: nothing is counted.
    """

    def __init__(self, link: HeadLink, table: ServiceTable, meter: UsageMeter, folder: str) -> None:
        self._link, self._table, self._meter, self._folder = link, table, meter, folder
        self._own: UsageSpool | None = None
        self._adopted: list[UsageSpool] = []
        self._refused = 0

    async def run(self) -> None:
        """Report until cancelled."""
        if not self._folder:
            await asyncio.Event().wait()
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._own = UsageSpool(os.path.join(self._folder, f"{uuid.uuid4().hex}.jsonl"))
        sent_s = adopted_s = float("-inf")
        while True:
            now_s = time.monotonic()
            if now_s - adopted_s >= ADOPT_S:
                adopted_s = now_s
                self._adopted += orphaned_spools(self._folder)
            await self.store()
            if now_s - sent_s >= SEND_S:
                sent_s = now_s
                with contextlib.suppress(HeadAway):
                    await self._send_all()
            await asyncio.sleep(STORE_S if len(self._own.waiting) < BEHIND else STORE_BEHIND_S)

    async def close(self) -> None:
        """Store the last use, and send it if the head answers."""
        if self._own is None:
            return
        await self.store()
        with contextlib.suppress(HeadAway, RuntimeError):  # or the connection is closed already
            await self._send_all()
        for spool in (self._own, *self._adopted):
            spool.close()

    async def store(self) -> None:
        """Store what was counted since the last call."""
        assert self._own is not None
        replicas = [
            (service.reads_for or name, job)
            for name, service in self._table.services.items()
            for job in service.replicas
        ]
        hours = self._meter.take(replicas, now_ms())
        if not hours:
            return
        try:
            await asyncio.to_thread(self._own.add, UsageReport(sequence=1, hours=hours[-24:]))
        except OSError as error:  # a full disk: the report is sent from memory
            _log.warning("reports of use cannot be written to %s: %s", self._own.path, error)

    async def _send_all(self) -> None:
        assert self._own is not None
        for spool in list(self._adopted):
            await self._send(spool)
            if not spool.waiting:
                self._adopted.remove(spool)
                spool.close()
        await self._send(self._own)

    async def _send(self, spool: UsageSpool) -> None:
        for report in list(spool.waiting):
            path = f"/v1/gateways/{spool.gateway_id}/usage"
            status, payload = await self._link.ask_own("POST", path, msgspec.json.encode(report))
            if status in (400, 413):  # it never will be counted
                _log.error("The head does not count a report of use: %s", refusal_text(status, payload))
                spool.counted(report.sequence)
                continue
            if status != 200:
                if status != self._refused:
                    _log.warning(
                        "The head refuses reports of use: %s. The gateway's token needs the role operator. They stay in %s.",
                        refusal_text(status, payload),
                        self._folder,
                    )
                self._refused = status
                return
            self._refused = 0
            with contextlib.suppress(msgspec.MsgspecError):
                spool.counted(msgspec.json.decode(payload, type=UsageReceipt).sequence)
