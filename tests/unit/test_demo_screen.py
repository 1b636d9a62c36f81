"""The live view of a drawn demo, frame by frame."""

import pytest
from rich.cells import cell_len

from phalanx.cli.demo.live_screen import rate, render
from phalanx.cli.demo.state import DemoState
from phalanx.cli.demo.views import PlainDemoView, progress_line
from phalanx.core.ids import NodeId
from phalanx.core.state.history import HistoryLine
from tests.unit.demo_drawn import KILL_S, SAVED, STEPS, T, make_scene

FRAME = """\
 PHALANX   3 nodes x 4 virtual devices                                    00:19

 train-gpt  RUNNING  attempt 2  2 x 2 on n0 and n2  from step 111
 step 111/300 ━━━━━━━━━━━━━━━━━━───────────────────────────────  checkpoint 111
── loss ────────────────────────────────────────────────────────────────────────
5.50┤⠓⠦⣄⡀                               │n1 killed
3.85┤   ⠉⠙⠒⠤⣤⣀⡀                         │
    │        ⠈⠉⠑⠓⠲⠦⠤⣄⣀⣀⢀                │
2.21┤                  ⠉⠉⠙⠑⠒⠒⠲⠶⠶⠤⠤⠤⠤⣤⣤⣄⣀⡀
    └┬──────────────────────────────────┴─┬────────────────────────────────────┬
     1                                   150                                300
── nodes ───────────────────────────────────────────────────────────────────────
 n0   up   0 r0  ██▌░░░  42 1 r1  ███░░░  52 2 free           3 free
 n1   DOWN  killed
 n2   up   0 r2  ██▌░░░  42 1 r3  ███░░░  52 2 free           3 free
── time from node failure to the next step ─────────────────────────────────────
   Phalanx┤█ 1.6 s
     Slurm┤██████████████████████████████████████████████████████ 300 s
Kubernetes┤███████████████████████████████████████████████████████████████ 350 s
── events ──────────────────────────────────────────────────────────────────────
   5.1 s all 4 tasks run
  17.6 s n1 is lost: its supervisor died and nothing of it is left
  17.7 s attempt 2 placed on n0 and n2, from the checkpoint of step 111
 k kill a node   q quit"""


def text_of(scene, width=80, height=24):
    return "\n".join(line.plain.rstrip() for line in render(scene, width=width, height=height))


def test_frame_of_a_job_that_waits_for_its_second_first_step():
    assert text_of(make_scene(19.0)) == FRAME


@pytest.mark.parametrize("at_s", [0.0, 0.95, 3.0, 10.0, 17.45, 19.0, 25.0, 40.0])
@pytest.mark.parametrize(("width", "height"), [(60, 18), (80, 24), (109, 30), (110, 30), (140, 40), (200, 60)])
def test_every_frame_fits_the_terminal_exactly(at_s, width, height):
    lines = render(make_scene(at_s), width=width, height=height)
    assert len(lines) == height
    assert all(cell_len(line.plain) <= width and "\n" not in line.plain for line in lines)


def test_before_anything_is_known_there_is_a_frame():
    empty = DemoState(
        started_s=T,
        now_s=T,
        fleet="3 nodes x 4 virtual devices",
        steps_total=STEPS,
        activity="the cluster is coming up",
    )
    assert "the cluster is coming up" in text_of(empty)


def test_stopwatch_runs_until_the_next_step_and_then_stands():
    assert "1.6 s" in text_of(make_scene(KILL_S + 1.6))
    assert "4.3 s" in text_of(make_scene(KILL_S + 6.0))
    assert "4.3 s" in text_of(make_scene(KILL_S + 20.0))


def test_each_rank_is_shown_on_its_device():
    before, after = text_of(make_scene(10.0)), text_of(make_scene(25.0))
    row = {line.split()[0]: line for line in after.splitlines() if line.strip()}
    assert "r2" in next(line for line in before.splitlines() if line.startswith(" n1"))
    assert "DOWN" in row["n1"]
    assert "r2" in row["n2"]


def test_after_the_restart_the_step_goes_back_to_the_checkpoint():
    assert f"step {SAVED}/{STEPS}" in text_of(make_scene(19.0))


def test_the_visitor_is_asked_in_the_last_line():
    scene = make_scene(10.0)
    scene.prompt = "kill which node?   0 n0   1 n1   2 n2"
    assert text_of(scene).splitlines()[-1].strip() == scene.prompt


def test_a_stranger_cannot_move_the_cursor():
    scene = make_scene(10.0)
    scene.add_events([HistoryLine(seq=99, at_s=T + 9, kind="x", text="evil\x1b[2J\nline")])
    assert "\x1b" not in text_of(scene)


def test_wide_terminals_show_two_columns():
    lines = text_of(make_scene(19.0), 140, 40).splitlines()
    assert any("train-gpt" in line and "nodes" in line for line in lines)


def test_progress_in_one_line_names_step_loss_rate_and_devices():
    assert (
        progress_line(make_scene(10.0))
        == "step 50/300, loss 3.454, 25.6k tokens/s, devices n0:42%/52% n1:42%/52%, checkpoint 37"
    )


def test_rates_are_short():
    assert [rate(value) for value in (None, 950.0, 12_140.0, 3.4e6)] == ["?", "950", "12.1k", "3.4M"]


def test_plain_lines_never_go_back_in_time(capsys):
    scene, audience = make_scene(12.8), PlainDemoView()
    audience.show_message("step 40", scene)
    audience.show_event(HistoryLine(seq=1, at_s=T + 12.4, kind="checkpoint", text="checkpoint 40"), scene)
    audience.show_event(HistoryLine(seq=2, at_s=T + 13.0, kind="running", text="all tasks run"), scene)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["12.8", "12.8", "13.0"]


def test_plain_lines_tell_the_loss_of_a_node_once(capsys):
    scene, audience = make_scene(20.0), PlainDemoView()
    for at_s in (17.6, 40.0):
        for seq, (kind, word) in enumerate([("node_down", "down"), ("node_lost", "lost")]):
            line = HistoryLine(seq=seq, at_s=T + at_s, kind=kind, text=f"n1 is {word}: it died", node_id=NodeId("n1"))
            audience.show_event(line, scene)
    assert [line.split("s  ")[1] for line in capsys.readouterr().out.splitlines()] == ["n1 is down: it died"] * 2
