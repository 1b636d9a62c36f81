"""Parse the environment variables of this rank into one record. Every variable may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from phalanx.wire.rank import (
    EPOCH_VARIABLE,
    GENERATION_VARIABLE,
    LEASE_PAGE_VARIABLE,
    LOCAL_CHECKPOINTS_VARIABLE,
    REPORT_PIPE_VARIABLE,
    STACKS_VARIABLE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The variables that this package reads. Paths and limits are None if the variable is unset or empty.

    Attributes:
        launched: a launcher (Phalanx, torchrun, Slurm) set the rendezvous of torch.distributed; without, the process is a gang of one.
        node_local_checkpoints: each node of the gang has its own checkpoint folder.
        layout, machine: from the plan, see `chosen`; empty without a plan.
        stacks_folder: folder in which this rank writes its stacks on request.
    """

    launched: bool
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    epoch: int
    generation: int
    restart_count: int
    virtual: bool
    lease_page: str | None
    report_pipe: str | None
    checkpoint_dir: str | None
    resume_from: str | None
    output_dir: str | None
    mtbf_s: float | None
    collective_timeout_s: float | None
    deadline_unix_s: float | None
    node_local_checkpoints: bool
    layout: str
    machine: str
    stacks_folder: str | None = None

    @property
    def supervised(self) -> bool:
        """Whether a supervisor reads the reports of this rank; the head then publishes and retains checkpoints."""
        return self.report_pipe is not None

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Self:
        """Parse `variables` (usually os.environ).

        Raises:
            ValueError: a variable that must be a number is not a number; the message names it.
        """
        world_size = _integer(variables, "WORLD_SIZE", 1)
        local_rank = _integer(variables, "LOCAL_RANK", 0)
        return cls(
            launched="MASTER_ADDR" in variables and "RANK" in variables,
            rank=_integer(variables, "RANK", 0),
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_integer(variables, "LOCAL_WORLD_SIZE", world_size),
            epoch=_integer(variables, EPOCH_VARIABLE, 0),
            generation=_integer(variables, GENERATION_VARIABLE, 0),
            restart_count=_integer(variables, "PHALANX_RESTART_COUNT", 0),
            virtual=variables.get("PHALANX_VIRTUAL", "") not in {"", "0"},
            lease_page=variables.get(LEASE_PAGE_VARIABLE) or None,
            report_pipe=variables.get(REPORT_PIPE_VARIABLE) or None,
            checkpoint_dir=variables.get("PHALANX_CHECKPOINT_DIR") or None,
            resume_from=variables.get("PHALANX_RESUME_FROM") or None,
            output_dir=variables.get("PHALANX_OUTPUT_DIR") or None,
            mtbf_s=_seconds(variables, "PHALANX_MTBF_S"),
            collective_timeout_s=_seconds(variables, "PHALANX_COLLECTIVE_TIMEOUT_S"),
            deadline_unix_s=_seconds(variables, "PHALANX_DEADLINE"),
            node_local_checkpoints=variables.get(LOCAL_CHECKPOINTS_VARIABLE, "") not in {"", "0"},
            layout=variables.get("PHALANX_LAYOUT", "").strip(),
            machine=variables.get("PHALANX_MACHINE", "").strip(),
            stacks_folder=variables.get(STACKS_VARIABLE) or None,
        )


def _integer(variables: Mapping[str, str], name: str, absent: int) -> int:
    text = variables.get(name, "")
    if not text:
        return absent
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} is {text!r}; it must be a whole number") from None


def _seconds(variables: Mapping[str, str], name: str) -> float | None:
    """Return a positive number of seconds; None if unset, empty or 0 ("no limit")."""
    text = variables.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"environment variable {name} is {text!r}; it must be a number of seconds") from None
    return value if value > 0.0 else None
