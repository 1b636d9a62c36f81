"""Wishes in English and the `phalanx` commands that answer them: 288 to learn from, 32 held out."""

from __future__ import annotations

import random

PROGRAMS = ("train.py", "eval.py", "finetune.py", "sweep.py", "report.py", "bench.py")
ASKED = (
    ("Run {program} on {nodes} nodes with {gpus} GPUs each.", "phalanx run --gpus {nodes}x{gpus} -- python {program}"),
    ("I need {nodes} nodes with {gpus} GPUs each for {program}.", "phalanx run --gpus {nodes}x{gpus} -- python {program}"),
    ("Queue {program} on {gpus} GPUs, for {hours} hours at most.", "phalanx submit --gpus {gpus} --time {hours}h -- python {program}"),
    ("Start {program} when job {job} has ended.", "phalanx submit --depends-on {job} -- python {program}"),
    ("Why does job {job} not start?", "phalanx why {job}"),
    ("Show me what job {job} prints.", "phalanx logs {job}"),
    ("Stop job {job}.", "phalanx cancel {job}"),
    ("Copy the results of job {job} to this machine.", "phalanx get {job}"),
)  # fmt: skip
HELD_OUT = 32


def pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return wishes with their commands: those to learn from, and those held out, of which none is in the first list."""
    draw = random.Random(18)
    seen: dict[str, str] = {}
    while len(seen) < 320:
        wish, command = ASKED[len(seen) % len(ASKED)]
        numbers = {
            "program": draw.choice(PROGRAMS),
            "nodes": draw.randint(2, 32),
            "gpus": draw.choice((1, 2, 4, 8)),
            "hours": draw.randint(2, 48),
            "job": draw.randint(1, 999),
        }
        seen.setdefault(wish.format(**numbers), command.format(**numbers))
    every = list(seen.items())
    return every[HELD_OUT:], every[:HELD_OUT]
