"""`phalanx simulate --pools`: cost and wait without and with renting."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from phalanx.cli.root import main
from phalanx.core.errors import BadFile
from phalanx.core.fleet.node_pool import PaidBy
from phalanx.simulator.pool_file import parse_pool_file

FLEET = ("--nodes", "1", "--gpus-per-node", "8")
POOLS = "pools:\n  cloud: {node: 8, max: 3, price: 16, boot: 5m, idle: 10m}\n"


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    rows = [f"j{at},{at * 600},{3600 + at % 5 * 600},{(8, 4, 2)[at % 3]}" for at in range(40)]
    Path("t.csv").write_text("\n".join(["job_id,submit_s,duration_s,num_gpus", *rows]) + "\n", encoding="utf-8")

    def run(pools, *words, code=0):
        Path("pools.yaml").write_text(pools, encoding="utf-8")
        assert main(["simulate", "--trace", "t.csv", *FLEET, "--pools", "pools.yaml", *words]) == code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return shown.out if not code else shown.err

    return run


def both(typed, pools, *words):
    plain, renting = json.loads(typed(pools, "--json", *words))
    assert (plain["rents"], renting["rents"], plain["rented_usd"]) == (False, True, 0.0)
    return plain, renting


def test_renting_shortens_waits_and_costs_what_the_nodes_were_charged(typed):
    plain, renting = both(typed, POOLS)
    assert renting["avg_wait_s"] < plain["avg_wait_s"] / 2.0
    assert renting["jobs"] == plain["jobs"] == 40
    assert renting["rented_usd"] == pytest.approx(renting["rented_gpu_s"] / 8 / 3600 * 16)
    assert renting["rented_nodes"] >= 1
    assert renting["utilization"] <= 1.0


def test_a_rule_that_rents_nothing_changes_no_start(typed):
    for rule in ("never", "when wait > 1000d and price < 0.01"):
        plain, renting = both(typed, f"burst: {rule}\n{POOLS}", "--limit-jobs", "20")
        same = {name: value for name, value in renting.items() if name not in ("rents", "wall_s")}
        assert same == {name: value for name, value in plain.items() if name not in ("rents", "wall_s")}, rule


def test_a_longer_wait_in_the_rule_rents_less(typed):
    costs = [both(typed, f"burst: when wait > {wait}\n{POOLS}")[1]["rented_usd"] for wait in ("10m", "3h", "12h")]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_caps_bound_the_rent(typed):
    _, free = both(typed, POOLS)
    _, one = both(typed, POOLS.replace("idle: 10m", "idle: 10m, cap: 16"))
    assert 0.0 < one["rented_usd"] < free["rented_usd"]
    _, month = both(typed, POOLS.replace("idle: 10m", "idle: 10m, month-cap: 20"))
    assert month["rented_nodes"] == 1
    _, none = both(typed, POOLS.replace("idle: 10m", "idle: 10m, month-cap: 0"))
    assert none["rented_usd"] == 0.0


def test_paid_hours_are_charged_whole(typed):
    _, hours = both(typed, POOLS.replace("idle: 10m", "billed: hour"))
    assert hours["rented_usd"] % 16.0 == pytest.approx(0.0, abs=1e-6)
    assert hours["rented_usd"] >= hours["rented_gpu_s"] / 8 / 3600 * 16


def test_rules_of_virtual_clusters_decide_for_their_jobs(typed):
    text = Path("t.csv").read_text(encoding="utf-8").splitlines()
    rows = [f"{text[0]},vc", *(f"{row},{'ab'[at % 2]}" for at, row in enumerate(text[1:]))]
    Path("t.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    _, all_rent = both(typed, POOLS)
    _, one_rents = both(typed, f"queues: {{a: never}}\n{POOLS}")
    _, none_rents = both(typed, f"queues: {{a: never, b: never}}\n{POOLS}")
    assert none_rents["rented_usd"] == 0.0 < one_rents["rented_usd"] < all_rent["rented_usd"]


def test_table_and_picture_show_the_rent(typed):
    shown = typed(POOLS, "--plot", "out.png", "--html", "out.html")
    assert re.search(r"rent, US dollars +0 +\d", shown)
    assert "default, renting" in shown
    with Image.open("out.png") as drawn:
        assert drawn.size[1] > 900  # four charts
    assert "rented GPUs over time" in Path("out.html").read_text(encoding="utf-8")


def test_a_file_is_read_with_all_its_keys():
    plan = parse_pool_file(
        "burst: when wait > 2h and price < 40\nqueues: {x: never}\npools:\n"
        "  a: {node: 'h100:4', min: 1, max: 9, price: $12.5/h, boot: 90s, idle: 1m, cap: 100, month-cap: 5000, billed: hour}\n",
        path="p.yaml",
    )
    (one,) = plan.pools
    pool = one.pool
    assert [(queue.id, str(queue.burst)) for queue in plan.queues] == [
        ("default", "when wait > 2h and price < 40"),
        ("x", "never"),
    ]
    assert (len(pool.template.devices), pool.min_nodes, pool.max_nodes, pool.price_per_h) == (4, 1, 9, 12.5)
    assert (one.boot_s, pool.idle_s, pool.cap_per_h, pool.cap_per_month) == (90.0, 60.0, 100.0, 5000.0)
    assert pool.billed is PaidBy.HOUR


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pools: {}", "no pools"),
        ("pools:\n  a: {node: 8, max: 2}", "p.yaml:2: pool a: price is missing"),
        ("pools:\n  a: {node: eight, max: 2, price: 1}", "not a number of GPUs"),
        ("pools:\n  a: {node: 8, max: 2, price: 1, boots: 5m}", "unknown key 'boots'"),
        ("pools:\n  a: {node: 8, max: 999, price: 1}", "0 to 999 nodes"),
        ("pools:\n  a: {node: 8, max: 2, price: -1}", "not an amount"),
        ("pools:\n  a: {node: 8, max: 2, price: 1, billed: day}", "neither second nor hour"),
        ("burst: sometimes\npools:\n  a: {node: 8, max: 2, price: 1}", "p.yaml:1: burst: 'sometimes' is not a rule"),
        ("queues: {default: never}\npools:\n  a: {node: 8, max: 2, price: 1}", "has the rule of the file"),
    ],
)
def test_a_wrong_file_names_the_line(text, says):
    with pytest.raises(BadFile, match=re.escape(says)):
        parse_pool_file(text, path="p.yaml")


def test_pools_need_one_fleet(typed):
    Path("fleet.csv").write_text("node,gpus,vc\nn0,8,a\n", encoding="utf-8")
    Path("p.yaml").write_text(POOLS, encoding="utf-8")
    words = ["simulate", "--trace", "t.csv", "--fleet", "fleet.csv", "--per-vc", "--pools", "p.yaml"]
    assert main(words) == 64
