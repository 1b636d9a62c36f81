"""Parse the output of Slurm's commands into records. Pure; output that cannot be parsed raises `SlurmOutputError` with the text.

Source: `scontrol --details --oneliner show node`, `scontrol --oneliner show partition`, `scontrol show topology` and
`squeue --Format`, as Slurm 20.11 to 24.05 print them; the golden files are from 22.05.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.units import MIB
from phalanx.engines.slurm.render import JOB_FIELDS, RESIDENT_FIELDS

_FIELD: Final = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=")
_GRES: Final = re.compile(r"gpu(?::([A-Za-z0-9_.\-]+?))??:([0-9]+)(?:\(.*\))?")
_OPEN: Final = frozenset({"IDLE", "MIXED", "ALLOCATED", "ALLOC", "COMPLETING"})
_CLOSED: Final = frozenset({"DRAIN", "DRAINED", "DRAINING", "MAINT", "RESERVED", "REBOOT_REQUESTED", "REBOOT"})
_DOWN: Final = frozenset(
    {
        "DOWN",
        "ERROR",
        "FAIL",
        "FAILING",
        "FUTURE",
        "UNKNOWN",
        "NOT_RESPONDING",
        "NO_RESPOND",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWER_DOWN",
        "POWERING_UP",
        "POWER_UP",
        "PERFCTRS",
    }
)
_TIME: Final = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+)")
_VERSION: Final = re.compile(r"slurm(?:-wlm)? ([0-9]+)\.([0-9]+)")
ENDED_STATES: Final = frozenset(
    {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
        "REVOKED",
    }
)
ALLOCATED_STATES: Final = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING"}
)


class SlurmOutputError(BadRequest):
    """This release cannot parse Slurm's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GresGpus:
    """Devices of one type: `kind` is the GRES type, "" if untyped."""

    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node of Slurm.

    Attributes:
        gpus, gpus_used: by type, in configured order.
        closed_reason: why it is up but takes no new work (drained, reserved, in maintenance); empty if it does.
        down_reason: why it is down; empty if it is up.
    """

    name: str
    address: str
    hostname: str
    cpus: int
    cpus_used: int
    memory_bytes: int
    memory_used_bytes: int
    gpus: tuple[GresGpus, ...]
    gpus_used: tuple[GresGpus, ...]
    features: tuple[str, ...]
    partitions: tuple[str, ...]
    state: str
    closed_reason: str
    down_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job in Slurm's queue, ours or another user's. `exit_code` is the command's, once it ended."""

    id: str
    user: str
    state: str
    nodes: tuple[str, ...]
    reason: str
    exit_code: int
    comment: str

    @property
    def has_nodes(self) -> bool:
        """Whether nodes are allocated to it now."""
        return self.state in ALLOCATED_STATES

    def is_cleaning_up(self, nodes: Sequence[str]) -> bool:
        """Whether it has ended, but one of these nodes still cleans it up."""
        return self.state == "COMPLETING" and not set(self.nodes).isdisjoint(nodes)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and is cleaned up on every node that answers."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRow:
    """A Slurm job that may be resident. `left_s`, `limit_s`: until its time limit, and the limit, in seconds; None without one."""

    id: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    left_s: float | None
    limit_s: float | None
    comment: str

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and is cleaned up on every node that answers."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """A partition and its limit. `state` ("UP", "DOWN", "DRAIN", "INACTIVE") and `max_time` ("UNLIMITED", "7-00:00:00") are Slurm's texts."""

    name: str
    default: bool
    state: str
    max_time: str

    @property
    def up(self) -> bool:
        """Whether it starts jobs that it accepts now: only an UP partition does both."""
        return self.state == "UP"


def parse_fields(line: str) -> dict[str, str]:
    """Parse the `Key=value` pairs of a one-line record; a value extends to the next key, because values may hold spaces."""
    found: dict[str, str] = {}
    marks = list(_FIELD.finditer(line))
    for place, mark in enumerate(marks):
        end = marks[place + 1].start() if place + 1 < len(marks) else len(line)
        found.setdefault(mark[1], line[mark.end() : end].strip())
    return found


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Parse nodes, sorted by name."""
    lines = [line for line in text.splitlines() if line.startswith("NodeName=")]
    return tuple(sorted((_node(parse_fields(line), line) for line in lines), key=lambda node: node.name))


def parse_jobs(text: str, mark: str) -> tuple[SlurmJob, ...]:
    """Parse jobs, in the order printed; `mark` ends each field, see `render.jobs`.

    Raises:
        SlurmOutputError: the fields are not the requested ones.
    """
    return tuple(_job(row) for row in _rows(text, mark, len(JOB_FIELDS)))


def parse_resident_rows(text: str, mark: str) -> tuple[ResidentRow, ...]:
    """Parse the fields `RESIDENT_FIELDS` of jobs, in the order printed; raises as `parse_jobs`."""
    found = []
    for job_id, state, reason, nodes, left, limit, comment in _rows(text, mark, len(RESIDENT_FIELDS)):
        found.append(
            ResidentRow(
                id=job_id,
                state=state.split(" ")[0].upper(),
                reason=reason,
                nodes=expand_hostlist(nodes) if nodes else (),
                left_s=parse_time_left_s(left),
                limit_s=parse_time_left_s(limit),
                comment=comment,
            )
        )
    return tuple(found)


def parse_time_left_s(text: str) -> float | None:
    """Parse a time as squeue prints it (`7-00:00:00`, `1:30:00`, `59:30`) into seconds; 0 once it is over, None for no limit."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0.0 if text == "INVALID" else None  # UNLIMITED, NOT_SET
    days, hours, minutes, seconds = (int(word or 0) for word in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _rows(text: str, mark: str, size: int) -> list[list[str]]:
    fields = [field.strip() for field in text.split(mark)]
    if len(fields) % size != 1 or fields.pop():
        raise SlurmOutputError(f"squeue: {text[-200:]!r} is not a complete row of {size} fields")
    return [fields[at : at + size] for at in range(0, len(fields), size)]


def parse_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Parse partitions, in the order printed."""
    found = []
    for line in text.splitlines():
        if line.startswith("PartitionName="):
            given = parse_fields(line)
            found.append(
                SlurmPartition(
                    name=given["PartitionName"],
                    default=given.get("Default") == "YES",
                    state=given.get("State", "UP"),
                    max_time=given.get("MaxTime", "UNLIMITED"),
                )
            )
    return tuple(found)


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Parse topology labels of nodes (`leaf`, `spine`) from Slurm's switch tree; empty without a tree.

    Level 0 switches are leaves; a node's spine is the outermost switch above it.
    """
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        given = parse_fields(line)
        if "SwitchName" not in given or not given.get("Nodes"):
            continue
        level = "leaf" if given.get("Level", "0") == "0" else "spine"
        for name in expand_hostlist(given["Nodes"]):
            found.setdefault(name, {})[level] = given["SwitchName"]
    return found


def parse_version(text: str) -> tuple[int, int]:
    """Parse year and month of the release from `sinfo --version`.

    Raises:
        SlurmOutputError: the text has no release.
    """
    match = _VERSION.match(text.strip())
    if match is None:
        raise SlurmOutputError(
            f"sinfo reports the version {text.strip()[:80]!r}", hint="check that this sinfo is Slurm's"
        )
    return int(match[1]), int(match[2])


def parse_gres(text: str) -> tuple[GresGpus, ...]:
    """Parse the GPUs of a GRES text: `gpu:h100:4(S:0-1),shard:8` or `gpu:h100:3(IDX:0-2)`. Other resources are ignored."""
    counts: dict[str, int] = {}
    for word in _split(text):
        match = _GRES.fullmatch(word)
        if match is not None:
            kind = match[1] or ""
            counts[kind] = counts.get(kind, 0) + int(match[2])
    return tuple(GresGpus(kind=kind, count=count) for kind, count in counts.items())


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    words, depth, current = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            words.append(current)
            current = ""
        else:
            current += char
    return [word.strip() for word in [*words, current] if word.strip()]


def _node(given: Mapping[str, str], line: str) -> SlurmNode:
    state = given.get("State", "UNKNOWN")
    silent = "*" in state
    words = [word.rstrip("*~#!%$@^-").upper() for word in state.split("+")]
    reason = given.get("Reason", "").partition(" [")[0]
    lost = [word for word in words if word in _DOWN] + (["NOT_RESPONDING"] if silent else [])
    closed = [word for word in words if word in _CLOSED]
    if not lost and not closed and not any(word in _OPEN for word in words):
        closed = [state]
    try:
        return SlurmNode(
            name=given["NodeName"],
            address=given.get("NodeAddr") or given["NodeName"],
            hostname=given.get("NodeHostName") or given["NodeName"],
            cpus=int(given.get("CPUEfctv") or given["CPUTot"]),
            cpus_used=int(given.get("CPUAlloc") or 0),
            memory_bytes=int(given.get("RealMemory") or 0) * MIB,
            memory_used_bytes=int(given.get("AllocMem") or 0) * MIB,
            gpus=parse_gres(given.get("Gres", "")),
            gpus_used=parse_gres(given.get("GresUsed", "")),
            features=_list(given.get("ActiveFeatures", "")),
            partitions=_list(given.get("Partitions", "")),
            state=state,
            closed_reason=_state_reason(closed, reason) if not lost else "",
            down_reason=_state_reason(lost, reason),
        )
    except (KeyError, ValueError) as error:
        raise SlurmOutputError(f"scontrol show node: {error}: {line[:200]!r}") from error


def _state_reason(words: Sequence[str], reason: str) -> str:
    if not words:
        return ""
    return f"Slurm state {'+'.join(dict.fromkeys(words)).lower()}" + (f": {reason}" if reason else "")


def _list(text: str) -> tuple[str, ...]:
    return () if text in {"", "(null)"} else tuple(word for word in text.split(",") if word)


def _job(words: Sequence[str]) -> SlurmJob:
    job_id, user, state, nodes, reason, code, comment = words
    return SlurmJob(
        id=job_id,
        user=user,
        state=state.split(" ")[0].upper(),
        nodes=expand_hostlist(nodes) if nodes else (),
        reason=reason,
        exit_code=_exit_code(code),
        comment="" if comment in {"(null)", "N/A"} else comment,
    )


def _exit_code(text: str) -> int:
    """Parse a wait status (256 for exit code 1), as squeue prints it, or in later releases `code:signal`."""
    code, colon, number = text.partition(":")
    if colon:
        return int(code or 0) or (128 + int(number) if number.isdecimal() and int(number) else 0)
    if not text.isdecimal():
        return 0
    status = int(text)
    return status >> 8 if status >= 256 else (128 + (status & 127) if status else 0)
