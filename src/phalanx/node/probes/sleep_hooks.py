"""Calls the sleep and wake hooks of a replica: requests to its port that let its program free its devices, and use them again.

Stopping or freezing the processes would not do: the memory of a device stays allocated until the program frees it.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from typing import Final

from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.node.logic.actions import CallSleepHook
from phalanx.node.logic.events import SleepHookAnswered
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.probes.readiness import PROBE_EVERY_S, probe

# A hook copies the weights of a model between device and host: 100 GB at 1 GB/s, the slowest PCIe in use.
HOOK_LIMIT_S: Final = 120.0
_STATUS_OK: Final = range(200, 300)
_ANSWER_BYTES_MAX: Final = 1 << 16  # read of a body, so that the server sees no reset


def call_sleep_hook(
    member: MemberRuntime,
    call: CallSleepHook,
    memory_in_use: Callable[[], str],
    on_event: Callable[[SleepHookAnswered], None],
) -> None:
    """Call the hook on a thread of its own, and report its answer.

    A sleep hook has succeeded once the memory of the devices is free too, a wake hook once the replica is ready too.

    Args:
        member: a replica on its first node.
        call: what to call.
        memory_in_use: what still uses the memory of the member's devices, after a wait; "" if nothing does.
        on_event: takes the answer.
    """
    start, terms = member.start, member.prepare.spec.service

    def run() -> None:
        if start is None or terms is None or not terms.sleep:
            why = "its revision has no sleep hook"
        else:
            member.asleep = False
            try:
                why = run_hook(member.prepare.addresses[0], start.service_port, terms, sleep=call.sleep)
                if call.sleep and not why:
                    why = memory_in_use()
            except Exception as error:  # noqa: BLE001  # the head waits for an answer
                why = f"{type(error).__name__}: {error}"
            member.asleep = call.sleep and not why
        on_event(SleepHookAnswered(key=call.key, turn=call.turn, sleep=call.sleep, why=why))

    threading.Thread(target=run, name="sleep-hook", daemon=True).start()


def run_hook(address: str, port: int, terms: ServiceTerms, *, sleep: bool, limit_s: float = HOOK_LIMIT_S) -> str:
    """Call a hook. Return why it failed; "" if it succeeded within the limit."""
    end_s = time.monotonic() + limit_s
    why = _post(address, port, terms.sleep if sleep else terms.wake, limit_s)
    if why or sleep:
        return why
    while why := probe(address, port, terms.ready):
        if time.monotonic() > end_s:
            return f"not ready {limit_s:.0f} s after its wake hook: {why}"
        time.sleep(PROBE_EVERY_S)
    return ""


def _post(address: str, port: int, path: str, limit_s: float) -> str:
    """POST an empty JSON object; return why it failed. Never quotes the program's answer, since every user may read the reason."""
    connection = http.client.HTTPConnection(address, port, timeout=limit_s)
    try:
        headers = {"User-Agent": "phalanx-sleep", "Connection": "close", "Content-Type": "application/json"}
        connection.request("POST", path, body=b"{}", headers=headers)
        answer = connection.getresponse()
        answer.read(_ANSWER_BYTES_MAX)
    except TimeoutError:
        return f"POST {path} did not answer within {limit_s:.0f} s"
    except (OSError, http.client.HTTPException) as error:
        return f"POST {path}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return "" if answer.status in _STATUS_OK else f"POST {path} answered {answer.status}"
