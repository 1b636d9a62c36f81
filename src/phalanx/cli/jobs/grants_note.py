"""What an attempt was granted, in one line: nodes with their GPUs, or with their MIG slices."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.work.job_file.shape_note import shape_note
from phalanx.wire.api.jobs import GrantView


def grants_note(grants: Sequence[GrantView]) -> str:
    """`2 nodes x 8 = 16 GPUs`; `1 node, MIG slices: 3g.40gb (GPU 0, memory slices 4-7) on n1`."""
    if not any(grant.slices for grant in grants):
        return shape_note([len(grant.devices) for grant in grants])
    parts = [
        f"{', '.join(f'{one.profile} (GPU {one.device}, memory slices {_span(one.start, one.memory_slices)})' for one in grant.slices)}"
        f" on {grant.node_id}"
        for grant in grants
    ]
    return f"{len(grants)} node{'' if len(grants) == 1 else 's'}, MIG slices: {'; '.join(parts)}"


def _span(start: int, size: int) -> str:
    return str(start) if size == 1 else f"{start}-{start + size - 1}"
