"""The result of the demo: failures, measurements, and the `--json` document. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from phalanx.cli.demo.recovery_time import OTHER_SYSTEMS, latest_job_kill
from phalanx.cli.demo.state import DemoState
from phalanx.core.accounting.usage_summary import AttemptSummary, UsageSummary
from phalanx.core.work.states import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """The result of a demo.

    Attributes:
        failures: failed expectations as sentences; empty after success.
        killed_at_step: the last step of the attempt whose node was killed; None without a kill.
        resumed_from_step: the checkpoint from which the next attempt resumed; None for a fresh start.
        kill_to_first_step_s: seconds from the kill to the first step of the next attempt.
        kill_to_running_s: seconds from the kill until all ranks were started again.
    """

    usage: UsageSummary
    failures: tuple[str, ...]
    killed_at_step: int | None
    resumed_from_step: int | None
    kill_to_first_step_s: float | None
    kill_to_running_s: float | None
    wall_s: float
    sample: str = ""


def build_outcome(scene: DemoState, usage: UsageSummary, *, sample: str, kill_wanted: bool) -> DemoOutcome:
    """Build the outcome of a demo whose job has ended."""
    kill = latest_job_kill(scene.kills)
    killed = _attempt(usage, kill.epoch) if kill is not None else None
    after = _attempt(usage, kill.epoch + 1) if kill is not None else None
    faults = []
    if usage.state != JobState.SUCCEEDED:
        why = next(
            (line.text for line in reversed(scene.history) if line.job_id == usage.job_id), "see the events above"
        )
        faults.append(f"job {usage.job_id} ended as {usage.state}: {why}")
    if usage.overlapping_steps:
        faults.append(f"two attempts computed {usage.overlapping_steps} steps at the same time: fencing failed")
    if kill_wanted and kill is None:
        faults.append("no node was killed because no checkpoint was published before training ended")
    if kill is not None and not faults and (after is None or kill.recovering):
        faults.append(f"no later attempt made a step after {kill.node} was killed")
    return DemoOutcome(
        usage=usage,
        failures=tuple(faults),
        killed_at_step=None if killed is None else killed.last_step,
        resumed_from_step=None if after is None else after.resumed_from_step,
        kill_to_first_step_s=None if kill is None or kill.recovering else kill.recovery_s(scene.now_s),
        kill_to_running_s=None if kill is None else kill.to_running_s,
        wall_s=scene.elapsed_s,
        sample=sample,
    )


def as_json(outcome: DemoOutcome, scene: DemoState) -> bytes:
    """Encode the usage summary and the demo's measurements as one JSON object with a final newline."""
    usage: dict[str, Any] = msgspec.to_builtins(outcome.usage)
    record = {
        **usage,
        "job_wall_s": usage["wall_s"],
        "wall_s": round(outcome.wall_s, 3),
        "causes": [attempt["cause"] for attempt in usage["attempts"]],
        "killed_at_step": outcome.killed_at_step,
        "resumed_from_step": outcome.resumed_from_step,
        "kill_to_first_step_s": outcome.kill_to_first_step_s,
        "kill_to_running_s": outcome.kill_to_running_s,
        "others_s": {peer.name: peer.seconds for peer in OTHER_SYSTEMS},
        "kills": [asdict(kill) for kill in scene.kills],
        "largest_loss_difference": scene.curve.largest_difference(),
        "fleet": scene.fleet,
        "sample": outcome.sample,
        "faults": list(outcome.failures),
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def usage_rows(outcome: DemoOutcome) -> list[tuple[str, str]]:
    """Return the usage summary as (label, value) rows."""
    usage = outcome.usage
    spent = usage.gpu_seconds
    unit = "virtual GPU-seconds" if usage.virtual else "GPU-seconds"

    def part(seconds: float) -> str:
        share = f"{100 * seconds / spent.total:5.1f} %" if spent.total else ""
        return f"{seconds:8.1f}  {share}"

    goodput = "unknown" if usage.goodput is None else f"{100 * usage.goodput:.1f} %"
    return [
        (f"{unit} used", f"{spent.total:8.1f}"),
        ("  kept training", part(spent.productive)),
        ("  lost to the failure", part(spent.lost)),
        ("  saving", part(spent.saving)),
        ("  starting and restarting", part(spent.restarting)),
        ("  idle: allocated, none of the above", part(spent.idle)),
        ("goodput", goodput),
        ("steps kept", f"{usage.steps_kept}" + (f" of {usage.steps_total}" if usage.steps_total else "")),
        ("steps redone", f"{usage.steps_redone}"),
        ("steps computed by two attempts at once", f"{usage.overlapping_steps}"),
        ("loss", f"{_loss(usage.loss_first)} to {_loss(usage.loss_last)}"),
        ("job, from submit to end", f"{usage.wall_s:.1f} s"),
    ]


def attempt_line(attempt: AttemptSummary) -> str:
    """Describe one attempt in one line."""
    where = ", ".join(f"{share.node}[{','.join(map(str, share.devices))}]" for share in attempt.nodes)
    steps = "no step" if attempt.first_step is None else f"steps {attempt.first_step} to {attempt.last_step}"
    source = f", from the checkpoint of step {attempt.resumed_from_step}" if attempt.resumed_from_step else ""
    span = "" if attempt.ended_s is None else f" after {attempt.ended_s - attempt.placed_s:.1f} s"
    return f"attempt {attempt.epoch} on {where}: {steps}{source}; {CAUSE_TEXTS.get(attempt.cause, attempt.cause)}{span}"


CAUSE_TEXTS: Mapping[str, str] = {
    "succeeded": "succeeded",
    "failed": "failed",
    "crash": "a task crashed",
    "node_fail": "a node died",
    "start_fail": "could not start",
    "preempted": "preempted",
    "drained": "drained",
    "cancelled": "cancelled",
    "requeued": "requeued",
    "timeout": "reached its time limit",
    "freeze": "frozen too long",
}


def _attempt(usage: UsageSummary, epoch: int) -> AttemptSummary | None:
    return next((attempt for attempt in usage.attempts if attempt.epoch == epoch), None)


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.3f}"
