"""`phalanx doctor`: checks this machine and its head. Each line is ok, warn or fail, with a fix."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx import __version__
from phalanx.cli import cells
from phalanx.cli.cluster.join_command import relay_fix, relay_problem
from phalanx.cli.cluster.machine_checks import Finding, Severity, run_machine_checks
from phalanx.cli.cluster.state_folder import (
    RecordedHead,
    find_local_head,
    home_folder,
    is_alive,
    listen_url,
    read_cluster_file,
)
from phalanx.cli.cluster.systemd_unit import HEAD_UNIT, NODE_UNIT, unit_state
from phalanx.cli.connection import PROBE_S, PROVIDER_ANSWER_S, connect
from phalanx.cli.list_output import to_json
from phalanx.cli.terminal import strip_control, terminal
from phalanx.client.connection.tls import fetch_ca
from phalanx.core.errors import BadRequest, NotFound, NotSignedIn, PhalanxError, TryLater, Unreachable
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import NodeState
from phalanx.core.units import format_bytes
from phalanx.core.work.users import UserRole
from phalanx.engines.registry import DEFAULT_ENGINE, engine_type
from phalanx.node import membership as records
from phalanx.ports.engine import Membership
from phalanx.web.command_hints import render_hint
from phalanx.wire.api.head import Health
from phalanx.wire.api.nodes import NodeView
from phalanx.wire.head_url import split_url

if TYPE_CHECKING:
    from phalanx.client import Client

_STYLE: Final = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "red"}
_PORT_DEFAULT: Final = 7600
_CHECK_FAILED: Final = 1  # exit code


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=_PORT_DEFAULT,
    show_default=True,
    help="The port that a head would use.",
)
def doctor(as_json: bool, port: int) -> int:
    """Check this machine and its head, and suggest fixes. Exits with 1 if a check failed."""
    screen, found = terminal(), []
    for finding in _all(home_folder(), port):
        found.append(finding)
        if not as_json:
            mark = screen.paint(f"{finding.level:<4}", _STYLE[finding.level])
            print(f"{mark}  {finding.what:<13} {strip_control(finding.says)}", flush=True)
            if finding.mend:
                print(f"{'':21}-> {strip_control(finding.mend)}", flush=True)
    failed = sum(finding.level is Severity.FAIL for finding in found)
    warned = sum(finding.level is Severity.WARN for finding in found)
    if as_json:
        print(to_json(found, indent=2))
    else:
        summary = (
            "no problems found"
            if not failed and not warned
            else f"{cells.count(failed, 'failure')}, {cells.count(warned, 'warning')}"
        )
        up_now = any(finding.what == "head" and finding.level is Severity.OK for finding in found)
        joined = any(finding.what == "joined" for finding in found)
        command = "nodes, on the head" if joined else "run --gpus 1 -- python train.py" if up_now else "up"
        print(f"{summary}; next: phalanx {command}")
    return _CHECK_FAILED if failed else 0


def _all(home: str, port: int) -> Iterator[Finding]:
    yield from run_machine_checks(home, port)
    yield from _unit_findings()
    yield from _engine_findings(home)
    yield from _head_findings(home)


def _unit_findings() -> Iterator[Finding]:
    """Check the system services of this machine; nothing where none is installed."""
    for unit in (HEAD_UNIT, NODE_UNIT):
        active, at_boot = unit_state(unit)
        if not active or (active == "inactive" and at_boot != "enabled"):
            continue
        level = Severity.FAIL if active == "failed" else Severity.OK if active == "active" else Severity.WARN
        mend = f"journalctl -u {unit}, then systemctl restart {unit}" if level is not Severity.OK else ""
        if level is Severity.OK and at_boot != "enabled":
            level, mend = Severity.WARN, f"it does not start at boot: systemctl enable {unit}"
        yield Finding(what="unit", level=level, says=f"{unit} is {active}, {at_boot or 'not installed'}", mend=mend)


def _engine_findings(home: str) -> Iterator[Finding]:
    """Check what the engine of this machine's head needs from its cluster; nothing for an engine that needs nothing."""
    stored = read_cluster_file(home)
    try:
        chosen = engine_type(str(stored.get("engine") or DEFAULT_ENGINE))
    except BadRequest as error:
        yield Finding(what="engine", level=Severity.FAIL, says=error.message, mend=render_hint(error.hint))
        return
    for check in chosen.diagnose(chosen.resolve({}, stored.get("engine_options") or {})):
        level = Severity.OK if check.ok else Severity.WARN if check.optional else Severity.FAIL
        yield Finding(what="engine", level=level, says=f"{chosen.title}: {check.says}", mend=check.mend)


def _head_findings(home: str) -> Iterator[Finding]:
    record = find_local_head(home)
    joined = (
        None if record is not None or os.environ.get("PHALANX_URL") else records.read(records.membership_folder(home))
    )
    if joined is not None:
        yield _membership(home, joined)
        return
    if record is None and not os.environ.get("PHALANX_URL"):
        yield Finding(what="head", level=Severity.WARN, says="no head runs here", mend="phalanx up")
        return
    try:
        head = connect()
        begun = time.monotonic()
        health = connect(0.0, PROBE_S).health()
        took_s = time.monotonic() - begun
    except NotSignedIn as error:
        yield _no_token(error)
        return
    except (Unreachable, BadRequest) as error:
        dead = record is not None and not is_alive(record.pid)
        yield Finding(
            what="head",
            level=Severity.FAIL,
            says="the head has died" if dead else error.message,
            mend="phalanx up"
            if dead
            else render_hint(error.hint)
            if record is None
            else _fix_for_silence(record, home),
        )
        return
    yield Finding(
        what="head",
        level=Severity.OK,
        says=f"{head.transport.url()} is {health.status}, answers in {took_s * 1000:.0f} ms",
    )
    yield _versions(health)
    try:
        yield _token(head)
        yield from _sign_in(connect(answer_timeout_s=PROVIDER_ANSWER_S))
        nodes = head.nodes()
        yield _nodes(nodes)
        yield from _node_versions(nodes, health.version)
        yield _history(head)
        if record is not None:
            yield _listen_address(home)
            yield from _relay(head)
            yield from _traces(home)
    except NotSignedIn as error:
        yield _no_token(error)
    except PhalanxError as error:
        yield Finding(what="head", level=Severity.FAIL, says=error.message, mend=render_hint(error.hint))


def _no_token(error: NotSignedIn) -> Finding:
    return Finding(
        what="token",
        level=Severity.FAIL,
        says=error.message,
        mend=render_hint(error.hint) or "set PHALANX_TOKEN, or ask an admin for one",
    )


def _membership(home: str, joined: Membership) -> Finding:
    """Check a server that joined a head on another machine: its keeper runs, and the head has the same CA."""
    says = f"this server is node {joined.node_id} of {joined.url}, at {joined.address}"
    if records.keeper_pid(records.membership_folder(home)) is None:
        return Finding(
            what="joined", level=Severity.FAIL, says=f"{says}; its keeper process is not running", mend="phalanx join"
        )
    _, name, port = split_url(joined.url)
    try:
        fetch_ca(name, port, joined.fingerprint)
    except PhalanxError as error:
        return Finding(
            what="joined", level=Severity.FAIL, says=f"{says}; {error.message}", mend=render_hint(error.hint)
        )
    return Finding(what="joined", level=Severity.OK, says=f"{says}; the head answers")


def _listen_address(home: str) -> Finding:
    """Report the address at which other servers can join this head."""
    listen = listen_url(home)
    if not listen:
        says = "other servers cannot join: the head listens on loopback only (phalanx up --listen ADDRESS)"
        return Finding(what="joining", level=Severity.OK, says=says)
    return Finding(
        what="joining",
        level=Severity.OK,
        says=f"other servers can join at {listen}; phalanx join --print prints the command for them",
    )


def _relay(head: Client) -> Iterator[Finding]:
    """Check the head's connection to its relay; nothing while there is one, and without a relay."""
    address, problem = relay_problem(head)
    if problem:
        says = f"no connection to {address}: {problem}; no other server can join, and those that have joined cannot reach the head"
        yield Finding(what="relay", level=Severity.FAIL, says=says, mend=relay_fix(address))


def _traces(home: str) -> Iterator[Finding]:
    """Report where traces of jobs go; nothing without a collector."""
    collector = str(read_cluster_file(home).get("otlp") or "off")
    if collector != "off":
        says = f"of ended jobs are sent to {collector}"
        yield Finding(what="traces", level=Severity.OK, says=says)


def _fix_for_silence(record: RecordedHead, home: str) -> str:
    """Return the fix for a head that is alive and does not answer: continue a stopped process, else read its log."""
    try:
        with open(f"/proc/{record.pid}/stat", encoding="ascii", errors="replace") as file:
            stopped = file.read().rpartition(")")[2].split()[:1] in (["T"], ["t"])
    except OSError:
        stopped = False
    return f"its process is stopped: kill -CONT {record.pid}" if stopped else f"see {home}/head.log"


def _versions(health: Health) -> Finding:
    if health.version == __version__:
        return Finding(what="versions", level=Severity.OK, says=f"head and command are both {__version__}")
    return Finding(
        what="versions",
        level=Severity.WARN,
        says=f"the head is {health.version}, this command is {__version__}",
        mend="phalanx down --keep-jobs, then phalanx up",
    )


def _token(head: Client) -> Finding:
    me = head.me()
    scope = f", restricted to {' '.join(me.scope)}" if me.scope else ""
    return Finding(what="token", level=Severity.OK, says=f"valid for user {me.user}, role {me.role}{scope}")


def _sign_in(head: Client) -> Iterator[Finding]:
    """Check the sign-in provider; nothing without one, and for who may not see it."""
    try:
        issuer = head.sign_in().issuer if head.me().role is UserRole.ADMIN else ""
        if not issuer:
            return
        head.check_sign_in()
    except NotFound:  # a head of an earlier release
        return
    except TryLater as error:
        yield Finding(
            what="sign-in", level=Severity.WARN, says=f"{error.message}; tokens are valid", mend="phalanx sign-in check"
        )
        return
    yield Finding(what="sign-in", level=Severity.OK, says=f"the provider {issuer} answers")


def _history(head: Client) -> Finding:
    status = head.history_status()
    if status.problem:
        return Finding(
            what="history",
            level=Severity.WARN,
            says=f"not stored: {status.problem}; jobs are not affected",
            mend="free some space, or see head.log",
        )
    return Finding(
        what="history", level=Severity.OK, says=f"{format_bytes(status.size_bytes)} of nodes, devices and jobs"
    )


def _node_versions(nodes: Sequence[NodeView], version: str) -> Iterator[Finding]:
    """Report nodes whose supervisor is of another release than the head; nothing without any."""
    others: dict[str, list[str]] = {}
    for node in nodes:
        if node.state is NodeState.UP and node.version not in ("", version):
            others.setdefault(node.version, []).append(str(node.id))
    if others:
        listed = "; ".join(f"{found} on {fold_hostlist(names)}" for found, names in sorted(others.items()))
        yield Finding(
            what="node versions",
            level=Severity.WARN,
            says=f"the head is {version}, nodes run {listed}",
            mend="once they are idle, phalanx down there, install the release, and the line of phalanx join --print",
        )


def _nodes(nodes: Sequence[NodeView]) -> Finding:
    """Report how many nodes are up, and warn of those that are down, cordoned or drained."""
    down = [node.id for node in nodes if node.state is NodeState.DOWN]
    closed = [node.id for node in nodes if node.state is not NodeState.DOWN and node.cordon is not None]
    devices = sum(len(node.devices) for node in nodes if node.state is NodeState.UP)
    says = f"{len(nodes) - len(down)} of {cells.count(len(nodes), 'node')} up, {cells.count(devices, 'device')}"
    if closed:
        says += f"; {len(closed)} cordoned or drained"
    if down or closed or not nodes:
        look = next(iter((*down, *closed)), "")
        mend = f"phalanx nodes show {look}" if look else "phalanx down, then phalanx up"
        return Finding(what="nodes", level=Severity.WARN, says=says, mend=mend)
    return Finding(what="nodes", level=Severity.OK, says=says)
