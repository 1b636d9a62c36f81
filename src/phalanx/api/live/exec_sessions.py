"""Exec sessions: bytes between a user's terminal and a command on a node. In memory, with bounded buffers; idle sessions end.

The user's side and the supervisor's side both use offsets, so that a repeated request neither repeats nor loses a byte.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.api.services import ApiLimits, per_user_share
from phalanx.core.access.caller import Caller
from phalanx.core.errors import Conflict, NotFound, PhalanxError, TryLater
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.ports.clock import Clock


@dataclass(slots=True)
class OffsetBuffer:
    """A buffer of bytes: `base` is the offset of its first byte. Bytes that were read are dropped."""

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

    def read(self, after: int, limit: int) -> bytes:
        """Return at most `limit` bytes from `after` on, and drop the bytes before."""
        passed = min(max(after - self.base, 0), len(self.data))
        del self.data[:passed]
        self.base += passed
        return bytes(self.data[:limit])


@dataclass(slots=True)
class HeadExecSession:
    """One command. `supervisor`: the name of the supervisor that runs it; `last_poll_s`: CLOCK_BOOTTIME of the user's newest call."""

    name: str
    caller: Caller
    job_id: JobId
    supervisor: NodeId
    rows: int
    cols: int
    last_poll_s: float
    input: OffsetBuffer = field(default_factory=OffsetBuffer)
    input_closed: bool = False
    resized: bool = False
    output: OffsetBuffer = field(default_factory=OffsetBuffer)
    exit_code: int | None = None
    error: str = ""
    ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def user(self) -> UserId:
        """The user who opened it."""
        return self.caller.user

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
    """All sessions. Use it on the event loop only.

    An ended session does not count against the limits. Its output stays available until the user stops polling, or the space is needed.
    """

    def __init__(self, limits: ApiLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._open: dict[str, HeadExecSession] = {}

    def open(self, *, caller: Caller, job_id: JobId, supervisor: NodeId, rows: int, cols: int) -> HeadExecSession:
        """Open a new session.

        Raises:
            TryLater: too many sessions are open, overall or of this user.
        """
        self.end_idle()
        self._make_room(caller.user)
        session = HeadExecSession(
            name=secrets.token_urlsafe(18),
            caller=caller,
            job_id=job_id,
            supervisor=supervisor,
            rows=rows,
            cols=cols,
            last_poll_s=self._clock.boottime_s(),
        )
        self._open[session.name] = session
        return session

    def for_user(self, name: str, user: UserId) -> HeadExecSession:
        """Return a user's own session, and keep it alive.

        Raises:
            NotFound: it does not exist, or belongs to another user (its name is a secret).
        """
        session = self._live(name)
        if session.user != user:
            raise _unknown()
        session.last_poll_s = self._clock.boottime_s()
        return session

    def for_supervisor(self, name: str, supervisor: NodeId) -> HeadExecSession:
        """Return a session to the supervisor that runs its command; the name distinguishes the supervisors on one node.

        Raises:
            NotFound: the supervisor does not run such a session, or its user has left, so that the command must end.
        """
        session = self._live(name)
        if session.supervisor != supervisor:
            raise _unknown()
        return session

    def end_idle(self) -> None:
        """End sessions that were not polled for `exec_idle_s`."""
        oldest = self._clock.boottime_s() - self._limits.exec_idle_s
        for name in [name for name, session in self._open.items() if session.last_poll_s < oldest]:
            session = self._open.pop(name)
            session.ended = True
            session.notify()

    def end_unauthorized(self, reauthorize: Callable[[HeadExecSession], None]) -> None:
        """End the sessions whose users lost the permission, for which `reauthorize` raises. Their commands receive SIGHUP."""
        for name, session in list(self._open.items()):
            try:
                reauthorize(session)
            except PhalanxError as error:
                del self._open[name]
                session.ended, session.error = True, error.message
                session.notify()

    def remove(self, session: HeadExecSession) -> None:
        """Remove a session: its user has left, or its space is needed."""
        self._open.pop(session.name, None)

    def count(self) -> int:
        """Return the number of open sessions."""
        return sum(not session.ended for session in self._open.values())

    def close(self) -> None:
        """End all sessions, since the head stops."""
        for session in self._open.values():
            session.ended = True
            session.error = session.error or "the head stopped"
            session.notify()
        self._open.clear()

    def _make_room(self, user: UserId) -> None:
        """Check that this user may open one more session; if needed, remove the ended session that was polled longest ago.

        Raises:
            TryLater: too many sessions are open, overall or of this user.
        """
        limit = self._limits.exec_sessions
        share = per_user_share(limit)
        own = [session for session in self._open.values() if session.user == user]
        if self.count() >= limit:
            raise TryLater(f"{self.count()} exec sessions are already open", hint="close one, or try again in a minute")
        if sum(not session.ended for session in own) >= share:
            raise TryLater(
                f"{share} exec sessions of {user} are already open, the most for one user",
                hint="close one of yours, or try again in a minute",
            )
        candidates = own if len(own) >= share else list(self._open.values()) if len(self._open) >= limit else []
        if candidates:
            self.remove(
                min((session for session in candidates if session.ended), key=lambda session: session.last_poll_s)
            )

    def _live(self, name: str) -> HeadExecSession:
        self.end_idle()
        session = self._open.get(name)
        if session is None:
            raise _unknown()
        return session


def _unknown() -> NotFound:
    return NotFound("no such exec session", hint="it has ended, or was idle for a minute; open a new one")
