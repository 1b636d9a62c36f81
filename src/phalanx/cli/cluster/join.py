"""`phalanx join`: make this server a node of a head elsewhere. Nothing is written before the head has taken it in."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

import click
import msgspec

from phalanx.cli.cluster.home import alive, home_folder, running
from phalanx.cli.cluster.joinline import print_line
from phalanx.cli.connect import connect
from phalanx.client.tls import fetch_ca, trusting, untrusted
from phalanx.client.transport import refusal_of
from phalanx.core.errors import BadRequest, Conflict, NotSignedIn, TryLater, Unreachable
from phalanx.core.ids import NodeId
from phalanx.engines.joined import records
from phalanx.engines.joined.records import Joined
from phalanx.wire.join import RAY_RECONNECT_S, JoinReply, JoinRequest, joined_address, split_address

PORT_DEFAULT: Final = 7600  # DESIGN 4
ANSWER_S: Final = 10.0  # of the head: it may make a key for us
UP_S: Final = 30.0  # for the supervisor to say hello: 1 to 3 s
UP_ON_RAY_S: Final = 90.0  # Ray's own processes come first: 8 s, and 17 s were seen on a busy machine
STOP_S: Final = 30.0  # for the keeper to end what it keeps
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """Where the head is, and what proves it."""

    name: str
    port: int
    ca_pem: str
    fingerprint: str

    @property
    def url(self) -> str:
        return f"https://{joined_address(self.name, self.port)}"


@click.command()
@click.argument("head", metavar="HEAD[:PORT]", required=False)
@click.option(
    "--token", envvar="PHALANX_JOIN_TOKEN", metavar="TOKEN", help="As `phalanx up` printed it; good for a day."
)
@click.option("--fingerprint", metavar="sha256:HEX", help="Of the head's CA, as printed.")
@click.option("--name", metavar="NODE", help="Of this server in the cluster; its host name otherwise.")
@click.option(
    "--address", metavar="ADDR", help="Where other servers reach this one; by default, as it reaches the head."
)
@click.option(
    "--virtual", type=click.IntRange(0, 256), metavar="D", help="D virtual devices, as on a server without GPUs."
)
@click.option("--foreground", is_flag=True, help="Stay, for a service manager; Ctrl-C leaves.")
@click.option("--print", "show", is_flag=True, help="On the head: print the line for the next server, and do nothing.")
@click.option("--new-token", is_flag=True, help="On the head: the same, and end every join token given out before.")
def join(
    head: str | None, token: str | None, fingerprint: str | None, name: str | None, address: str | None, virtual: int | None,
    foreground: bool, show: bool, new_token: bool,
) -> None:  # fmt: skip
    """Make this server a node of the head at HEAD. Harmless when it is one; without HEAD it comes back to the one it joined."""
    if show or new_token:
        if head is not None:
            raise BadRequest("--print and --new-token are for the head itself, and take no HEAD")
        print_line(connect(), renew=new_token)
        return
    _refuse_beside_head()
    folder = records.folder_of(home_folder())
    known = records.read(folder)
    where = _head_of(head, fingerprint, known)
    if known is not None and known.url == where.url and records.keeper(folder) and not foreground:
        print(f"{known.node_id} has joined {known.url} already; next: phalanx nodes, on the head")
        return
    if known is not None and known.url != where.url and records.keeper(folder):
        raise Conflict(f"this server belongs to {known.url}", hint="phalanx down here leaves it")
    began_s = time.monotonic()
    joined, reply = _ask(where, folder, known, token=token, name=name, address=address, virtual=virtual)
    if reply.ray is not None:
        from phalanx.engines.ray.member import check_alike, write_ray_files

        check_alike(reply.ray)
        write_ray_files(folder, reply.ray)
    records.write(folder, joined, token=reply.token, ca_pem=where.ca_pem)
    if foreground:
        os.execv(sys.executable, _command(folder))  # noqa: S606  # no shell is wanted
    _start(folder)
    _await_up(where, folder, joined, began_s)


def _refuse_beside_head() -> None:
    """Nothing, unless a head of this user runs here.

    Raises:
        Conflict: one does, and brings this machine's GPUs up itself: another's node cannot have them too.
    """
    record = running(home_folder())
    if record is not None and alive(record.pid):
        raise Conflict(
            f"a head runs on this machine ({record.url}), and its GPUs are its own",
            hint="phalanx join is for the other servers, and --print shows their line; phalanx down ends this head",
        )


def _head_of(head: str | None, wanted: str | None, known: Joined | None) -> _Head:
    """The head that was named, or the one this server joined; proven by its fingerprint.

    Raises:
        PhalanxError: none is known, or it is not who it should be.
    """
    if head is None:
        if known is None:
            raise BadRequest("which head? this server has joined none", hint="`phalanx up` on the head prints the line to paste")  # fmt: skip
        head = known.url
    name, named_port = split_address(head.removeprefix("https://").rstrip("/"))
    port = str(PORT_DEFAULT) if named_port is None else named_port
    if not name or not port.isdecimal() or "/" in name or head.startswith("http://"):
        raise BadRequest(f"{head!r} is no address of a head", hint="HEAD:PORT, as `phalanx up --listen` prints it")
    fingerprint = wanted or (known.fingerprint if known is not None else "")
    if not fingerprint:
        raise BadRequest("--fingerprint is missing: it proves that the head is the one you mean",
                         hint="`phalanx up` on the head prints the whole line")  # fmt: skip
    ca_pem = fetch_ca(name, int(port), fingerprint)
    return _Head(name=name, port=int(port), ca_pem=ca_pem, fingerprint=fingerprint)


def _ask(
    where: _Head, folder: str, known: Joined | None, *, token: str | None, name: str | None, address: str | None,
    virtual: int | None,
) -> tuple[Joined, JoinReply]:  # fmt: skip
    """Ask the head to take this server in; nothing is written here.

    Raises:
        PhalanxError: it does not, or this server has nothing to bring.
    """
    ours = known if known is not None and known.url == where.url else None
    node_id = NodeId(name or (ours.node_id if ours is not None else socket.gethostname().split(".")[0]))
    own = records.token(folder) if ours is not None and ours.node_id == node_id else ""
    if not (own or token):
        raise NotSignedIn("--token is missing", hint="`phalanx up` on the head prints the whole line")
    if virtual is None and ours is not None and ours.virtual:
        virtual = ours.devices
    devices = virtual if virtual is not None else _gpus()
    if not devices and virtual is None:
        raise BadRequest("NVML finds no GPU on this server", hint="--virtual 4 brings 4 virtual devices, --virtual 0 CPUs alone")  # fmt: skip
    wish = JoinRequest(
        node_id=node_id, hostname=socket.gethostname(), address=address or _own_address(where), devices=devices,
        virtual=virtual is not None,
    )  # fmt: skip
    try:
        reply = _post(where, wish, own or token or "")
    except NotSignedIn:
        if not (own and token):
            raise
        reply = _post(where, wish, token)  # the head lost its secret since: the line just pasted counts
    joined = Joined(
        url=where.url, fingerprint=where.fingerprint, node_id=node_id, engine=reply.engine, address=wish.address, devices=devices,
        virtual=wish.virtual, ray_address="" if reply.ray is None else reply.ray.address,
        ray_reconnect_s=RAY_RECONNECT_S if reply.ray is None else reply.ray.reconnect_s, heads=",".join(reply.heads),
    )  # fmt: skip
    return joined, reply


def _gpus() -> int:
    from phalanx.node.shell.nvml import open_nvml

    probe = open_nvml()
    if probe is None:
        return 0
    try:
        return len(probe.devices())
    finally:
        probe.close()


def _own_address(where: _Head) -> str:
    """The address by which this server reaches the head."""
    try:
        with socket.create_connection((where.name, where.port), timeout=ANSWER_S) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise Unreachable(f"no head at {where.name}:{where.port}: {error.strerror or error}") from error


def _post(where: _Head, wish: JoinRequest, token: str) -> JoinReply:
    connection = http.client.HTTPSConnection(where.name, where.port, timeout=ANSWER_S, context=trusting(where.ca_pem))
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/join", msgspec.json.encode(wish), headers)
        reply = connection.getresponse()
        body = reply.read()
    except ssl.SSLCertVerificationError as error:
        raise untrusted(error, where.url) from error
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        raise Unreachable(f"the head at {where.url} does not answer: {error}", hint="try again in a moment") from error
    finally:
        connection.close()
    if reply.status != 200:
        raise refusal_of(reply.status, body, "POST /v1/join")
    return msgspec.json.decode(body, type=JoinReply)


# ------------------------------------------------------------------------------------------------------------- the keeper


def _command(folder: str) -> list[str]:
    return [sys.executable, "-P", "-m", "phalanx.app.joined", "--folder", folder]


def _start(folder: str) -> None:
    with open(os.path.join(folder, "keeper.out"), "wb") as out:
        subprocess.Popen(
            _command(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder
        )


def _await_up(where: _Head, folder: str, joined: Joined, began_s: float) -> None:
    """Until the head says that the node is up. If it does not come, nothing is left behind.

    Raises:
        TryLater: it did not come in time.
    """
    wish = JoinRequest(node_id=joined.node_id, address=joined.address, devices=joined.devices, virtual=joined.virtual)
    limit_s = UP_ON_RAY_S if joined.ray_address else UP_S
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        with contextlib.suppress(Unreachable, TryLater):
            if _post(where, wish, records.token(folder)).up:
                kind = "virtual devices" if joined.virtual else "GPUs"
                print(f"{joined.node_id} has joined {joined.url}: {joined.devices} {kind}, at {joined.address}, "
                      f"in {time.monotonic() - began_s:.1f} s")  # fmt: skip
                print("next: phalanx nodes, on the head; phalanx down here leaves the cluster")
                return
        time.sleep(_POLL_S)
    words = _last_words(folder)
    leave(folder)
    raise TryLater(
        f"{joined.node_id} did not come up in {limit_s:.0f} s{words}; it has left again", hint="phalanx doctor"
    )


def _last_words(folder: str) -> str:
    for name in ("keeper.out", "keeper.log"):
        with contextlib.suppress(OSError), open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read()[-4096:].splitlines() if line.strip()]
            if lines:
                return f" ({lines[-1][:200]})"
    return ""


def leave(folder: str) -> None:
    """End the keeper and what it keeps, and forget the membership.

    Raises:
        TryLater: it does not end.
    """
    pid = records.keeper(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while records.keeper(folder) is not None:
            if time.monotonic() > until:
                raise TryLater(f"the keeper (pid {pid}) has not ended in {STOP_S:.0f} s", hint="ask again in a moment")
            time.sleep(_POLL_S)
    records.forget(folder)
