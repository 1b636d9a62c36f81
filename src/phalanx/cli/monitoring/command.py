"""`phalanx monitoring`: what Prometheus and Grafana need to watch a head."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import urlsplit

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.monitoring.board import board
from phalanx.cli.monitoring.rules import rule_groups
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import terminal
from phalanx.wire.metrics import FAMILIES


@click.group(cls=CommandGroup)
def monitoring() -> None:
    """Print what Prometheus and Grafana need to watch this head.

    docs/monitoring.md has the steps.
    """


@monitoring.command()
def rules() -> None:
    """Print alert and recording rules for Prometheus, as YAML.

    phalanx monitoring rules > /etc/prometheus/phalanx.rules.yml
    """
    _print_yaml(rule_groups())


@monitoring.command("board")
def print_board() -> None:
    """Print a board for Grafana 10 or newer, as JSON.

    phalanx monitoring board > phalanx.json
    """
    click.echo(json.dumps(board(), indent=2))


@monitoring.command()
@click.option(
    "--token-file",
    default="/etc/prometheus/phalanx.token",
    show_default=True,
    metavar="FILE",
    help="File with the token that Prometheus sends; its user needs the role viewer.",
)
def scrape(token_file: str) -> None:
    """Print the part of prometheus.yml that reads this head, as YAML."""
    with connect() as client:
        address = urlsplit(client.transport.url())
    job: dict[str, Any] = {
        "job_name": "phalanx",
        "scheme": address.scheme,
        "authorization": {"credentials_file": token_file},
        "static_configs": [{"targets": [address.netloc]}],
    }
    if address.scheme == "https":
        job["tls_config"] = {"ca_file": "/etc/prometheus/phalanx-ca.pem"}
    _print_yaml({"scrape_configs": [job]})


@monitoring.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def metrics(*, as_json: bool) -> None:
    """List the metrics that a head exports, with their labels."""
    families = FAMILIES.values()
    if as_json:
        click.echo(json.dumps([{"name": one.sample, "labels": one.labels, "text": one.text} for one in families]))
        return
    columns = [Column(title="METRIC"), Column(title="LABELS", min_width=12), Column(title="MEANING", min_width=30)]
    rows = [(one.sample, " ".join(one.labels), one.text) for one in families]
    for line in table(columns, rows, terminal()):
        click.echo(line)


def _print_yaml(content: dict[str, Any]) -> None:
    from ruamel.yaml import YAML

    writer = YAML()
    writer.width = 160
    writer.dump(content, sys.stdout)
