"""The head off loopback: where it listens, with which certificate, and what a server that joins is given."""

from __future__ import annotations

import errno
import ipaddress
import json
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from phalanx.api.server import TlsListener
from phalanx.core.access.node_keys import join_token, node_token
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.ids import NodeId
from phalanx.engines.joined.records import ENGINE_NAME
from phalanx.wire.join import JoinLine, JoinReply, JoinRequest, RayJoin, fingerprint, joined_address, split_address

if TYPE_CHECKING:
    from phalanx.app.certificates import Authority, Signed
    from phalanx.app.home import Home

JOIN_TOKEN_S: Final = 24 * 3600.0  # a line that is pasted the same day; `phalanx join --print` prints a fresh one
_SALT_FILE: Final = "join_salt.json"
# Nothing that another server could be told.
_NO_ADDRESSES: Final = frozenset({"0.0.0.0", "::", "*", "", "127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """An address of this machine that the other servers reach."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Of the head, as others see it."""
        return f"https://{joined_address(self.host, self.port)}"


def listen_of(text: str, port: int) -> Listen:
    """What `--listen` names: ADDRESS or ADDRESS:PORT; the head's own port where it says none.

    Raises:
        BadRequest: it is a wildcard, on loopback, or no address.
    """
    host, tail = split_address(text)
    if host in _NO_ADDRESSES:
        raise BadRequest(
            f"--listen {text}: that is no address that another server reaches",
            hint="give the address of this machine on the network that joins the servers, as in --listen 10.0.0.5",
        )
    if tail and not (tail.isdecimal() and 0 < int(tail) < 65536):
        raise BadRequest(f"--listen {text}: {tail!r} is no port", hint="--listen 10.0.0.5:7600")
    return Listen(host=host, port=int(tail) if tail else port)


def bind(where: Listen) -> socket.socket:
    """The listening socket, bound before anything else happens.

    Raises:
        Conflict: the address is not this machine's, or its port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        _refuse_everywhere(where, str(address[0]))
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter of a name with an empty label, or one over 63 letters
        raise _not_bound(where, error) from error
    listener.set_inheritable(False)
    return listener


def _refuse_everywhere(where: Listen, found: str) -> None:
    """Nothing, if the name or number stands for one address: `0`, `0x0` or a name can mean all of them just as well.

    Raises:
        BadRequest: it does not.
    """
    address = ipaddress.ip_address(found.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if any(one.is_unspecified or one.is_multicast for one in (address, mapped or address)):
        raise BadRequest(
            f"--listen {where.host} means {found}, which is no address of one machine",
            hint="give the address of this machine on the network that joins the servers, as in --listen 10.0.0.5",
        )


def _not_bound(where: Listen, error: OSError | UnicodeError) -> Conflict:
    asked, own = f"--listen {joined_address(where.host, where.port)}", "ip addr lists those of this machine"
    match error:
        case socket.gaierror() | UnicodeError():
            return Conflict(f"{asked}: no address is known for the name {where.host}", hint=f"give an address; {own}")
        case OSError(errno=errno.EADDRINUSE):
            return Conflict(
                f"{asked}: another program listens there already",
                hint=f"--listen {joined_address(where.host, where.port + 1)} takes another port; ss -ltnp shows who has this one",
            )
        case OSError(errno=errno.EADDRNOTAVAIL):
            return Conflict(f"{asked}: {where.host} is no address of this machine", hint=own)
        case _:
            return Conflict(f"{asked}: {error.strerror or error}", hint=f"give an address and a free port; {own}")


def secured(listener: socket.socket, authority: Authority, where: Listen) -> TlsListener:
    """The socket with a certificate made for its address just now."""
    certificate, key = authority.write("head", authority.sign(names_at(where.host, socket.gethostname())))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return TlsListener(socket=listener, context=context)


@dataclass(slots=True, kw_only=True)
class Salt:
    """Of a head's join tokens, kept in its state folder; without a folder it is forgotten with the process."""

    home: Home | None = None
    value: str = ""

    @classmethod
    def kept(cls, home: Home) -> Salt:
        """As it was left by the head before."""
        return cls(home=home, value=str(home.read_json(_SALT_FILE).get("salt", "")))

    def renew(self) -> None:
        """Have another: written first, so that a token that was ended stays so."""
        fresh = secrets.token_hex(16)
        if self.home is not None:
            self.home.write_private(_SALT_FILE, json.dumps({"salt": fresh}))
        self.value = fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What the API hands to servers that join.

    Attributes:
        engine: the word that their nodes carry.
        ray: of a head whose supervisors Ray brings: what a server needs to be a node of that Ray cluster.
        salt: of its join tokens.
    """

    authority: Authority
    where: Listen
    node_secret: bytes
    head_id: str
    engine: str = ENGINE_NAME
    ray: Callable[[Signed], RayJoin] | None = None
    salt: Salt = field(default_factory=Salt)

    @property
    def ca_pem(self) -> str:
        """The certificate of the head's CA."""
        return self.authority.ca_pem

    def line(self, now_s: float) -> JoinLine:
        """What the next server is told."""
        expires_s = now_s + JOIN_TOKEN_S
        return JoinLine(
            address=joined_address(self.where.host, self.where.port),
            token=join_token(self.node_secret, expires_s, self.salt.value),
            fingerprint=fingerprint(self.ca_pem),
            expires_s=expires_s,
        )

    def take_in(self, wish: JoinRequest) -> JoinReply:
        """The node's token, and under Ray its key."""
        ray = None
        if self.ray is not None:
            if not wish.address:
                raise BadRequest(f"node {wish.node_id} did not say its address", hint="phalanx join --address names it")
            ray = self.ray(self.authority.sign(names_at(wish.address, wish.hostname or wish.node_id)))
        return JoinReply(
            node_id=wish.node_id,
            token=node_token(self.node_secret, NodeId(wish.node_id)),
            head_id=self.head_id,
            engine=self.engine,
            ray=ray,
        )


def names_at(address: str, hostname: str) -> list[str]:
    """What a certificate of the server at this address is good for, the address first; each once."""
    return list(dict.fromkeys([address, hostname, "localhost", "127.0.0.1"]))
