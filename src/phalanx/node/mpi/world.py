"""An MPI world: which ranks run on which node of a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, Self

_MAPPING_CHARS_MAX: Final = 1000  # a value of PMI-1 holds 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiWorld:
    """The ranks of one step.

    Attributes:
        name: of the step, "17.0".
        namespace: its name in PMIx.
        hosts: names of its nodes.
        ranks: of each node, ascending.
        place: the index of this node in both.
        uid, gid: whose processes they are.
    """

    name: str
    namespace: str
    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    place: int
    uid: int
    gid: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the world that `to_json` wrote."""
        lists = {"hosts": tuple(values["hosts"]), "ranks": tuple(tuple(one) for one in values["ranks"])}
        return cls(**{**values, **lists})

    def to_json(self) -> dict[str, Any]:
        """Return it as values for a message."""
        return asdict(self)

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return sum(map(len, self.ranks))

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.ranks[self.place]

    def node_of(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return next(place for place, ranks in enumerate(self.ranks) if rank in ranks)

    def places(self, ranks: Sequence[int]) -> list[int]:
        """Return the indices of the nodes of some ranks; of no ranks, of all."""
        return sorted({self.node_of(rank) for rank in ranks}) if ranks else list(range(len(self.ranks)))


def process_mapping(world: MpiWorld) -> str:
    """Return PMI's `PMI_process_mapping`: (first node, nodes, ranks on each) for each block; "" if it would be too long.

    Source: MPICH, src/pmi/README and `MPIR_pmi_build_nodemap`.
    """
    counts = [len(ranks) for ranks in world.ranks]
    in_order = [rank for ranks in world.ranks for rank in ranks] == list(range(world.size))
    if in_order and len(set(counts)) == 1:
        return f"(vector,(0,{len(counts)},{counts[0]}))"
    owner = {rank: place for place, ranks in enumerate(world.ranks) for rank in ranks}
    runs = [(place, len(list(run))) for place, run in groupby(owner[rank] for rank in range(world.size))]
    text = f"(vector,{','.join(f'({place},1,{length})' for place, length in runs)})"
    return text if len(text) <= _MAPPING_CHARS_MAX else ""
