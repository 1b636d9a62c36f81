"""Output of many ranks: whole lines under their rank, no line lost or mixed, nothing that steers the reader's screen."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.jobs.log_printer import LogPrinter
from phalanx.cli.terminal import Terminal

PIPE = Terminal(width=10_000, height=24, interactive=False, colour=False, blocks=True)
TTY = Terminal(width=80, height=24, interactive=True, colour=True, blocks=True)


def written(pieces, *, prefix=True, screen=PIPE):
    out = io.StringIO()
    output = LogPrinter(prefix=prefix, out=out, screen=screen)
    for stream, text in pieces:
        output.write(1, stream, text)
    output.finish()
    return out.getvalue()


def test_lines_of_ranks_never_mix():
    assert written([("rank-0", "he"), ("rank-1", "a\nb"), ("rank-0", "llo\n"), ("rank-1", "c\n")]) == (
        "[rank 1] a\n[rank 0] hello\n[rank 1] bc\n"
    )


def test_an_unfinished_line_is_printed_at_the_end():
    assert written([("rank-3", "no newline")]) == "[rank 3] no newline\n"


def test_one_task_goes_out_as_it_comes():
    assert written([("rank-0", "50%\r"), ("rank-0", "100%\n")], prefix=False) == "50%\r100%\n"


def test_a_progress_bar_shows_its_last_state():
    assert written([("rank-0", "10%\r50%\r100%\n")]) == "[rank 0] 100%\n"
    assert written([("rank-0", "text\r\n")]) == "[rank 0] text\n"


def test_notes_of_supervisors_carry_their_stream():
    assert written([("supervisor-1", "froze\n")]) == "[supervisor 1] froze\n"


def test_the_screen_is_not_steered_and_colours_stay():
    text = "\x1b[2J\x1b[H\x1b]0;title\x07\x1b[1A\x1b[31mred\x1b[0m\x1b[?1049h!\n"
    assert written([("rank-0", text)], screen=TTY) == "\x1b[36m[rank 0]\x1b[0m \x1b[31mred\x1b[0m!\x1b[0m\n"
    assert written([("rank-0", text)]) == f"[rank 0] {text}"  # a file gets what was written


def test_a_line_without_end_is_not_held_for_ever():
    shown = written([("rank-0", "x" * 50_000), ("rank-0", "y" * 50_000)])
    assert shown == "[rank 0] " + "x" * 50_000 + "y" * 50_000 + "\n"


def test_a_new_attempt_is_announced(capsys):
    out = io.StringIO()
    output = LogPrinter(prefix=True, out=out, screen=PIPE)
    output.write(1, "rank-0", "cut sh")
    output.write(2, "rank-0", "again\n")
    assert out.getvalue() == "[rank 0] cut sh\n[rank 0] again\n"
    assert capsys.readouterr().err == "--- attempt 2 ---\n"


LINE = st.text(st.characters(exclude_characters="\r\n\x1b", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.tuples(st.integers(0, 3), LINE), max_size=30), st.randoms(use_true_random=False))
def test_however_it_is_cut_every_line_arrives_once_and_in_order(lines, chance):
    streams = {rank: "".join(text + "\n" for owner, text in lines if owner == rank) for rank in range(4)}
    pieces = []
    while any(streams.values()):
        rank = chance.choice([rank for rank, rest in streams.items() if rest])
        size = chance.randint(1, 5)
        pieces.append((f"rank-{rank}", streams[rank][:size]))
        streams[rank] = streams[rank][size:]
    shown = written(pieces).split("\n")[:-1]
    for rank in range(4):
        prefix = f"[rank {rank}] "
        assert [line.removeprefix(prefix) for line in shown if line.startswith(prefix)] == [
            text for owner, text in lines if owner == rank
        ]


@pytest.mark.parametrize(
    "planted",
    [
        "\x1b]0;title\x07",
        "\x1b]52;c;cm0gLXJmIH4=\x07",
        "\x1b]8;;http://evil\x1b\\",
        "\x1b[6n",
        "\x1b[c",
        "\x1b[>c",
        "\x1b[5i",
        "\x1bP$q\x1b\\",
        "\x1b_cmd\x1b\\",
        "\x1bc",
        "\x1b[2J",
        "\x1b[H",
        "\x1b[10;10H",
        "\x1b[?1049h",
        "\x1b[?1000h",
        "\x1b[20t",
        "\x1b#8",
        "\x1b(0",
        "\x1b7",
        "\x9b6n",
        "\x9d0;t\x9c",
        "\x1b[!p",
    ],
)
@pytest.mark.parametrize("prefix", [True, False])
def test_no_task_masters_the_readers_terminal_also_when_it_has_it_for_itself(planted, prefix):
    shown = written([("rank-0", f"a{planted}b\n")], prefix=prefix, screen=TTY)
    assert not re.search(r"\x1b(?!\[[0-9;]*m)|[\x80-\x9f\x07]", shown)
    for cut in range(1, len(planted)):  # the same in two pieces
        shown = written([("rank-0", "a" + planted[:cut]), ("rank-0", planted[cut:] + "b\n")], prefix=prefix, screen=TTY)
        assert not re.search(r"\x1b(?!\[[0-9;]*m)|[\x80-\x9f\x07]", shown), cut


PIECES = [*"\x1b[]152;JnmKAca>?P\\ \x07\x05\b\x85\x9b\r\n"]
TRICKS = [
    "\x1b\x1b[2J[2J",
    "\x1b\x85]52;c;ZXZpbA==\x07",
    "\x1b\x1b]x\x07[6n",
    "\x1b[\x1b[2J2J",
    "\x1b[1\x052J",
    "a\x05b",
    "\x1b[>4;1m",
    "\x1b[?4m",
]
# Of escapes those that begin neither a colour nor, where the screen is the task's own, what a bar draws with; and all other control.
FORBIDDEN = {
    True: re.compile(r"\x1b(?!\[[0-9:;]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"),
    False: re.compile(r"\x1b(?!\[[0-9:;]*[A-GKm])|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"),
}
PLAIN = Terminal(width=80, height=24, interactive=True, colour=False, blocks=True)  # no colours of ours


@given(st.lists(st.sampled_from([*PIECES, *TRICKS]), max_size=24).map("".join), st.integers(0, 24), st.booleans())
def test_what_is_taken_out_never_joins_its_neighbours_to_a_sequence(text, cut, prefix):
    whole = written([("rank-0", text)], prefix=prefix, screen=PLAIN)
    halves = [("rank-0", half) for half in (text[:cut], text[cut:]) if half]
    assert not FORBIDDEN[prefix].search(whole)
    assert written(halves or [("rank-0", "")], prefix=prefix, screen=PLAIN) == whole
    shown = re.sub(r"(?m)^\[rank 0\] ", "", whole)
    assert written([("rank-0", shown)], prefix=prefix, screen=PLAIN) == whole  # cleaning twice is cleaning once


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sequence_hidden_in_another_is_not_shown(trick, prefix):
    """Found by reading: what was taken out of the middle left an escape and `[2J` side by side."""
    for cut in range(len(trick) + 1):
        shown = written([("rank-0", trick[:cut]), ("rank-0", trick[cut:] + "\n")], prefix=prefix, screen=PLAIN)
        assert "\x1b" not in shown, cut
        assert not FORBIDDEN[prefix].search(shown), cut


def test_a_rank_does_not_draw_over_its_label():
    assert written([("rank-0", "\b" * 9 + "[rank 1] x\n")], screen=PLAIN) == "[rank 0] [rank 1] x\n"


def test_half_a_sequence_does_not_wait_for_the_next_attempt():
    out = io.StringIO()
    output = LogPrinter(prefix=False, out=out, screen=PLAIN)
    output.write(1, "rank-0", "a\x1b[3")
    output.write(2, "rank-0", "1m, b\n")
    assert out.getvalue() == "a\n1m, b\n"


def test_a_progress_bar_that_draws_over_its_lines_still_does():
    bar = "\r\x1b[K\x1b[32m50%\x1b[0m\x1b[1A\x1b[2C\t\x1b[38:2::1:2:3m|\b/\x1b[m\r\n"
    assert written([("rank-0", bar)], prefix=False, screen=TTY) == bar
    assert written([("rank-0", "50\x1b["), ("rank-0", "K%\n")], prefix=False, screen=TTY) == "50\x1b[K%\n"
