"""The keys of a job file or request: what each holds, what it is called elsewhere, and how a wrong one is refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from phalanx.core.errors import BadFile
from phalanx.core.work.nearest import nearest


class Kind(enum.Enum):
    """What a key holds. TEXT keeps the words as written, so that `1.10`, `010` and `no` stay what the user typed."""

    TEXT = "text"
    WORDS = "words"  # text, or a list of words
    LIST = "list"  # one thing, or a list of them
    NUMBER = "number"  # a whole number
    FLAG = "flag"
    MAYBE_TABLE = "maybe table"  # text, or names and their texts
    TABLE = "table"  # names and their texts, or a list of NAME=text


KEYS: Final[Mapping[str, Kind]] = {
    "name": Kind.TEXT, "run": Kind.WORDS, "gpus": Kind.TEXT, "nodes": Kind.NUMBER, "gpus_per_node": Kind.NUMBER,
    "cpus": Kind.NUMBER, "memory": Kind.TEXT, "tasks_per_node": Kind.NUMBER, "workdir": Kind.TEXT, "env": Kind.TABLE,
    "setup": Kind.TEXT, "project": Kind.TEXT, "queue": Kind.TEXT, "priority": Kind.NUMBER,
    "time": Kind.TEXT, "retry": Kind.NUMBER, "checkpoint": Kind.TEXT, "warm": Kind.FLAG, "hold": Kind.FLAG,
    "grace": Kind.TEXT, "collective_timeout": Kind.TEXT, "upload": Kind.TEXT, "labels": Kind.TABLE,
    "depends_on": Kind.LIST, "array": Kind.TEXT, "begin": Kind.TEXT,
    "within": Kind.TEXT, "prefer": Kind.TEXT, "slice": Kind.NUMBER, "slice_within": Kind.TEXT, "preemptible": Kind.FLAG,
    "saves_on_stop": Kind.FLAG,
    "reservation": Kind.TEXT, "plan": Kind.MAYBE_TABLE, "requirements": Kind.TEXT,
    "image": Kind.TEXT,
    "nodelist": Kind.TEXT, "exclude": Kind.TEXT, "slurm": Kind.TABLE,
}  # fmt: skip

# What the same thing is called elsewhere, so that a newcomer's first file is answered well.
_KIN: Final = {
    "accelerators": "gpus", "after": "depends_on", "args": "run", "cmd": "run", "command": "run", "container": "image", "cpu": "cpus", "cwd": "workdir",
    "dependencies": "depends_on", "dependency": "depends_on", "directory": "workdir", "entrypoint": "run", "environment": "env",
    "env_vars": "env", "envs": "env", "not_before": "begin", "start_after": "begin", "gpu": "gpus", "gres": "gpus", "max_retries": "retry", "mem": "memory", "num_gpus": "gpus",
    "num_nodes": "nodes", "nproc_per_node": "tasks_per_node", "ntasks_per_node": "tasks_per_node", "partition": "queue",
    "restarts": "retry", "retries": "retry", "script": "run", "time_limit": "time", "timeout": "time", "walltime": "time",
    "working_dir": "workdir", "slices": "slice", "topology": "within", "switches": "within", "segment": "slice", "preemptable": "preemptible",
    "packages": "requirements", "pip": "requirements", "requires": "requirements", "layout": "plan", "parallelism": "plan", "parallel": "plan",
}  # fmt: skip


class BadKey(BadFile):
    """One key's value, or the key itself, is wrong. `key` is as written, so that a line or a flag can be named."""

    def __init__(self, message: str, *, key: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


def unknown_key(key: str) -> BadKey:
    """The refusal of a key that no release knows, with the nearest match."""
    near = _KIN.get(key.lower().replace("-", "_")) or nearest(key, [*KEYS])
    hint = f"did you mean {near!r}?" if near else f"known keys: {' '.join(KEYS)}"
    return BadKey(f"unknown key {key!r}", key=key, hint=hint)


def refuse_key(key: object) -> None:
    """Refuse a key that no job has.

    Raises:
        BadKey: an unknown one.
    """
    if not isinstance(key, str):
        raise BadKey(f"a key must be a word, not {key!r}", key=str(key))
    if key not in KEYS:
        raise unknown_key(key)
