"""`phalanx simulate`, as typed."""

import json
import re
import struct
import zlib
from pathlib import Path

import pytest

from phalanx.cli.root import main

HEADER = "job_id,submit_s,duration_s,num_gpus,gpu_type,vc,status"
KEYS = [
    "jobs", "avg_jct_s", "median_jct_s", "p99_jct_s", "avg_wait_s", "p99_wait_s", "avg_wait_large_s", "max_wait_s", "makespan_s",
    "utilization", "preemptions", "moves", "lost_gpu_s", "wall_s",
]  # fmt: skip  # the issue's


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))

    def run(*words):
        code = main(["simulate", *words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return run


def trace(*rows, name="t.csv", header=HEADER):
    with open(name, "w", encoding="utf-8") as file:
        file.write("\n".join((header, *rows)) + "\n")
    return name


def busy(rows=60):
    return trace(*(f"j{at},{at * 30},{300 + at % 7 * 100},{(1, 2, 8, 4)[at % 4]},,vc{at % 2}," for at in range(rows)))


FLEET = ("--nodes", "2", "--gpus-per-node", "8")


def test_json_has_the_keys_of_the_issue(typed):
    code, out, _ = typed("--trace", busy(), *FLEET, "--policy", "fifo", "--json")
    figures = json.loads(out)
    assert code == 0
    assert [key for key in KEYS if key not in figures] == []
    assert (figures["policy"], figures["jobs"], figures["gpus"], figures["preemptions"]) == ("fifo", 60, 16, 0)


def test_two_jobs_on_one_node_wait_as_reckoned_by_hand(typed):
    _, out, _ = typed(
        "--trace",
        trace("a,0,100,8,,,", "b,10,50,8,,,"),
        "--nodes",
        "1",
        "--gpus-per-node",
        "8",
        "--policy",
        "fifo",
        "--json",
    )
    figures = json.loads(out)
    assert (figures["avg_jct_s"], figures["avg_wait_s"], figures["max_wait_s"], figures["makespan_s"]) == (
        120.0,
        45.0,
        90.0,
        150.0,
    )
    assert figures["utilization"] == 1.0


def test_compare_sets_policies_side_by_side(typed):
    code, out, _ = typed("--trace", busy(), *FLEET, "--compare", "fifo,sjf,las")
    assert code == 0
    assert re.search(r"fifo +sjf +las", out)
    _, out, _ = typed("--trace", busy(), *FLEET, "--compare", "fifo, sjf", "--json")
    assert [each["policy"] for each in json.loads(out)] == ["fifo", "sjf"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--trace", "t.csv"), 64, "the fleet is missing"),
        (("--trace", "t.csv", "--nodes", "2"), 64, "the fleet is missing"),
        (("--trace", "t.csv", *FLEET, "--fleet", "n.csv"), 64, "contradict"),
        (("--trace", "t.csv", *FLEET, "--per-vc"), 64, "which node is whose"),
        (("--trace", "t.csv", *FLEET, "--policy", "fofo"), 64, "no policy 'fofo'"),
        (("--trace", "t.csv", *FLEET, "--compare", "fifo,fofo"), 64, "no policy 'fofo'"),
        (("--trace", "t.csv", *FLEET, "--policy", "sjf", "--durations", "limit"), 64, "sjf is a yardstick"),
        (("--trace", "t.csv", *FLEET, "--policy", "srtf", "--durations", "predicted"), 64, "srtf is a yardstick"),
        (("--trace", "t.csv", *FLEET, "--policy", "backfill", "--durations", "limit"), 64, "job a (line 2) has no time limit"),
        (("--trace", "none.csv", *FLEET), 78, "none.csv: there is no such file"),
        (("--trace", ".", *FLEET), 78, "is a folder"),
        (("--trace", "bad.csv", *FLEET), 78, "bad.csv: 2 bad rows: line 3: num_gpus 0 asks for no device; line 4: duration_s 'x' is not a number"),
        (("--trace", "big.csv", *FLEET), 64, "job b (line 3)"),
        (("--trace", "t.csv", *FLEET, "--nodes", "0"), 64, "is no fleet"),
    ],
)  # fmt: skip
def test_refusals_name_what_and_where(typed, words, code, said):
    trace("a,0,10,1,,,")
    trace("a,0,10,1,,,", "b,1,10,0,,,", "c,1,x,1,,,", name="bad.csv")
    trace("a,0,10,1,,,", "b,1,10,64,,,", name="big.csv")
    got, out, err = typed(*words)
    assert (got, out) == (code, "")
    assert said in err


def test_skip_bad_leaves_out_rows_and_jobs_that_fit_nowhere_and_names_them(typed):
    trace("a,0,10,1,,,", "b,1,10,0,,,", "c,1,10,64,,,", name="bad.csv")
    code, out, err = typed("--trace", "bad.csv", *FLEET, "--skip-bad", "--json")
    figures = json.loads(out)
    assert (code, figures["jobs"], figures["bad_rows"], figures["jobs_left_out"]) == (0, 1, 1, 1)
    assert "bad.csv: line 3: num_gpus 0 asks for no device" in err
    assert "job c (line 4)" in err


def test_virtual_clusters_run_on_their_own_nodes(typed):
    trace("n0,,8,red", "n1,,8,blue", name="n.csv", header="node,gpu_type,gpus,vc")
    rows = trace("a,0,100,8,,red,", "b,0,100,8,,red,", "c,0,100,8,,blue,")
    _, out, _ = typed("--trace", rows, "--fleet", "n.csv", "--policy", "fifo", "--json")
    assert json.loads(out)["max_wait_s"] == 100.0
    assert json.loads(out)["makespan_s"] == 200.0
    _, out, _ = typed("--trace", rows, "--fleet", "n.csv", "--policy", "fifo", "--per-vc", "--json")
    assert (json.loads(out)["avg_wait_s"], json.loads(out)["gpus"]) == (pytest.approx(100 / 3), 16)


def test_swf_is_read_with_its_limits(typed):
    with open("t.swf", "w", encoding="utf-8") as file:
        file.write(
            "; MaxNodes: 1\n1 0 0 100 8 0 0 8 500 0 0 1 1 1 1 1 -1 -1\n2 1 0 50 8 0 0 8 60 0 0 1 1 1 1 1 -1 -1\n"
        )
    code, out, _ = typed("--trace", "t.swf", *FLEET, "--policy", "backfill", "--durations", "limit", "--json")
    assert (code, json.loads(out)["jobs"]) == (0, 2)


def test_limit_jobs_takes_the_first(typed):
    _, out, _ = typed("--trace", busy(), *FLEET, "--limit-jobs", "5", "--policy", "fifo", "--json")
    assert json.loads(out)["jobs"] == 5


@pytest.mark.parametrize("policies", ["fifo", "fifo,sjf,skip"])
def test_plot_is_a_png_with_ink_on_it(typed, policies):
    code, _, _ = typed("--trace", busy(), *FLEET, "--compare", policies, "--plot", "out.png")
    raw = Path("out.png").read_bytes()
    assert code == 0
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    wide, tall = struct.unpack(">II", raw[16:24])
    body = raw[raw.index(b"IDAT") + 4 : raw.index(b"IEND") - 8]
    pixels = zlib.decompress(body)
    assert len(pixels) == tall * (wide * 3 + 1)
    assert bytes.fromhex("2a6fd0") in pixels  # the first series


def test_page_needs_nothing_else_and_holds_both_themes(typed):
    typed("--trace", busy(), *FLEET, "--compare", "fifo,sjf", "--html", "out.html")
    page = Path("out.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(src|href)=|https?:|\$[a-z]", page)


def test_progress_and_hints_stay_out_of_pipes(typed):
    _, out, err = typed("--trace", busy(), *FLEET, "--policy", "fifo")
    assert err == ""
    assert "\x1b" not in out
    assert "mean wait" in out
