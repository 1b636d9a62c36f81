"""The Redis that stores the state of our Ray head. Ray reads and writes it; this module checks that it answers, and deletes Ray's data."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadRequest, Unreachable
from phalanx.wire.head_url import split_address

ANSWER_S: Final = 3.0  # a running Redis answers in under a millisecond
DELETE_DATA_S: Final = 30.0  # includes importing Ray: 1 to 3 s on an idle machine
_HINT: Final = "write HOST:PORT; Redis listens at port 6379 by default"
_log = logging.getLogger("phalanx.engines.ray")


def check(address: str) -> None:
    """Check that a Redis without a password answers at the address.

    Raises:
        BadRequest: not an address, not a Redis, or one with a password.
        Unreachable: nothing listens there.
    """
    host, port = split_address(address)
    odd = BadRequest(f"Redis {address}: not an address of the form HOST:PORT", hint=_HINT)
    if not host or port is None or not port.isdecimal():
        raise odd
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(b"PING\r\n")
            reply = connection.recv(200)
    except UnicodeError as error:  # a name with an empty label, or one over 63 letters
        raise odd from error
    except OSError as error:
        raise Unreachable(f"no Redis at {address}: {error.strerror or error}", hint=_HINT) from error
    if reply.startswith((b"-NOAUTH", b"-DENIED", b"-WRONGPASS")):
        raise BadRequest(
            f"the Redis at {address} needs a password, which Ray would show in its processes' arguments",
            hint="give Ray its own Redis, reachable from this machine only",
        )
    if not reply.startswith(b"+PONG"):
        raise BadRequest(f"the server at {address} is not a Redis: it answers PING with {reply[:40]!r}", hint=_HINT)


def delete_data(address: str, namespace: str, environment: Mapping[str, str]) -> None:
    """Delete a Ray cluster's data in Redis. A failure is logged; the next cluster of this head then finds the data."""
    host, port = split_address(address)
    command = [sys.executable, "-P", "-m", "phalanx.engines.ray.private_api", host, str(port), namespace]
    try:
        subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DELETE_DATA_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        why = f"no end within {DELETE_DATA_S:.0f} s"
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().rpartition("\n")[2] or f"exit code {error.returncode}"
    else:
        return
    _log.warning("Could not delete Ray's data in the Redis at %s, namespace %s: %s", address, namespace, why)
