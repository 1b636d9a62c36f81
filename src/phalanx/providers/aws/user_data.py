"""The start script of an instance: it joins the head with a token for its one node, and switches itself off if that fails."""

from __future__ import annotations

import shlex

from phalanx.core.ids import NodeId
from phalanx.ports.engine import MachineJoin
from phalanx.providers.aws.pool_terms import InstanceTerms


def user_data(terms: InstanceTerms, node_id: NodeId, join: MachineJoin) -> str:
    """Return the script. The same order gives the same text, as an idempotency token demands.

    A machine that ends is a machine that is not charged: EC2 terminates an instance that is shut down from inside.
    """
    # Without quotes, an empty line of `setup` would be a syntax error.
    setup = f"({terms.setup})" if terms.setup else ":"
    words = [
        *("--head", join.address, "--fingerprint", join.fingerprint, "--name", node_id),
        *("--silence", f"{terms.silence_s:g}"),
        *(("--virtual", str(terms.virtual)) if terms.virtual else ()),
    ]
    return f"""#!/bin/sh
# Node {node_id} of Phalanx. The machine ends itself when its head has no use for it, or is silent for {terms.silence_s:g} s.
export HOME="${{HOME:-/root}}" PHALANX_JOIN_TOKEN={shlex.quote(join.token)}
{setup} && python3 -m phalanx.app.rented_machine {shlex.join(words)}
exec shutdown -h now
"""
