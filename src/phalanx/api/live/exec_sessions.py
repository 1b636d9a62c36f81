"""Exec sessions: bytes between a user's WebSocket and a command on a node. In memory, with bounded buffers.

The supervisor's side uses offsets, so that a repeated request neither repeats nor loses a byte. Bytes stay in the buffer until their
reader acknowledges them: the supervisor by asking for later ones, the user by a frame.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass, field

from phalanx.api.services import ApiLimits, per_user_share
from phalanx.core.errors import Conflict, NotFound, PhalanxError, TryLater
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId, NodeId, UserId


@dataclass(slots=True)
class OffsetBuffer:
    """A buffer of bytes: `base` is the offset of its first byte. Acknowledged bytes are dropped."""

    base: int = 0
    data: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.base + len(self.data)

    def append(self, offset: int, data: bytes, room: int) -> bool:
        """Append the new bytes of `data`; returns False, without a change, if the buffer would exceed `room` bytes.

        Raises:
            Conflict: `data` starts past the end, so bytes before it are missing.
        """
        if offset > self.end:
            raise Conflict(f"bytes {self.end} to {offset} are missing", hint=f"send from {self.end} on")
        fresh = data[self.end - offset :]
        if fresh and len(self.data) + len(fresh) > room:
            return False
        self.data += fresh
        return True

    def acknowledge(self, offset: int) -> None:
        """Drop the bytes before an offset; an offset outside the buffer is clamped to it."""
        passed = min(max(offset - self.base, 0), len(self.data))
        del self.data[:passed]
        self.base += passed

    def read(self, after: int, limit: int) -> bytes:
        """Return at most `limit` bytes from `after` on, or from the first byte if `after` is before it."""
        start = max(after - self.base, 0)
        return bytes(self.data[start : start + limit])


@dataclass(slots=True)
class HeadExecSession:
    """One command. `supervisor`: the name of the supervisor that runs it; `signals`: all that the user sent, in order."""

    name: str
    user: UserId
    job_id: JobId
    supervisor: NodeId
    rows: int
    cols: int
    input: OffsetBuffer = field(default_factory=OffsetBuffer)
    input_closed: bool = False
    resized: bool = False
    signals: list[int] = field(default_factory=list)
    output: OffsetBuffer = field(default_factory=OffsetBuffer)
    exit_code: int | None = None
    error: PhalanxError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether the command has ended, or was not started."""
        return self.exit_code is not None or self.error is not None

    def failure(self, why: str) -> Conflict:
        """Return the error of a session that ends without an exit code."""
        return Conflict(why, hint=Hint(HintCode.SHOW_JOB, job=self.job_id))

    def notify(self) -> None:
        """Wake both sides."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next change, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass


class ExecSessionRegistry:
    """All sessions; each is as long as its WebSocket. Use it on the event loop only."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._open: dict[str, HeadExecSession] = {}

    def open(self, *, user: UserId, job_id: JobId, supervisor: NodeId, rows: int, cols: int) -> HeadExecSession:
        """Open a new session.

        Raises:
            TryLater: too many sessions are open, overall or of this user.
        """
        limit = self._limits.exec_sessions
        share = per_user_share(limit)
        if len(self._open) >= limit:
            raise TryLater(f"{limit} exec sessions are already open", hint="close one, or try again in a minute")
        if Counter(session.user for session in self._open.values())[user] >= share:
            raise TryLater(
                f"{share} exec sessions of {user} are already open, the most for one user",
                hint="close one of yours, or try again in a minute",
            )
        session = HeadExecSession(
            name=secrets.token_urlsafe(18), user=user, job_id=job_id, supervisor=supervisor, rows=rows, cols=cols
        )
        self._open[session.name] = session
        return session

    def for_supervisor(self, name: str, supervisor: NodeId) -> HeadExecSession:
        """Return a session to the supervisor that runs its command; the name distinguishes the supervisors on one node.

        Raises:
            NotFound: the supervisor does not run such a session, or its user has left, so that the command must end.
        """
        session = self._open.get(name)
        if session is None or session.supervisor != supervisor:
            raise NotFound("no such exec session", hint="it has ended; open a new one")
        return session

    def remove(self, session: HeadExecSession) -> None:
        """Remove a session that has ended or whose user has left: its supervisor then ends the command."""
        self._open.pop(session.name, None)
        session.notify()

    def count(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    def close(self) -> None:
        """End all sessions, since the head stops."""
        for session in self._open.values():
            session.error = session.error or session.failure("the head stopped")
            session.notify()
