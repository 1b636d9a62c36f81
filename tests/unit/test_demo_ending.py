"""What stays of a demo: verdict, figures, the printed end and the page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from phalanx.cli.demo.charts import activity_spans
from phalanx.cli.demo.loss_curve import LossCurve
from phalanx.cli.demo.outcome import as_json, build_outcome, usage_rows
from phalanx.cli.demo.page import build_page
from phalanx.cli.demo.summary import result_lines, summary_lines
from phalanx.core.ids import Epoch
from phalanx.core.work.states import JobState
from tests.unit.demo_drawn import (
    END_S,
    KILLED,
    SAMPLE,
    SAVED,
    STEPS,
    make_outcome,
    make_scene,
    make_usage_summary,
    step_views,
)


def finished(**changes):
    scene = make_scene(END_S + 2.0)
    return scene, make_outcome(scene, **changes)


def text_of(lines):
    return "\n".join(line.plain for line in lines)


# ---- curve ------------------------------------------------------------------------------------------------------------


def test_a_step_told_twice_counts_once():
    curve = LossCurve()
    curve.add(step_views(10.0))
    curve.add(step_views(12.0))
    assert len(curve.steps) == len(step_views(12.0))


def test_steps_from_where_the_new_attempt_began_are_lost():
    curve = LossCurve()
    curve.add(step_views(END_S))
    kept, lost = curve.kept_and_lost()
    assert [point.step for point in kept] == list(range(1, STEPS + 1))
    assert [point.step for point in lost] == list(range(SAVED + 1, KILLED + 1))
    assert [each.step for each in curve.repeated_steps()] == list(range(SAVED + 1, KILLED + 1))


@pytest.mark.parametrize(("drift", "difference"), [(0.0, 0.0), (0.25, 0.25)])
def test_the_largest_difference_between_first_and_second_losses_is_told(drift, difference):
    curve = LossCurve()
    curve.add(step_views(END_S, drift=drift))
    assert curve.largest_difference() == pytest.approx(difference)


# ---- verdict ----------------------------------------------------------------------------------------------------------


def test_a_job_that_outlived_its_node_passes():
    _, outcome = finished()
    assert outcome.failures == ()
    assert (outcome.killed_at_step, outcome.resumed_from_step) == (KILLED, SAVED)
    assert outcome.kill_to_first_step_s == pytest.approx(4.28)
    assert f"step {KILLED}" in text_of(result_lines(outcome))


def test_a_job_that_failed_fails_the_demo():
    _, outcome = finished(state=JobState.FAILED)
    assert "ended as failed" in outcome.failures[0]
    assert text_of(result_lines(outcome)).startswith("demo failed: ")


def test_steps_made_by_two_attempts_at_once_fail_the_demo():
    late = [replace_step(step_views(END_S)[0], step=150, at_s=END_S)]
    _, outcome = finished(extra_steps=late)
    assert outcome.usage.overlapping_steps == 1
    assert "two attempts computed 1 steps" in outcome.failures[0]


def replace_step(view, *, step, at_s):
    return type(view)(
        epoch=Epoch(1),
        generation=view.generation,
        step=step,
        loss=1.0,
        at_s=view.at_s,
        begin_ns=round(at_s * 1e9),
        end_ns=round(at_s * 1e9),
    )


def test_a_demo_without_its_kill_fails_unless_none_was_wanted():
    scene, outcome = finished()
    scene.kills.clear()
    assert "no node was killed" in build_outcome(scene, outcome.usage, sample="", kill_wanted=True).failures[0]
    assert build_outcome(scene, outcome.usage, sample="", kill_wanted=False).failures == ()


def test_a_kill_with_no_step_after_it_fails_the_demo():
    scene, outcome = finished()
    alone = replace(outcome.usage, attempts=outcome.usage.attempts[:1])
    assert "no later attempt" in build_outcome(scene, alone, sample="", kill_wanted=True).failures[0]


# ---- figures ----------------------------------------------------------------------------------------------------------


def test_json_holds_the_promised_figures():
    scene, outcome = finished()
    record = json.loads(as_json(outcome, scene))
    assert record["causes"] == ["node_fail", "succeeded"]
    assert [attempt["cause"] for attempt in record["attempts"]] == record["causes"]
    assert (record["killed_at_step"], record["resumed_from_step"]) == (KILLED, SAVED)
    assert record["loss_first"] > record["loss_last"]
    assert 0 < record["goodput"] < 1
    assert record["wall_s"] == pytest.approx(END_S + 2.0, abs=0.01)
    assert record["overlapping_steps"] == 0
    assert record["kill_to_first_step_s"] == pytest.approx(4.28)


def test_every_part_of_the_bill_is_printed():
    _, outcome = finished()
    labels = [label.strip() for label, _ in usage_rows(outcome)]
    for word in ("used", "kept", "lost", "saving", "restarting", "idle", "goodput", "two attempts at once"):
        assert any(word in label for label in labels), word


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_end_fits_its_width_but_for_sentences(width):
    scene, outcome = finished()
    lines = summary_lines(scene, outcome, width=width)
    charts = [line for line in lines if "│" in line.plain]
    assert charts
    assert all(line.cell_len <= width for line in charts)


def test_where_there_is_no_unicode_the_charts_are_plain_ascii():
    scene, outcome = finished()
    drawn = text_of(
        line
        for line in summary_lines(scene, outcome, width=80, blocks=False)
        if line.plain.strip().startswith(("|", "5.", "1."))
    )
    assert "*" in drawn
    assert drawn.isascii()


def test_a_demo_without_a_kill_prints_no_stopwatch_and_no_second_losses():
    scene = make_scene(17.0)
    outcome = build_outcome(scene, make_usage_summary(scene), sample="", kill_wanted=False)
    printed = text_of(summary_lines(scene, outcome, width=80))
    assert "Repeated steps" not in printed
    assert "Slurm" not in printed


# ---- page -------------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects tags with their attributes, and sees that they nest."""

    VOID = frozenset({"meta", "line", "rect", "circle", "path", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID and (not self.open or self.open[-1] != tag):
            return
        assert self.open.pop() == tag


def page(**changes):
    scene, outcome = finished(**changes)
    return build_page(scene, replace(outcome, sample=SAMPLE), version="1.0", command="python train.py")


def test_page_needs_nothing_else():
    text = page()
    tags = Tags()
    tags.feed(text)
    assert not [
        tag
        for tag, attrs in tags.seen
        if tag in {"link", "script", "img", "iframe"} or {"src", "href", "srcset"} & attrs.keys()
    ]
    assert not re.search(r"url\([^#]|@import|https?://", text)


def test_page_is_well_formed_and_leaves_no_hole():
    tags = Tags()
    tags.feed(page())
    # A path holds a title, so its end tag is seen; what is left open are voids of HTML alone.
    assert [tag for tag in tags.open if tag not in {"path", "rect", "circle"}] == []
    assert "$" not in re.sub(r"<style>.*?</style>", "", page(), flags=re.DOTALL)


def test_page_is_light_and_dark():
    assert "prefers-color-scheme: dark" in page()


def test_page_escapes_what_the_model_wrote():
    assert "&lt;path&gt;" in page()
    assert "<path>" not in page()


def test_page_draws_kills_checkpoints_repeated_steps_and_each_device():
    text = page()
    for word in ("n1 killed", f"checkpoint of step {SAVED} published", "n0 device 1, attempt 1: starting", "300.0 s"):
        assert word in text, word
    dots = re.findall(r"<title>step (\d+): first [\d.]+, again", text)
    repeated = [str(step) for step in range(SAVED + 1, KILLED + 1)]
    assert dots == repeated * 2  # in the chart of the run and in their own


def test_page_of_a_failed_demo_says_so():
    text = page(state=JobState.FAILED)
    assert "The demo failed" in text
    assert "ended as failed" in text


def test_timeline_has_no_hole_between_placement_and_end():
    scene = make_scene(END_S + 2.0)
    for attempt in make_usage_summary(scene).attempts:
        pieces = activity_spans(attempt, end_s=END_S)
        assert pieces[0][1] == attempt.placed_s
        assert pieces[-1][2] == attempt.ended_s
        assert all(before[2] == after[1] for before, after in pairwise(pieces))
