"""The options that describe a job, as `run` and `submit` have them: one for each key of a job file that fits on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from phalanx.cli.option_types import DURATION, GPUS, LABEL, MEMORY, NODES, PAIR
from phalanx.core.work.job_file.data_mode import DataMode

F = TypeVar("F", bound=Callable[..., Any])


def job_options(command: F) -> F:
    """Add the job file argument and every option that describes a job."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def override_options(command: F) -> F:
    """Add every option that describes a job, for a command that changes an earlier one."""
    for option in reversed(_OPTIONS[1:]):
        command = option(command)
    return command


_OPTIONS: Final = (
    click.argument("file", nargs=-1, metavar="[FILE]"),
    click.option("--name", metavar="NAME", help="Name of the job; default: the first word of the command."),
    click.option(
        "-g",
        "--gpus",
        type=GPUS,
        metavar="GPUS",
        help="GPUs of the whole job: 8, 2x8, h200:8, a100-80gb:8, 4xh200:8; h200,h100:8 accepts either, any-60gb:8 all of 60 GB. Part of one: 1/4, 20GiB. MIG slice: h100.1g.10gb.",
    ),
    click.option("-N", "--nodes", type=NODES, metavar="N", help="Number of nodes; 2..8 for an elastic job."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs on each node."),
    click.option(
        "--share", type=click.Choice(["mig", "mps", "time"]), help="How a part of a GPU is shared; default: mps."
    ),
    click.option("--tasks-per-node", type=int, metavar="N", help="Tasks on each node; default: one per GPU."),
    click.option("--cpus", type=int, metavar="N", help="CPUs on each node."),
    click.option(
        "--resources",
        metavar="NAME:N,...",
        help="Other resources: those that nodes offer, per node, and licences of the whole job: scratch:100GiB,matlab:2.",
    ),
    click.option("--memory", type=MEMORY, metavar="MEM", help="Memory on each node: 64 (GiB), 512M."),
    click.option(
        "-e",
        "--env",
        multiple=True,
        type=PAIR,
        metavar="K=V",
        help="Environment variable of every task; K alone copies its value from here.",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        type=LABEL,
        metavar="K=V",
        help="Label of the job, to list jobs by it (ps -l) and in reports; repeatable.",
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME",
        help="Secret that every task gets as a variable of this name (phalanx secrets); repeatable.",
    ),
    click.option(
        "--data",
        multiple=True,
        metavar="NAME=SOURCE",
        help="Dataset that each node copies before the ranks start: train=s3://bucket/folder, tok=/nfs/tok; repeatable.",
    ),
    click.option(
        "--data-mode",
        type=click.Choice([mode.value for mode in DataMode]),
        help="How the datasets reach the ranks: a copy on the node (stage), the address (stream), or a folder that is read on demand (mount).",
    ),
    click.option(
        "--port",
        "ports",
        multiple=True,
        metavar="[NAME=]PORT",
        help="Port of a web program of the job, which a browser reaches at the head; repeatable.",
    ),
    click.option(
        "--notify",
        "notify",
        multiple=True,
        metavar="TO",
        help="Mail address, channel, or '$NAME' of a secret with a URL, that gets messages about the job; repeatable.",
    ),
    click.option(
        "--notify-on",
        metavar="EVENTS",
        help="Of which events: start,end,failure,stall,idle,requeue; all but requeue by default.",
    ),
    click.option(
        "--on-end",
        metavar="COMMAND",
        help="Shell command that runs after the job has ended, in a job without GPUs; PHALANX_ENDED_STATE says how.",
    ),
    click.option("-t", "--time", type=DURATION, metavar="TIME", help="Time limit: 90m, 2h, HH:MM:SS, D-HH:MM:SS."),
    click.option(
        "--idle", type=DURATION, metavar="TIME", help="Park it after so long without work and without a client: 1h."
    ),
    click.option("--priority", type=int, metavar="N", help="Higher starts first."),
    click.option("-q", "--queue", metavar="QUEUE", help="Queue of the job."),
    click.option("-p", "--project", metavar="PROJECT", help="Project to charge."),
    click.option(
        "--retry", type=int, metavar="N", help="Restarts after a non-zero exit; lost nodes have their own budget."
    ),
    click.option(
        "--warm", is_flag=True, default=None, help="Fork Python ranks from a process that has imported torch."
    ),
    click.option(
        "--checkpoint",
        metavar="FOLDER",
        help="Place of checkpoints: a folder, or s3://bucket/folder; default: in the head's state folder.",
    ),
    click.option(
        "--outputs",
        metavar="URL",
        help="Object store for PHALANX_OUTPUT_DIR: s3://bucket/folder; default: the head's state folder.",
    ),
    click.option("--setup", metavar="SHELL", help="Shell command to run once on each node before the tasks."),
    click.option(
        "--requirements",
        metavar="FILE",
        help="Packages to install once on each node: requirements.txt or pyproject.toml; or none.",
    ),
    click.option("--conda", metavar="NAME", help="Conda environment of the nodes to run in: its name or folder."),
    click.option("--venv", metavar="FOLDER", help="Virtual environment of the nodes to run in."),
    click.option("--uv", metavar="FILE", help="uv.lock from which each node makes the environment once."),
    click.option("--modules", metavar="NAMES", help="Modules to load on each node: cuda/12,gcc."),
    click.option("--image", metavar="IMAGE", help="Container image to run in, with podman or apptainer."),
    click.option("-C", "--workdir", metavar="FOLDER", help="Working directory; default: the current one."),
    click.option(
        "--within",
        metavar="LEVEL",
        help="All nodes inside one domain of this level: spine, leaf, rack, nvlink or node.",
    ),
    click.option("--prefer", metavar="LEVEL", help="The same if possible; a wider placement rather than wait."),
    click.option(
        "--slice", type=int, metavar="N", help="Every N nodes, in rank order, inside one domain of --slice-within."
    ),
    click.option("--slice-within", metavar="LEVEL", help="Level of the slices."),
    click.option(
        "--no-preempt", "preemptible", is_flag=True, flag_value=False, default=None, help="Never preempt this job."
    ),
    click.option(
        "--saves-on-stop",
        is_flag=True,
        default=None,
        help="The job saves a checkpoint when asked to stop, so that stopping it is cheap.",
    ),
    click.option("--reservation", metavar="NAME", help="Run only on the nodes of this reservation."),
    click.option("-w", "--nodelist", metavar="NODES", help="Place it only on these nodes: n0, gpu[001-004,007]."),
    click.option("-x", "--exclude", metavar="NODES", help="Never place it on these nodes."),
    click.option(
        "--plan",
        metavar="PLAN",
        help="Layout of the model: auto, tp=2,pp=2,fsdp=2, or FILE.json of `phalanx plan --save`.",
    ),
    click.option(
        "--copy", is_flag=True, help="Upload a copy of the working directory (honours .gitignore, at most 100 MB)."
    ),
    click.option(
        "--depends-on",
        "--dependency",
        "depends_on",
        metavar="JOBS",
        help="Start after other jobs: 17, afterok:17:18, afterany:17, singleton.",
    ),
    click.option(
        "-a",
        "--array",
        metavar="NUMBERS",
        help="One job for each number: 0-99, 1,3,7-20:2; 0-99%8 for at most 8 at once.",
    ),
    click.option("-b", "--begin", metavar="WHEN", help="Earliest start: 2h (from now), 16:00, 2026-12-01T08:00."),
    click.option("--hold", is_flag=True, default=None, help="Hold until `phalanx release`."),
    click.option("--allow-never", is_flag=True, default=None, help="Submit the job even if it can never start here."),
    click.option(
        "--scale-down",
        is_flag=True,
        help="Lower the numbers of an #SBATCH script to what the cluster has, for a trial.",
    ),
    click.option("--grace", type=DURATION, metavar="TIME", help="Time from SIGTERM to SIGKILL; default 30s."),
    click.option("--collective-timeout", type=DURATION, metavar="TIME", help="Timeout of collectives; default 10m."),
)  # a table: one option a line
