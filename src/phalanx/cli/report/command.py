"""`phalanx report KIND`: the group, and the table of its kinds. A new kind is a function with `report_kind` and one entry here."""

from __future__ import annotations

from typing import Final

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.report.cost import cost, invoice
from phalanx.cli.report.energy import energy
from phalanx.cli.report.failures import failures
from phalanx.cli.report.node_states import states
from phalanx.cli.report.own_or_rent import own_or_rent
from phalanx.cli.report.past_waste import past_waste
from phalanx.cli.report.tokens import tokens
from phalanx.cli.report.usage import usage

KINDS: Final[tuple[click.Command, ...]] = (
    usage,
    states,
    past_waste,
    energy,
    cost,
    invoice,
    tokens,
    failures,
    own_or_rent,
)


@click.group(cls=CommandGroup)
def report() -> None:
    """Report what the GPUs of the fleet were used for, and what they cost."""


for _kind in KINDS:
    report.add_command(_kind)
