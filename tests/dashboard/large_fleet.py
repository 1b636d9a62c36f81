"""A real head with thousands of nodes, jobs and samples, written into its store before it starts, as no supervisor could send them in seconds."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import time
from contextlib import contextmanager
from dataclasses import replace

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Cordon, NodeState
from phalanx.core.units import GIB
from phalanx.core.work.states import AttemptState, JobState
from phalanx.ports.store import Batch
from phalanx.store.memory import MemoryStore
from phalanx.wire.supervisor import DeviceSample, SamplesRequest
from tests.builders import T, at, job, placed
from tests.contract.api_head import ApiHead, make_node

GPUS, RACK = 8, 32
JOB_NODES = 20  # nodes of a job
MODEL = "NVIDIA H100 80GB HBM3"


@contextmanager
def large_fleet(home, nodes):
    """A head with so many nodes in racks; nine of ten are held by jobs. Yields a caller."""
    store = MemoryStore()
    now_s = time.time()
    records = [_node(number) for number in range(nodes)]
    names = [node.id for node in records]
    holders = {}
    for seq, first in enumerate(range(0, nodes * 9 // 10, JOB_NODES), start=1):
        on = names[first : first + JOB_NODES]
        case = at(
            placed(
                replace(job(str(seq), gpus=f"{len(on)}x{GPUS}"), seq=seq),
                " ".join(f"{name}:{','.join(map(str, range(GPUS)))}" for name in on),
                now_s=now_s - T,
            ),
            AttemptState.RUNNING,
        )
        records += [replace(case.job, state=JobState.RUNNING, submit_s=now_s, started_s=now_s), case.attempt]
        holders |= dict.fromkeys(on, case.job.id)
    store.commit(Batch(records=records))
    head = ApiHead(home, store=store)
    for number, name in enumerate(names):
        head.telemetry.put_samples(_samples(name, holders.get(name), _utilization(number), now_s))
    try:
        with head.calling() as call:
            yield call
    finally:
        head.close()


def _node(number):
    """Some nodes are down, cordoned or have a broken GPU."""
    name = f"gpu{number:05}"
    devices = tuple(
        Device(
            index=index,
            uuid=f"GPU-{name}-{index}",
            model=MODEL,
            memory_bytes=80 * GIB,
            healthy=(number, index) not in ((77, 3), (1201, 0), (4040, 6)),
        )
        for index in range(GPUS)
    )
    cordon = Cordon(by="opal", why="firmware update", since_s=1.0) if number % 1000 in range(960, 968) else None
    state = NodeState.DOWN if number % 2500 == 2400 else NodeState.UP
    labels = {"rack": f"{number // RACK:03}"}
    return replace(
        make_node(name), devices=devices, labels=labels, cordon=cordon, state=state, engine="joined", virtual=False
    )


def _utilization(number):
    """Most jobs compute, some little, some not at all."""
    part = number // JOB_NODES % 25
    return 0.0 if part == 7 else 0.06 if part in (3, 19) else 0.9


def _samples(name, holder, utilization, now_s):
    devices = [
        DeviceSample(
            index=index,
            uuid=f"GPU-{name}-{index}",
            counter="gpm_sm",
            utilization=utilization if holder else 0.0,
            job_id=holder,
            processes=1 if holder else 0,
        )
        for index in range(GPUS)
    ]
    return SamplesRequest(supervisor_id=f"s-{name}", node_id=name, at_s=now_s, devices=devices, every_s=600.0)
