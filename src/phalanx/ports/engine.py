"""The port of engines. An engine brings a supervisor to each node and watches it; all else goes through the supervisors' channel.

An engine consists of an `EngineType`, found by its name (`engines.registry`), and of the `Engine` that it creates for one head. The head
and the command line know engines by these two only: no code outside an engine's folder knows its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # the command line loads the types of engines, for their options
    from phalanx.core.fleet.node import Node
    from phalanx.core.ids import Epoch, JobId, NodeId
    from phalanx.core.state.events import Event
    from phalanx.core.state.reports import NodeDied
    from phalanx.core.work.attempt import Attempt
    from phalanx.core.work.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What an engine found when its head started.

    Attributes:
        deaths: nodes of this engine that certainly do not run. The lease decides about all others.
        retired: nodes of this engine that this head does not start any more; the head removes those that are down.
    """

    deaths: Sequence[NodeDied] = ()
    retired: Sequence[NodeId] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How a server that joins becomes a node. `engine`: the type that keeps it there; `settings`: what that type needs, also secrets."""

    engine: str
    settings: Mapping[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Brings supervisors to nodes for one head. The head calls `discover`, then `open`, then the others in any order, and `close` last."""

    @property
    def name(self) -> str:
        """The name of its type, as in `Node.engine`."""
        ...

    def discover(self, known: Sequence[Node], live: Sequence[tuple[Job, Attempt]]) -> Discovery:
        """Find what still runs from an earlier head, and remove what must not run. Idempotent, within seconds: leases are waiting.

        Args:
            known: the nodes of the store, of all engines.
            live: the attempts that have not ended, of all engines.
        """
        ...

    def open(self) -> None:
        """Bring supervisors to all nodes, in threads of the engine, which retry what fails. A second call does nothing.

        Raises:
            OSError: nothing could be started; the head logs it and continues.
        """
        ...

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Handle an attempt whose newest record became durable. Never blocks.

        An engine with one supervisor per attempt brings supervisors to a placed attempt and releases those of an ended one. It ignores
        attempts on other engines' nodes. An engine with one supervisor per node ignores all.
        """
        ...

    def observe(self) -> Sequence[Event]:
        """Return what happened since the last call: deaths of nodes, changes of the inventory, withdrawn attempts. Never blocks."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever `observe` has something to return. The head calls this once, before `open`."""
        ...

    def expected_nodes(self) -> Sequence[NodeId] | None:
        """Return the nodes that this engine is bringing up or keeps up; None while it has not listed them yet. Never blocks.

        Until each of them is known to the head, it refuses no job for want of nodes. Nodes that come only by `observe` are left out, and
        must have been returned by it before this returns anything else than None.
        """
        ...

    def admit(self, node_id: NodeId, address: str, hostname: str) -> Admission | None:
        """Admit a server that joins as a node; None if this engine takes none.

        Raises:
            BadRequest: the engine needs an address, and the server sent none.
        """
        ...

    def close(self, *, keep_nodes: bool) -> None:
        """Stop watching; unless `keep_nodes`, release every node: no process is left on it. Within 30 s."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node that this machine contributes: `virtual_devices` slots, or 0 for its real GPUs.

    Attributes:
        virtual_model: the GPU that the slots stand in for, by its name in the fact tables; "" for none.
        virtual_mig: the slots can be divided by MIG.
        offers: named amounts that it offers, as `--offers` writes them.
        cordoned: it takes no jobs from its first registration on until an operator returns it to service.
    """

    id: NodeId
    virtual_devices: int
    virtual_model: str = ""
    virtual_mig: bool = False
    offers: str = ""
    cordoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedCertificate:
    """A key and its certificate, in PEM form."""

    key_pem: str
    certificate_pem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """The paths of a certificate, of its key, and of the certificate of the CA that signed it."""

    certificate: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineJoin:
    """What the machine of a pool's order needs to join: the head's HOST:PORT, a token for its one node, and the fingerprint of the CA."""

    address: str
    token: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine gets from its head: how supervisors connect, and what is unique to the head.

    Attributes:
        state_folder: where the engine keeps its files.
        nodes: of this machine, which the engine brings up; empty if it brings none (`EngineType.uses_local_nodes`).
        url: of the head, for other machines; on loopback if it listens on no other address.
        address: of this machine, for other machines; empty if the head listens on loopback only.
        ca_pem: certificate of the head's CA; empty if `url` is on loopback.
        environment: returns the variables of supervisors that may run on another machine.
        local_environment: returns the variables of supervisors on this machine.
        node_token, attempt_key: return the secret of the supervisor of a node, or of those of an attempt.
        derive_id: returns 64 hex digits that are unique to the state folder and the given purpose; not secret.
        sign: returns a certificate for a server, given its address and host name.
        certificate_files: writes a certificate for this machine, given the name of the files and the address.
        revive_after_s: pause before a dead supervisor on this machine is started again; None: never.
        machine_join: returns what the machine of a pool's order needs, given the node and the order's token; None if the head listens on
            loopback only.
        sole_head: no other head shares the store, so that every node of the store is of this head.
    """

    state_folder: str
    nodes: Sequence[LocalNode]
    url: str
    address: str
    ca_pem: str
    environment: Callable[[], dict[str, str]]
    local_environment: Callable[[], dict[str, str]]
    node_token: Callable[[NodeId], str]
    attempt_key: Callable[[JobId, Epoch], str]
    derive_id: Callable[[str], str]
    sign: Callable[[str, str], SignedCertificate]
    certificate_files: Callable[[str, str], CertificateFiles]
    revive_after_s: float | None
    sole_head: bool
    machine_join: Callable[[NodeId, str], MachineJoin] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOption:
    """An option of `phalanx up` that an engine adds. Its value is stored for the next head.

    Attributes:
        name: without the leading dashes.
        reset: the value that clears it.
    """

    name: str
    metavar: str
    help: str
    reset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSetup:
    """What the user asked of the head, for the check of an engine's options.

    Attributes:
        listens, listened_before: whether this head and the one before listen off loopback.
        shares_store: the store is shared with other heads.
        virtual: the `--virtual` of this command line; empty without one.
    """

    listens: bool
    listened_before: bool
    shares_store: bool
    virtual: str


class KeeperStop(threading.Event):
    """Set when the keeper of a joined server shall end. `keep_node`: the node stays, with its jobs, and the next keeper adopts it."""

    keep_node = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The membership of a joined server.

    Attributes:
        url: of the head, https://.
        engine: the type that keeps this server a node.
        address: where other nodes reach this server's ranks.
        devices: number of virtual devices, or of GPUs.
        settings: what the engine remembers of its admission; no secrets.
        offers: named amounts that it offers, as `--offers` writes them.
        cordoned: it joined out of service, as for a test.
        heads: URLs of the other heads that share the store, comma-separated; its supervisor learns of later ones by itself.
    """

    url: str
    fingerprint: str
    node_id: NodeId
    engine: str
    address: str
    devices: int
    virtual: bool
    settings: dict[str, str] = field(default_factory=dict)
    heads: str = ""
    offers: str = ""
    cordoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """One check of what an engine needs from its cluster.

    Attributes:
        ok: it is there.
        optional: the engine works without it.
        says: what was found, and what is lost without it.
        mend: what to do about it; empty if nothing is to be done.
    """

    ok: bool
    says: str
    optional: bool = False
    mend: str = ""


class EngineType:
    """What the head and the command line know of an engine. Subclass it; importing the module of a subclass must be cheap.

    Attributes:
        name: as in `phalanx up --engine NAME` and `Node.engine`.
        title: for messages.
        options: that the engine adds to `phalanx up`. Begin their names with that of the engine.
        has_virtual_models: its virtual devices can stand in for GPU models.
        nodes_offer_extras: its nodes register what `--offers` gives them.
        selectable: `phalanx up --engine` offers it; otherwise only servers that join use it.
        nodes_start_s: how long `phalanx up` waits for the nodes.
        member_starts_s: how long `phalanx join` waits for the node.
        members_follow: a running member finds its head at another address, once `phalanx join` has recorded it.
        job_account: the account of jobs, in words; empty if the head's `--jobs-as` decides.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    options: ClassVar[Sequence[EngineOption]] = ()
    has_virtual_models: ClassVar[bool] = False
    nodes_offer_extras: ClassVar[bool] = False
    selectable: ClassVar[bool] = True
    nodes_start_s: ClassVar[float] = 10.0
    member_starts_s: ClassVar[float] = 30.0
    members_follow: ClassVar[bool] = False
    job_account: ClassVar[str] = ""

    def check(self, given: Mapping[str, str], previous: Mapping[str, str] | None, setup: HeadSetup) -> dict[str, str]:
        """Return the options to use and to store, after checking them. Nothing has been written or started yet.

        Args:
            given: the options of this command line.
            previous: the stored options; None if the head before used another engine.
            setup: the head's own options.

        Raises:
            PhalanxError: an option is wrong, or the engine cannot work here.
        """
        del setup
        return self.resolve(given, previous)

    def resolve(self, given: Mapping[str, str], previous: Mapping[str, str] | None) -> dict[str, str]:
        """Return each option: as given, else as stored, else empty."""
        found = {option.name: given.get(option.name, (previous or {}).get(option.name, "")) for option in self.options}
        return {
            option.name: "" if found[option.name] == option.reset else found[option.name] for option in self.options
        }

    def setup_text(self, options: Mapping[str, str], *, head: bool = False) -> str:
        """Return what an administrator of the engine's cluster has to grant, for the cluster's own tool; empty if nothing.

        `head`: with what runs the head itself in the cluster.
        """
        del options, head
        return ""

    def diagnose(self, options: Mapping[str, str]) -> Sequence[EngineCheck]:
        """Check what the engine needs from its cluster, within seconds. It changes nothing and raises nothing."""
        del options
        return ()

    def uses_local_nodes(self, options: Mapping[str, str]) -> bool:
        """Whether the engine brings up nodes of the head's machine."""
        del options
        return True

    def create(self, options: Mapping[str, str], head: EngineContext) -> Engine:
        """Create the engine of a head; nothing is started yet. Needed if `selectable`."""
        raise NotImplementedError

    def prepare_member(self, folder: str, settings: Mapping[str, str]) -> dict[str, str]:
        """On a server that joins: check that it can be a node, write the secrets of `settings`, and return what to remember.

        Raises:
            BadRequest: this server cannot be a node of this engine.
        """
        del folder, settings
        return {}

    def keep_member(self, folder: str, membership: Membership, ended: KeeperStop) -> None:
        """On a joined server: keep its node running until `ended` is set, then stop it, unless `ended.keep_node` says otherwise. Needed if `Engine.admit` names this type."""
        raise NotImplementedError
