"""The channels to ports of jobs: one for each user, attempt and node, opened when it is needed, closed after a minute without connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from phalanx.api.auth.audited_call import CURRENT_CALL, AuditedCall
from phalanx.api.live.exec_sessions import HeadExecSession
from phalanx.api.live.exec_start import start_exec
from phalanx.api.programs.port_streams import PortChannel, PortStream
from phalanx.api.programs.targets import ProgramTarget
from phalanx.api.runtime import ApiRuntime
from phalanx.api.services import per_user_share
from phalanx.core.access.audit import AuditCall
from phalanx.core.errors import TryLater
from phalanx.core.ids import Epoch, JobId, UserId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.wire.api.execs import ExecBody
from phalanx.wire.stream_relay import relay_command

IDLE_S: Final = 60.0
_Key = tuple[UserId, JobId, Epoch, int]


class PortChannels:
    """All channels of a head. Use it on the event loop only."""

    def __init__(self, runtime: ApiRuntime) -> None:
        self._runtime = runtime
        self._open: dict[_Key, PortChannel] = {}
        self._streams: Counter[UserId] = Counter()
        self._opening = asyncio.Lock()

    @contextmanager
    def place_for(self, user: UserId) -> Iterator[None]:
        """Hold a place for one connection of a user, of those that the head and the user may have.

        Raises:
            TryLater: all are taken.
        """
        limit = self._runtime.services.limits.program_connections
        share = per_user_share(limit)
        if self._streams.total() >= limit or self._streams[user] >= share:
            raise TryLater(
                f"{share if self._streams[user] >= share else limit} connections to web programs are open",
                hint="close some of their pages, and try again",
            )
        self._streams[user] += 1
        try:
            yield
        finally:
            self._streams[user] -= 1
            if not self._streams[user]:
                del self._streams[user]

    async def connect(
        self, user: UserId, job: Job, attempt: Attempt, target: ProgramTarget, call: AuditCall
    ) -> PortStream:
        """Open a connection to a port in a running attempt. The first one of a channel leaves a line in the audit trail. The caller was authorised.

        Raises:
            PhalanxError: its node is away, or too many sessions are open.
        """
        key = (user, job.id, attempt.epoch, target.node_rank)
        channel = self._open.get(key)
        if channel is None or not channel.is_open:
            async with self._opening:
                channel = self._open.get(key)
                if channel is None or not channel.is_open:
                    node_id = attempt.allocation.grants[target.node_rank].node_id
                    token = CURRENT_CALL.set(AuditedCall(call=call))
                    try:
                        await self._runtime.record_call(f"job {job.id} of {job.user} node {node_id} port {target.port}")
                    finally:
                        CURRENT_CALL.reset(token)
                    body = ExecBody(argv=relay_command(), node_rank=target.node_rank)
                    channel = self._start(key, start_exec(self._runtime, user, attempt, body))
        return channel.connect(target.port)

    def _start(self, key: _Key, session: HeadExecSession) -> PortChannel:
        def ended() -> None:
            self._runtime.sessions.remove(session)
            if self._open.get(key) is channel:
                del self._open[key]

        buffer_bytes = self._runtime.services.limits.exec_buffer_bytes
        channel = PortChannel(session, buffer_bytes=buffer_bytes, idle_s=IDLE_S, on_end=ended)
        self._open[key] = channel
        return channel
