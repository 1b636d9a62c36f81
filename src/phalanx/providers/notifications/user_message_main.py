"""Sends one message to the URL of a user: `python -I -m phalanx.providers.notifications.user_message_main`, with JSON on stdin and on stdout.

It runs apart from the head, with limits of time and memory, since the URL leads to a machine that a user may own: one that never ends its reply,
or ends it after a terabyte.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Final

from phalanx.providers.notifications.public_connections import restrict_process

TIME_MAX_S: Final = 30
_CPU_MAX_S: Final = 20
_MEMORY_MAX_BYTES: Final = 1 << 29


def main() -> None:
    """Read `url`, `title` and `body`; write `error`, which is empty if the service accepted the message."""
    signal.alarm(TIME_MAX_S)  # ends it too if the head has gone
    for limit, most in (
        (resource.RLIMIT_AS, _MEMORY_MAX_BYTES),
        (resource.RLIMIT_CPU, _CPU_MAX_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    given = json.load(sys.stdin)
    from phalanx.core.errors import PhalanxError
    from phalanx.providers.notifications.apprise_service import apprise_service, deliver

    apprise_service("json://localhost")  # imports what binds a socket to see whether there is IPv6
    refused = restrict_process()
    error = ""
    try:
        service = apprise_service(given["url"])
        service.retry = 0  # what the URL may set, within bounds
        service.socket_read_timeout = min(service.socket_read_timeout, TIME_MAX_S)
        service.socket_connect_timeout = min(service.socket_connect_timeout, TIME_MAX_S)
        deliver(service, given["title"], given["body"])
    except PhalanxError as failed:
        error = str(failed)
    if error and refused:
        error = refused[-1]
    json.dump({"error": error}, sys.stdout)


if __name__ == "__main__":
    main()
