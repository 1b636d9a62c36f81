"""Exec sessions: bytes between a user's terminal and a command on a node. In memory, bounded both ways, ended when nobody polls.

The user's side and the supervisor's side both speak in offsets, so that a repeated request neither doubles nor loses a byte.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.api.parts import Limits, users_share
from phalanx.core.access.roles import Caller
from phalanx.core.errors import Conflict, NotFound, PhalanxError, TryLater
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.ports.clock import Clock


@dataclass(slots=True)
class Pipe:
    """Bytes in flight: `base` is the offset of the first one kept. What is read past is dropped."""

    base: int = 0
    kept: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.base + len(self.kept)

    def put(self, offset: int, data: bytes, room: int) -> bool:
        """Take what is new of `data`; False, and nothing taken, if that would keep more than `room` bytes.

        Raises:
            Conflict: it starts past the end: bytes before it are missing.
        """
        if offset > self.end:
            raise Conflict(f"bytes {self.end} to {offset} are missing", hint=f"send from {self.end} on")
        fresh = data[self.end - offset :]
        if fresh and len(self.kept) + len(fresh) > room:
            return False
        self.kept += fresh
        return True

    def get(self, after: int, limit: int) -> bytes:
        """At most `limit` bytes from `after` on; those before are dropped."""
        passed = min(max(after - self.base, 0), len(self.kept))
        del self.kept[:passed]
        self.base += passed
        return bytes(self.kept[:limit])


@dataclass(slots=True)
class Session:
    """One command. `supervisor`: the name of the one that runs it; `polled_s`: CLOCK_BOOTTIME of the user's newest call."""

    name: str
    caller: Caller
    job_id: JobId
    supervisor: NodeId
    rows: int
    cols: int
    polled_s: float
    typed: Pipe = field(default_factory=Pipe)
    typed_closed: bool = False
    resized: bool = False
    printed: Pipe = field(default_factory=Pipe)
    exit_code: int | None = None
    error: str = ""
    over: bool = False
    _bell: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def user(self) -> UserId:
        """Who opened it."""
        return self.caller.user

    def tell(self) -> None:
        """Wake both sides."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    async def hear(self, timeout_s: float) -> None:
        """Until something changes after this call, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            pass


class Sessions:
    """All sessions. Used on the event loop alone.

    One that is over holds no place; its last words are kept for its user until nobody polls it or its room is wanted.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._open: dict[str, Session] = {}

    def open(self, *, caller: Caller, job_id: JobId, supervisor: NodeId, rows: int, cols: int) -> Session:
        """A new session.

        Raises:
            TryLater: too many are open, or too many of this user.
        """
        self.end_idle()
        self._make_room(caller.user)
        session = Session(
            name=secrets.token_urlsafe(18),
            caller=caller,
            job_id=job_id,
            supervisor=supervisor,
            rows=rows,
            cols=cols,
            polled_s=self._clock.boottime_s(),
        )
        self._open[session.name] = session
        return session

    def of_user(self, name: str, user: UserId) -> Session:
        """A user's own session; their call keeps it alive.

        Raises:
            NotFound: there is none of this name, or it is another's (its name is a secret).
        """
        session = self._live(name)
        if session.user != user:
            raise _unknown()
        session.polled_s = self._clock.boottime_s()
        return session

    def of_supervisor(self, name: str, supervisor: NodeId) -> Session:
        """A session for the supervisor that runs its command, by that one's name: beside it on the node may sit another job's.

        Raises:
            NotFound: it runs none of this name, or its user has left: the command shall end.
        """
        session = self._live(name)
        if session.supervisor != supervisor:
            raise _unknown()
        return session

    def end_idle(self) -> None:
        """Forget sessions that no user polled for long."""
        oldest = self._clock.boottime_s() - self._limits.exec_idle_s
        for name in [name for name, session in self._open.items() if session.polled_s < oldest]:
            session = self._open.pop(name)
            session.over = True
            session.tell()

    def expel(self, still: Callable[[Session], None]) -> None:
        """End the sessions whose users may not hold them any more: `still` raises for those. Their commands are hung up on."""
        for name, session in list(self._open.items()):
            try:
                still(session)
            except PhalanxError as error:
                del self._open[name]
                session.over, session.error = True, error.message
                session.tell()

    def drop(self, session: Session) -> None:
        """Forget one: its user has left, or its room is wanted."""
        self._open.pop(session.name, None)

    def count(self) -> int:
        """How many are open."""
        return sum(not session.over for session in self._open.values())

    def close(self) -> None:
        """The head stops."""
        for session in self._open.values():
            session.over = True
            session.error = session.error or "the head stopped"
            session.tell()
        self._open.clear()

    def _make_room(self, user: UserId) -> None:
        """See that one more of this user may come. What is kept is bounded as what is open: of those over, the one polled longest ago goes.

        Raises:
            TryLater: too many are open, or too many of this user.
        """
        limit = self._limits.exec_sessions
        share = users_share(limit)
        own = [session for session in self._open.values() if session.user == user]
        if self.count() >= limit:
            raise TryLater(f"{self.count()} exec sessions are open already", hint="close one, or try again in a minute")
        if sum(not session.over for session in own) >= share:
            raise TryLater(
                f"{share} exec sessions of {user} are open already",
                hint=f"close one of yours, or try again in a minute: one user may have {share} open",
            )
        crowd = own if len(own) >= share else list(self._open.values()) if len(self._open) >= limit else []
        if crowd:
            self.drop(min((session for session in crowd if session.over), key=lambda session: session.polled_s))

    def _live(self, name: str) -> Session:
        self.end_idle()
        session = self._open.get(name)
        if session is None:
            raise _unknown()
        return session


def _unknown() -> NotFound:
    return NotFound("no such exec session", hint="it ended, or nobody polled it for a minute; open another")
