"""Build `TF_CONFIG`, TensorFlow's description of the cluster and of this task's place in it. Pure.

Source: tensorflow.org, "Multi-worker training with Keras" and the guide "Distributed training", section TF_CONFIG: `chief` and `worker` form
the cluster; an `evaluator` has a place of its own and no address that others use.
"""

from __future__ import annotations

import json
from typing import Final

from phalanx.core.state.commands import PrepareTasks
from phalanx.node.logic.variables.rank_variables import address_with_port

ROLES_VARIABLE: Final = "TF_ROLES"  # of the job: which special roles it wants, "chief", "evaluator" or both
_FIRST_PORT: Final = 1  # the first task listens right above the rendezvous port


def tf_config(prepare: PrepareTasks, port: int, rank: int) -> str:
    """Return TF_CONFIG of a rank: each task at its node's address, with its own port above the rendezvous port.

    By default all are workers, of which the first acts as the chief. With `TF_ROLES=chief,evaluator` in the job's variables, rank 0 is the
    chief and the last rank the evaluator, if enough tasks are left.
    """
    world_size, asked = prepare.allocation.world_size, _asked_roles(prepare)
    addresses = [
        address_with_port(address, port + _FIRST_PORT + task)
        for address, grant in zip(prepare.addresses, prepare.allocation.grants, strict=True)
        for task in range(grant.first_rank, grant.first_rank + grant.tasks)
    ]
    first = 1 if "chief" in asked else 0
    last = world_size - 1 if "evaluator" in asked and world_size > 1 else world_size
    cluster = {"chief": addresses[:first], "worker": addresses[first:last]}
    if rank < first:
        task = {"type": "chief", "index": 0}
    elif rank >= last:
        task = {"type": "evaluator", "index": 0}
    else:
        task = {"type": "worker", "index": rank - first}
    return json.dumps({"cluster": {role: members for role, members in cluster.items() if members}, "task": task})


def _asked_roles(prepare: PrepareTasks) -> frozenset[str]:
    text = dict(prepare.spec.env).get(ROLES_VARIABLE, "")
    return frozenset(word.strip().lower() for word in text.split(","))
