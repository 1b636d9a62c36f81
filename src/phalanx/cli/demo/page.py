"""demo.html: the report of the demo in one self-contained file, in the reader's light or dark theme. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template
from typing import Final

from phalanx.cli.demo.charts import (
    AGAIN,
    IDLE,
    KEPT,
    LOST,
    RESTARTING,
    SAVING,
    loss_chart,
    recovery_chart,
    repeated_steps_chart,
    timeline_chart,
    usage_bar,
)
from phalanx.cli.demo.live_screen import plain_text
from phalanx.cli.demo.outcome import CAUSE_TEXTS, DemoOutcome, usage_rows
from phalanx.cli.demo.recovery_time import OTHER_SYSTEMS, OTHER_SYSTEMS_NOTE, latest_job_kill
from phalanx.cli.demo.state import DemoState
from phalanx.cli.demo.summary import compare_losses
from phalanx.cli.figure_files import inline_svg, theme_css

_LOSS_LEGEND: Final = (
    (KEPT, "loss of kept steps"),
    (LOST, "first loss of a repeated step"),
    (AGAIN, "its second loss"),
    (SAVING, "checkpoint published"),
)
_TIME_LEGEND: Final = (
    (RESTARTING, "starting, loading"),
    (KEPT, "training, kept"),
    (LOST, "training, repeated later"),
    (IDLE, "after its last step"),
)
_USAGE_LEGEND: Final = (
    (KEPT, "kept"),
    (LOST, "lost"),
    (SAVING, "saving"),
    (RESTARTING, "starting"),
    (IDLE, "idle"),
)


def build_page(scene: DemoState, outcome: DemoOutcome, *, version: str, command: str) -> str:
    """Return the page as HTML."""
    usage = outcome.usage
    kept, _ = scene.curve.kept_and_lost()
    redone = scene.curve.repeated_steps()
    hits = [kill for kill in scene.kills if kill.held]
    killed = [(float(kill.step), kill.node) for kill in hits if kill.step]
    losses = loss_chart(
        kept, redone, steps=scene.steps_total, kills=killed, published=[step for _, step in scene.checkpoints]
    )
    devices = timeline_chart(
        scene.nodes,
        usage.attempts,
        start_s=scene.started_s,
        end_s=scene.now_s,
        kills=[(kill.at_s, kill.node) for kill in scene.kills],
    )
    template = Template(files("phalanx.cli.demo").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        theme=theme_css(),
        title=escape(_title(scene, outcome)),
        lead=f"{escape(scene.fleet)}; <code>{escape(command)}</code> as job {escape(usage.job_id)} on {usage.gpus} {'virtual devices' if usage.virtual else 'GPUs'}.",
        faults="".join(f'<p class="fault">{escape(fault)}</p>' for fault in outcome.failures),
        tiles=_tiles(outcome),
        loss_words=escape(_loss_words(outcome)),
        loss_key=_legend(_LOSS_LEGEND if redone else (_LOSS_LEGEND[0], _LOSS_LEGEND[3])),
        loss_chart=inline_svg(losses, "loss over steps"),
        again_section=_repeated_section(scene),
        timeline_words=escape(
            "; ".join(f"attempt {each.epoch}: {CAUSE_TEXTS.get(each.cause, each.cause)}" for each in usage.attempts)
            + "."
        ),
        timeline_key=_legend(_TIME_LEGEND),
        timeline=inline_svg(devices, "device allocation over time"),
        stopwatch_section=_recovery_section(scene),
        job_id=escape(usage.job_id),
        usage_words=escape(
            "The devices were virtual slots on CPUs."
            if usage.virtual
            else "All allocated devices, from placement to release."
        ),
        ledger=inline_svg(usage_bar(usage.gpu_seconds), "GPU time by category") + _legend(_USAGE_LEGEND),
        usage="".join(_row(label, value) for label, value in usage_rows(outcome)),
        sample_words=escape(
            f'A continuation of "def " by the model after {usage.steps_kept} training steps on Python source code.'
        ),
        sample=escape(outcome.sample) or "The job wrote no sample.",
        attempts=_attempts(outcome),
        history="".join(_event_rows(scene)),
        footer=f"Phalanx {escape(version)}. Run it again: <code>phalanx demo</code>. {escape(OTHER_SYSTEMS_NOTE)}.",
    )


def _title(scene: DemoState, outcome: DemoOutcome) -> str:
    kill = latest_job_kill(scene.kills)
    if outcome.failures:
        return "The demo failed"
    if kill is None or outcome.kill_to_first_step_s is None:
        return f"A model trained in {outcome.wall_s:.0f} s"
    return f"A node died; training continued {outcome.kill_to_first_step_s:.1f} s later"


def _tiles(outcome: DemoOutcome) -> str:
    usage = outcome.usage
    watch = outcome.kill_to_first_step_s
    tiles = [
        ("–" if watch is None else f"{watch:.1f} s", "from node failure to the next step"),
        (
            "–" if usage.goodput is None else f"{100 * usage.goodput:.0f} %",
            "goodput: allocated time that became kept steps",
        ),
        (f"{usage.steps_redone}", "repeated steps"),
        (f"{usage.overlapping_steps}", "steps computed by two attempts at once"),
        (f"{outcome.wall_s:.0f} s", "the whole demo"),
    ]
    return "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in tiles
    )


def _loss_words(outcome: DemoOutcome) -> str:
    text = f"{outcome.usage.steps_kept} steps of a byte-level GPT."
    if outcome.killed_at_step is not None:
        source = f"the checkpoint of step {outcome.resumed_from_step}" if outcome.resumed_from_step else "the start"
        text += f" The node died after step {outcome.killed_at_step}; the next attempt resumed from {source}."
    return text


def _repeated_section(scene: DemoState) -> str:
    redone = scene.curve.repeated_steps()
    if not redone:
        return ""
    words = compare_losses(redone) + " A resume with different data, weights or optimizer state would show here."
    drawn = inline_svg(repeated_steps_chart(redone), "losses of the repeated steps")
    return f"<section><h2>Repeated steps</h2><p>{escape(words)}</p>{drawn}</section>"


def _recovery_section(scene: DemoState) -> str:
    kill = latest_job_kill(scene.kills)
    if kill is None or kill.recovering:
        return ""
    words = "" if kill.to_running_s is None else f"all ranks restarted after {kill.to_running_s:.1f} s"
    figures = [
        ("Phalanx", kill.recovery_s(scene.now_s), words),
        *((peer.name, peer.seconds, "") for peer in OTHER_SYSTEMS),
    ]
    drawn = inline_svg(recovery_chart(figures), "time from node failure to the next step")
    return f"<section><h2>Time from node failure to the next step</h2><p>{escape(OTHER_SYSTEMS_NOTE)}.</p>{drawn}</section>"


def _attempts(outcome: DemoOutcome) -> str:
    head = "<tr><th>attempt</th><th>nodes and devices</th><th>steps</th><th>started from</th><th>allocated</th><th>end</th></tr>"
    body = []
    for each in outcome.usage.attempts:
        where = ", ".join(f"{share.node} [{', '.join(map(str, share.devices))}]" for share in each.nodes)
        steps = "none" if each.first_step is None else f"{each.first_step} to {each.last_step}"
        source = f"checkpoint of step {each.resumed_from_step}" if each.resumed_from_step else "scratch"
        held = "" if each.ended_s is None else f"{each.ended_s - each.placed_s:.1f} s"
        cells = (str(each.epoch), where, steps, source, held, CAUSE_TEXTS.get(each.cause, each.cause))
        body.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return head + "".join(body)


def _event_rows(scene: DemoState) -> Iterable[str]:
    events = [(line.at_s, plain_text(line.text), False) for line in scene.history]
    events += [
        (
            kill.at_s,
            f"{kill.node} killed by the {'user' if kill.by == 'visitor' else kill.by}: SIGKILL to all of its processes",
            True,
        )
        for kill in scene.kills
    ]
    for at_s, text, loud in sorted(events, key=lambda each: each[0]):
        yield f"<tr{' class=loud' if loud else ''}><td>{at_s - scene.started_s:.1f} s</td><td>{escape(text)}</td></tr>"


def _row(label: str, value: str) -> str:
    """Format label, amount and share as a table row."""
    amount, _, share = value.strip().partition("  ")
    kind = " class=sub" if label.startswith(" ") else ""
    return f'<tr{kind}><td>{escape(label.strip())}</td><td class="n">{escape(amount)}</td><td class="n">{escape(share.strip())}</td></tr>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return (
        '<div class="key">'
        + "".join(f'<span><i style="background:var(--{name})"></i>{escape(word)}</span>' for name, word in entries)
        + "</div>"
    )
