"""`phalanx simulate`, as typed."""

import gzip
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from phalanx.cli.root import main

HEADER = "job_id,submit_s,duration_s,num_gpus,gpu_type,vc,status"
KEYS = [
    "jobs",
    "avg_jct_s",
    "median_jct_s",
    "p99_jct_s",
    "avg_wait_s",
    "p99_wait_s",
    "avg_wait_large_s",
    "max_wait_s",
    "makespan_s",
    "utilization",
    "preemptions",
    "moves",
    "lost_gpu_s",
    "wall_s",
]  # the issue's


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
        (("--trace", "t.csv"), 64, "no fleet given"),
        (("--trace", "t.csv", "--nodes", "2"), 64, "no fleet given"),
        (("--trace", "t.csv", *FLEET, "--fleet", "n.csv"), 64, "exclude each other"),
        (("--trace", "t.csv", *FLEET, "--per-vc"), 64, "needs the virtual cluster of each node"),
        (("--trace", "t.csv", *FLEET, "--policy", "fofo"), 64, "unknown policy 'fofo'"),
        (("--trace", "t.csv", *FLEET, "--compare", "fifo,fofo"), 64, "unknown policy 'fofo'"),
        (
            ("--trace", "t.csv", *FLEET, "--policy", "sjf", "--durations", "limit"),
            64,
            "job a (line 2) has no time limit",
        ),
        (
            ("--trace", "t.csv", *FLEET, "--compare", "fifo,backfill", "--durations", "limit"),
            64,
            "job a (line 2) has no time limit",
        ),
        (
            ("--trace", "t.csv", *FLEET, "--policy", "srtf", "--durations", "predicted"),
            64,
            "srtf needs exact durations",
        ),
        (
            ("--trace", "t.csv", *FLEET, "--policy", "backfill", "--durations", "limit"),
            64,
            "job a (line 2) has no time limit",
        ),
        (("--trace", "none.csv", *FLEET), 78, "none.csv: no such file"),
        (("--trace", ".", *FLEET), 78, "is a folder"),
        (
            ("--trace", "bad.csv", *FLEET),
            78,
            "bad.csv: 2 bad rows: line 3: num_gpus must be at least 1; line 4: duration_s 'x' is not a number",
        ),
        (("--trace", "big.csv", *FLEET), 64, "job b (line 3)"),
        (("--trace", "empty.csv", *FLEET), 78, "empty.csv is empty"),
        (("--trace", "t.csv", "--fleet", "empty.csv"), 78, "empty.csv is empty"),
        (("--trace", "few.csv", *FLEET), 78, "few.csv: line 1 lacks the columns duration_s, num_gpus"),
        (("--trace", "noise.csv", *FLEET), 78, "noise.csv: byte 0 is not UTF-8 text"),
        (("--trace", "cut.csv.gz", *FLEET), 78, "cut.csv.gz: invalid gzip file"),
        (("--trace", "t.csv", "--nodes", "99999999", "--gpus-per-node", "8"), 64, "exceed the limit"),
        (("--trace", "t.csv", *FLEET, "--restart-cost", "nan"), 64, "is not a number of seconds"),
        (("--trace", "t.csv", *FLEET, "--plot", "nowhere/out.png"), 64, "folder nowhere does not exist"),
        (("--trace", "t.csv", *FLEET, "--plot", "out.jpg"), 64, "must end in .png, .svg or .pdf"),
        (("--trace", "t.csv", *FLEET, "--html", "."), 64, "--html . is a folder"),
        (("--trace", "t.csv", *FLEET, "--nodes", "0"), 64, "is not a fleet"),
    ],
)
def test_refusals_name_what_and_where(typed, words, code, said):
    trace("a,0,10,1,,,")
    trace("a,0,10,1,,,", "b,1,10,0,,,", "c,1,x,1,,,", name="bad.csv")
    trace("a,0,10,1,,,", "b,1,10,64,,,", name="big.csv")
    Path("empty.csv").write_text("\n")
    trace("a,0", name="few.csv", header="job_id,submit_s")
    Path("noise.csv").write_bytes(b"\xff\xfe\x00")
    Path("cut.csv.gz").write_bytes(gzip.compress(b"job_id,submit_s" * 9)[:20])
    got, out, err = typed(*words)
    assert (got, out) == (code, "")
    assert said in err


def test_skip_bad_leaves_out_rows_and_jobs_that_fit_nowhere_and_names_them(typed):
    trace("a,0,10,1,,,", "b,1,10,0,,,", "c,1,10,64,,,", name="bad.csv")
    code, out, err = typed("--trace", "bad.csv", *FLEET, "--skip-bad", "--json")
    figures = json.loads(out)
    assert (code, figures["jobs"], figures["bad_rows"], figures["jobs_left_out"]) == (0, 1, 1, 1)
    assert "skipped line 3 of bad.csv: num_gpus must be at least 1" in err
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


@pytest.mark.slow
@pytest.mark.parametrize(("policies", "series"), [("fifo", 2), ("fifo,sjf,skip", 3)])
def test_plot_is_a_light_picture_with_every_series_on_it(typed, policies, series):
    code, _, _ = typed("--trace", busy(), *FLEET, "--compare", policies, "--plot", "out.png")
    assert code == 0
    picture = Image.open("out.png").convert("RGB")
    assert picture.width == 2080
    assert 1500 < picture.height < 2500
    counts = {colour: count for count, colour in picture.getcolors(1 << 24) or ()}
    inks = [(0x2A, 0x6F, 0xD0), (0xE0, 0x93, 0x0A), (0x2E, 0x9C, 0x6A), (0xD8, 0x43, 0x3D)]
    assert [counts.get(ink, 0) > 1000 for ink in inks] == [number < series for number in range(4)]
    assert counts[255, 255, 255] > 0.5 * picture.width * picture.height


@pytest.mark.filterwarnings("error")
def test_plot_of_a_job_that_neither_ran_nor_waited_is_drawn_without_complaint(typed):
    code, _, err = typed(
        "--trace", trace("a,0,0,1,,,"), *FLEET, "--policy", "fifo", "--plot", "o.png", "--html", "o.html"
    )
    assert (code, err) == (0, "")
    assert Path("o.png").stat().st_size > 10_000


def test_plot_is_the_kind_of_file_that_its_name_says(typed):
    typed("--trace", busy(), *FLEET, "--policy", "fifo", "--plot", "out.svg")
    drawn = Path("out.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    assert "<svg" in drawn


def test_jobs_go_to_the_models_that_they_name_in_the_order_they_name_them(typed):
    trace("x,Tesla V100-SXM2,8", "y,P100,8", name="n.csv", header="node,gpu_type,gpus")
    both = ("a,0,100,8,v100|p100,,", "b,0,100,8,V100|P100,,")
    one = ("a,0,100,8,v100,,", "b,0,100,8,v100,,")
    waits = []
    for rows in (both, one):
        _, out, _ = typed("--trace", trace(*rows), "--fleet", "n.csv", "--policy", "fifo", "--json")
        waits.append(json.loads(out)["max_wait_s"])
    assert waits == [0.0, 100.0]


def test_model_that_the_fleet_has_not_is_refused_and_where_no_node_names_any_it_counts_for_nothing(typed):
    trace("x,T4,8", name="n.csv", header="node,gpu_type,gpus")
    rows = trace("a,0,100,8,,,", "b,0,100,8,h100|k80,,")
    code, _, err = typed("--trace", rows, "--fleet", "n.csv")
    assert code == 64
    assert "job b (line 3)" in err
    assert "this fleet has: t4" in err
    code, out, _ = typed("--trace", rows, "--fleet", "n.csv", "--skip-bad", "--policy", "fifo", "--json")
    assert (code, json.loads(out)["jobs_left_out"]) == (0, 1)
    code, out, _ = typed("--trace", rows, *FLEET, "--policy", "fifo", "--json")
    assert (code, json.loads(out)["jobs"]) == (0, 2)


def test_fractions_of_a_gpu_are_refused_by_line_and_left_out_on_demand(typed):
    rows = trace("a,0,10,0.46,,,", "b,0,10,1,,,")
    code, _, err = typed("--trace", rows, *FLEET)
    assert code == 78
    assert "line 2: num_gpus 0.46 is not an integer; only --inflate places parts of one GPU" in err
    code, out, _ = typed("--trace", rows, *FLEET, "--skip-bad", "--policy", "fifo", "--json")
    assert (code, json.loads(out)["jobs"], json.loads(out)["bad_rows"]) == (0, 1, 1)


def test_gzipped_trace_and_standard_input_are_read_as_the_plain_file(typed, monkeypatch):
    plain = Path(busy()).read_bytes()
    Path("t.csv.gz").write_bytes(gzip.compress(plain))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(plain)))
    figures = []
    for path in ("t.csv", "t.csv.gz", "-"):
        _, out, _ = typed("--trace", path, *FLEET, "--policy", "fifo", "--json")
        figures.append(json.loads(out)["avg_jct_s"])
    assert len(set(figures)) == 1


def test_json_is_alone_on_standard_output(typed):
    code, out, _ = typed("--trace", busy(), *FLEET, "--policy", "fifo", "--json", "--plot", "o.png", "--html", "o.html")
    assert code == 0
    assert json.loads(out)["jobs"] == 60


def test_page_needs_nothing_else_and_holds_both_themes(typed):
    typed("--trace", busy(), *FLEET, "--compare", "fifo,sjf", "--html", "out.html")
    page = Path("out.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "prefers-color-scheme: dark" in page
    assert "#2a6fd0" not in page.split("</style>", 1)[1]  # charts name colours of the theme
    assert ["Jobs waiting" in page, "hours since the first submit" in page, "99th percentile" in page] == [True] * 3
    assert not re.search(r"src=|href=\"[^#]|url\([^#]|https?:|\$[a-z]", page)


def test_progress_and_hints_stay_out_of_pipes(typed):
    _, out, err = typed("--trace", busy(), *FLEET, "--policy", "fifo")
    assert err == ""
    assert "\x1b" not in out
    assert "mean wait" in out


# ---- filling a fleet ------------------------------------------------------------------------------------------------

PARTS = ("a,0,,0.5,,,", "b,0,,1,,,", "c,0,,0,,,")


def test_a_fill_prints_the_share_of_each_seed(typed):
    words = ("--trace", trace(*PARTS), "--fleet", "2xv100:2,1xt4:1", "--inflate", "2")
    code, out, err = typed(*words, "--policy", "fgd", "--seeds", "3-4,9", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [one["seed"] for one in found["seeds"]] == [3, 4, 9]
    mean = sum(one["gpu_allocated_share"] for one in found["seeds"]) / 3
    assert found["gpu_allocated_share"] == pytest.approx(mean)
    assert 0.5 < mean <= 1.0
    assert found["trace_first"] is False
    _, out, _ = typed(*words, "--policy", "fgd", "--trace-first", "--json")
    assert json.loads(out)["trace_first"] is True
    code, out, _ = typed(*words, "--compare", "default,random")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["POLICY", "default", "random"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--inflate", "2", "--policy", "fifo"), "--inflate does not know the policy fifo"),
        (("--inflate", "2", "--seeds", "9-3"), "--seeds 9-3: 1 to 1000 seeds"),
        (("--inflate", "2", "--seeds", "x"), "'x' is not a seed"),
        (("--inflate", "2", "--html", "o.html"), "--html does not go with --inflate"),
        (("--seeds", "1"), "--seeds is for --inflate"),
        (("--trace-first",), "--trace-first is for --inflate"),
    ],
)
def test_what_a_fill_refuses(typed, words, said):
    code, _, err = typed("--trace", trace("a,0,5,1,,,"), "--fleet", "1xv100:2", *words)
    assert code == 64
    assert said in err


def test_a_family_is_drawn_by_its_seed_for_its_fleet(typed):
    words = ("--family", "few-classes", "--policy", "fifo", "--json")
    first, again, other = (json.loads(typed(*words, "--seed", seed)[1]) for seed in ("3", "3", "4"))
    assert (first["jobs"], first["gpus"], first["trace"]) == (3000, 64, "family few-classes, seed 3")
    assert first["avg_jct_s"] == again["avg_jct_s"] != other["avg_jct_s"]
    assert json.loads(typed(*words, "--nodes", "9", "--gpus-per-node", "8")[1])["gpus"] == 72


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--family", "steady", "--trace", "t.csv"), "exclude each other"),
        (("--family", "calm"), "steady"),
        (("--family", "steady", "--per-vc"), "virtual cluster"),
        ((), "--family steady"),
    ],
)
def test_a_family_is_refused_with_what_does_not_go_with_it(typed, words, shown):
    code, _, err = typed(*words)
    assert code == 64
    assert shown in err


def test_per_queue_shows_who_waited_while_whose_jobs_ran(typed):
    """One queue's long gang is first; the other's job waits for it."""
    rows = ("gang,0,3600,8,,big,", "small,10,900,8,,other,", "again,20,900,8,,other,")
    words = ("--trace", trace(*rows), "--nodes", "1", "--gpus-per-node", "8", "--policy", "fifo", "--per-queue")
    big, other = json.loads(typed(*words, "--json")[1])["queues"]
    assert (big["queue"], big["jobs"], big["gpu_h"], big["max_wait_s"]) == ("big", 1, 8.0, 0.0)
    assert (other["queue"], other["jobs"], other["gpu_share"], other["wait_share"]) == ("other", 2, 1 / 3, 1.0)
    assert (other["avg_wait_s"], other["max_wait_s"]) == ((3590.0 + 4480.0) / 2, 4480.0)
    _, out, _ = typed(*words)
    assert re.search(r"other +2 +4 +33\.3% +100\.0%", out)
