"""`phalanx up`: starts a head on this machine, in its own session, and waits until it is ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.cells import count
from phalanx.cli.cluster.join_command import fetch_join_command, relay_fix, relay_problem
from phalanx.cli.cluster.state_folder import (
    find_local_head,
    home_folder,
    is_alive,
    listen_url,
    own_node_names,
    read_cluster_file,
    read_head_file,
    shares_files,
)
from phalanx.cli.cluster.systemd_unit import lasting_python, system_head_unit, system_service_of, systemd_unit
from phalanx.cli.connection import connect, probe_head_id
from phalanx.cli.errors import warn
from phalanx.cli.option_types import DURATION
from phalanx.cli.terminal import strip_control
from phalanx.client.input_files import read_database_url
from phalanx.core.errors import BadFile, BadRequest, Conflict, NotSignedIn, PhalanxError, TryLater, Unreachable
from phalanx.core.fleet.node import NodeState
from phalanx.engines.registry import DEFAULT_ENGINE, engine_type, selectable_engines
from phalanx.ports.provider import EnginePools
from phalanx.wire.api.nodes import NodeView

if TYPE_CHECKING:
    from phalanx.client import Client

_DISK_LEAST_BYTES: Final = 1 << 20
_REFUSALS: Final = {
    int(kind.exit_code): kind for kind in (BadRequest, BadFile)
}  # errors of the head that are reported unchanged
_READY_S: Final = 60.0  # a head with 10,000 jobs loads in 2 s; thirty times that for a busy machine
_ANSWER_S: Final = 5.0  # for the answer of a running head, which may be starting or busy
_NODES_S: Final = 10.0  # for the nodes to register; the head is ready without them
_LEADER_S: Final = 30.0  # for a leader election: the last leader may have died without ending its term
_POLL_S: Final = 0.03
_RELAY_S: Final = 3.0  # for the first connection to the relay: some tries of the head
_MEMBERS_MAX: Final = 8  # joined servers named in a warning
_PORT_DEFAULT: Final = 7600  # DESIGN 4


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all engines to the command, in their order."""
    for option in reversed([option for engine in selectable_engines() for option in engine.options]):
        command = click.option(f"--{option.name}", metavar=option.metavar, help=option.help)(command)
    return command


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help=f"Port on 127.0.0.1. Default: that of the last start, or {_PORT_DEFAULT}.",
)
@click.option(
    "--listen",
    metavar="ADDR[:PORT]",
    help="Address of this machine at which other servers can join, with TLS; off: none.",
)
@click.option(
    "--relay",
    metavar="HOST:PORT",
    help="Relay at which other servers can join, for a head that they cannot reach (docs/relay.md); off: none.",
)
@click.option(
    "--relay-key",
    callback=lambda _context, _option, text: text if text in {None, "off"} else os.path.abspath(text),
    metavar="FILE",
    help="Copy of the key file of that relay; off: relay.key in the state folder.",
)
@click.option(
    "--store",
    metavar="URL",
    help="postgresql://USER@HOST/DB shared by several heads, a leader and standbys; @FILE reads the URL from FILE; off: SQLite.",
)
@click.option(
    "--files", metavar="DIR", help="Directory shared by those heads for the files of jobs; off: a folder of each head."
)
@click.option(
    "--virtual",
    metavar="NxD",
    help="N virtual nodes of D devices; ranks run on CPUs. Nxh100:D+mig: they stand in for H100s with MIG on; none: no node here, servers join.",
)
@click.option(
    "--offers",
    metavar="NAME=N,...",
    help="What each node offers besides: scratch=2TiB,nic=8. Jobs ask with --resources; off: nothing.",
)
@click.option(
    "--engine",
    type=click.Choice([engine.name for engine in selectable_engines()]),
    help="Source of the nodes: this machine, Ray, Slurm or Kubernetes.",
)
@click.option(
    "--jobs-as",
    type=click.Choice(["owner", "head"]),
    help="For a head of root: jobs run as the account of their owner, or as root.  [owner]",
)
@_engine_options
@click.option(
    "--print",
    "prints",
    is_flag=False,
    flag_value="rights",
    type=click.Choice(["rights", "all"]),
    help="Only print what an administrator of the engine's cluster has to grant; all: also what runs the head in that cluster.  [rights]",
)
@click.option("--foreground", is_flag=True, help="Run in the foreground; Ctrl-C stops the head.")
@click.option("--systemd", is_flag=True, help="Only print a systemd unit of this user.")
@click.option(
    "--system", is_flag=True, help="With --systemd: print the unit of a head for many users, as account phalanx."
)
@click.option(
    "--lease",
    type=float,
    metavar="SECONDS",
    help="Time without contact to the head after which a node freezes its jobs.",
)
@click.option("--token-life-max", metavar="TIME", help="Maximum lifetime of tokens, for example 30d; off: no limit.")
@click.option(
    "--otlp",
    metavar="URL",
    help="OpenTelemetry collector that receives a trace of each ended job, for example http://127.0.0.1:4318; off: none.",
)
@click.option(
    "--secrets-key",
    callback=lambda _context, _option, text: text if text in {None, "off"} else os.path.abspath(text),
    help="File with the keys that encrypt secrets, the same on all heads of a database; off: one of this head.",
)
@click.option(
    "--programs-port",
    metavar="PORT",
    help="Port for pages of web programs of jobs (docs/sessions.md); any: a free one; off: none.  [the port + 100]",
)
@click.option(
    "--programs-host",
    metavar="NAME",
    help="Domain whose names all lead to this head: each web program has a name of its own below it; off: none.",
)
@click.option(
    "--policy",
    metavar="NAME",
    help="Scheduling policy: default, throughput, fifo, skip, backfill, las, fair, makespan or MODULE:CLASS.",
)
@click.option("--min-run", type=DURATION, help="Minimum run time before preemption by jobs of equal rank.  [30m]")
@click.option(
    "--min-run-by-right", type=DURATION, help="The same for a higher priority, or the owner of the quota.  [1m]"
)
@click.option(
    "--min-stay", type=DURATION, help="Minimum time between two moves or resizes of a job.  [by what a move costs it]"
)
@click.option(
    "--preemption/--no-preemption", default=None, help="Whether running jobs are stopped or moved for others."
)
def up(prints: str | None, foreground: bool, systemd: bool, system: bool, **given: Any) -> None:
    """Start a cluster on this machine, with its GPUs, or with virtual devices if it has none. Idempotent."""
    home = home_folder()
    if prints:
        _print_engine_setup(home, given, head=prints == "all")
        return
    _export_store_url(given.pop("store"))
    arguments = _arguments(given)
    if systemd:
        _print_unit(home, arguments, system=system)
        return
    if system:
        raise BadRequest("--system only works together with --systemd", hint="phalanx up --systemd --system")
    url = _running(home)
    if url is not None:
        if arguments:
            warn("the head is already up, and the options were ignored; run phalanx down first")
        _print_summary(connect(), url, "is up already")
        return
    _refuse_if_joined(home)
    if unit := system_service_of(home):
        raise Conflict(f"{home} belongs to the service {unit}", hint=f"systemctl start {unit}")
    if foreground:
        print("the head runs in the foreground; Ctrl-C stops it", file=sys.stderr, flush=True)
        os.environ["PHALANX_HOME"] = home
        os.execv(sys.executable, _command(arguments))  # noqa: S606  # no shell is wanted
    listened = _stored_address(home)
    url = _start(home, arguments)
    head = connect(retry_limit_s=_LEADER_S)
    _wait_for_membership(head, home)
    _wait_for_nodes(head, own_node_names(home), engine_type(given["engine"] or DEFAULT_ENGINE).nodes_start_s)
    _print_summary(head, url, "is up")
    _warn_members(head, listened, _stored_address(home))


def _stored_address(home: str) -> str:
    """Return the relay of the last head of this folder, else what it listened on; empty if neither."""
    stored = read_cluster_file(home)
    found = [str(stored.get(name) or "off") for name in ("relay", "listen")]
    return next((one for one in found if one != "off"), "")


def _print_engine_setup(home: str, given: Mapping[str, Any], *, head: bool) -> None:
    """Print what the engine needs from its cluster; with `head`, also what runs the head there.

    Raises:
        BadRequest: the engine needs nothing.
    """
    stored = read_cluster_file(home)
    chosen = engine_type(given["engine"] or str(stored.get("engine") or DEFAULT_ENGINE))
    named = {option.name: given[option.name.replace("-", "_")] for option in chosen.options}
    previous = stored.get("engine_options") if stored.get("engine") == chosen.name else None
    text = chosen.setup_text(
        chosen.resolve({key: value for key, value in named.items() if value is not None}, previous), head=head
    )
    if not text:
        raise BadRequest(f"the engine {chosen.name} needs nothing from an administrator")
    print(text, end="")


def _print_unit(home: str, arguments: list[str], *, system: bool) -> None:
    """Print a unit on stdout, and what to do with it on stderr."""
    if os.environ.get("PHALANX_STORE"):
        where = "write PHALANX_STORE=URL into /etc/phalanx/head.env (mode 0600)"
        saved = "run phalanx up --store once, which saves it in the state folder"
        warn(f"--store is a secret and not in the unit: {where if system else saved}")
    if system:
        print(system_head_unit(python=lasting_python(), arguments=arguments), end="")
        path, control = "/etc/systemd/system/phalanx-head.service", "systemctl"
        account = "useradd --system --home-dir /var/lib/phalanx --shell /usr/sbin/nologin phalanx, then "
    else:
        print(systemd_unit(python=lasting_python(), home=home, arguments=arguments), end="")
        path, control, account = "~/.config/systemd/user/phalanx.service", "systemctl --user", ""
    name = os.path.basename(path).removesuffix(".service")
    print(f"next: save it as {path}, then {account}{control} enable --now {name}", file=sys.stderr)


def _warn_members(head: Client, before: str, now: str) -> None:
    """If the address for other servers changed: name the joined servers, which know the old one."""
    if before in ("", "off", now):
        return
    members = [node.id for node in head.nodes() if engine_type(node.engine).members_follow]
    if not members:
        return
    follow = f"run on each: phalanx join {now}" if now not in ("", "off") else "they need a head with --listen"
    names = ", ".join(members[:_MEMBERS_MAX]) + (", ..." if len(members) > _MEMBERS_MAX else "")
    warn(
        f"{count(len(members), 'joined server')} ({names}) only know the old address {before}; {follow}. Their jobs continue"
    )


def _export_store_url(given: str | None) -> None:
    """Pass the database URL to the head in its environment: every user of the machine can read arguments.

    Raises:
        BadFile: the file with the URL cannot be read.
        BadRequest: the URL in the command has a password.
    """
    if given is None:
        return
    if _has_password(given):
        raise BadRequest(
            "--store contains a password, which every user of this machine can read in the process list",
            hint="put the URL into a file (mode 0600) and use --store @FILE, or set PHALANX_STORE",
        )
    if given.startswith("@"):
        given = read_database_url(given[1:])
    os.environ["PHALANX_STORE"] = given


def _has_password(given: str) -> bool:
    try:
        from phalanx.store.sql.postgres.address import has_password
    except ImportError:  # psycopg is missing: the head reports it
        return False
    return given.startswith(("postgresql://", "postgres://")) and has_password(given)


def _refuse_if_joined(home: str) -> None:
    """Check that this server is not a node of another head: two heads would allocate the same GPUs.

    Raises:
        Conflict: it is one.
    """
    from phalanx.node import membership as records

    folder = records.membership_folder(home)
    joined = records.read(folder)
    if joined is not None and records.keeper_pid(folder) is not None:
        raise Conflict(
            f"this server is node {joined.node_id} of the head at {joined.url}, which uses its GPUs",
            hint="leave that head with phalanx down on this server",
        )


def _arguments(given: Mapping[str, Any]) -> list[str]:
    """Convert the options to arguments of the head. For missing options, the head uses the stored values."""
    if given["policy"] is not None:
        from phalanx.core.scheduling.settings import check_live_policy

        check_live_policy(given["policy"])
    arguments: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _command(arguments: list[str]) -> list[str]:
    # -P: modules in the current folder must not shadow ours.
    return [sys.executable, "-P", "-m", "phalanx.app.head", *arguments]


def _running(home: str) -> str | None:
    """Return the URL of this folder's head if it runs and answers, else None.

    Raises:
        TryLater: its process runs but does not answer.
    """
    record = find_local_head(home)
    if record is None or not is_alive(record.pid):
        return None
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until:
        head_id = probe_head_id(record.url)
        if head_id and head_id == (record.head_id or head_id):
            return record.url
        if not is_alive(record.pid):
            return None
        time.sleep(0.1)
    # The pid may belong to another process by now: then the lock is free, and a new head may start.
    if _lock_is_free(home):
        return None
    raise TryLater(f"the head (pid {record.pid}) runs but does not answer at {record.url}", hint=f"see {home}/head.log")


def _lock_is_free(home: str) -> bool:
    import fcntl

    try:
        with open(
            os.open(os.path.join(home, "head.lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK), "rb+", buffering=0
        ) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _start(home: str, arguments: list[str]) -> str:
    """Start the head, wait until it is ready, and return its URL.

    Raises:
        PhalanxError: the head exited; the message has its last line of output.
        TryLater: the head is not ready in time; it continues to start.
    """
    fresh = not os.path.isdir(home)
    os.makedirs(home, mode=0o700, exist_ok=True)
    output = os.path.join(home, "head.out")
    with open(os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "rb+") as out:
        child = subprocess.Popen(
            _command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=home,
            env={**os.environ, "PHALANX_HOME": home},
        )
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        record = read_head_file(home)
        if record is not None and record.pid == child.pid and probe_head_id(record.url) == record.head_id:
            return record.url
        code = child.poll()
        if code is not None:
            refusal = _exit_error(output, code)
            # The head exited before it stored anything: remove the new folder, unless a head of a concurrent `phalanx up` uses it.
            if fresh and _lock_is_free(home) and not os.path.exists(os.path.join(home, "phalanx.db")):
                shutil.rmtree(home, ignore_errors=True)
            raise refusal
        time.sleep(_POLL_S)
    raise TryLater(
        f"the head (pid {child.pid}) is not ready after {_READY_S:.0f} s; it is still starting",
        hint=f"see {home}/head.log",
    )


def _exit_error(output: str, code: int) -> PhalanxError:
    """Return the error that the head printed last, in the format of this command."""
    with open(output, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-65536:].splitlines() if line.strip()]
    if not lines and shutil.disk_usage(output).free < _DISK_LEAST_BYTES:  # even the error found no room
        return TryLater(
            f"the head did not start: the disk of {os.path.dirname(output)} is full", hint="free some space"
        )
    last = lines[-1] if lines else f"exit code {code}"
    message, _, hint = last.removeprefix("phalanx: error: ").partition(" (")
    hint = hint.removesuffix(")")
    kind = _REFUSALS.get(code)
    if kind is not None:
        return kind(message, hint=hint)
    return Unreachable(f"the head did not start: {message}", hint=hint or f"its output is in {output}")


def _wait_for_membership(head: Client, home: str) -> None:
    """With several heads: wait until the leader lists this head and accepts this folder's token.

    Raises:
        PhalanxError: no head leads.
    """
    record = read_head_file(home)
    if record is None or not record.role:
        return
    ours = {record.url, listen_url(home)}
    until = time.monotonic() + _NODES_S
    while True:
        try:
            if any(one.url in ours for one in head.heads().heads):
                return
        except NotSignedIn:
            if time.monotonic() > until:
                raise
        if time.monotonic() > until:
            return
        time.sleep(_POLL_S * 4)


def _wait_for_nodes(head: Client, names: set[str], limit_s: float = _NODES_S) -> None:
    """Wait until the nodes that this head starts have registered. Other known nodes may never return."""
    stored = read_cluster_file(home_folder())
    if not names and (stored.get("virtual") == "none" or _nodes_come_for_jobs(stored)):
        return
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        nodes = head.nodes()
        up_now = {node.id for node in nodes if node.state is NodeState.UP}
        awaited = names or {node.id for node in nodes if node.state is not NodeState.DOWN}
        if up_now and awaited <= up_now:
            return
        time.sleep(_POLL_S * 2)


def _nodes_come_for_jobs(stored: Mapping[str, Any]) -> bool:
    """Whether the engine has only node pools that start nodes for jobs."""
    chosen = engine_type(str(stored.get("engine") or DEFAULT_ENGINE))
    pools = chosen.pools(stored.get("engine_options") or {}) if isinstance(chosen, EnginePools) else ()
    return bool(pools) and not any(pool.min_nodes for pool in pools)


def _print_summary(head: Client, url: str, what: str) -> None:
    nodes = head.nodes()
    print(f"Phalanx {what}: {url}")
    _print_heads(head)
    for node in nodes:
        print(strip_control(f"  {_node_line(node)}"))
    if not nodes:
        print("  no node has joined yet")
    _print_relay_problem(head)
    line = fetch_join_command(head)
    if line is not None:
        print(f"on the next server: {line}")
    stored = read_cluster_file(home_folder())
    if not nodes and stored.get("virtual") == "none" and not _nodes_come_for_jobs(stored) and not head.pools():
        print(f"next: phalanx {'nodes' if line is not None else 'up --listen ADDRESS'}")
    else:
        print(f"next: phalanx run --gpus {_first_request(nodes)} -- python train.py")


def _print_relay_problem(head: Client) -> None:
    """Print that no server can join while the head has no connection to its relay, which it may get within its first tries."""
    if str(read_cluster_file(home_folder()).get("relay") or "off") == "off":
        return
    until = time.monotonic() + _RELAY_S
    while (found := relay_problem(head))[1] and time.monotonic() < until:
        time.sleep(_POLL_S)
    address, problem = found
    if problem:
        print(
            strip_control(
                f"  no connection to the relay {address}: {problem}; no other server can join until there is one"
            )
        )
        print(strip_control(f"  {relay_fix(address)}"))


def _first_request(nodes: Sequence[NodeView]) -> str:
    """Return `1`, or the first MIG profile where all GPUs have MIG mode on, so that none is granted as a whole."""
    devices = [device for node in nodes for device in node.devices]
    divided = [device.mig for device in devices if device.mig is not None and device.mig.on and device.mig.profiles]
    return divided[0].profiles[0].name if divided and len(divided) == len(devices) else "1"


def _print_heads(head: Client) -> None:
    """With several heads: print the leader, and which files a takeover would not have."""
    known = head.heads().heads
    if not known:
        return
    leader = next((one for one in known if one.role == "leader"), None)
    others = sum(one.role == "standby" for one in known)
    which = "none yet" if leader is None else leader.url
    print(strip_control(f"  heads that share its store: {len(known)}; leader: {which}; standbys: {others}"))
    home = home_folder()
    if not shares_files(home):
        print(
            "  logs, outputs, uploads and stored checkpoints stay with the head that received them; --files DIR shares them"
        )
    if not listen_url(home):
        print("  without --listen, only heads and nodes on this machine can reach this head")


def _node_line(node: NodeView) -> str:
    model = node.devices[0].model if node.devices else ""
    count = len(node.devices)
    virtual = f"{count} virtual {'device' if count == 1 else 'devices'}"
    devices = f"{count} x {model}" if model and not node.virtual else virtual if count else "no devices"
    return f"{node.id}: {devices}, {node.cpus} CPUs, {node.state}"
