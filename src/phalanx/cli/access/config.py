"""`phalanx config`: the clusters that this user has saved, and which of them commands use."""

from __future__ import annotations

import os
import time

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import PATIENCE_S
from phalanx.cli.errors import warn
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.client.connection.clusters import SavedCluster, chosen_cluster, read_clusters, write_clusters
from phalanx.core.units import format_duration


@click.group(cls=CommandGroup, invoke_without_command=True)
@list_options
@click.pass_context
def config(context: click.Context, as_json: bool, watch: bool) -> None:
    """Saved clusters: list, use, show, rename or remove them. `phalanx login` saves one."""
    if context.invoked_subcommand is None:
        show_list(_list, as_json=as_json, watch=watch)


@config.command("list")
@list_options
def list_(as_json: bool, watch: bool) -> None:
    """List the saved clusters; * marks the one that commands use."""
    show_list(_list, as_json=as_json, watch=watch)


@config.command()
@click.argument("name", required=False)
@list_options
def show(name: str | None, as_json: bool, watch: bool) -> None:
    """Show a saved cluster, without its token: the one in use by default."""

    def fetch() -> ListView:
        chosen = read_clusters().require(name) if name is not None else chosen_cluster()
        if chosen is None:
            return ListView(value=None, lines=lambda _: ["no saved cluster in use"], next_command="phalanx config")
        value = _value(chosen)
        return ListView(value=value, lines=lambda _: [strip_control(f"{k + ':':<9}{v}") for k, v in value.items() if v])

    show_list(fetch, as_json=as_json, watch=watch)


@config.command()
@click.argument("name")
def use(name: str) -> None:
    """Let commands use the cluster NAME; `-` returns to the head of this machine."""
    saved = read_clusters()
    if name == "-":
        write_clusters(saved.with_current(""))
        print("commands use the head of this machine")
        return
    cluster = saved.require(name)
    write_clusters(saved.with_current(name))
    print(strip_control(f"commands use the cluster {name}: {cluster.url}"))
    for variable in ("PHALANX_URL", "PHALANX_HOME"):
        if os.environ.get(variable):
            print(f"note: {variable} is set, and goes before it")


@config.command("ssh")
@click.option("--print", "only_print", is_flag=True, help="Print the line for ~/.ssh/config instead of adding it.")
def ssh_(only_print: bool) -> None:
    """Let ssh, scp, rsync, git and editors reach jobs as 17.phalanx: include one file in ~/.ssh/config."""
    from phalanx.cli.sessions import ssh_files

    settings = ssh_files.settings_file()
    if only_print:
        print(f'Include "{settings}"')
        return
    path, changed = ssh_files.include_settings(settings)
    print(f"{path} {'now includes' if changed else 'already includes'} {settings}")
    if not ssh_files.is_read_by_ssh(path):
        warn(f"ssh reads the home of your account and not $HOME: use ssh -F {path}")
    print(f"next: ssh JOB{ssh_files.DOMAIN}")


@config.command()
@click.argument("name")
@click.option("--revoke", is_flag=True, help="Revoke the token first; the head must answer.")
def remove(name: str, revoke: bool) -> None:
    """Forget the cluster NAME and its token. Without --revoke the token stays valid."""
    saved = read_clusters()
    cluster = saved.require(name)
    if revoke and cluster.token:
        from phalanx.client import Client

        with Client(cluster.url, cluster.token, ca=cluster.ca, retry_limit_s=PATIENCE_S) as head:
            head.revoke_token(head.me().token_id)
    write_clusters(saved.without(name))
    ends = "its token is revoked" if revoke else "its token stays valid until it ends or is revoked"
    print(strip_control(f"cluster {name} removed; {ends}"))


@config.command()
@click.argument("name")
@click.argument("new")
def rename(name: str, new: str) -> None:
    """Call the cluster NAME by the name NEW."""
    write_clusters(read_clusters().renamed(name, new))
    print(strip_control(f"cluster {name} is now called {new}"))


def _list() -> ListView:
    saved, chosen, now_s = read_clusters(), chosen_cluster(), time.time()
    columns = (
        Column(title=""),
        Column(title="CLUSTER", min_width=8),
        Column(title="USER"),
        Column(title="TOKEN"),
        Column(title="URL", min_width=12),
    )
    rows: list[list[Cell | str]] = [
        ["*" if chosen is not None and chosen.name == one.name else "", one.name, one.user, _token(one, now_s), one.url]
        for one in saved.clusters.values()
    ]
    return ListView(
        value=[
            {**_value(one), "current": chosen is not None and chosen.name == one.name}
            for one in saved.clusters.values()
        ],
        lines=lambda screen: table(columns, rows, screen) if rows else ["no saved clusters"],
        next_command="phalanx config use NAME" if rows else "phalanx login https://gpu-head:7600",
    )


def _token(cluster: SavedCluster, now_s: float) -> Cell | str:
    if not cluster.token:
        return Cell("none", "yellow")
    if cluster.expires_s is None:
        return "valid"
    left_s = cluster.expires_s - now_s
    return f"for {format_duration(left_s)}" if left_s > 0 else Cell("ended", "red")


def _value(cluster: SavedCluster) -> dict[str, str]:
    shown = _token(cluster, time.time())
    return {
        "cluster": cluster.name,
        "url": cluster.url,
        "user": cluster.user,
        "token": shown if isinstance(shown, str) else shown.text,
        "ca": "saved" if cluster.ca else "",
    }
