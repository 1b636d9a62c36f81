"""The connection of an Executor to the broker of one node: an exec session, which the head carries as bytes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from phalanx.client import Client
from phalanx.core.errors import PhalanxError, Unreachable
from phalanx.executor.frames import FrameKind, FrameReader, InvalidFrame, frame

_WRITE_BYTES: Final = 1 << 16
_log = logging.getLogger(__name__)


def _relay() -> str:
    with open(os.path.join(os.path.dirname(__file__), "relay.py"), encoding="utf-8") as file:
        return file.read()


class BrokerLink:
    """One connection, with a thread for each direction.

    Args:
        client: to the head.
        job_id: the Executor's job.
        rank: of the node in the job.
        python: what runs the broker there.
        hello: name of this Executor, and how many results it has of the broker's run.

    Raises:
        PhalanxError: the job does not run, or the head refuses the session.
    """

    def __init__(
        self,
        client: Client,
        job_id: str,
        rank: int,
        python: str,
        hello: tuple[str, int],
    ) -> None:
        self.rank = rank
        self.opened_s = time.monotonic()
        self.welcomed = False  # the broker has answered
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._over = False
        self._exec = client.exec(job_id, [python, "-S", "-E", "-c", _relay()], node_rank=rank)
        self._exec.on_room = self._wake
        self.send(frame(FrameKind.HELLO, json.dumps({"client": hello[0], "after": hello[1]}).encode()))

    def start(
        self,
        on_frames: Callable[[BrokerLink, list[tuple[FrameKind, bytes]]], None],
        on_lost: Callable[[BrokerLink], None],
        first: list[bytes],
    ) -> None:
        """Start the threads.

        Args:
            on_frames: gets what arrives, on the reading thread.
            on_lost: called once the connection is gone.
            first: frames after the greeting.
        """
        self._on_frames, self._on_lost = on_frames, on_lost
        self.send(*first)
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"phalanx-executor-{self.rank}", daemon=True).start()

    def send(self, *frames: bytes) -> None:
        """Queue frames."""
        with self._changed:
            self._queue.extend(frames)
            self._changed.notify()

    def close(self) -> None:
        """Close the connection; the broker goes on."""
        with self._changed:
            self._over = True
            self._changed.notify()
        with contextlib.suppress(OSError, PhalanxError):
            self._exec.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _read(self) -> None:
        reader = FrameReader()
        try:
            while (data := self._exec.read()) is not None:
                frames = list(reader.feed(data))
                if frames:
                    self._on_frames(self, frames)
        except (PhalanxError, InvalidFrame) as error:  # also the relay's own words: no broker listens there
            _log.debug("node %d: %s", self.rank, error)
        finally:
            self.close()
            self._on_lost(self)

    def _write(self) -> None:
        rest = b""
        while True:
            with self._changed:
                while not self._over and (not (self._queue or rest) or self._exec.room <= 0):
                    self._changed.wait(1.0)
                if self._over:
                    return
                parts, size = [rest], len(rest)
                while self._queue and size < _WRITE_BYTES:
                    parts.append(self._queue.popleft())
                    size += len(parts[-1])
                room = self._exec.room
            data = b"".join(parts)
            piece, rest = data[: min(room, _WRITE_BYTES)], data[min(room, _WRITE_BYTES) :]
            try:
                self._exec.write(piece)
            except (Unreachable, OSError):
                return  # the reading thread tells why
