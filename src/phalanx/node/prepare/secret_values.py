"""Asks the head for the values of a job's secrets, once for each start of its tasks. They stay in memory and in the environment of its processes."""

from __future__ import annotations

import threading
import time
from typing import Final

from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.output_mask import OutputMasker
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.wire.supervisor import SecretValues, decode

_ANSWER_S: Final = 10.0
_TRIES_S: Final = 60.0  # a head that restarts, or a takeover by another, is over by then
_PAUSE_S: Final = 0.5
_OF_THE_JOB: Final = frozenset({404, 409})  # removed, or not to be decrypted: a retry does not help


def fetch_secrets(member: MemberRuntime, access: HeadAccess) -> None:
    """Set the member's secrets.

    Raises:
        PreparationFailed: one was removed or cannot be decrypted, or the head does not answer.
    """
    names = member.prepare.spec.secrets
    if not names:
        return
    connection = HeadConnection(access)
    try:
        values = _ask(connection, f"/v1/node/secrets/{member.key.job_id}/{member.key.epoch}", member.cancelled)
    except RequestRejected as error:
        raise PreparationFailed(f"secrets: {error.message}", charge=error.status in _OF_THE_JOB) from error
    finally:
        connection.close()
    missing = [name for name in names if name not in values]
    if missing:
        raise PreparationFailed(f"secrets: the head sent no {missing[0]}", charge=False)
    member.secrets = {name: values[name] for name in names}
    member.masker = OutputMasker(member.secrets.values())


def _ask(connection: HeadConnection, path: str, cancelled: threading.Event) -> dict[str, str]:
    """Return the values that the head sends; waits for a head that restarts.

    Raises:
        RequestRejected: it does not send them.
        PreparationFailed: it does not answer, or the member was stopped.
    """
    until_s = time.monotonic() + _TRIES_S
    while True:
        try:
            return decode(connection.call("GET", path, timeout_s=_ANSWER_S), SecretValues).values
        except (HeadUnavailable, RegistrationRequired) as error:
            if time.monotonic() > until_s:
                raise PreparationFailed(f"secrets: the head did not send them: {error}", charge=False) from error
        if cancelled.wait(_PAUSE_S):
            raise PreparationFailed("the job was stopped during preparation", charge=False)
