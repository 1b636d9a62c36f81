"""The dashboard's benchmark: its output and its ranges. What it measures is for the benchmark to say."""

import json

from benchmarks import dashboard
from benchmarks.dashboard_fleet import list_requests

KEYS = ["first_view_ms", "usable_ms", "transfer_kb", "tick_ms", "list_p95_ms"]


def test_json_is_flat_has_its_keys_and_names_what_is_missed(capsys):
    ranges = json.loads(dashboard.RANGES.read_text(encoding="utf-8"))
    figures = [dashboard._ranged(key, [2.0, 1e4, 1.0], ranges) for key in KEYS[:-1]]
    figures.append(dashboard._ranged("list_p95_ms", [200.0], ranges))
    dashboard.print_figures(figures, {"nodes": 1000}, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [told[key] for key in KEYS] == [2.0, 2.0, 2.0, 2.0, 200.0]
    assert (told["nodes"], told["missed"]) == (1000, ["list_p95_ms"])


def test_every_range_says_where_its_bound_comes_from():
    for bound in json.loads(dashboard.RANGES.read_text(encoding="utf-8")).values():
        assert set(bound) == {"bound", "unit", "direction", "origin"}
        assert bound["direction"] == "at most"
        assert bound["origin"].startswith("design of the dashboard: ")


def test_lists_are_asked_for_in_every_order_alone_and_filtered():
    paths = list_requests(["run-1"])
    for sort in ("number", "name", "state", "user", "queue", "gpus"):
        assert sum(f"sort={sort}&" in path for path in paths) >= 14
    assert len(set(paths)) == len(paths)
