"""The configuration of a supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.fleet.node import Node
from phalanx.core.ids import SupervisorId
from phalanx.core.work.seats import Seat
from phalanx.node.files.job_accounts import SINGLE_ACCOUNT, JobAccountPolicy
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.logic.supervisor import TERMINATE_GRACE_MAX_S
from phalanx.node.mig.slice_keeper import SliceKeeper
from phalanx.node.power.limit_keeper import PowerLimitKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The configuration of a supervisor. `base` is the environment that ranks inherit.

    `unwatched`: no engine of the head watches it, so it reports its own end. `slices`: makes MIG slices; None if no device can be divided. `power`: sets power limits; None without GPUs. `hooks`: path of the operator's file of hooks. `seat`: set if it was started for this attempt alone. Its engine chose the devices: they are 0, 1, ... here, whatever their index at the head. `signals_reach_ranks`: who ends this node signals its ranks too. `terminate_grace_s`: as of `Supervisor`.
    """

    node: Node
    supervisor_id: SupervisorId
    node_key: str
    folder: str
    access: HeadAccess
    base: dict[str, str]
    seat: Seat | None = None
    unwatched: bool = False
    signals_reach_ranks: bool = False
    accounts: JobAccountPolicy = SINGLE_ACCOUNT
    slices: SliceKeeper | None = None
    power: PowerLimitKeeper | None = None
    hooks: str = ""
    terminate_grace_s: float = TERMINATE_GRACE_MAX_S
