"""Alert rules and the board name only metrics and labels that a head exports, and commands that exist."""

import itertools
import re

import click
import pytest

from phalanx.cli.monitoring.board import board
from phalanx.cli.monitoring.rules import ALERTS, RECORDED, rule_groups
from phalanx.cli.root import COMMANDS, LazyGroup
from phalanx.wire.metrics import FAMILIES

SAMPLES = {family.sample: family for family in FAMILIES.values()}
EXPRESSIONS = [
    *(rule.expression for rule in (*RECORDED, *ALERTS)),
    *(target["expr"] for panel in board()["panels"] for target in panel["targets"]),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_exported_metrics_and_their_labels(expression):
    names = re.findall(r"\b(?:phalanx|DCGM)_\w+", expression)
    assert names
    assert set(names) <= SAMPLES.keys()
    known = {label for name in names for label in SAMPLES[name].labels}
    asked = re.findall(r"(\w+)=~?\"", expression)
    asked += [label for group in re.findall(r"(?:by|on) \((.*?)\)", expression) for label in group.split(", ")]
    assert set(asked) <= known


def test_texts_of_alerts_name_labels_of_their_metric():
    for rule in ALERTS:
        known = {
            label for name in re.findall(r"\b(?:phalanx|DCGM)_\w+", rule.expression) for label in SAMPLES[name].labels
        }
        assert set(re.findall(r"\$labels\.(\w+)", rule.summary + rule.text)) <= known, rule.name


def test_texts_of_alerts_name_commands_that_exist():
    for rule in ALERTS:
        for verb, word in re.findall(r"phalanx ([a-z]+)(?: ([a-z]+))?", rule.text):
            assert verb in COMMANDS, rule.name
            group = LazyGroup(name="phalanx")
            command = group.get_command(click.Context(group), verb)
            assert not word or word in getattr(command, "commands", [word]), rule.text


def test_alerts_have_names_of_their_own_and_known_severities():
    names = [rule.name for rule in ALERTS]
    assert len(set(names)) == len(names)
    assert {rule.severity for rule in ALERTS} == {"critical", "warning", "info"}
    assert [len(group["rules"]) for group in rule_groups()["groups"]] == [len(RECORDED), len(ALERTS)]


def test_panels_do_not_overlap_and_stay_on_the_board():
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    boxes = [panel["gridPos"] for panel in panels]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for one, other in itertools.combinations(boxes, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
