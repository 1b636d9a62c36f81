"""`phalanx up`: a head on this machine, in a session of its own; back when it is ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.cluster.home import alive, fleet, home_folder, listens, recorded, running, shares_files
from phalanx.cli.cluster.joinline import line_of
from phalanx.cli.cluster.unit import unit
from phalanx.cli.connect import connect, healthy
from phalanx.cli.faults import warn
from phalanx.cli.terminal import clean
from phalanx.cli.words import DURATION
from phalanx.client.given import address_in
from phalanx.core.errors import BadFile, BadRequest, Conflict, NotSignedIn, PhalanxError, TryLater, Unreachable
from phalanx.core.fleet.node import NodeState
from phalanx.wire.api.nodes import NodeView

if TYPE_CHECKING:
    from phalanx.client import Client

_REFUSALS: Final = {int(kind.exit_code): kind for kind in (BadRequest, BadFile)}  # ours to say as they are
_READY_S: Final = 60.0  # a head with 10,000 jobs loads in 2 s; a busy machine gets thirty times that
_ANSWER_S: Final = 5.0  # for a head that runs to answer: it may be starting, or busy for a moment
_NODES_S: Final = 10.0  # for the nodes to say hello; the head is ready without them
_NODES_OF_S: Final = {"ray": 60.0}  # Ray's own processes take 5 to 10 s a machine before ours begin
_LEADER_S: Final = 30.0  # for one of several heads to lead: the one before may have left its term without a word
_POLL_S: Final = 0.03
_PORT_DEFAULT: Final = 7600  # DESIGN 4


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help=f"On 127.0.0.1; {_PORT_DEFAULT}, or that of the last time.",
)
@click.option(
    "--listen",
    metavar="ADDR[:PORT]",
    help="Let other servers join, with TLS, at this address of the machine; off: no longer.",
)
@click.option(
    "--store",
    metavar="URL",
    help="postgresql://USER@HOST/DB that several heads share: one leads, the others stand by. @FILE reads it from there; off: alone again.",
)
@click.option("--files", metavar="DIR", help="For what jobs write, shared by those heads; off: each head's own folder.")
@click.option("--virtual", metavar="NxD", help="N virtual nodes of D devices: ranks run on CPUs, all else is real.")
@click.option(
    "--engine", type=click.Choice(["local", "ray", "slurm"]), help="What brings the nodes: this machine, Ray, or Slurm."
)
@click.option(
    "--jobs-as",
    type=click.Choice(["owner", "head"]),
    help="Started by root: jobs run as their owner's account, or all as root.  [owner]",
)
@click.option("--ray-address", metavar="HOST:PORT", help="The Ray cluster that is there; own: one of our own again.")
@click.option(
    "--ray-redis", metavar="HOST:PORT", help="Of our own Ray: its head keeps what it knows there; off: no longer."
)
@click.option("--partition", metavar="NAME", help="Of Slurm; its default one otherwise.")
@click.option("--account", metavar="NAME", help="Who pays in Slurm.")
@click.option("--qos", metavar="NAME", help="Slurm's quality of service.")
@click.option("--foreground", is_flag=True, help="Stay; Ctrl-C stops the head.")
@click.option("--systemd", is_flag=True, help="Print a unit for systemd and do nothing.")
@click.option("--lease", type=float, metavar="SECONDS", help="How long a node may be silent before its jobs freeze.")
@click.option("--token-life-max", metavar="TIME", help="Longest life that a token may be given, as 30d; off: no bound.")
@click.option("--policy", metavar="NAME", help="Who goes first: default, fifo, skip, backfill, las or fair.")
@click.option("--min-run", type=DURATION, help="A job that started runs so long before its equals may stop it.  [30m]")
@click.option(
    "--min-run-by-right", type=DURATION, help="The same against a higher priority and the owner of its quota.  [1m]"
)
@click.option("--min-stay", type=DURATION, help="Least time between two moves or sizes of a job.  [5m]")
@click.option(
    "--preemption/--no-preemption", default=None, help="Whether jobs that run are stopped or moved for others."
)
def up(foreground: bool, systemd: bool, **given: Any) -> None:
    """Bring a cluster up on this machine: its GPUs, or virtual devices where it has none. Harmless when it is up already."""
    home = home_folder()
    _hand_on_store(given.pop("store"))
    arguments = _arguments(given)
    if systemd:
        if os.environ.get("PHALANX_STORE"):
            warn("--store is a secret and not in the unit: phalanx up once by hand, and the folder remembers it")
        print(unit(python=sys.executable, home=home, arguments=arguments), end="")
        print(
            "next: save it as ~/.config/systemd/user/phalanx.service, then systemctl --user enable --now phalanx",
            file=sys.stderr,
        )
        return
    url = _running(home)
    if url is not None:
        if arguments:
            warn("it is up already, so the options count for nothing; phalanx down first")
        _tell(connect(), url, "is up already")
        return
    _refuse_if_joined(home)
    if foreground:
        print("the head stays in the foreground; Ctrl-C stops it", file=sys.stderr, flush=True)
        os.environ["PHALANX_HOME"] = home
        os.execv(sys.executable, _command(arguments))  # noqa: S606  # no shell is wanted
    url = _start(home, arguments)
    head = connect(patience_s=_LEADER_S)
    _await_place(head, home)
    _await_nodes(head, fleet(home), _NODES_OF_S.get(given["engine"] or "", _NODES_S))
    _tell(head, url, "is up")


def _hand_on_store(given: str | None) -> None:
    """The database's address goes to the head by its environment: arguments are for all of the machine to read.

    Raises:
        BadFile: the file that holds it cannot be read.
        BadRequest: it holds a password, and stands in the command.
    """
    if given is None:
        return
    if _says_password(given):
        raise BadRequest(
            "--store with a password: all of this machine can read the words of a command",
            hint="put the address into a file (mode 0600) and say --store @FILE, or into PHALANX_STORE",
        )
    if given.startswith("@"):
        given = address_in(given[1:])
    os.environ["PHALANX_STORE"] = given


def _says_password(given: str) -> bool:
    try:
        from phalanx.store.sql.postgres.address import has_password
    except ImportError:  # psycopg is not here: the head says so
        return False
    return given.startswith(("postgresql://", "postgres://")) and has_password(given)


def _refuse_if_joined(home: str) -> None:
    """Nothing, unless this server is a node of a head elsewhere.

    Raises:
        Conflict: it is, and two heads would each believe its GPUs to be their own.
    """
    from phalanx.engines.joined import records

    folder = records.folder_of(home)
    joined = records.read(folder)
    if joined is not None and records.keeper(folder) is not None:
        raise Conflict(
            f"this server is node {joined.node_id} of the head at {joined.url}, and its GPUs are that head's",
            hint="phalanx down here leaves it",
        )


def _arguments(given: Mapping[str, Any]) -> list[str]:
    """What was given, as the head's own arguments; what is left out it remembers."""
    if given["policy"] is not None:
        from phalanx.core.scheduling.settings import check_live

        check_live(given["policy"])
    arguments: list[str] = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _command(arguments: list[str]) -> list[str]:
    # -P: no module of the folder we stand in may take the place of one of ours.
    return [sys.executable, "-P", "-m", "phalanx.app.head", *arguments]


def _running(home: str) -> str | None:
    """The URL of this folder's head, if it runs and answers.

    Raises:
        TryLater: its process runs but does not answer.
    """
    record = running(home)
    if record is None or not alive(record.pid):
        return None
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until:
        head_id = healthy(record.url)
        if head_id and head_id == (record.head_id or head_id):
            return record.url
        if not alive(record.pid):
            return None
        time.sleep(0.1)
    # The number may have gone to another process since: then the head's lock is free, and a new head may start.
    if _lock_is_free(home):
        return None
    raise TryLater(
        f"the head (pid {record.pid}) runs but does not answer at {record.url}", hint=f"look into {home}/head.log"
    )


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
    """Start the head and wait until it is ready; its URL.

    Raises:
        PhalanxError: it ended instead; says its last words.
        TryLater: it is not ready in time; it is left alone.
    """
    fresh = not os.path.isdir(home)
    os.makedirs(home, mode=0o700, exist_ok=True)
    words = os.path.join(home, "head.out")
    with open(os.open(words, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "rb+") as out:
        child = subprocess.Popen(
            _command(arguments), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=home,
            env={**os.environ, "PHALANX_HOME": home},
        )  # fmt: skip
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        record = recorded(home)
        if record is not None and record.pid == child.pid and healthy(record.url) == record.head_id:
            return record.url
        code = child.poll()
        if code is not None:
            refusal = _ended(words, code)
            # Refused before it knew anything: nothing stays. Unless another `phalanx up` came at the same time, and its head has the folder.
            if fresh and _lock_is_free(home) and not os.path.exists(os.path.join(home, "phalanx.db")):
                shutil.rmtree(home, ignore_errors=True)
            raise refusal
        time.sleep(_POLL_S)
    raise TryLater(
        f"the head (pid {child.pid}) is not ready after {_READY_S:.0f} s; it is still starting",
        hint=f"look into {home}/head.log",
    )


def _ended(words: str, code: int) -> PhalanxError:
    """The head's refusal as our own: it has said it in our manner already."""
    with open(words, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-65536:].splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {code}"
    message, _, hint = last.removeprefix("phalanx: error: ").partition(" (")
    hint = hint.removesuffix(")")
    kind = _REFUSALS.get(code)
    if kind is not None:
        return kind(message, hint=hint)
    return Unreachable(f"the head did not start: {message}", hint=hint or f"its last words are in {words}")


def _await_place(head: Client, home: str) -> None:
    """Of several heads: until the one that leads has seen this one, and lets this folder's token in.

    Raises:
        PhalanxError: none leads.
    """
    record = recorded(home)
    if record is None or not record.role:
        return
    ours = {record.url, listens(home)}
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


def _await_nodes(head: Client, names: set[str], limit_s: float = _NODES_S) -> None:
    """Until the nodes that this head brings up said hello. Others that it remembers may be gone for good."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        nodes = head.nodes()
        up_now = {node.id for node in nodes if node.state is NodeState.UP}
        awaited = names or {node.id for node in nodes if node.state is not NodeState.DOWN}
        if up_now and awaited <= up_now:
            return
        time.sleep(_POLL_S * 2)


def _tell(head: Client, url: str, what: str) -> None:
    nodes = head.nodes()
    print(f"Phalanx {what}: {url}")
    _tell_heads(head)
    for node in nodes:
        print(clean(f"  {_node(node)}"))
    if not nodes:
        print("  no node has joined yet")
    line = line_of(head)
    if line is not None:
        print(f"on the next server: {line}")
    print("next: phalanx run --gpus 1 -- python train.py")


def _tell_heads(head: Client) -> None:
    """Of several heads: who leads, and what would not follow a takeover."""
    known = head.heads().heads
    if not known:
        return
    leader = next((one for one in known if one.role == "leader"), None)
    others = sum(one.role == "standby" for one in known)
    where = "nobody yet" if leader is None else f"{leader.url}, with {others} more standing by"
    print(clean(f"  of {len(known)} head{'s' if len(known) > 1 else ''} that share its store leads {where}"))
    home = home_folder()
    if not shares_files(home):
        print(
            "  logs, outputs, uploads and kept checkpoints stay with the head that led when they came; --files DIR shares them"
        )
    if not listens(home):
        print("  without --listen, only heads and nodes of this machine reach this head")


def _node(node: NodeView) -> str:
    model = node.devices[0].model if node.devices else ""
    count = len(node.devices)
    devices = (
        f"{count} x {model}" if model and not node.virtual else f"{count} virtual devices" if count else "no devices"
    )
    return f"{node.id}: {devices}, {node.cpus} CPUs, {node.state}"
