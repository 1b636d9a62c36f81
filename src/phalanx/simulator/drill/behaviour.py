"""How the tasks of a job behave in a drill, and one of them: what users, nodes and invariants say to each other about processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.work.failure import Evidence
from phalanx.node.logic.happenings import MemberKey

CANARY: Final = "canary-8f2e61"  # what a variable of every job holds; nobody but its ranks may ever read it


@dataclass(frozen=True)
class Behaviour:
    """How the tasks of a job behave.

    Attributes:
        run_s: work of one task from the beginning; a step is a second of it, and a checkpoint saves the steps.
        save_every_s: rank 0 saves so often; None never.
        ends: (key, rank) -> (after seconds, code, signal), or None for the usual end.
        refuses: node -> why it cannot prepare, "!" before it for the job's own fault, "?" for the node's.
        prepare_s: how long preparing takes.
        stubborn: SIGTERM does nothing.
        saves: asked to stop, rank 0 saves before it ends.
        port_taken: how many generations find the rendezvous port taken.
        bad_save: which of its saves fails; 0 for none.
        leaves_s: how long something its tasks started lives on after them.
        unspawnable: generations whose tasks cannot be exec'd on node rank 0.
        evidence: (key, rank) -> what its supervisor finds when it fails.
    """

    run_s: float = 5.0
    save_every_s: float | None = None
    ends: Callable[[MemberKey, int], tuple[float, int | None, int | None] | None] = lambda _key, _rank: None
    refuses: dict[str, str] = field(default_factory=dict)
    prepare_s: float = 0.05
    stubborn: bool = False
    saves: bool = False
    port_taken: int = 0
    bad_save: int = 0
    leaves_s: float = 0.0
    unspawnable: int = 0
    evidence: Callable[[MemberKey, int], Evidence | None] = lambda _key, _rank: None


@dataclass
class Task:
    """A process: works while its node does and nobody froze it."""

    key: MemberKey
    rank: int
    devices: tuple[int, ...]
    left_s: float
    code: int | None
    signal: int | None
    done_s: float = 0.0
    save_every_s: float | None = None
    checkpoint_dir: str = ""
    frozen: bool = False
    since_s: float | None = None  # it works since then
    token: int = 0
    ended: bool = False
    saved: int = 0
