"""Redis behind a Ray cluster of our own: what Ray's head knows outlives it there. Ray reads and writes; we look whether it is there, and clear up."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadRequest, Unreachable
from phalanx.wire.join import split_address

ANSWER_S: Final = 3.0  # of a Redis that is there: under a millisecond
FORGET_S: Final = 30.0  # Ray is imported for it: 1 to 3 s where nothing else runs
_HINT: Final = "--ray-redis HOST:PORT; Redis listens at 6379 by default"
_FORGET: Final = """
import sys
from ray._private.gcs_utils import cleanup_redis_storage
cleanup_redis_storage(host=sys.argv[1], port=int(sys.argv[2]), password="", use_ssl=False, storage_namespace=sys.argv[3])
"""
_log = logging.getLogger("phalanx.engines.ray")


def check(address: str) -> None:
    """Nothing, if a Redis answers there that asks for no password.

    Raises:
        BadRequest: that is no address, or no Redis, or one with a password.
        Unreachable: nothing listens.
    """
    host, port = split_address(address)
    odd = BadRequest(f"--ray-redis {address}: that is no HOST:PORT", hint=_HINT)
    if not host or port is None or not port.isdecimal():
        raise odd
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(b"PING\r\n")
            said = connection.recv(200)
    except UnicodeError as error:  # of a name with an empty label, or one over 63 letters
        raise odd from error
    except OSError as error:
        raise Unreachable(f"no Redis at {address}: {error.strerror or error}", hint=_HINT) from error
    if said.startswith((b"-NOAUTH", b"-DENIED", b"-WRONGPASS")):
        raise BadRequest(
            f"the Redis at {address} asks for a password, and Ray would show it in its processes' arguments",
            hint="give Ray a Redis of its own, reached from this machine alone",
        )
    if not said.startswith(b"+PONG"):
        raise BadRequest(f"what listens at {address} is no Redis: it answers PING with {said[:40]!r}", hint=_HINT)


def forget(address: str, namespace: str, environment: Mapping[str, str]) -> None:
    """Remove what a Ray cluster kept there; where it cannot be, the log says so, and the next cluster of this head finds it."""
    host, port = split_address(address)
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _FORGET, host, str(port), namespace], env=dict(environment), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=FORGET_S, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
    _log.warning("what Ray kept in the Redis at %s under %s could not be removed", address, namespace)
