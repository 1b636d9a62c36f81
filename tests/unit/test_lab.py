"""The lab's pure parts, and what is said where it cannot be built. The lab itself: tests/e2e/test_lab.py."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import rank_order
from tests.lab import needs, network


@pytest.fixture
def fresh():
    needs.why_not.cache_clear()
    yield
    needs.why_not.cache_clear()


def test_without_root_the_lab_says_so_in_one_line(fresh, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert needs.why_not() == "the lab needs root (network namespaces, character devices): run as root"


def test_a_program_that_is_missing_is_named_by_its_package(fresh, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    assert needs.why_not() == "the lab needs iproute2: `make lab` installs what is missing, on Debian"


def test_a_container_that_forbids_namespaces_is_quoted(fresh, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: f"/sbin/{program}")
    refusal = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refusal)
    assert needs.why_not().endswith("forbids the lab: unshare: unshare failed: Operation not permitted")


def test_the_benchmark_without_a_lab_says_why_and_ends_well(monkeypatch, capsys):
    monkeypatch.setattr(rank_order, "why_not", lambda: "the lab needs root")
    monkeypatch.setattr(sys, "argv", ["rank_order", "--json"])
    assert rank_order.main() == 0
    assert capsys.readouterr().out == "rank_order: skipped: the lab needs root\n"


def test_a_lossy_link_loses_what_its_host_is_sent_and_what_its_host_sends():
    losses = {0: 0.0, 1: 0.25}
    assert [" ".join(rule) for rule in network.drop_rules(1, losses)] == [
        "iptables -F INPUT",
        "iptables -A INPUT ! -i lo -m statistic --mode random --probability 0.250000 -j DROP",
    ]
    assert [" ".join(rule) for rule in network.drop_rules(0, losses)] == [
        "iptables -F INPUT",
        "iptables -A INPUT -s 10.77.0.2 -m statistic --mode random --probability 0.250000 -j DROP",
    ]


def test_both_ends_of_a_cable_are_shaped_alike():
    assert " ".join(network.shape_command("h0", 200.0)) == (
        "tc qdisc replace dev h0 root tbf rate 200000kbit burst 128kb latency 25ms"
    )
