"""The main process of a rented machine: `python -m phalanx.app.rented_machine`, started by the machine's start script.

It joins the head, runs the node, and switches the machine off when the head has no use for it, has been silent for too long, or refuses it: a
machine that is not needed must not be paid for, also if the head is gone for good. If its cloud announces that it will take the machine back, it
reports that to the head, which drains the node. The join token is in PHALANX_JOIN_TOKEN. PHALANX_POWER_OFF names another command than `shutdown`, for
machines that end in another way; in PHALANX_METADATA_URL a test names another address of the metadata service.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Final

from phalanx.cli.cluster.state_folder import home_folder
from phalanx.core.errors import PhalanxError
from phalanx.node import membership as records
from phalanx.node.probes.spot_notices import ADDRESS, SpotNotices, notices_of
from phalanx.ports.engine import Membership
from phalanx.wire.head_http import BROKEN, HeadHttp, context_for_file, request_headers

ASK_EVERY_S: Final = 10.0
ANSWER_S: Final = 10.0
END_S: Final = 60.0  # for the node's processes
REFUSED_WAIT_S: Final = 20.0  # between two attempts to join
_POWER_OFF: Final = "shutdown -h now"


@dataclass(slots=True, kw_only=True)
class MachineLease:
    """Whether the machine may run on. Times are by CLOCK_BOOTTIME, so that a clock that is set ends nothing.

    Attributes:
        silence_s: the machine ends when the head has been silent for so long.
        heard_s: when it last said that the machine is wanted.
        ended: why the machine ends; empty while it runs.
    """

    silence_s: float
    heard_s: float
    ended: str = ""

    def answered(self, now_s: float, *, wanted: bool, why: str) -> None:
        """The head has answered."""
        if wanted:
            self.heard_s = now_s
        else:
            self.ended = f"the head does not want it: {why}"

    def check(self, now_s: float) -> str:
        """Return why the machine ends, or an empty text."""
        if not self.ended and now_s - self.heard_s >= self.silence_s:
            self.ended = f"the head has been silent for {self.silence_s:g} s"
        return self.ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the node until the lease ends, then switch the machine off."""
    words = argparse.ArgumentParser(prog="rented_machine")
    words.add_argument("--head", required=True)
    words.add_argument("--fingerprint", required=True)
    words.add_argument("--name", required=True)
    words.add_argument("--silence", type=float, required=True)
    words.add_argument("--virtual", default="")
    words.add_argument("--notices", default="", help="the cloud whose notices are read")
    given = words.parse_args(arguments)
    lease = MachineLease(silence_s=given.silence, heard_s=_boottime_s())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, partial(_ask_to_end, lease))
    node = [sys.executable, "-P", "-m", "phalanx.app.cli", "join", given.head, "--fingerprint", given.fingerprint]
    node += ["--name", given.name, "--foreground", *(("--virtual", given.virtual) if given.virtual else ())]
    try:
        _run(lease, node, notices_of(given.notices, os.environ.get("PHALANX_METADATA_URL", ADDRESS)))
    finally:
        print(f"switching off: {lease.ended or 'an error'}", flush=True)
        subprocess.run(shlex.split(os.environ.get("PHALANX_POWER_OFF", _POWER_OFF)), check=False)


def _run(lease: MachineLease, node: Sequence[str], notices: SpotNotices | None) -> None:
    keeper = subprocess.Popen(node)
    folder = records.membership_folder(home_folder())
    next_s, announced = 0.0, False
    while not lease.check(_boottime_s()):
        time.sleep(0.5)
        joined = records.read(folder)
        if keeper.poll() is not None and joined is None and _boottime_s() >= next_s:
            # Not joined: the head may not answer yet. Its token ends with the order, so this does not go on for ever.
            next_s = _boottime_s() + REFUSED_WAIT_S
            keeper = subprocess.Popen(node)
        elif keeper.poll() is not None and joined is not None:
            lease.ended = "the node has ended"
        elif joined is not None and _boottime_s() >= next_s:
            next_s = _boottime_s() + ASK_EVERY_S
            _ask(lease, folder, joined)
        if notices is not None and not announced and (notice := notices.look(time.monotonic())) and joined is not None:
            announced = _ask(lease, folder, joined, leaving=notice)
            if announced:
                print(notice, flush=True)
    keeper.terminate()
    try:
        keeper.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        keeper.kill()


def _ask(lease: MachineLease, folder: str, joined: Membership, *, leaving: str = "") -> bool:
    """Ask the heads whether the machine is wanted, or report why it leaves; return whether one answered. Without an answer, nothing changes."""
    method, body_sent = ("POST", json.dumps({"why": leaving}).encode()) if leaving else ("GET", None)
    for url in filter(None, [joined.url, *joined.heads.split(",")]):
        try:
            with closing(HeadHttp(url, lambda: context_for_file(records.ca_file(folder)))) as head:
                headers = request_headers(records.read_token(folder), "application/json" if leaving else "")
                reply = head.request(method, "/v1/join/order", body_sent, headers=headers, timeout_s=ANSWER_S)
                body = json.loads(reply.read(1 << 20))
        except (*BROKEN, ValueError, PhalanxError):
            continue
        if reply.status == 200:
            lease.answered(_boottime_s(), wanted=bool(body.get("wanted")), why=str(body.get("why", "")))
            return True
    return False


def _ask_to_end(lease: MachineLease, number: int, frame: FrameType | None) -> None:
    del frame
    lease.ended = lease.ended or f"signal {number}"


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    main()
