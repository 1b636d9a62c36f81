"""The supervisor process: `python -m phalanx.app.node`, one for each node, started by an engine.

Settings come by environment, and leave it before anything else is started, so that no rank ever sees them:

    PHALANX_NODE_ID       the node's name
    PHALANX_NODE_KEY      marks every process of this node; unique on the machine. Stays in the environment: the engine's sweep looks for it
    PHALANX_NODE_LIFE     the id of this life of the supervisor, by which its engine tells the head of its death; drawn by itself without
    PHALANX_NODE_DIR      the node's folder: log, scratch
    PHALANX_NODE_TOKEN    its token at the head
    PHALANX_NODE_VIRTUAL  number of virtual devices; 0 for the GPUs that NVML finds
    PHALANX_NODE_ADDRESS  where other nodes reach its ranks
    PHALANX_NODE_ENGINE   the engine's word for itself; "local" without
    PHALANX_NODE_SEAT     of a supervisor that was brought for one attempt (app.seat): it ends with that
    PHALANX_NODE_DEVICES  of a seat, and of a node that Ray brings: positions in the driver's list of the devices that the engine gave; as many virtual ones without a driver
    PHALANX_HEAD_URL      where the head was when the supervisor started; of several heads all, with commas
    PHALANX_HEAD_FILE     a JSON file with "url" and "heads", read again when the head is not where it was
    PHALANX_HEAD_CA       the head's CA, where it speaks TLS
    PHALANX_HEAD_UID      numbers, with commas, of the accounts that heads here run under: no other is spoken to by plain HTTP, but root and our own
    PHALANX_JOBS_AS       owner: where we are root, jobs run as the account of their owner (`node.shell.accounts` has this and its kin)
    PHALANX_LOG           log level; INFO without

SIGTERM stops all it carries with grace and ends; a second one ends at once. When it dies, all its ranks die with it.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.work.seat import read_seat
from phalanx.node.shell import scratch, sysfs
from phalanx.node.shell.accounts import SETTINGS, JobAccounts
from phalanx.node.shell.channels import start_thread
from phalanx.node.shell.descriptors import open_many
from phalanx.node.shell.head_address import HeadAddress
from phalanx.node.shell.link import HeadAccess
from phalanx.node.shell.logbook import log_to
from phalanx.node.shell.loop import Loop, NodeSettings
from phalanx.node.shell.loopback import HEAD_UID_VARIABLE
from phalanx.node.shell.probe_link import LinkListener
from phalanx.node.shell.probes import DeviceProbe, NodeFacts, node_facts
from phalanx.wire.rank import StopReason

_KEPT: Final = "PHALANX_NODE_KEY"
_USAGE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a supervisor ended: `code` of the first task that failed by itself, and why its ranks were asked to end, if they were.

    Where none did (`failed`), the code is that of a task we stopped.
    """

    code: int
    failed: bool = False
    stop: StopReason = StopReason.NONE


def main() -> int:
    """Run until told to end; the exit code of the process."""
    return run().code


def run() -> Ended:
    """Run until told to end."""
    try:
        given = _take_settings()
    except KeyError as missing:
        print(
            f"phalanx node: {missing} is not set; supervisors are started by an engine (`phalanx up`)", file=sys.stderr
        )
        return Ended(code=_USAGE)
    # Not a seat: there the engine's own job control keeps its hold of us.
    if os.getsid(0) != os.getpid() and "PHALANX_NODE_SEAT" not in given:
        try:
            os.setsid()
        except PermissionError:  # already leads a process group; the engine's sweep goes by the key, not by the session
            pass
    open_many()
    folder = given["PHALANX_NODE_DIR"]
    os.makedirs(folder, mode=0o700, exist_ok=True)
    log_to(os.path.join(folder, "supervisor.log"), given.get("PHALANX_LOG", "INFO").upper())
    try:
        accounts = JobAccounts.of_settings(given, folder)
    except ValueError as error:
        print(f"phalanx node: {error}", file=sys.stderr)
        return Ended(code=_USAGE)
    scratch.sweep(folder, accounts.folder)
    facts = node_facts(folder)
    probe, virtual = _probe(given, facts)
    links = LinkListener(given["PHALANX_NODE_ID"], given.get("PHALANX_NODE_ADDRESS", "127.0.0.1"))
    loop = Loop(_settings(given, facts, probe, links.port, accounts, virtual=virtual), probe)
    start_thread("links", links.run)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.terminate())
    loop.run()
    probe.close()
    return (
        Ended(code=loop.exit_code, failed=loop.failed, stop=loop.stop)
        if "PHALANX_NODE_SEAT" in given
        else Ended(code=0)
    )


def _take_settings() -> dict[str, str]:
    """Our own variables, taken out of the environment.

    Raises:
        KeyError: one that must be there is not.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith("PHALANX_")}
    for name in given:
        ours = name.startswith(("PHALANX_NODE_", "PHALANX_HEAD_", "PHALANX_TOKEN", "PHALANX_LOG")) or name in SETTINGS
        if ours and name != _KEPT:
            del os.environ[name]
    for name in ("PHALANX_NODE_ID", _KEPT, "PHALANX_NODE_DIR", "PHALANX_NODE_TOKEN", "PHALANX_HEAD_URL"):
        if name not in given and not (name == "PHALANX_HEAD_URL" and "PHALANX_HEAD_FILE" in given):
            raise KeyError(name)
    return given


def _probe(given: dict[str, str], facts: NodeFacts) -> tuple[DeviceProbe, bool]:
    """What tells of the devices, and whether they are virtual; a machine without GPUs has none, unless told how many to pretend."""
    from phalanx.node.shell.virtual import VirtualProbe

    if "PHALANX_NODE_DEVICES" in given:
        return _probe_of_given(given, facts)
    slots = int(given.get("PHALANX_NODE_VIRTUAL") or 0)
    if slots > 0:
        return VirtualProbe(given[_KEPT], slots, facts.memory_bytes // slots), True
    from phalanx.node.shell.nvml import open_nvml

    real = open_nvml()
    return (VirtualProbe(given[_KEPT], 0, 0), False) if real is None else (real, False)


def _probe_of_given(given: dict[str, str], facts: NodeFacts) -> tuple[DeviceProbe, bool]:
    """The devices that the engine gave, numbered from 0."""
    from phalanx.node.shell.bound import BoundProbe
    from phalanx.node.shell.nvml import open_nvml
    from phalanx.node.shell.virtual import VirtualProbe

    places = [int(word) for word in given.get("PHALANX_NODE_DEVICES", "").split(",") if word]
    real = open_nvml()
    if real is not None:
        return BoundProbe(real, places), False
    return VirtualProbe(given[_KEPT], len(places), facts.memory_bytes // max(1, len(places))), bool(places)


def _settings(
    given: dict[str, str],
    facts: NodeFacts,
    probe: DeviceProbe,
    probe_port: int,
    accounts: JobAccounts,
    *,
    virtual: bool,
) -> NodeSettings:
    node_id = NodeId(given["PHALANX_NODE_ID"])
    supervisor_id = SupervisorId(given.get("PHALANX_NODE_LIFE") or f"{node_id}-{secrets.token_hex(8)}")
    devices = _devices(probe)
    node = Node(
        id=node_id,
        engine=given.get("PHALANX_NODE_ENGINE", "local"),
        devices=devices,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes,
        state=NodeState.UP,
        supervisor_id=supervisor_id,
        address=given.get("PHALANX_NODE_ADDRESS", "127.0.0.1"),
        hostname=facts.hostname,
        boot_id=facts.boot_id,
        virtual=virtual,
        probe_port=probe_port,
        nics=sysfs.nics(),
        runs_as=accounts.own,
    )
    access = HeadAccess(
        address=HeadAddress(
            given.get("PHALANX_HEAD_URL", ""),
            given.get("PHALANX_HEAD_FILE"),
            os.path.join(given["PHALANX_NODE_DIR"], "heads.json"),
        ),
        token=given["PHALANX_NODE_TOKEN"],
        ca_file=given.get("PHALANX_HEAD_CA"),
        head_uids=_head_uids(given),
    )
    return NodeSettings(
        node=node,
        supervisor_id=supervisor_id,
        node_key=given[_KEPT],
        folder=given["PHALANX_NODE_DIR"],
        access=access,
        base=dict(os.environ),
        seat=read_seat(given.get("PHALANX_NODE_SEAT", "")),
        accounts=accounts,
    )


def _head_uids(given: dict[str, str]) -> frozenset[int]:
    return frozenset(int(word) for word in given.get(HEAD_UID_VARIABLE, "").split(",") if word.strip().isdecimal())


def _devices(probe: DeviceProbe) -> tuple[Device, ...]:
    """The inventory as the head keeps it; links by index, for UUIDs mean nothing to people."""
    found = probe.devices()
    by_peer = [dict(zip(facts.nvlink_peers, facts.nvlinks, strict=False)) for facts in found]
    return tuple(
        Device(
            index=facts.index,
            uuid=facts.uuid,
            model=facts.model,
            memory_bytes=facts.memory_bytes,
            virtual=facts.virtual,
            nvlinks=tuple(links.get(peer.uuid, 0) for peer in found) if links else (),
            pci_bus=facts.pci_bus,
            pcie=facts.pcie,
            numa=sysfs.numa_of(facts.pci_bus),
        )
        for facts, links in zip(found, by_peer, strict=True)
    )


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the threads are daemons blocked on the head; nothing is left to be written
