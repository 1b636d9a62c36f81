"""Runs the program that stores a job's files in an object store (`node.data.job_objects_main`), under the job's account and with its credentials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.processes.file_limits import wait_readable
from phalanx.wire.manifest import CheckpointInvalid

_PROGRAM: Final = (sys.executable, "-I", "-m", "phalanx.node.data.job_objects_main")
_CHECK_S: Final = 0.2
_LINE_BYTES_MAX: Final = 1 << 20


class ObjectStoreUnavailable(Exception):
    """The store did not answer, or the program was killed; a retry may help."""


class AttemptSuperseded(Exception):
    """A newer attempt of the job stores its outputs."""


def run_program(
    member: MemberRuntime,
    order: Mapping[str, object],
    dropped: Callable[[], bool],
    on_bytes: Callable[[], None] = lambda: None,
) -> object:
    """Run the program; None once `dropped` is true.

    Raises:
        ObjectStoreUnavailable: it can be tried again.
        AttemptSuperseded: a newer attempt of the job stores its outputs.
        CheckpointInvalid: the store refuses, or its bytes are not those that were stored.
    """
    account: dict[str, Any] = {}
    if member.account is not None:
        account = {"user": member.account.uid, "group": member.account.gid, "extra_groups": member.account.groups}
    try:
        process = subprocess.Popen(
            _PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=member.store_variables,
            start_new_session=True,
            **account,
        )
    except OSError as error:
        raise ObjectStoreUnavailable(f"no process can be started: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        rest = b""
        while True:
            if dropped():
                return None
            if not wait_readable(process.stdout.fileno(), _CHECK_S):
                continue
            piece = os.read(process.stdout.fileno(), _LINE_BYTES_MAX)
            *lines, rest = (rest + piece).split(b"\n")
            for answer in map(json.loads, lines):
                if "bytes" in answer:
                    on_bytes()
                elif answer.get("superseded"):
                    raise AttemptSuperseded("a newer attempt of the job stores its outputs")
                elif "why" in answer and answer["again"]:
                    raise ObjectStoreUnavailable(answer["why"])
                elif "why" in answer:
                    raise CheckpointInvalid(answer["why"])
                else:
                    return answer["result"] if answer["result"] is not None else ""
            if not piece or len(rest) > _LINE_BYTES_MAX:
                raise ObjectStoreUnavailable("the program of the object store was killed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ObjectStoreUnavailable(f"the program of the object store: {error}") from error
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
