"""The rules in Debian's Prometheus: checked by promtool, and a node that stops and comes back, seen by a real Prometheus on a real head."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
from ruamel.yaml import YAML

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.prove,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no Prometheus here: make prometheus-tools"),
]
# Alert, series with their values each minute, minute at which it is looked for, and whose labels it then has; None if it must be silent.
PLAYED = [
    ("PhalanxNodeDown", {'phalanx_node_up{node="n0"}': "1 0 0 0"}, 3, {"node": "n0"}),
    ("PhalanxNodeDown", {'phalanx_node_up{node="n0"}': "1 0 0 1"}, 3, None),
    ("PhalanxNodeDown", {'phalanx_node_up{node="n0"}': "1 1 0"}, 2, None),
    ("PhalanxNoHead", {'phalanx_head_info{version="1",head_id="a"}': "1 stale _ _"}, 3, {}),
    ("PhalanxNodeFaulty", {'phalanx_node_cordoned{node="n0",by="phalanx"}': "1"}, 0, {"node": "n0", "by": "phalanx"}),
    ("PhalanxNodeFaulty", {'phalanx_node_cordoned{node="n0",by="operator"}': "1"}, 0, None),
    (
        "PhalanxNodeSendsNoSamples",
        {'phalanx_node_sample_age_seconds{node="n0"}': "400x9", 'phalanx_node_up{node="n0"}': "1x9"},
        8,
        {"node": "n0"},
    ),
    (
        "PhalanxNodeSendsNoSamples",
        {'phalanx_node_sample_age_seconds{node="n0"}': "400x9", 'phalanx_node_up{node="n0"}': "0x9"},
        8,
        None,
    ),
    ("PhalanxGpusHeldForNothing", {'phalanx_waste_alarm_gpus{kind="idle"}': "3"}, 0, {"kind": "idle"}),
    ("PhalanxGpusHeldForNothing", {'phalanx_waste_alarm_gpus{kind="broken"}': "3"}, 0, None),
    ("PhalanxJobsHang", {'phalanx_waste_alarms{kind="hung"}': "1"}, 0, {"kind": "hung"}),
    ("PhalanxJobsWaitBesideFreeGpus", {'phalanx_gpus{state="free_demand"}': "4x40"}, 35, {}),
    ("PhalanxJobsWaitBesideFreeGpus", {'phalanx_gpus{state="free_demand"}': "4x20 0x20"}, 35, None),
    ("PhalanxDiskFills", {"phalanx_disk_free_bytes": "9x20", "phalanx_disk_bytes": "100x20"}, 15, {}),
    ("PhalanxDiskFull", {"phalanx_disk_free_bytes": "9x20", "phalanx_disk_bytes": "100x20"}, 15, None),
    ("PhalanxHistoryFails", {"phalanx_history_failing": "1x20"}, 15, {}),
]


def test_rules_pass_promtool_and_start_and_end_as_they_say(tmp_path):
    shell = Shell(tmp_path)
    rules = tmp_path / "phalanx.rules.yml"
    rules.write_text(shell("monitoring", "rules").stdout)
    checked = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    severities = {
        rule["alert"]: rule["labels"]["severity"]
        for group in YAML(typ="safe").load(rules.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    played = tmp_path / "played.json"  # JSON is YAML
    tests = []
    for alert, series, minute, labels in PLAYED:
        expected = [] if labels is None else [{"exp_labels": {**labels, "severity": severities[alert]}}]
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) by (alertname)',
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] * bool(expected),
                    }
                ],
            }
        )
    played.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", played], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A server of its own, which reads a head each second."""

    def __init__(self, folder, shell):
        shell("users", "add", "prometheus", "--role", "viewer")
        token = folder / "token"
        token.write_text(shell("tokens", "add", "--user", "prometheus").stdout.split()[-1])
        (folder / "rules.yml").write_text(shell("monitoring", "rules").stdout)
        config = YAML(typ="safe").load(shell("monitoring", "scrape", "--token-file", str(token)).stdout)
        config |= {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml"]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "prometheus.log").open("w"),
        )

    def ask(self, path):
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def alerts(self):
        return {
            (alert["labels"]["alertname"], alert["labels"].get("node")): alert["state"]
            for alert in self.ask("alerts")["alerts"]
        }

    def value(self, expression):
        found = self.ask(f"query?query={urllib.parse.quote(expression)}")["result"]
        return float(found[0]["value"][1]) if found else None

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=60)


@pytest.fixture
def phalanx(tmp_path):
    shell = Shell(tmp_path)
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


@pytest.fixture
def prometheus(tmp_path, phalanx):
    folder = tmp_path / "prometheus"
    folder.mkdir()
    server = Prometheus(folder, phalanx)
    yield server
    server.close()


def eventually(condition, within_s=240.0):
    until = time.monotonic() + within_s
    while True:
        try:
            found = condition()
        except OSError:  # the server is not up yet
            found = None
        if found:
            return found
        assert time.monotonic() < until
        time.sleep(0.5)


def test_a_node_that_stops_is_pending_then_firing_then_resolved(phalanx, prometheus):
    eventually(lambda: prometheus.value("sum(phalanx_gpus)") == 4)
    assert [(target["health"], target["lastError"]) for target in prometheus.ask("targets")["activeTargets"]] == [
        ("up", "")
    ]
    eventually(lambda: prometheus.value("phalanx:gpus:sum") == 4)
    eventually(lambda: prometheus.alerts() == {})  # before its first scrape, no head answers
    phalanx("submit", "--gpus", "1", "--", "sleep", "600")
    eventually(lambda: prometheus.value("phalanx:gpus_held:ratio") == 0.25)
    stopped = phalanx.processes("phalanx.app.node", PHALANX_NODE_ID="n1")
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    alert = ("PhalanxNodeDown", "n1")
    try:
        eventually(lambda: prometheus.alerts().get(alert) == "pending")
        eventually(lambda: prometheus.alerts().get(alert) == "firing")
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: alert not in prometheus.alerts())
    assert prometheus.value('phalanx_node_up{node="n1"}') == 1


def test_a_token_that_is_revoked_ends_the_scrape(phalanx, prometheus):
    eventually(lambda: prometheus.value("phalanx_head_info") == 1)
    for token in phalanx.json("tokens"):
        if token["user"] == "prometheus":
            phalanx("tokens", "revoke", token["id"])
    found = eventually(lambda: [one for one in prometheus.ask("targets")["activeTargets"] if one["health"] == "down"])
    assert "401" in found[0]["lastError"]
