"""Jobs and nodes in Slurm's words: states, reasons, durations. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import NodeState
from phalanx.core.units import MIB
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.nodes import NodeView

STATES: Final = {
    JobState.PENDING: ("PENDING", "PD"),
    JobState.RUNNING: ("RUNNING", "R"),
    JobState.SUCCEEDED: ("COMPLETED", "CD"),
    JobState.FAILED: ("FAILED", "F"),
    JobState.CANCELLED: ("CANCELLED", "CA"),
    JobState.TIMEOUT: ("TIMEOUT", "TO"),
}
"""A job's state in Slurm's words: long and short."""


def raw_number(job: JobView) -> str:
    """The number of a job; of an element of an array its own."""
    return job.id if job.id.isdecimal() else str(job.seq)


def job_states(text: str) -> tuple[JobState, ...]:
    """The states that `--states` names, long or short; all for "all"."""
    words = {word.strip().upper() for word in text.split(",")}
    return tuple(state for state, names in STATES.items() if "ALL" in words or words & set(names))


def squeue_row(job: JobView, now_s: float) -> dict[str, str]:
    """The fields of squeue, by the letter of its format."""
    long, short = STATES[job.state]
    nodes = fold_hostlist(list(job.nodes)) if job.nodes else ""
    reason = pending_reason(job, now_s) if job.state is JobState.PENDING else "None"
    used_s = run_time_s(job, now_s)
    return {
        "i": job.id,
        "A": raw_number(job),
        "F": job.array_id or job.id,
        "K": "N/A" if job.array_index is None else str(job.array_index),
        "j": job.name,
        "u": job.user,
        "a": job.project,
        "P": job.queue,
        "q": job.queue,
        "t": short,
        "T": long,
        "M": slurm_duration(used_s),
        "l": "UNLIMITED" if job.time_limit_s is None else slurm_duration(job.time_limit_s),
        "L": "UNLIMITED" if job.time_limit_s is None else slurm_duration(max(0.0, job.time_limit_s - used_s)),
        "D": str(node_count(job)),
        "b": f"gres/gpu:{job.gpus}" if job.gpu_count else "N/A",
        "N": nodes,
        "r": reason,
        "R": nodes if job.state is JobState.RUNNING else f"({reason})",
        "Q": str(job.priority),
        "p": str(job.priority),
        "V": slurm_time(job.submit_s),
        "S": slurm_time(job.started_s),
        "e": slurm_time(_end_s(job)),
        "Z": job.workdir,
        "o": job.command,
        "k": job.labels.get("slurm.comment", ""),
    }


SQUEUE_TITLES: Final = {
    "i": "JOBID",
    "A": "JOBID",
    "F": "ARRAY_JOB_ID",
    "K": "ARRAY_TASK_ID",
    "j": "NAME",
    "u": "USER",
    "a": "ACCOUNT",
    "P": "PARTITION",
    "q": "QOS",
    "t": "ST",
    "T": "STATE",
    "M": "TIME",
    "l": "TIME_LIMIT",
    "L": "TIME_LEFT",
    "D": "NODES",
    "b": "TRES_PER_NODE",
    "N": "NODELIST",
    "r": "REASON",
    "R": "NODELIST(REASON)",
    "Q": "PRIORITY",
    "p": "PRIORITY",
    "V": "SUBMIT_TIME",
    "S": "START_TIME",
    "e": "END_TIME",
    "Z": "WORK_DIR",
    "o": "COMMAND",
    "k": "COMMENT",
}


def sacct_row(job: JobView, now_s: float) -> dict[str, str]:
    """The fields of sacct, by name. Fields that Phalanx does not measure for a job are empty."""
    tres = f"gres/gpu={job.gpu_count},node={node_count(job)}" if job.gpu_count else f"node={node_count(job)}"
    return {
        "JobID": job.id,
        "JobIDRaw": raw_number(job),
        "JobName": job.name,
        "Partition": job.queue,
        "Account": job.project,
        "QOS": job.queue,
        "User": job.user,
        "State": STATES[job.state][0],
        "ExitCode": exit_code_text(job),
        "Elapsed": slurm_duration(run_time_s(job, now_s), hours=True),
        "Timelimit": "UNLIMITED" if job.time_limit_s is None else slurm_duration(job.time_limit_s, hours=True),
        "Submit": slurm_time(job.submit_s),
        "Start": slurm_time(job.started_s, unknown="Unknown"),
        "End": slurm_time(job.ended_s, unknown="Unknown"),
        "NNodes": str(node_count(job)),
        "NodeList": fold_hostlist(list(job.nodes)) if job.nodes else "None assigned",
        "ReqTRES": tres,
        "AllocTRES": tres if job.nodes else "",
        "Priority": str(job.priority),
        "WorkDir": job.workdir,
        "AllocCPUS": "",
        "MaxRSS": "",
        "Restarts": str(job.restarts),
    }


SACCT_WIDTHS: Final = {
    "JobID": 12,
    "JobIDRaw": 12,
    "JobName": 10,
    "Partition": 10,
    "Account": 10,
    "QOS": 10,
    "User": 9,
    "AllocCPUS": 10,
    "State": 10,
    "ExitCode": 8,
    "Elapsed": 10,
    "Timelimit": 10,
    "Submit": 19,
    "Start": 19,
    "End": 19,
    "NNodes": 8,
    "NodeList": 15,
    "ReqTRES": 10,
    "AllocTRES": 10,
    "Priority": 10,
    "WorkDir": 20,
    "MaxRSS": 10,
    "Restarts": 8,
}


def job_lines(job: JobView, now_s: float) -> list[str]:
    """The lines of `scontrol show job`, as KEY=value words."""
    reason = pending_reason(job, now_s) if job.state is JobState.PENDING else "None"
    nodes = fold_hostlist(list(job.nodes)) if job.nodes else "(null)"
    array = f" ArrayJobId={job.array_id} ArrayTaskId={job.array_index}" if job.array_id else ""
    limit = "UNLIMITED" if job.time_limit_s is None else slurm_duration(job.time_limit_s, hours=True)
    return [
        f"JobId={job.id}{array} JobName={job.name}",
        f"   UserId={job.user} Account={job.project} QOS={job.queue} Priority={job.priority}",
        f"   JobState={STATES[job.state][0]} Reason={reason} Dependency={','.join(job.unmet) or '(null)'}",
        f"   Requeue=1 Restarts={job.restarts} BatchFlag=1 ExitCode={exit_code_text(job)}",
        f"   RunTime={slurm_duration(run_time_s(job, now_s), hours=True)} TimeLimit={limit}",
        f"   SubmitTime={slurm_time(job.submit_s)}",
        f"   StartTime={slurm_time(job.started_s, unknown='Unknown')} EndTime={slurm_time(_end_s(job), unknown='Unknown')}",
        f"   Partition={job.queue} NodeList={nodes} NumNodes={node_count(job)}",
        f"   TresPerJob={f'gres:gpu:{job.gpus}' if job.gpu_count else '(null)'}",
        f"   Command={job.command or '(null)'}",
        f"   WorkDir={job.workdir}",
    ]


def node_lines(node: NodeView) -> list[str]:
    """The lines of `scontrol show node`."""
    models = Counter(device.model.replace(" ", "_") for device in node.devices)
    gres = ",".join(f"gpu:{model}:{count}" for model, count in models.items()) or "(null)"
    return [
        f"NodeName={node.id} CPUTot={node.cpus} RealMemory={node.memory_bytes // MIB}",
        f"   Gres={gres} State={node_state(node).upper()}",
    ]


def node_state(node: NodeView) -> str:
    """A node's state in sinfo's words."""
    if node.state is not NodeState.UP:
        return "down"
    if node.cordon is not None:
        return "drained"
    busy = sum(device.job_id is not None for device in node.devices)
    return "idle" if not busy else "allocated" if busy == len(node.devices) else "mixed"


_DEFAULT_PARTITION: Final = "default"  # the queue of jobs that name none
NODE_STATE_CODES: Final[Mapping[str, str]] = {
    "idle": "idle",
    "allocated": "alloc",
    "mixed": "mix",
    "drained": "drain",
    "down": "down",
}
SINFO_TITLES: Final = {
    "P": "PARTITION",
    "R": "PARTITION",
    "a": "AVAIL",
    "l": "TIMELIMIT",
    "D": "NODES",
    "t": "STATE",
    "T": "STATE",
    "N": "NODELIST",
    "n": "HOSTNAMES",
    "c": "CPUS",
    "m": "MEMORY",
    "G": "GRES",
    "f": "AVAIL_FEATURES",
}


def sinfo_rows(
    nodes: Sequence[NodeView], partitions: Sequence[str], letters: Sequence[str], *, each: bool
) -> list[dict[str, str]]:
    """One row for the nodes of which all `letters` that are shown are equal; with `each`, one for each node of each partition."""
    if each:
        pairs = [(node, partition) for node in nodes for partition in partitions]
        return [_sinfo_row([node], partition) for node, partition in pairs]
    shown = [letter for letter in letters if letter not in {"D", "N"}]
    groups: dict[tuple[str, ...], tuple[str, dict[str, NodeView]]] = {}
    for partition in partitions:
        for node in nodes:
            row = _sinfo_row([node], partition)
            groups.setdefault(tuple(row[letter] for letter in shown), (partition, {}))[1][node.id] = node
    return [_sinfo_row(list(members.values()), partition) for partition, members in groups.values()]


def _sinfo_row(nodes: Sequence[NodeView], partition: str) -> dict[str, str]:
    first, state = nodes[0], node_state(nodes[0])
    models = Counter(device.model.replace(" ", "_") for device in first.devices)
    return {
        "P": f"{partition}*" if partition == _DEFAULT_PARTITION else partition,
        "R": partition,
        "a": "up",
        "l": "infinite",
        "D": str(len(nodes)),
        "t": NODE_STATE_CODES[state],
        "T": state,
        "N": fold_hostlist([node.id for node in nodes]),
        "n": first.id,
        "c": str(first.cpus),
        "m": str(first.memory_bytes // MIB),
        "G": ",".join(f"gpu:{model}:{count}" for model, count in models.items()) or "(null)",
        "f": "(null)",
    }


# ---- values -------------------------------------------------------------------------------------------------------------


def pending_reason(job: JobView, now_s: float) -> str:
    """Why a job waits, as one of Slurm's words; `phalanx why` says more."""
    if job.held:
        return "JobHeldUser"
    if job.begin_s is not None and job.begin_s > now_s:
        return "BeginTime"
    return "Dependency" if job.unmet else "Resources"


def node_count(job: JobView) -> int:
    """The nodes that a job has, or asks for as far as its shape says."""
    wanted = job.shape.partition("x")[0].strip()
    return len(job.nodes) or (int(wanted) if wanted.isdecimal() else 1)


def run_time_s(job: JobView, now_s: float) -> float:
    """How long a job has run."""
    return 0.0 if job.started_s is None else max(0.0, (job.ended_s or now_s) - job.started_s)


def exit_code_text(job: JobView) -> str:
    """Slurm's `code:signal`; a job that never started has neither."""
    code = 0 if job.started_s is None else job.exit_code or 0
    return f"0:{code - 128}" if code > 128 else f"{code}:0"


def slurm_duration(seconds: float, *, hours: bool = False) -> str:
    """A duration as `M:SS`, `H:MM:SS` or `D-HH:MM:SS`; with `hours` at least `HH:MM:SS`."""
    minutes, left = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    day, hour = divmod(hour, 24)
    if day:
        return f"{day}-{hour:02}:{minute:02}:{left:02}"
    if hours:
        return f"{hour:02}:{minute:02}:{left:02}"
    return f"{hour}:{minute:02}:{left:02}" if hour else f"{minute}:{left:02}"


def slurm_time(moment_s: float | None, *, unknown: str = "N/A") -> str:
    """A moment in local time."""
    return unknown if moment_s is None else datetime.fromtimestamp(moment_s).strftime("%Y-%m-%dT%H:%M:%S")  # noqa: DTZ006  # local, as Slurm prints it


def _end_s(job: JobView) -> float | None:
    if job.ended_s is not None or job.started_s is None or job.time_limit_s is None:
        return job.ended_s
    return job.started_s + job.time_limit_s
