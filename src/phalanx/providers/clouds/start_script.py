"""The start script of a machine: it joins the head with a token for its one node, and switches itself off if that fails."""

from __future__ import annotations

import shlex

from phalanx.core.ids import NodeId
from phalanx.ports.engine import MachineJoin


def start_script(
    node_id: NodeId, join: MachineJoin, *, silence_s: float, notices: str, virtual: int = 0, setup: str = ""
) -> str:
    """Return the script. The same order gives the same text, as an idempotency token demands.

    A machine that is switched off is charged for its disks at most, until the head deletes it; EC2 deletes it at once.

    Args:
        node_id: of the machine.
        join: how it joins the head.
        silence_s: the machine ends itself when its head has been silent for so long.
        notices: the cloud whose notices the machine reads, as in `node.probes.spot_notices`; empty for none.
        virtual: it joins with so many virtual devices; 0 for its GPUs.
        setup: a shell command that runs before it joins.
    """
    # Without quotes, an empty line of `setup` would be a syntax error.
    before = f"({setup})" if setup else ":"
    words = [
        *("--head", join.address, "--fingerprint", join.fingerprint, "--name", node_id),
        *("--silence", f"{silence_s:g}"),
        *(("--notices", notices) if notices else ()),
        *(("--virtual", str(virtual)) if virtual else ()),
    ]
    return f"""#!/bin/sh
# Node {node_id} of Phalanx. The machine ends itself when its head has no use for it, or is silent for {silence_s:g} s.
export HOME="${{HOME:-/root}}" PHALANX_JOIN_TOKEN={shlex.quote(join.token)}
{before} && python3 -m phalanx.app.rented_machine {shlex.join(words)}
exec shutdown -h now
"""
