"""`phalanx join`: makes this server a node of a head on another machine. Nothing is written before the head has accepted it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Final

import click
import msgspec

from phalanx.cli.cluster.join_command import print_join_command
from phalanx.cli.cluster.state_folder import find_local_head, home_folder, is_alive
from phalanx.cli.cluster.systemd_unit import NODE_UNIT, lasting_python, start_unit, system_node_unit, unit_state
from phalanx.cli.connection import connect
from phalanx.client.connection.discovery import SYSTEM_NODE_FOLDER
from phalanx.client.connection.tls import certificate_error, fetch_ca
from phalanx.client.connection.transport import error_from_reply
from phalanx.core.errors import BadRequest, Conflict, NotSignedIn, TryLater, Unreachable
from phalanx.core.ids import NodeId
from phalanx.core.work.extras import parse_offers
from phalanx.engines.registry import engine_type
from phalanx.node import membership as records
from phalanx.ports.engine import Membership
from phalanx.wire.head_http import BROKEN, HeadHttp, context_for_ca, request_headers
from phalanx.wire.head_url import joined_address, split_address
from phalanx.wire.join import JoinReply, JoinRequest

PORT_DEFAULT: Final = 7600  # DESIGN 4
ANSWER_S: Final = 10.0  # of the head, which may have to generate a key
STOP_S: Final = 30.0  # for the keeper to stop its supervisor
_POLL_S: Final = 0.1
_ADDRESS_HINT: Final = "write HEAD:PORT, as `phalanx up --listen` prints it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """Address and CA of the head. `others`: URLs of further heads that the user named or that this server knew."""

    name: str
    port: int
    ca_pem: str
    fingerprint: str
    others: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"https://{joined_address(self.name, self.port)}"


@click.command()
@click.argument("head", metavar="HEAD[:PORT][,HEAD...]", required=False)
@click.option(
    "--token",
    envvar="PHALANX_JOIN_TOKEN",
    metavar="TOKEN",
    help="Join token that `phalanx up` printed; valid for a day.",
)
@click.option("--fingerprint", metavar="sha256:HEX", help="Fingerprint of the head's CA, as printed.")
@click.option("--name", metavar="NODE", help="Name of this server in the cluster; default: its host name.")
@click.option("--address", metavar="ADDR", help="Address for other servers; default: the one used to reach the head.")
@click.option("--virtual", type=click.IntRange(0, 256), metavar="D", help="Use D virtual devices instead of GPUs.")
@click.option(
    "--offers", metavar="NAME=N,...", help="What this server offers besides: scratch=2TiB,nic=8; off: nothing."
)
@click.option("--cordoned", is_flag=True, help="Take no jobs before an operator tests and undrains it.")
@click.option("--foreground", is_flag=True, help="Run in the foreground, for a service manager.")
@click.option(
    "--system", is_flag=True, help="Run the node as the system service phalanx-node; jobs run as their owners."
)
@click.option("--systemd", is_flag=True, help="Only print the systemd unit of that service.")
@click.option("--print", "show", is_flag=True, help="On the head: only print the command for the next server.")
@click.option("--new-token", is_flag=True, help="On the head: the same, and revoke all earlier join tokens.")
def join(
    head: str | None,
    token: str | None,
    fingerprint: str | None,
    name: str | None,
    address: str | None,
    virtual: int | None,
    offers: str | None,
    cordoned: bool,
    foreground: bool,
    system: bool,
    systemd: bool,
    show: bool,
    new_token: bool,
) -> None:
    """Make this server a node of the head at HEAD. Idempotent. Without HEAD, rejoin the last head.

    If that head has moved, HEAD is its new address: jobs here continue. Several addresses are tried in turn, now and whenever one is silent.
    """
    if systemd:
        print(system_node_unit(python=lasting_python()), end="")
        print(f"next: save it as /etc/systemd/system/{NODE_UNIT}, then phalanx join HEAD --system", file=sys.stderr)
        return
    if system:
        _use_system_folder()
    if show or new_token:
        if head is not None:
            raise BadRequest("--print and --new-token run on the head itself", hint="leave HEAD out")
        print_join_command(connect(), renew_token=new_token)
        return
    _refuse_beside_head()
    folder = records.membership_folder(home_folder())
    known = records.read(folder)
    where = _verified_head(head, fingerprint, known)
    if known is not None and known.url == where.url and records.keeper_pid(folder) and not foreground:
        print(f"{known.node_id} has already joined {known.url}; next: phalanx nodes, on the head")
        return
    if known is not None and known.url != where.url and records.keeper_pid(folder):
        _follow_head(where, folder, known)
        return
    began_s = time.monotonic()
    before = known.offers if known is not None and known.url == where.url else ""
    offered = before if offers is None else parse_offers(offers)
    joined, reply = _request_join(where, folder, known, token=token, name=name, address=address, virtual=virtual)
    engine = engine_type(reply.engine)
    if offered and not engine.nodes_offer_extras:
        raise BadRequest(f"--offers cannot be used with the nodes of engine {engine.name}", hint="use --offers off")
    if cordoned and not engine.nodes_offer_extras:
        raise BadRequest(
            f"--cordoned cannot be used with the nodes of engine {engine.name}", hint="join, then drain it on the head"
        )
    settings = engine.prepare_member(folder, reply.settings)
    joined = replace(joined, settings=settings, offers=offered, cordoned=cordoned)
    records.write(folder, joined, token=reply.token, ca_pem=where.ca_pem)
    if foreground:
        os.execv(sys.executable, _command(folder))  # noqa: S606  # no shell is wanted
    _start(folder)
    _wait_until_up(where, folder, joined, began_s)


def _use_system_folder() -> None:
    """Use the state folder of the system service.

    Raises:
        BadRequest: this is not root, or the unit is not installed.
    """
    if os.geteuid() != 0:
        raise BadRequest("--system needs root", hint="sudo phalanx join ... --system")
    if not unit_state(NODE_UNIT)[0]:
        raise BadRequest(
            f"systemd does not know {NODE_UNIT}",
            hint=f"phalanx join --systemd > /etc/systemd/system/{NODE_UNIT} && systemctl daemon-reload",
        )
    os.environ["PHALANX_HOME"] = SYSTEM_NODE_FOLDER


def _refuse_beside_head() -> None:
    """Check that no head of this user runs here: the GPUs of this machine can belong to one head only.

    Raises:
        Conflict: a head runs here.
    """
    record = find_local_head(home_folder())
    if record is not None and is_alive(record.pid):
        raise Conflict(
            f"a head runs on this machine ({record.url}) and uses its GPUs",
            hint="run phalanx join on the other servers (--print shows the command), or stop this head with phalanx down",
        )


def _verified_head(head: str | None, wanted: str | None, known: Membership | None) -> _Head:
    """Return the first of the named heads that answers, or of those of this server's membership, with its CA verified by the fingerprint.

    Raises:
        PhalanxError: no head is known, none answers, or a fingerprint differs.
    """
    if head is None and known is None:
        raise BadRequest(
            "HEAD is missing: this server has not joined a head before",
            hint="`phalanx join --print` on the head prints the command",
        )
    words = head.split(",") if head is not None else []
    if head is None and known is not None:
        words = [known.url, *known.heads.split(",")]
    addresses = [_parsed_address(word) for word in words if word.strip()]
    if not addresses:
        raise BadRequest(f"{head!r} is not the address of a head", hint=_ADDRESS_HINT)
    fingerprint = wanted or (known.fingerprint if known is not None else "")
    if not fingerprint:
        raise BadRequest(
            "--fingerprint is missing: it proves the identity of the head",
            hint="`phalanx join --print` on the head prints the command",
        )
    for place, (name, port) in enumerate(addresses):
        try:
            ca_pem = fetch_ca(name, port, fingerprint)
        except Unreachable:
            if place + 1 == len(addresses):
                raise
            continue
        others = tuple(f"https://{joined_address(*one)}" for one in addresses if one != (name, port))
        return _Head(name=name, port=port, ca_pem=ca_pem, fingerprint=fingerprint, others=others)
    raise AssertionError  # the loop returns or raises at its last address


def _parsed_address(word: str) -> tuple[str, int]:
    text = word.strip()
    name, named_port = split_address(text.removeprefix("https://").rstrip("/"))
    port = str(PORT_DEFAULT) if named_port is None else named_port
    if not name or not port.isdecimal() or "/" in name or text.startswith("http://"):
        raise BadRequest(f"{text!r} is not the address of a head", hint=_ADDRESS_HINT)
    return name, int(port)


def _follow_head(where: _Head, folder: str, known: Membership) -> None:
    """Record that the head of this server has moved. The supervisor reads the record when the old address is silent; jobs continue.

    Raises:
        Conflict: it is another head, by its CA or because it does not know this server; or the engine keeps addresses of its own.
    """
    leave_first = "leave it first with phalanx down on this server"
    if where.fingerprint != known.fingerprint:
        raise Conflict(
            f"this server has joined {known.url}, and {where.url} is another head: its CA differs", hint=leave_first
        )
    if not engine_type(known.engine).members_follow:
        raise Conflict(f"this server has joined {known.url}; nodes of {known.engine} cannot follow", hint=leave_first)
    try:
        reply = _post(where, _join_request(known), records.read_token(folder))
    except NotSignedIn as error:
        raise Conflict(
            f"this server has joined {known.url}; the head at {where.url} does not know it", hint=leave_first
        ) from error
    moved = replace(known, url=where.url, heads=_other_heads(where, reply))
    records.write(folder, moved, token=records.read_token(folder), ca_pem=where.ca_pem)
    until = time.monotonic() + engine_type(known.engine).member_starts_s
    while not reply.up and time.monotonic() < until:
        time.sleep(_POLL_S)
        with contextlib.suppress(Unreachable, TryLater):
            reply = _post(where, _join_request(known), records.read_token(folder))
    state = "" if reply.up else "; its supervisor has not reached it yet, see phalanx doctor"
    print(f"{known.node_id} follows its head from {known.url} to {where.url}; its jobs continue{state}")


def _join_request(joined: Membership) -> JoinRequest:
    return JoinRequest(node_id=joined.node_id, address=joined.address, devices=joined.devices, virtual=joined.virtual)


def _other_heads(where: _Head, reply: JoinReply) -> str:
    """Return the URLs of the heads besides `where`, comma-separated: those that it reports, and those that the user named."""
    return ",".join(url for url in dict.fromkeys([*reply.heads, *where.others]) if url != where.url)


def _request_join(
    where: _Head,
    folder: str,
    known: Membership | None,
    *,
    token: str | None,
    name: str | None,
    address: str | None,
    virtual: int | None,
) -> tuple[Membership, JoinReply]:
    """Ask the head to accept this server; nothing is written here.

    Raises:
        PhalanxError: the head refuses, or this server has no GPU.
    """
    ours = known if known is not None and known.fingerprint == where.fingerprint else None  # its address may be new
    node_id = NodeId(name or (ours.node_id if ours is not None else socket.gethostname().split(".")[0]))
    own = records.read_token(folder) if ours is not None and ours.node_id == node_id else ""
    if not (own or token):
        raise NotSignedIn("--token is missing", hint="`phalanx join --print` on the head prints the command")
    if virtual is None and ours is not None and ours.virtual:
        virtual = ours.devices
    devices = virtual if virtual is not None else _count_gpus()
    if not devices and virtual is None:
        raise BadRequest(
            "NVML finds no GPU on this server", hint="--virtual 4 adds 4 virtual devices, --virtual 0 only the CPUs"
        )
    request = JoinRequest(
        node_id=node_id,
        hostname=socket.gethostname(),
        address=address or _own_address(where),
        devices=devices,
        virtual=virtual is not None,
    )
    try:
        reply = _post(where, request, own or token or "")
    except NotSignedIn:
        if not (own and token):
            raise
        reply = _post(where, request, token)  # the head no longer knows the node's token: use the join token
    joined = Membership(
        url=where.url,
        fingerprint=where.fingerprint,
        node_id=node_id,
        engine=reply.engine,
        address=request.address,
        devices=devices,
        virtual=request.virtual,
        heads=_other_heads(where, reply),
    )
    return joined, reply


def _count_gpus() -> int:
    from phalanx.node.probes.nvml import open_nvml

    probe = open_nvml()
    if probe is None:
        return 0
    try:
        return len(probe.devices())
    finally:
        probe.close()


def _own_address(where: _Head) -> str:
    """Return the local address of a connection to the head."""
    try:
        with socket.create_connection((where.name, where.port), timeout=ANSWER_S) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise Unreachable(f"no head at {where.name}:{where.port}: {error.strerror or error}") from error


def _post(where: _Head, request: JoinRequest, token: str) -> JoinReply:
    connection = HeadHttp(where.url, lambda: context_for_ca(where.ca_pem))
    headers = request_headers(token, "application/json")
    try:
        reply = connection.request(
            "POST", "/v1/join", msgspec.json.encode(request), headers=headers, timeout_s=ANSWER_S
        )
        body = reply.read()
    except ssl.SSLCertVerificationError as error:
        raise certificate_error(error, where.url) from error
    except (*BROKEN, UnicodeError) as error:
        raise Unreachable(f"the head at {where.url} does not answer: {error}", hint="try again in a moment") from error
    finally:
        connection.close()
    if reply.status != 200:
        raise error_from_reply(reply.status, body, "POST /v1/join")
    return msgspec.json.decode(body, type=JoinReply)


# ---- the keeper process ---------------------------------------------------------------------------------------------


def _command(folder: str) -> list[str]:
    return [sys.executable, "-P", "-m", "phalanx.app.server_keeper", "--folder", folder]


def _start(folder: str) -> None:
    if folder == records.membership_folder(SYSTEM_NODE_FOLDER):
        why = start_unit(NODE_UNIT)
        if why:
            raise TryLater(f"{NODE_UNIT} did not start: {why}", hint=f"journalctl -u {NODE_UNIT}")
        return
    with open(os.path.join(folder, "keeper.out"), "wb") as out:
        subprocess.Popen(
            _command(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder
        )


def _wait_until_up(where: _Head, folder: str, joined: Membership, began_s: float) -> None:
    """Wait until the head reports that the node is up. On a timeout, leave the cluster again.

    Raises:
        TryLater: the node did not come up in time.
    """
    request = _join_request(joined)
    limit_s = engine_type(joined.engine).member_starts_s
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        with contextlib.suppress(Unreachable, TryLater):
            if _post(where, request, records.read_token(folder)).up:
                kind = "virtual devices" if joined.virtual else "GPUs"
                print(
                    f"{joined.node_id} has joined {joined.url}: {joined.devices} {kind}, at {joined.address}, "
                    f"in {time.monotonic() - began_s:.1f} s"
                )
                test = f"phalanx nodes test {joined.node_id} --undrain" if joined.cordoned else "phalanx nodes"
                print(f"next: {test}, on the head; phalanx down on this server leaves the cluster")
                return
        time.sleep(_POLL_S)
    reason = _last_log_line(folder)
    leave(folder)
    raise TryLater(
        f"{joined.node_id} did not come up within {limit_s:.0f} s{reason} and has left the cluster",
        hint="run phalanx doctor",
    )


def _last_log_line(folder: str) -> str:
    for name in ("keeper.out", "keeper.log"):
        with contextlib.suppress(OSError), open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read()[-4096:].splitlines() if line.strip()]
            if lines:
                return f" ({lines[-1][:200]})"
    return ""


def leave(folder: str) -> None:
    """Stop the keeper and its supervisor, and remove the record of the membership.

    Raises:
        TryLater: the keeper does not stop.
    """
    pid = records.keeper_pid(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)  # SIGTERM would leave a supervisor with jobs running
        until = time.monotonic() + STOP_S
        while records.keeper_pid(folder) is not None:
            if time.monotonic() > until:
                raise TryLater(
                    f"the keeper (pid {pid}) has not stopped within {STOP_S:.0f} s", hint="try again in a moment"
                )
            time.sleep(_POLL_S)
    records.remove(folder)
