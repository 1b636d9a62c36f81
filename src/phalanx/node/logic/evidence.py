"""Signs of a failure, read out of text: the kernel's log, a rank's last output, a stack. Pure; `shell.evidence` and `shell.stacks` bring the text.

The text is what a kernel, a driver or a job printed: every function bears any bytes, and gives back bounded records.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.failure import LINE_CHARS_MAX, LINES_MAX

SECRET_CHARS_MIN: Final = (
    6  # shorter values of a job's variables ("1", "true", a port) are no secrets and stand in every line
)
_HIDDEN: Final = "***"
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{4,20})\): ([0-9]{1,4})\b")
_OOM: Final = re.compile(r"(?:Memory cgroup out|Out) of memory: Killed process ([0-9]{1,10})\b")
_STEERING: Final = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|[@-_])")
_FRAME: Final = re.compile(r'^  File "([^"\n]{1,500})", line ([0-9]{1,9}) in (.{1,200})$', re.MULTILINE)
_THREAD: Final = re.compile(
    r"^(Current thread|Thread) 0x[0-9a-f]+[^\n]{0,80} \(most recent call first\):$", re.MULTILINE
)
# Frames in which a rank waits for its peers. Source: files of PyTorch 2.13 that call into collectives and wait there; DDP reduces its
# gradients inside the backward engine.
_WAITING: Final = (
    "torch/distributed/", "torch/autograd/graph.py", "torch/nn/parallel/distributed.py", "phalanx/torch/agreement.py",
    "phalanx/torch/checkpointer.py",
)  # fmt: skip
_INNERMOST: Final = 12  # frames looked at for those
_LIBRARIES: Final = ("site-packages/", "dist-packages/", "/lib/python", "<frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """One error of the GPU driver. `bus`: the GPU's PCI address as the kernel writes it."""

    bus: str
    xid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """The kernel killed a process for want of memory."""

    pid: int


def kernel_signs(text: str) -> list[XidSeen | OomKill]:
    """What lines of the kernel log say of GPUs and memory, in their order; other lines say nothing."""
    found: list[XidSeen | OomKill] = []
    for line in text.splitlines():
        if xid := _XID.search(line):
            found.append(XidSeen(bus=xid[1], xid=int(xid[2])))
        elif oom := _OOM.search(line):
            found.append(OomKill(pid=int(oom[1])))
    return found


def same_bus(left: str, right: str) -> bool:
    """Whether two ways of writing a PCI address mean the same GPU: `0000:c6:00` and `00000000:C6:00.0`."""
    return _bus(left) == _bus(right)


def _bus(text: str) -> tuple[int, ...]:
    words = text.lower().partition(".")[0].split(":")
    try:
        numbers = [int(word, 16) for word in words]
    except ValueError:
        return ()
    return (*([0] if len(numbers) == 2 else []), *numbers)


def last_lines(tail: bytes, secrets: Iterable[str] = ()) -> tuple[str, ...]:
    """The last lines that say something, oldest first, each cut; values of the job's own variables are struck out.

    They go into the story, which more people may read than the log.
    """
    text = _STEERING.sub("", tail.decode("utf-8", "replace"))
    for secret in sorted({one for one in secrets if len(one) >= SECRET_CHARS_MIN}, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    shown = (_shown(line) for line in text.split("\n"))
    return tuple(line for line in shown if line)[-LINES_MAX:]


def _shown(line: str) -> str:
    """Of a line that was drawn over, the last state; nothing that is no character."""
    last = line.rstrip("\r").rsplit("\r", 1)[-1]
    return "".join(char if char.isprintable() else " " for char in last).strip()[:LINE_CHARS_MAX]


def standing(dump: str) -> tuple[str, bool]:
    """Of a `faulthandler` dump: where its main thread stands, and whether it waits for its peers there. ("", False) without a frame.

    Where: the innermost frame, and the innermost of the user's own after it: `all_reduce (distributed_c10d.py:2501) from train (train.py:20)`.
    """
    frames = _FRAME.findall(_main_thread(dump))
    if not frames:
        return "", False
    waits = any(place in file for file, _, _ in frames[:_INNERMOST] for place in _WAITING)
    own = next((frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)), None)
    where = _named(frames[0])
    return (where if own is None or own == frames[0] else f"{where} from {_named(own)}"), waits


def _named(frame: tuple[str, str, str]) -> str:
    file, line, function = frame
    return f"{function.strip()} ({os.path.basename(file)}:{line})"


def _main_thread(dump: str) -> str:
    """The last dump's thread that took the signal, else its last one: the main thread is begun first and listed last."""
    threads = list(_THREAD.finditer(dump))
    if not threads:
        return ""
    current = [number for number, found in enumerate(threads) if found[1] == "Current thread"]
    chosen = current[-1] if current else len(threads) - 1
    end = threads[chosen + 1].start() if chosen + 1 < len(threads) else len(dump)
    return dump[threads[chosen].end() : end]
