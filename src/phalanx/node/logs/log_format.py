"""Log format of the head and supervisors: each record is one line, whatever text of a user or job it contains; traceback lines are
prefixed.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Includes characters that change the direction of text.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MARK: Final = "    | "
# With the watch's 0.05 s less than the margin of a leader's lease (0.2 s); a line takes 0.1 ms.
LOG_TIMEOUT_S: Final = 0.1


def log_with_timeout(log: Callable[[], object]) -> None:
    """Log before an action that must not wait for the log: its disk may hang while a lock of logging is held."""
    thread = threading.Thread(target=log, name="last-words", daemon=True)
    thread.start()
    thread.join(LOG_TIMEOUT_S)


class OneLineFormatter(logging.Formatter):
    """Escapes characters that could end a line or control a terminal: a name cannot forge a log line."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name that logging calls
        """The line."""
        return _CONTROL.sub(_escaped, super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802  # the name that logging calls
        """The traceback, below its line."""
        text = super().formatException(ei)  # type: ignore[arg-type]  # the type that logging passes
        return "\n".join(_MARK + _CONTROL.sub(_escaped, line) for line in text.split("\n"))


def _escaped(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"
