"""Drawn demos: scenes as the conductor would have filled them, at chosen moments of one history. No test by itself."""

import math

from phalanx.cli.demo.outcome import build_outcome
from phalanx.cli.demo.recovery_time import NodeKill
from phalanx.cli.demo.state import DemoState
from phalanx.core.accounting.usage_summary import build_usage_summary
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import AttemptState, JobState
from phalanx.wire.api.jobs import CheckpointView, JobView, Progress
from phalanx.wire.api.nodes import DeviceView, NodeView
from phalanx.wire.api.output import StepView

T = 1_700_000_000.0
STEPS, KILLED, SAVED = 300, 142, 111
STEP_S, FIRST_S, KILL_S, AGAIN_S = 0.08, 6.0, 6.0 + 142 * 0.08, 6.0 + 142 * 0.08 + 4.2
END_S = AGAIN_S + (STEPS - SAVED) * STEP_S
SAMPLE = 'def _check(self, name):\n    """Return the name of the <path>."""\n    if self.name is None:\n        return self.name\n\tself._state = 0'


def loss(step):
    return 1.9 + 3.6 * math.exp(-step / 60) + 0.06 * math.sin(step * 1.7)


def step_views(until_s, *, drift=0.0):
    views = [(1, n, FIRST_S + n * STEP_S) for n in range(1, KILLED + 1)]
    views += [(2, n, AGAIN_S + (n - SAVED) * STEP_S) for n in range(SAVED + 1, STEPS + 1)]
    return [
        StepView(
            epoch=Epoch(epoch),
            generation=Generation(0),
            step=n,
            loss=loss(n) + drift * (epoch - 1),
            tokens=2048,
            at_s=T + at_s,
            begin_ns=round((at_s - STEP_S) * 1e9),
            end_ns=round(at_s * 1e9),
        )
        for epoch, n, at_s in views
        if at_s <= until_s
    ]


HISTORY = [
    (0.9, "submitted", "job 1 submitted by ada: 4 tasks: 2 nodes x 2, one per GPU"),
    (1.0, "placed", "attempt 1 placed on n0 and n1"),
    (5.1, "running", "all 4 tasks run"),
    (KILL_S + 0.2, "node_lost", "n1 is lost: its supervisor died and nothing of it is left"),
    (KILL_S + 0.3, "placed", "attempt 2 placed on n0 and n2, from the checkpoint of step 111"),
    (KILL_S + 2.9, "running", "all 4 tasks run"),
    (END_S + 0.5, "succeeded", "job 1 succeeded"),
]


def make_scene(at_s, *, drift=0.0):
    """The scene `at_s` seconds into the demo: n1 dies at 17.4 s, training goes on at 21.6 s and ends at 36.7 s."""
    scene = DemoState(
        started_s=T, now_s=T + at_s, fleet="3 nodes x 4 virtual devices", steps_total=STEPS, has_keyboard=True
    )
    scene.curve.add(step_views(at_s, drift=drift))
    scene.add_events(
        HistoryLine(
            seq=i, at_s=T + when, kind=kind, text=text, job_id=JobId("1"), epoch=Epoch(2 if when > KILL_S + 0.25 else 1)
        )
        for i, (when, kind, text) in enumerate(HISTORY, 1)
        if when <= at_s
    )
    dead, second = at_s >= KILL_S, at_s >= KILL_S + 0.3
    if dead:
        scene.kills.append(NodeKill(node="n1", at_s=T + KILL_S, by="demo", held=True, epoch=1, step=KILLED))
        scene.complete_kills()
    nodes = ["n0", "n2"] if second else ["n0", "n1"]
    over = at_s > END_S
    scene.update_job(job_view(scene, nodes, epoch=2 if second else 1, over=over))
    for n in range(3):
        busy = f"n{n}" in nodes and not over
        scene.nodes.append(node_view(n, nodes.index(f"n{n}") if busy else None, down=dead and n == 1))
    return scene


def job_view(scene, nodes, *, epoch, over):
    newest = scene.curve.newest
    progress = None
    if newest is not None:
        progress = Progress(
            epoch=newest.epoch,
            generation=newest.generation,
            step=newest.step,
            at_s=newest.at_s,
            loss=newest.loss,
            tokens_per_s=25600.0,
        )
    published = [37, 74, SAVED, 148, 185, 222, 259, 296]
    made = 0 if newest is None else newest.step
    return JobView(
        id=JobId("1"),
        seq=1,
        name="train-gpt",
        state=JobState.SUCCEEDED if over else JobState.RUNNING,
        user=UserId("ada"),
        project=ProjectId("default"),
        queue=QueueId("default"),
        submit_s=T + 0.9,
        gpu_count=4,
        shape="2 x 2",
        nodes=[NodeId(name) for name in nodes],
        epoch=Epoch(epoch),
        attempt_state=None if over else AttemptState.RUNNING,
        resume_step=SAVED if epoch == 2 else None,
        progress=progress,
        virtual=True,
        checkpoints=[
            CheckpointView(epoch=Epoch(1 if s <= SAVED else 2), step=s, path="") for s in published if s <= made
        ],
    )


def node_view(n, node_rank, *, down):
    devices = []
    for index in range(4):
        held = node_rank is not None and index < 2
        devices.append(
            DeviceView(
                index=index,
                uuid=f"v{n}-{index}",
                model="virtual",
                memory_bytes=1,
                virtual=True,
                job_id=JobId("1") if held else None,
                ranks=[2 * node_rank + index] if held else [],
                utilization=0.42 + 0.1 * index if held else 0.0,
            )
        )
    return NodeView(
        id=NodeId(f"n{n}"),
        state=NodeState.DOWN if down else NodeState.UP,
        engine="local",
        devices=devices,
        cpus=2,
        memory_bytes=1,
        virtual=True,
        down_cause="its supervisor died" if down else "",
    )


def make_usage_summary(scene, *, state=JobState.SUCCEEDED, extra_steps=()):
    """The usage summary of the whole history, from the very records that the head would have."""

    def attempt(epoch, nodes, begin_s, end_s, cause):
        grants = tuple(
            NodeGrant(
                node_id=NodeId(name),
                node_rank=rank,
                devices=(0, 1),
                cpus=1,
                memory_bytes=0,
                tasks=2,
                first_rank=2 * rank,
            )
            for rank, name in enumerate(nodes)
        )
        return Attempt(
            job_id=JobId("1"),
            epoch=Epoch(epoch),
            folder=f"1-k/epoch-{epoch}-k",
            allocation=Allocation(grants=grants),
            placed_s=T + begin_s,
            ended_s=T + end_s,
            state=AttemptState.ENDED,
            stop_cause=cause,
            running_s=T + begin_s + 3.0,
        )

    job = Job(
        id=JobId("1"),
        folder="1-k",
        seq=1,
        spec=JobSpec(name="train-gpt", role=Role(), workdir="/"),
        user=UserId("ada"),
        project=ProjectId("default"),
        queue=QueueId("default"),
        submit_s=T + 0.9,
        state=state,
        ended_s=T + END_S + 0.5,
    )
    attempts = [
        attempt(1, ["n0", "n1"], 1.0, KILL_S + 0.2, EndCause.NODE_FAIL),
        attempt(2, ["n0", "n2"], KILL_S + 0.3, END_S + 0.5, EndCause.SUCCEEDED),
    ]
    reports: dict[Epoch, list[dict]] = {}
    for view in [*scene.curve.steps, *extra_steps]:
        reports.setdefault(view.epoch, []).append(
            {
                "k": "step",
                "rank": 0,
                "epoch": view.epoch,
                "generation": 0,
                "step": view.step,
                "loss": view.loss,
                "tokens": view.tokens,
                "begin_ns": view.begin_ns,
                "end_ns": view.end_ns,
                "at_s": view.at_s,
            }
        )
    reports.setdefault(Epoch(2), []).append(
        {"k": "resumed", "rank": 0, "epoch": 2, "generation": 0, "step": SAVED, "load_s": 0.2}
    )
    return build_usage_summary(
        job, attempts, reports, nodes={NodeId(f"n{n}"): record(n) for n in range(3)}, now_s=T + END_S + 1
    )


def record(n):
    return Node(
        id=NodeId(f"n{n}"),
        engine="local",
        devices=(),
        cpus=2,
        memory_bytes=1,
        state=NodeState.UP,
        boot_id="b",
        virtual=True,
    )


def make_outcome(scene, *, kill_wanted=True, **changes):
    return build_outcome(scene, make_usage_summary(scene, **changes), sample=SAMPLE, kill_wanted=kill_wanted)
