"""`phalanx rules`: files of rules, and what is refused of them with its line."""

import msgspec
import pytest

from phalanx.cli.cluster.rule_file import parse_rule_file
from phalanx.cli.cluster.rules import rule_conditions
from phalanx.core.errors import BadFile
from phalanx.core.recovery.failure_rules import parse_rules, rule_to_plain
from phalanx.core.work.failure import FailureAttribution, FailureReaction, RestartBudget
from phalanx.planner.facts.failure_rules import shipped_rules
from phalanx.wire.api.rules import RuleView

GOOD = """\
rules:
  - name: spot            # ours
    codes: [117]
    blame: preempted
    remedy: elsewhere
  - name: licence
    pattern: no licence*left | licence server
    signals: [SIGTERM, 9]
    blame: infrastructure
    remedy: here
    oom: true
    weight: 0.5
"""


def test_file_becomes_rules():
    first, second = parse_rule_file(GOOD, path="r.yaml")
    assert first == {"name": "spot", "codes": [117], "blame": "preempted", "remedy": "elsewhere"}
    assert (second["oom"], second["weight"]) == (True, 0.5)


REFUSED = [
    (GOOD.replace("codes: [117]", "code: 117"), "r.yaml:3: unknown key 'code'", "did you mean 'codes'?"),
    (
        GOOD.replace("remedy: here", "remedy: her"),
        "r.yaml:6: rule 2 (licence): remedy: 'her' is not one of",
        "did you mean 'here'?",
    ),
    (
        GOOD.replace("licence\n    pattern", "spot\n    pattern"),
        "r.yaml:6: spot is defined twice, here and on line 2",
        "",
    ),
    (GOOD.replace("oom: true", "oom: yes"), "r.yaml:6: rule 2 (licence): oom", ""),
    ("rule: []", "r.yaml:1: unknown key 'rule'", "did you mean 'rules'?"),
    ("- a\n- b", "r.yaml:1: a rule file has keys and values", "write rules:"),
    ("", "r.yaml:1: empty file", "write rules:"),
    ("rules: {a: 1}", "r.yaml:1: rules: expected a list of rules", ""),
    ("rules:\n  - 5\n", "rule 1: a table is required", ""),
    ("rules: [", "r.yaml:1: not YAML", ""),
    ("rules:\n  - &a {name: x}\n  - *a\n", "r.yaml:2: anchors and aliases are not allowed", ""),
    (
        "rules: !!python/object:os.system []",
        "r.yaml:1: the tag tag:yaml.org,2002:python/object:os.system is not allowed",
        "",
    ),
    ("rules:\n  - [[[[[[[[[1]]]]]]]]]\n", "r.yaml:2: nested more than 4 deep", ""),
    pytest.param("rules:\n" + "  - [1, 2, 3, 4]\n" * 6_000, "more than 32000 values", "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("text", "words", "hint"), REFUSED)
def test_wrong_file_is_refused_with_its_line(text, words, hint):
    with pytest.raises(BadFile) as refusal:
        parse_rule_file(text, path="r.yaml")
    assert words in refusal.value.message
    assert hint in refusal.value.hint


def test_every_shipped_rule_can_be_written_and_read_again():
    for rule in shipped_rules():
        (again,) = parse_rules([msgspec.json.decode(msgspec.json.encode(rule_to_plain(rule)))])
        assert rule_to_plain(again) == rule_to_plain(rule)


def test_signs_are_drawn_in_a_line():
    view = RuleView(
        name="r",
        attribution=FailureAttribution.USER,
        remedy=FailureReaction.STOP,
        charge=RestartBudget.RETRY,
        codes=[3, 4],
        signals=[11, 40],
        xids=[79],
        pattern="a*b",
        oom=True,
    )
    assert rule_conditions(view) == 'code 3, 4 and SIGSEGV, signal 40 and XID 79 and out of memory and "a*b"'
