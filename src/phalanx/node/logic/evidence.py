"""Extract signs of a failure from text: the kernel's log, a rank's last output, a stack dump. Pure.

`shell.evidence` and `shell.stacks` read the text, which a kernel, a driver or a job printed. Every function accepts any bytes and returns
bounded records.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.failure import EVIDENCE_LINE_CHARS_MAX, EVIDENCE_LINES_MAX

# Shorter values of a job's variables ("1", "true", a port) are no secrets and occur in many lines.
SECRET_CHARS_MIN: Final = 6
_REDACTED: Final = "***"
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): ([0-9]{1,4})\b")
_OOM: Final = re.compile(r"(?:Memory cgroup out|Out) of memory: Killed process ([0-9]{1,10})\b")
_ESCAPE_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|[@-_])")
_FRAME: Final = re.compile(r'^  File "([^"\n]{1,500})", line ([0-9]{1,9}) in (.{1,200})$', re.MULTILINE)
_THREAD: Final = re.compile(
    r"^(Current thread|Thread) 0x[0-9a-f]+[^\n]{0,80} \(most recent call first\):$", re.MULTILINE
)
# Files whose frames mean that a rank waits for its peers. Source: files of PyTorch 2.13 that call collectives and wait; DDP reduces its
# gradients inside the backward engine.
_WAITING_FILES: Final = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/nn/parallel/distributed.py",
    "phalanx/torch/agreement.py",
    "phalanx/torch/checkpointer.py",
)
_INNERMOST: Final = 12  # frames searched for those files
_LIBRARIES: Final = ("site-packages/", "dist-packages/", "/lib/python", "<frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class XidError:
    """One error of the GPU driver. `bus` is the GPU's PCI address as the kernel writes it."""

    bus: str
    xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """The kernel killed a process because memory ran out."""

    pid: int


def parse_kernel_log(text: str) -> list[XidError | OomKill]:
    """Find GPU errors and out-of-memory kills in the kernel log, in order."""
    found: list[XidError | OomKill] = []
    for line in text.splitlines():
        if xid := _XID.search(line):
            found.append(XidError(bus=xid[1], xid=int(xid[2])))
        elif oom := _OOM.search(line):
            found.append(OomKill(pid=int(oom[1])))
    return found


def is_same_pci_address(left: str, right: str) -> bool:
    """Whether two spellings of a PCI address name the same GPU: `0000:c6:00` and `00000000:C6:00.0`."""
    return _bus(left) == _bus(right)


def _bus(text: str) -> tuple[int, ...]:
    words = text.lower().partition(".")[0].split(":")
    try:
        numbers = [int(word, 16) for word in words]
    except ValueError:
        return ()
    return (*([0] if len(numbers) == 2 else []), *numbers)


def last_lines(tail: bytes, secrets: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the last lines that are not blank, oldest first, each cut to size, with the values in `secrets` redacted.

    They become part of the history, which more people may read than the log.
    """
    text = _ESCAPE_SEQUENCE.sub("", tail.decode("utf-8", "replace"))
    for secret in sorted({one for one in secrets if len(one) >= SECRET_CHARS_MIN}, key=len, reverse=True):
        text = text.replace(secret, _REDACTED)
    shown = (_final_text(line) for line in text.split("\n"))
    return tuple(line for line in shown if line)[-EVIDENCE_LINES_MAX:]


def _final_text(line: str) -> str:
    """Return the last state of a line that carriage returns overwrote, with unprintable characters blanked."""
    last = line.rstrip("\r").rsplit("\r", 1)[-1]
    return "".join(char if char.isprintable() else " " for char in last).strip()[:EVIDENCE_LINE_CHARS_MAX]


def stack_position(dump: str) -> tuple[str, bool]:
    """Return the position of a `faulthandler` dump's main thread, and whether it waits there for its peers. ("", False) without a frame.

    The position is the innermost frame, then the innermost frame of the user's code:
    `all_reduce (distributed_c10d.py:2501) from train (train.py:20)`.
    """
    frames = _FRAME.findall(_main_thread(dump))
    if not frames:
        return "", False
    waits = any(place in file for file, _, _ in frames[:_INNERMOST] for place in _WAITING_FILES)
    own = next((frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)), None)
    where = _frame_label(frames[0])
    return (where if own is None or own == frames[0] else f"{where} from {_frame_label(own)}"), waits


def _frame_label(frame: tuple[str, str, str]) -> str:
    file, line, function = frame
    return f"{function.strip()} ({os.path.basename(file)}:{line})"


def _main_thread(dump: str) -> str:
    """Return the frames of the thread that handled the signal in the last dump, else of the last thread: the main thread is listed last."""
    threads = list(_THREAD.finditer(dump))
    if not threads:
        return ""
    current = [number for number, found in enumerate(threads) if found[1] == "Current thread"]
    chosen = current[-1] if current else len(threads) - 1
    end = threads[chosen + 1].start() if chosen + 1 < len(threads) else len(dump)
    return dump[threads[chosen].end() : end]
