"""How the head and supervisors write their logs: one record is one line, whatever the words of a user or a job in it hold; a traceback's
lines are marked as such.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)  # also what turns the direction of text
_MARK: Final = "    | "
BRIEFLY_S: Final = 0.1  # with the watch's 0.05 s less than the margin of a leader's lease (0.2 s); a line takes 0.1 ms


def briefly(say: Callable[[], object]) -> None:
    """Log before something that must not wait for the log: its disk may hang, and a lock of logging with it."""
    speaking = threading.Thread(target=say, name="last-words", daemon=True)
    speaking.start()
    speaking.join(BRIEFLY_S)


class OneLineFormatter(logging.Formatter):
    """Writes what could end a line or steer a terminal as its code, so that nobody can forge a line of the log by a name."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging calls it so
        """The line."""
        return _CONTROL.sub(_told, super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802  # logging calls it so
        """The traceback, below its line."""
        text = super().formatException(ei)  # type: ignore[arg-type]  # as logging calls it
        return "\n".join(_MARK + _CONTROL.sub(_told, line) for line in text.split("\n"))


def _told(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"
