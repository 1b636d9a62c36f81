"""A head off loopback: its address, its certificate, and the service by which other servers join."""

from __future__ import annotations

import errno
import ipaddress
import json
import secrets
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from phalanx.api.http.relay_agent import RelayStatus
from phalanx.api.http.server import TlsSocket
from phalanx.app.machine_files import MachineFiles
from phalanx.core.access.node_tokens import join_token, node_token
from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.ids import NodeId
from phalanx.ports.engine import Engine
from phalanx.wire.head_http import fingerprint
from phalanx.wire.head_url import joined_address, split_address
from phalanx.wire.join import (
    JoinArguments,
    JoinReply,
    JoinRequest,
)

if TYPE_CHECKING:
    from phalanx.app.certificates import CertificateAuthority
    from phalanx.app.state_folder import StateFolder

JOIN_TOKEN_LIFETIME_S: Final = 24 * 3600.0  # join lines are used the same day; `phalanx join --print` prints a new one
_SALT_FILE: Final = "join_salt.json"
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", "*", ""})
# Other servers cannot connect to these.
_NO_ADDRESSES: Final = _WILDCARDS | {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """An address that other servers can reach: of this machine, or of its relay."""

    host: str
    port: int
    is_relay: bool = False

    @property
    def own_host(self) -> str:
        """The host if it is this machine; empty for a relay."""
        return "" if self.is_relay else self.host

    @property
    def url(self) -> str:
        """The URL of the head for other servers."""
        return f"https://{joined_address(self.host, self.port)}"


def parse_listen(text: str, port: int) -> ListenAddress:
    """Parse `--listen`: ADDRESS or ADDRESS:PORT; the port defaults to the head's own.

    Raises:
        BadRequest: it is a wildcard, on loopback, or invalid.
    """
    host, tail = split_address(text)
    if host in _NO_ADDRESSES:
        raise BadRequest(
            f"--listen {text}: other servers cannot reach this address",
            hint="use this machine's address on the network of the servers, as in --listen 10.0.0.5",
        )
    if tail and not (tail.isdecimal() and 0 < int(tail) < 65536):
        raise BadRequest(f"--listen {text}: {tail!r} is not a port", hint="--listen 10.0.0.5:7600")
    return ListenAddress(host=host, port=int(tail) if tail else port)


def parse_relay(text: str) -> ListenAddress:
    """Parse `--relay`: HOST:PORT of a relay.

    Raises:
        BadRequest: it is a wildcard, has no port, or is invalid.
    """
    host, port = split_address(text)
    if host in _WILDCARDS or not port or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise BadRequest(f"--relay {text}: not a host and port", hint="--relay relay.example.org:7600")
    return ListenAddress(host=host, port=int(port), is_relay=True)


def bind_socket(address: ListenAddress, *, listens: bool = True) -> socket.socket:
    """Bind the listening socket, before anything else happens.

    Raises:
        Conflict: the address is not of this machine, or its port is in use.
    """
    try:
        family, _, _, _, bound = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        _require_one_address(address, str(bound[0]))
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(bound)
            if listens:
                listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty label, or one over 63 letters
        raise _bind_error(address, error) from error
    listener.set_inheritable(False)
    return listener


def _require_one_address(where: ListenAddress, found: str) -> None:
    """Check that the name or number means one address: `0`, `0x0` or a name can also mean all addresses.

    Raises:
        BadRequest: it does not.
    """
    address = ipaddress.ip_address(found.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if any(one.is_unspecified or one.is_multicast for one in (address, mapped or address)):
        raise BadRequest(
            f"--listen {where.host} means {found}, which is not the address of one machine",
            hint="use this machine's address on the network of the servers, as in --listen 10.0.0.5",
        )


def _bind_error(where: ListenAddress, error: OSError | UnicodeError) -> Conflict:
    option, own = f"--listen {joined_address(where.host, where.port)}", "ip addr lists the addresses of this machine"
    match error:
        case socket.gaierror() | UnicodeError():
            return Conflict(f"{option}: the name {where.host} has no address", hint=f"use an address; {own}")
        case OSError(errno=errno.EADDRINUSE):
            return Conflict(
                f"{option}: another program already listens there",
                hint=f"choose another port, as in --listen {joined_address(where.host, where.port + 1)}; ss -ltnp shows the program",
            )
        case OSError(errno=errno.EADDRNOTAVAIL):
            return Conflict(f"{option}: {where.host} is not an address of this machine", hint=own)
        case _:
            return Conflict(f"{option}: {error.strerror or error}", hint=f"use an address and a free port; {own}")


def with_tls(
    listener: socket.socket,
    authority: CertificateAuthority,
    address: ListenAddress,
    *,
    stem: str = "head",
    below: str = "",
) -> TlsSocket:
    """Return the socket with a new certificate for its address, and for all names directly below `below`."""
    names = [*certificate_names(address.host, socket.gethostname()), *([f"*.{below}"] if below else [])]
    certificate, key = authority.write(stem, authority.sign(names))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return TlsSocket(socket=listener, context=context)


@dataclass(slots=True, kw_only=True)
class StoredJoinSalt:
    """The salt of a head's join tokens, stored in its state folder; without a folder only in memory."""

    home: StateFolder | None = None
    value: str = ""

    @classmethod
    def stored(cls, home: StateFolder) -> StoredJoinSalt:
        """Return the stored salt."""
        return cls(home=home, value=str(home.read_json(_SALT_FILE).get("salt", "")))

    def renew(self) -> None:
        """Replace the salt. It is stored first, so that revoked tokens stay revoked."""
        fresh = secrets.token_hex(16)
        if self.home is not None:
            self.home.write_private(_SALT_FILE, json.dumps({"salt": fresh}))
        self.value = fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadJoinService:
    """The service by which servers join.

    Attributes:
        engines: of the head; the first that admits a server makes it a node.
        salt: of the join tokens.
        machine_files: what rented machines download.
        relay: whether the head has a connection to its relay.
    """

    authority: CertificateAuthority
    address: ListenAddress
    node_secret: bytes
    head_id: str
    engines: Sequence[Engine]
    salt: StoredJoinSalt = field(default_factory=StoredJoinSalt)
    machine_files: MachineFiles | None = None
    relay: RelayStatus = field(default_factory=RelayStatus)

    @property
    def ca_pem(self) -> str:
        """The certificate of the head's CA."""
        return self.authority.ca_pem

    def join_line(self, now_s: float) -> JoinArguments:
        """Return what the next server needs to join."""
        expires_s = now_s + JOIN_TOKEN_LIFETIME_S
        return JoinArguments(
            address=joined_address(self.address.host, self.address.port),
            token=join_token(self.node_secret, expires_s, self.salt.value),
            fingerprint=fingerprint(self.ca_pem),
            expires_s=expires_s,
            relay_problem=self.relay.problem,
        )

    def files_for_machines(self) -> str:
        """Return the path of the program of rented machines, a compressed tar.

        Raises:
            NotFound: this head has none.
            OSError: it cannot be made.
        """
        if self.machine_files is None:
            raise NotFound("this head has no files for machines")
        return self.machine_files.prepare()

    def accept(self, submission: JoinRequest) -> JoinReply:
        """Return the node's token, and what its engine needs on that server.

        Raises:
            Conflict: no engine of this head takes servers.
        """
        offers = (
            engine.admit(submission.node_id, submission.address, submission.hostname or submission.node_id)
            for engine in self.engines
        )
        admission = next((offer for offer in offers if offer is not None), None)
        if admission is None:
            raise Conflict("no engine of this head takes servers that join")
        return JoinReply(
            node_id=submission.node_id,
            token=node_token(self.node_secret, NodeId(submission.node_id)),
            head_id=self.head_id,
            engine=admission.engine,
            settings=dict(admission.settings),
        )


def certificate_names(address: str, hostname: str) -> list[str]:
    """Return the names of a server's certificate without duplicates, the address first."""
    return list(dict.fromkeys([address, hostname, "localhost", "127.0.0.1"]))
