"""Drive the demo: poll the head, kill a node at the chosen step, and handle keys until the job has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import msgspec

from phalanx.cli.demo.cluster import DemoCluster
from phalanx.cli.demo.recovery_time import NodeKill
from phalanx.cli.demo.state import DemoState
from phalanx.cli.demo.views import DemoView
from phalanx.core.accounting.usage_summary import UsageSummary
from phalanx.core.errors import Conflict, WaitTimedOut
from phalanx.core.work.states import AttemptState, JobState

_WATCH_S: Final = 600.0  # a longer demo counts as hung
_NODES_S: Final = 30.0
_SLOW_POLL_S: Final = 0.5  # for steps and events; the overview is polled with every frame
_FINAL_POLLS: Final = 20  # until the last streams have arrived
_LOG_TAIL_BYTES: Final = 3000
_HOLDING: Final = (AttemptState.STARTING, AttemptState.RUNNING)


class DemoQuit(Exception):
    """The user pressed q."""


@dataclass(slots=True)
class DemoRunner:
    """Runs one demo on an open cluster. With `kill_step` None it kills no node by itself."""

    cluster: DemoCluster
    scene: DemoState
    audience: DemoView
    kill_step: int | None
    job_id: str = ""
    _cursor: str = ""
    _slow_s: float = 0.0
    _choosing_node: bool = False

    def await_nodes(self, count: int) -> None:
        """Wait until `count` nodes are up.

        Raises:
            WaitTimedOut: fewer nodes came up in time.
        """
        until_s = time.monotonic() + _NODES_S
        while True:
            self.scene.now_s = time.time()
            nodes = self.cluster.client.nodes()
            self.scene.nodes = list(nodes)
            self.audience.show(self.scene)
            if len(self.scene.up_nodes()) >= count:
                return
            if time.monotonic() > until_s:
                raise WaitTimedOut(f"{len(self.scene.up_nodes())} of {count} nodes came up in {_NODES_S:.0f} s")
            if self.audience.read_key() == "q":
                raise DemoQuit

    def submit(self, job: dict[str, object]) -> None:
        """Submit the job."""
        reply = self.cluster.client.submit(job)
        self.job_id = reply.id
        self.scene.update_job(reply.job)
        for note in reply.notes:
            self.audience.show_message(note, self.scene)

    def run(self) -> None:
        """Poll until the job has ended.

        Raises:
            DemoQuit: the user pressed q.
            WaitTimedOut: the job hangs.
        """
        until_s = time.monotonic() + _WATCH_S
        while True:
            self.update()
            self.audience.show(self.scene)
            if self.scene.job is not None and self.scene.job.state.terminal:
                break
            if time.monotonic() > until_s:
                raise WaitTimedOut(
                    f"job {self.job_id} has not ended after {_WATCH_S:.0f} s: {self.scene.job and self.scene.job.detail}"
                )
            self.kill_if_due()
            self.handle_key(self.audience.read_key())
        self.poll_final()

    def update(self) -> None:
        """Update the scene from the head."""
        scene = self.scene
        scene.now_s = time.time()
        scene.update(self.cluster.client.overview(), self.job_id)
        if scene.now_s - self._slow_s >= _SLOW_POLL_S or (scene.job is not None and scene.job.state.terminal):
            self._slow_s = scene.now_s
            self._read_steps()
            self._read_history()
        for kill in scene.complete_kills():
            self.audience.show_message(
                f"{kill.recovery_s(scene.now_s):.1f} s from the death of {kill.node} to the next step", scene
            )

    def kill_if_due(self) -> None:
        """Kill the job's last node once training has passed `kill_step` and a checkpoint of this attempt is published.

        The last node, not the first: then all steps that rank 0 reported reach the head, and the curve has no gap.
        """
        job, scene = self.scene.job, self.scene
        if (
            self.kill_step is None
            or scene.kills
            or job is None
            or job.attempt_state is not AttemptState.RUNNING
            or not job.nodes
        ):
            return
        newest = scene.curve.newest_of(job.epoch)
        if newest is not None and newest.step >= self.kill_step and job.checkpoints:
            self.kill_node(job.nodes[-1], by="demo")

    def handle_key(self, key: str) -> None:
        """Handle a key: k asks for a node, its number kills it, any other key cancels; q quits.

        Raises:
            DemoQuit: on q.
        """
        scene = self.scene
        if self._choosing_node:
            self._choosing_node, scene.prompt = False, ""
            if key.isdigit() and int(key) < len(scene.nodes):
                self.kill_node(scene.nodes[int(key)].id, by="visitor")
            elif not key:
                self._ask_for_node()
        elif key == "k":
            self._ask_for_node()
        elif key == "q":
            raise DemoQuit

    def _ask_for_node(self) -> None:
        names = "   ".join(f"{number} {node.id}" for number, node in enumerate(self.scene.nodes[:10]))
        self._choosing_node, self.scene.prompt = True, f"kill which node?   {names}   (any other key: cancel)"

    def kill_node(self, node: str, *, by: str) -> None:
        """Kill a node now; start measuring the recovery if the job uses it."""
        scene = self.scene
        newest = scene.curve.newest
        job = scene.job
        held = scene.job_uses(node) and job is not None and job.attempt_state in _HOLDING
        kill = NodeKill(
            node=node,
            at_s=time.time(),
            by=by,
            held=held,
            epoch=0 if job is None else job.epoch,
            step=None if newest is None else newest.step,
        )
        try:
            count = self.cluster.kill_node(node)
        except Conflict as error:
            self.audience.show_message(error.message, scene)
            return
        scene.kills.append(kill)
        self.audience.show_message(
            f"{node} killed: SIGKILL to its {count} processes" + ("" if held else "; the job did not use it"),
            scene,
        )

    def poll_final(self) -> None:
        """Poll for the last steps and events, which arrive shortly after the job's end."""
        for _ in range(_FINAL_POLLS):
            before = len(self.scene.curve.steps), len(self.scene.history)
            self.update()
            self.audience.show(self.scene)
            newest = self.scene.curve.newest
            complete = newest is not None and newest.step >= self.scene.steps_total
            failed = self.scene.job is None or self.scene.job.state is not JobState.SUCCEEDED
            if (complete or failed) and (len(self.scene.curve.steps), len(self.scene.history)) == before:
                return
            time.sleep(0.1)

    def fetch_usage_summary(self) -> UsageSummary:
        """Fetch the job's usage summary."""
        return msgspec.convert(self.cluster.client.usage(self.job_id), UsageSummary)

    def _read_steps(self) -> None:
        more = True
        while more:
            reply = self.cluster.client.steps(self.job_id, after=self._cursor)
            self.scene.curve.add(reply.steps)
            self._cursor, more = reply.cursor, reply.more

    def log_tail(self) -> str:
        """Fetch the end of the job's output."""
        chunks = self.cluster.client.logs(self.job_id, tail_bytes=_LOG_TAIL_BYTES).chunks
        return "".join(chunk.text for chunk in chunks)

    def _read_history(self) -> None:
        """Fetch new events of the job and the nodes."""
        last = self.scene.history[-1].seq if self.scene.history else 0
        for line in self.scene.add_events(self.cluster.client.whole_history(after=last).history):
            self.audience.show_event(line, self.scene)
