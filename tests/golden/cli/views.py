"""Canned views: one small cluster at one moment, with something of everything."""

from functools import partial

import msgspec

from phalanx.core.fleet.node import NodeState
from phalanx.core.fleet.node_pool import PoolNodeState
from phalanx.core.ids import JobId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import AttemptState, JobState
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.head import Overview
from phalanx.wire.api.jobs import (
    AttemptView,
    CheckpointView,
    ExitView,
    GrantView,
    JobView,
    Progress,
)
from phalanx.wire.api.nodes import CordonView, DeviceView, NodeView, OrderedNodeView

NOW_S = 1_800_000_000.0


def make(record, /, **fields):
    """A record from plain values."""
    return msgspec.convert(msgspec.to_builtins(fields), record)


def job(number, name, state, **more):
    fields = {
        "user": "ada",
        "project": "ml",
        "queue": "default",
        "submit_s": NOW_S - 600,
        "command": "python train.py",
        "workdir": "/home/ada/gpt",
    }
    return make(JobView, **{"id": str(number), "seq": number, "name": name, "state": state, **fields, **more})


def training():
    return job(
        12,
        "train-gpt",
        JobState.RUNNING,
        started_s=NOW_S - 192,
        gpus="2x2",
        gpu_count=4,
        shape="2 x 2",
        nodes=["n0", "n2"],
        epoch=2,
        attempts=2,
        restarts=1,
        attempt_state=AttemptState.RUNNING,
        resume_step=80,
        utilization=0.874,
        virtual=True,
        output_dir="/s/outputs/12",
        progress=make(
            Progress, epoch=2, generation=0, step=120, at_s=NOW_S, steps_total=400, loss=2.1274, tokens_per_s=16_100.0
        ),
        checkpoints=[
            make(
                CheckpointView,
                epoch=1,
                step=80,
                path="/s/checkpoints/12/epoch-1/step-00000080",
                bytes=50_000_000,
                saved_s=NOW_S - 60,
            )
        ],
    )


def jobs():
    return [
        job(7, "prepare", JobState.SUCCEEDED, started_s=NOW_S - 500, ended_s=NOW_S - 490),
        job(
            9,
            "broken",
            JobState.FAILED,
            started_s=NOW_S - 400,
            ended_s=NOW_S - 396,
            exit_code=3,
            gpus="1",
            gpu_count=1,
            shape="1 x 1",
            detail="rank 0 on n1 exited with 3",
        ),
        training(),
        job(
            13,
            "a-name-that-is-rather-long-for-a-column",
            JobState.PENDING,
            gpus="16",
            gpu_count=16,
            reason="resources",
            detail="needs 16 GPUs; 8 free in total, at most 4 on one node",
        ),
        job(
            14,
            "später\x1b[2J",
            JobState.PENDING,
            gpus="1",
            gpu_count=1,
            held=True,
            reason="held",
            detail="held",
            queue="fast",
        ),
    ]


def devices(count, *, job_id=None, busy=()):
    return [
        make(
            DeviceView,
            index=index,
            uuid=f"virtual-{index}",
            model="virtual",
            memory_bytes=6 << 30,
            virtual=True,
            counter="rank_cpu",
            job_id=job_id if index < len(busy) else None,
            ranks=[index] if index < len(busy) else [],
            utilization=busy[index] if index < len(busy) else 0.0,
            memory_used_bytes=200 << 20 if index < len(busy) else 0,
        )
        for index in range(count)
    ]


def node(name, *, state=NodeState.UP, held=None, **more):
    return make(
        NodeView,
        id=name,
        state=state,
        engine="local",
        devices=held or devices(4),
        cpus=2,
        memory_bytes=24 << 30,
        address="127.0.0.1",
        virtual=True,
        joined_s=NOW_S - 3600,
        changed_s=NOW_S - 1800,
        load_1m=1.25,
        **more,
    )


def ordered_nodes():
    order = partial(
        make,
        OrderedNodeView,
        pool="burst",
        provider="virtual",
        node="h100-sxm5-80gb:8",
        model="h100-sxm5-80gb",
        gpus=8,
        price_per_h=2.0,
        changed_s=NOW_S,
    )
    return [
        order(id="burst-0", state=PoolNodeState.PROVISIONING, requested_s=NOW_S - 40.0, why="job 1 waits for capacity"),
        order(id="burst-1", state=PoolNodeState.DOWN, requested_s=NOW_S - 600.0, why="no capacity in the zone"),
    ]


def nodes():
    return [
        node("n0", held=devices(4, job_id="12", busy=(0.93, 0.05)), jobs=["12"]),
        node("n1", state=NodeState.DOWN, down_cause="its processes ended (signal 9)", failures=1),
        node(
            "n2",
            held=devices(4, job_id="12", busy=(0.5, 1.0)),
            jobs=["12"],
            cordon=make(CordonView, by="ada", why="bad fan", since_s=NOW_S - 60, drain=True),
        ),
        make(
            NodeView,
            id="gpu007",
            state=NodeState.UP,
            engine="local",
            cpus=96,
            memory_bytes=1 << 40,
            address="10.0.0.7",
            joined_s=NOW_S - 86_400,
            load_1m=3.0,
            devices=[
                make(
                    DeviceView,
                    index=0,
                    uuid="GPU-1",
                    model="NVIDIA H100 80GB HBM3",
                    memory_bytes=80 << 30,
                    counter="gpm_sm",
                    utilization=0.75,
                    job_id="12",
                    memory_used_bytes=61 << 30,
                    power_w=612.0,
                    temperature_c=71.0,
                    throttle=["sw_power_cap"],
                ),
                make(
                    DeviceView,
                    index=1,
                    uuid="GPU-2",
                    model="NVIDIA H100 80GB HBM3",
                    memory_bytes=80 << 30,
                    healthy=False,
                ),
            ],
        ),
    ]


def attempts():
    return [
        make(
            AttemptView,
            job_id="12",
            epoch=1,
            state=AttemptState.ENDED,
            generation=1,
            placed_s=NOW_S - 192,
            cause=EndCause.NODE_FAIL,
            causes=[EndCause.CRASH, EndCause.NODE_FAIL],
            ended_s=NOW_S - 70,
            why="node n1 died: its processes ended (signal 9)",
            grants=[
                make(GrantView, node_id="n0", node_rank=0, devices=[0, 1], first_rank=0, tasks=2),
                make(GrantView, node_id="n1", node_rank=1, devices=[0, 1], first_rank=2, tasks=2),
            ],
        ),
        make(
            AttemptView,
            job_id="12",
            epoch=2,
            state=AttemptState.RUNNING,
            generation=0,
            placed_s=NOW_S - 69,
            running_s=NOW_S - 68,
            resume_step=80,
            resume_epoch=1,
            grants=[
                make(GrantView, node_id="n0", node_rank=0, devices=[0, 1], first_rank=0, tasks=2),
                make(GrantView, node_id="n2", node_rank=1, devices=[0, 1], first_rank=2, tasks=2),
            ],
            exits=[make(ExitView, rank=3, node_id="n2", code=None, signal=15, by_us=True, at_s=NOW_S)],
        ),
    ]


def history():
    told = [
        ("submitted", "submitted by ada for ml: 4 GPUs", "ada"),
        ("placed", "attempt 1 on n0, n1", ""),
        ("node_fail", "node n1 died: attempt 1 ends", ""),
        ("placed", "attempt 2 on n0, n2, from step 80", ""),
    ]
    return [
        make(HistoryLine, seq=index, at_s=NOW_S - 200 + index, kind=kind, text=text, job_id="12", by=by)
        for index, (kind, text, by) in enumerate(told, start=1)
    ]


def usage():
    """A job's usage summary as the API sends it."""
    seconds = {"productive": 700.0, "lost": 40.0, "saving": 12.5, "restarting": 9.5, "idle": 6.0, "total": 768.0}
    return {
        "job_id": "12",
        "name": "train-gpt",
        "state": "running",
        "gpus": 4,
        "virtual": True,
        "measured_by": "steps",
        "gpu_seconds": seconds,
        "goodput": 0.9114,
        "wall_s": 600.0,
        "queued_s": 408.0,
        "attempts": [],
        "steps_total": 400,
        "steps_kept": 120,
        "steps_lost": 9,
        "steps_redone": 9,
        "overlapping_steps": 0,
        "loss_first": 5.5412,
        "loss_last": 2.1274,
        "tokens_kept": 491_520,
        "checkpoints": [],
    }


def _attempt_summary():
    seconds = usage()["gpu_seconds"]
    nodes = [{"node": node, "devices": [0, 1], "first_rank": 0, "tasks": 2} for node in ("n0", "n1")]
    times = {"placed_s": NOW_S - 192.0, "running_s": NOW_S - 190.0, "ended_s": None, "kept_until_s": NOW_S}
    steps = {"first_step_s": NOW_S - 180.0, "last_step_s": NOW_S, "first_step": 1, "last_step": 129, "steps": 129}
    why: dict[str, object] = {"cause": "running", "why": "", "causes": [], "exit_code": None, "resumed_from_step": None}
    return {"epoch": 2, "gpus": 4, "nodes": nodes, "generations": [], "gpu_seconds": seconds, **times, **steps, **why}


def job_usage():
    """A job's usage as the API sends it."""
    device = {"mean": 0.06, "peak": 0.31, "memory_peak_bytes": 3 << 30, "memory_bytes": 80 << 30}
    where = [(node, index) for node in ("n0", "n1") for index in (0, 1)]
    host = {"cpu_s": 576.0, "busy_cpus": 0.96, "memory_peak_bytes": 6 << 30}
    return {
        "summary": {**usage(), "attempts": [_attempt_summary()]},
        "gpu_hours": 0.213,
        "by_state": {"data_bound": 0.12, "computing": 0.086, "starting": 0.007},
        "by_note": {},
        "energy_kwh": 0.041,
        "energy_share": 0.97,
        "gpus": "2x2",
        "cpus": 16,
        "memory_bytes": 64 << 30,
        "time_limit_s": 86_400.0,
        "measured": {
            "epoch": 2,
            "run_s": 600.0,
            "counter": "gpm_sm",
            "mean": 0.06,
            "device_count": 4,
            "devices": [{"node": node, "index": index, **device} for node, index in where],
            "nodes": [{"node": node, **host} for node in ("n0", "n1")],
        },
        "advice": [
            {
                "check": "spread_over_nodes",
                "measured": "It ran on 2 nodes with 2 GPUs each; a node has 8",
                "change": "use one node",
                "settings": (("gpus", "1x4"), ("cpus", "32")),
                "gpu_hours": 0.0,
            },
            {
                "check": "waits_for_data",
                "measured": "56% of the time (0.12 of 0.21 GPU-hours) its steps waited for data",
                "change": "load with more workers and ahead of time, in the script",
                "code": "DataLoader(num_workers=8, prefetch_factor=4)",
                "gpu_hours": 0.12,
            },
            {
                "check": "long_limit",
                "measured": "It ended after 10m00s of a time limit of 1d00h",
                "change": "a shorter limit starts sooner: it fits into gaps",
                "settings": (("time", "15m"),),
                "gpu_hours": 0.0,
            },
        ],
        "no_advice": "",
    }


def fleet():
    """The same nodes by columns."""
    cells = [
        "X" * len(node.devices)
        if node.state.value == "down"
        else "".join("F" if device.job_id is None else "A" for device in node.devices)
        for node in nodes()
    ]
    return FleetFrame(
        now_s=NOW_S,
        nodes=[node.id for node in nodes()],
        places=[""] * len(cells),
        states=[node.state.value for node in nodes()],
        cells=cells,
        jobs=[[device.job_id or JobId("") for device in node.devices] for node in nodes()],
        counts={},
    )


def overview():
    return make(
        Overview,
        now_s=NOW_S,
        head_id="h1",
        version="0.1.0",
        nodes=nodes(),
        running=[jobs()[2]],
        pending=jobs()[3:],
        recent=jobs()[:2],
        counts={JobState.RUNNING: 1, JobState.PENDING: 2, JobState.SUCCEEDED: 1, JobState.FAILED: 1},
    )


def encoded(view):
    return msgspec.json.encode(view)
