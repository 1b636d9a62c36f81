"""`phalanx rules`: shows the failure rules, and replaces the operators' own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.recovery.failure_rules import SIGNALS
from phalanx.wire.api.rules import RulesReply, RuleView

if TYPE_CHECKING:
    from phalanx.client import Client

_TEXT_MAX = 48  # columns; --json has the whole texts
_NAMES = {number: name for name, number in SIGNALS.items()}
_STYLES = {"user": "yellow", "infrastructure": "red", "preempted": "blue", "echo": "dim"}


@list_group("Show the failure rules; check and apply a file with your own.", subcommand="show")
def rules(head: Client, _now_s: float) -> ListView:
    """Show the active rules, in the order of evaluation."""
    found = head.rules()
    return ListView(
        value=found,
        lines=lambda screen: _lines(found, screen),
        next_command="phalanx rules apply FILE",
        notes=("whole conditions and sources: phalanx rules --json",),
    )


@rules.command()
@click.argument("file", type=str)
def check(file: str) -> None:
    """Check a rule file locally, without a head."""
    from phalanx.cli.cluster.rule_file import read_rule_file

    found = read_rule_file(file)
    print(f"{file}: {cells.count(len(found), 'rule')}, valid; next: phalanx rules apply {shlex.quote(file)}")


@rules.command()
@click.argument("file", type=str)
def apply(file: str) -> None:
    """Apply the rules of a file in place of those applied before. They precede the built-in rules (docs/recovery.md)."""
    from phalanx.cli.cluster.rule_file import read_rule_file

    reply = connect().put_rules(read_rule_file(file))
    own = sum(rule.own for rule in reply.rules)
    print(
        strip_control(f"{cells.count(own, 'rule')} of your own active, before {len(reply.rules) - own} built-in rules")
    )


def _lines(found: RulesReply, screen: Terminal) -> list[str]:
    columns = (
        Column(title="RULE", min_width=12),
        Column(title="CONDITIONS", min_width=20, max_width=_TEXT_MAX),
        Column(title="BLAME"),
        Column(title="REMEDY"),
        Column(title="CHARGED"),
        Column(title="MEANS", min_width=16, max_width=_TEXT_MAX, hide_empty=True, drop_order=2),
        Column(title="FROM", hide_empty=True, drop_order=1, min_width=12),
    )
    return table(columns, [_row(rule) for rule in found.rules], screen)


def _row(rule: RuleView) -> Sequence[Cell | str]:
    return [
        rule.name,
        rule_conditions(rule),
        Cell(rule.attribution.value, _STYLES[rule.attribution.value]),
        rule.remedy.value,
        "retry" if rule.charge.value == "retry" else "no progress",
        rule.says,
        "yours" if rule.own else _source_name(rule.source),
    ]


def _source_name(source: str) -> str:
    """Return the name of a source without its address and the place in it; --json has all."""
    return source.partition(" (")[0].partition(":")[0]


def rule_conditions(rule: RuleView) -> str:
    """Describe the conditions of a rule in one line."""
    found = [
        f"code {', '.join(map(str, rule.codes))}" if rule.codes else "",
        ", ".join(_NAMES.get(number, f"signal {number}") for number in rule.signals),
        f"XID {', '.join(map(str, rule.xids))}" if rule.xids else "",
        "out of memory" if rule.oom else "",
        rule.cause,
        f'"{rule.pattern}"' if rule.pattern else "",
    ]
    return " and ".join(filter(None, found))
