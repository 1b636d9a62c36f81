"""The supervisor process: `python -m phalanx.app.node`, one per node, started by an engine.

Settings are environment variables. They are removed from the environment before any other process starts, so ranks never see them:

    PHALANX_NODE_ID       the node's name
    PHALANX_NODE_KEY      marks every process of this node; unique on the machine. Not removed: the engine finds leftover processes by it
    PHALANX_NODE_LIFE     the supervisor's id, by which its engine reports its death to the head; random by default
    PHALANX_NODE_DIR      the node's folder: log, scratch
    PHALANX_NODE_TOKEN    its token for the head
    PHALANX_NODE_CORDONED  1: a node that the head does not know yet takes no jobs until an operator returns it to service
    PHALANX_NODE_OFFERS   named amounts that the node offers, such as scratch=2TiB,nic=8
    PHALANX_NODE_VIRTUAL  virtual devices as `core.fleet.virtual_devices` writes them; 0 for the GPUs that NVML finds
    PHALANX_VIRTUAL_CPUS, PHALANX_VIRTUAL_MEMORY  what a virtual node claims to have; by default the machine's
    PHALANX_NODE_ADDRESS  the address at which other nodes reach its ranks
    PHALANX_NODE_ENGINE   the engine's name
    PHALANX_NODE_SEAT     the seat of a supervisor that runs for one attempt (app.seat) and ends with it
    PHALANX_NODE_STOP_GRACE_S  longest grace of its ranks after SIGTERM, in seconds; default: 8
    PHALANX_NODE_DEVICES  for a seat or a Ray node: the devices from the engine, as positions in the driver's list; virtual without a driver
    PHALANX_NODE_CPUS, PHALANX_NODE_MEMORY_BYTES  what the engine assigned of the machine; by default all of it
    PHALANX_NODE_SIGNALS_REACH_RANKS  set if the engine ends the node by a signal to all of its processes, the ranks among them
    PHALANX_NODE_UNWATCHED  set if no engine of the head watches the supervisor: it reports to the head that it leaves
    PHALANX_NODE_OUTSIDE  for a Ray node: positions in that list of the devices that others hold; PHALANX_NODE_OUTSIDE_BY: who
    PHALANX_HEAD_URL      the head's URL when the supervisor started; of several heads all URLs, separated by commas
    PHALANX_HEAD_FILE     a JSON file with "url" and "heads", read again when the head is unreachable
    PHALANX_HEAD_CA       the file with the head's CA certificate, if the head uses TLS
    PHALANX_HEAD_UID      user ids of heads on this machine, separated by commas: plain HTTP is sent only to these, root and the own account
    PHALANX_JOBS_AS       owner: if the supervisor is root, jobs run as the account of their owner (see `node.shell.accounts`)
    PHALANX_HOOKS         the operator's file of hooks (`node.prepare.hook_runner`)
    PHALANX_LOG           log level; default: INFO

SIGTERM stops its ranks with a grace period and then ends the process; a second SIGTERM ends it at once. When it dies, its ranks die.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from phalanx import __version__
from phalanx.app.account_name import name_account
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.mig import DeviceMig
from phalanx.core.fleet.node import NO_FOREIGN_USAGE, Cordon, ForeignUsage, Node, NodeState
from phalanx.core.fleet.virtual_devices import (
    MODEL_PREFIX,
    VIRTUAL_CPUS_MAX,
    VIRTUAL_CPUS_VARIABLE,
    VIRTUAL_MEMORY_VARIABLE,
    VirtualDevices,
    parse_virtual_devices,
)
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.units import parse_memory_bytes
from phalanx.core.work.extras import parse_extras
from phalanx.core.work.seats import parse_seat
from phalanx.node.data.rclone_remote import why_no_mounts
from phalanx.node.files.job_accounts import ACCOUNT_VARIABLES, JobAccountPolicy
from phalanx.node.head_link.channels import start_thread
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.head_link.peer_account import HEAD_UID_VARIABLE
from phalanx.node.logic.operator_hooks import HOOKS_VARIABLE
from phalanx.node.logic.supervisor import TERMINATE_GRACE_MAX_S
from phalanx.node.logs.log_file import log_to_file
from phalanx.node.member import scratch
from phalanx.node.mig.slice_keeper import SliceKeeper
from phalanx.node.power.limit_keeper import PowerLimitKeeper
from phalanx.node.prepare.hook_runner import hooks_file
from phalanx.node.probes import sysfs
from phalanx.node.probes.devices import DeviceFacts, DeviceProbe, NodeFacts, node_facts
from phalanx.node.probes.link_probe import LinkProbeListener
from phalanx.node.processes.file_limits import raise_file_limit
from phalanx.node.shell.node_settings import NodeSettings
from phalanx.node.shell.supervisor_loop import SupervisorLoop
from phalanx.node.transfer import unsent_output
from phalanx.wire.rank import RankStopReason

_KEPT: Final = "PHALANX_NODE_KEY"
_USAGE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorResult:
    """How a supervisor ended: the exit code of the first task that failed on its own, and why its ranks were stopped, if they were.

    If no task `failed`, the code is that of a task that the supervisor stopped.
    """

    code: int
    failed: bool = False
    stop: RankStopReason = RankStopReason.NONE


def main() -> int:
    """Run until asked to stop, and return the exit code of the process."""
    return run().code


def run(on_signal: Callable[[SupervisorLoop], Callable[[], None]] = lambda loop: loop.terminate) -> SupervisorResult:
    """Run until asked to stop. `on_signal` returns what a signal to stop calls, in the signal's handler."""
    name_account()
    try:
        given = _take_settings()
    except KeyError as missing:
        print(f"phalanx node: {missing} is not set; engines start supervisors (use `phalanx up`)", file=sys.stderr)
        return SupervisorResult(code=_USAGE)
    # Not for a seat: the engine's job control must keep control of the process.
    if os.getsid(0) != os.getpid() and "PHALANX_NODE_SEAT" not in given:
        try:
            os.setsid()
        except (
            PermissionError
        ):  # it already leads a process group; the engine finds processes by the key, not by the session
            pass
    raise_file_limit()
    folder = given["PHALANX_NODE_DIR"]
    os.makedirs(folder, mode=0o700, exist_ok=True)
    log_to_file(os.path.join(folder, "supervisor.log"), given.get("PHALANX_LOG", "INFO").upper())
    try:
        accounts = JobAccountPolicy.from_environment(given, folder)
    except ValueError as error:
        print(f"phalanx node: {error}", file=sys.stderr)
        return SupervisorResult(code=_USAGE)
    unsent_output.keep_unsent_output(folder, scratch.attempts_folder(folder))
    scratch.remove_old_scratch(folder, accounts.folder)
    facts = node_facts(folder)
    probe, virtual = _probe(given, facts)
    if virtual:
        facts = claimed_facts(given, facts)
    facts = replace(
        facts,
        cpus=int(given.get("PHALANX_NODE_CPUS", facts.cpus)),
        memory_bytes=int(given.get("PHALANX_NODE_MEMORY_BYTES", facts.memory_bytes)),
    )
    links = LinkProbeListener(given["PHALANX_NODE_ID"], given.get("PHALANX_NODE_ADDRESS", "127.0.0.1"))
    slices = _slice_keeper(given, facts)
    settings = _settings(given, facts, probe, slices, links.port, accounts, virtual=virtual)
    try:
        loop = SupervisorLoop(settings, probe)
    except ValueError as error:  # a containment or limits that do not work here were demanded
        print(f"phalanx node: {error}", file=sys.stderr)
        return SupervisorResult(code=_USAGE)
    start_thread("links", links.run)
    asked_to_stop = on_signal(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_stop())
    loop.run()
    if slices is not None:
        slices.close()
    probe.close()
    return (
        SupervisorResult(code=loop.exit_code, failed=loop.failed, stop=loop.stop)
        if "PHALANX_NODE_SEAT" in given
        else SupervisorResult(code=0)
    )


def _take_settings() -> dict[str, str]:
    """Read Phalanx's variables, and remove the private ones from the environment.

    Raises:
        KeyError: a required variable is missing.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith("PHALANX_")}
    for name in given:
        ours = name.startswith(("PHALANX_NODE_", "PHALANX_HEAD_", "PHALANX_TOKEN", "PHALANX_LOG")) or name in (
            *ACCOUNT_VARIABLES,
            HOOKS_VARIABLE,
        )
        if ours and name != _KEPT:
            del os.environ[name]
    for name in (
        "PHALANX_NODE_ID",
        _KEPT,
        "PHALANX_NODE_DIR",
        "PHALANX_NODE_ENGINE",
        "PHALANX_NODE_TOKEN",
        "PHALANX_HEAD_URL",
    ):
        if name not in given and not (name == "PHALANX_HEAD_URL" and "PHALANX_HEAD_FILE" in given):
            raise KeyError(name)
    return given


def _probe(given: dict[str, str], facts: NodeFacts) -> tuple[DeviceProbe, bool]:
    """Return the device probe, and whether its devices are virtual. A machine without GPUs has no devices unless virtual ones are set."""
    from phalanx.node.probes.virtual_devices import VirtualProbe

    if "PHALANX_NODE_DEVICES" in given:
        return _probe_of_engine_devices(given, facts)
    asked = _virtual_devices(given)
    if asked.count > 0:
        memory_bytes = facts.memory_bytes // asked.count
        model = MODEL_PREFIX + asked.model if asked.model else "virtual"
        if asked.model:
            memory_bytes = _memory_bytes(asked.model)
        return VirtualProbe(given[_KEPT], asked.count, memory_bytes, model=model), True
    from phalanx.node.probes.nvml import open_nvml

    real = open_nvml()
    return (VirtualProbe(given[_KEPT], 0, 0), False) if real is None else (real, False)


def _virtual_devices(given: dict[str, str]) -> VirtualDevices:
    return parse_virtual_devices(given.get("PHALANX_NODE_VIRTUAL") or "0")


def _memory_bytes(model: str) -> int:
    """Return the memory of a GPU that a virtual device stands in for. It limits nothing: ranks use this machine's memory."""
    from phalanx.planner.facts.gpus import find_gpu
    from phalanx.planner.facts.mig import find_mig_gpu

    try:
        return find_gpu(model).gpu.memory_bytes
    except BadRequest:
        divisible = find_mig_gpu(model)
        return 0 if divisible is None else divisible.memory_bytes


def claimed_facts(given: Mapping[str, str], facts: NodeFacts) -> NodeFacts:
    """Return the facts of a virtual node, with the CPUs and the memory that it claims to have: a script for a larger machine can be tried.

    Raises:
        BadRequest: the variable is not a number of CPUs, or not an amount of memory.
    """
    cpus, memory = given.get(VIRTUAL_CPUS_VARIABLE, ""), given.get(VIRTUAL_MEMORY_VARIABLE, "")
    if cpus and not (cpus.isdecimal() and 1 <= int(cpus) <= VIRTUAL_CPUS_MAX):
        raise BadRequest(f"{VIRTUAL_CPUS_VARIABLE}={cpus[:20]!r} is not a number from 1 to {VIRTUAL_CPUS_MAX}")
    return replace(
        facts,
        cpus=int(cpus) if cpus else facts.cpus,
        memory_bytes=parse_memory_bytes(memory, what=VIRTUAL_MEMORY_VARIABLE) if memory else facts.memory_bytes,
    )


def _slice_keeper(given: dict[str, str], facts: NodeFacts) -> SliceKeeper | None:
    """Return what makes MIG slices here and knows its own; None if no device can be divided."""
    folder = given["PHALANX_NODE_DIR"]
    asked = _virtual_devices(given)
    if asked.count == 0:
        from phalanx.node.mig.nvml_instances import open_nvml_instances

        real = open_nvml_instances()
        return None if real is None else SliceKeeper(real, folder, facts.boot_id)
    from phalanx.node.mig.virtual_instances import VirtualInstances
    from phalanx.planner.facts.mig import find_mig_gpu

    divisible = find_mig_gpu(asked.model) if asked.model else None
    if divisible is None:
        return None
    profiles = [divisible.profiles] * asked.count
    return SliceKeeper(VirtualInstances(folder, facts.boot_id, profiles, on=asked.mig), folder, facts.boot_id)


def _probe_of_engine_devices(given: dict[str, str], facts: NodeFacts) -> tuple[DeviceProbe, bool]:
    """Return the probe of the devices that the engine assigned, numbered from 0."""
    from phalanx.node.probes.device_subset import DeviceSubsetProbe
    from phalanx.node.probes.nvml import open_nvml
    from phalanx.node.probes.virtual_devices import VirtualProbe

    places = [int(word) for word in given.get("PHALANX_NODE_DEVICES", "").split(",") if word]
    real = open_nvml()
    if real is not None:
        return DeviceSubsetProbe(real, places), False
    return VirtualProbe(given[_KEPT], len(places), facts.memory_bytes // max(1, len(places))), bool(places)


_JOINED_CORDONED: Final = Cordon(by="join", why="it joined out of service, to be tested first", since_s=0.0)


def _settings(
    given: dict[str, str],
    facts: NodeFacts,
    probe: DeviceProbe,
    slices: SliceKeeper | None,
    probe_port: int,
    accounts: JobAccountPolicy,
    *,
    virtual: bool,
) -> NodeSettings:
    node_id = NodeId(given["PHALANX_NODE_ID"])
    supervisor_id = SupervisorId(given.get("PHALANX_NODE_LIFE") or f"{node_id}-{secrets.token_hex(8)}")
    devices = _devices(probe, slices)
    node = Node(
        id=node_id,
        engine=given["PHALANX_NODE_ENGINE"],
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
        extras=parse_extras(given.get("PHALANX_NODE_OFFERS", ""), key="PHALANX_NODE_OFFERS"),
        supervisor_account=accounts.supervisor_account,
        foreign_usage=_foreign_usage(given),
        version=__version__,
        mounts_error=why_no_mounts(given.get("PATH", os.defpath)),
        cordon=_JOINED_CORDONED if given.get("PHALANX_NODE_CORDONED") else None,
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
        seat=parse_seat(given.get("PHALANX_NODE_SEAT", "")),
        unwatched="PHALANX_NODE_UNWATCHED" in given,
        signals_reach_ranks="PHALANX_NODE_SIGNALS_REACH_RANKS" in given,
        accounts=accounts,
        slices=slices,
        power=None if virtual else _power_keeper(given, probe),
        hooks="" if "PHALANX_NODE_SEAT" in given else hooks_file({**os.environ, **given}),
        terminate_grace_s=float(given.get("PHALANX_NODE_STOP_GRACE_S", TERMINATE_GRACE_MAX_S)),
    )


def _power_keeper(given: Mapping[str, str], probe: DeviceProbe) -> PowerLimitKeeper | None:
    """Return what sets the power limits of the GPUs; None without GPUs, and for a supervisor that ends with its attempt."""
    from phalanx.node.probes.nvml import load_nvml

    if "PHALANX_NODE_SEAT" in given or not probe.devices():
        return None
    nvml = load_nvml()
    return None if nvml is None else PowerLimitKeeper(nvml, given["PHALANX_NODE_DIR"], probe.devices())


def _foreign_usage(given: Mapping[str, str]) -> ForeignUsage:
    """Return the devices that other users of the node's engine held when the engine started the supervisor."""
    places = tuple(int(word) for word in given.get("PHALANX_NODE_OUTSIDE", "").split(",") if word)
    return ForeignUsage(devices=places, owners=(given["PHALANX_NODE_OUTSIDE_BY"],)) if places else NO_FOREIGN_USAGE


def _head_uids(given: dict[str, str]) -> frozenset[int]:
    return frozenset(int(word) for word in given.get(HEAD_UID_VARIABLE, "").split(",") if word.strip().isdecimal())


def _devices(probe: DeviceProbe, slices: SliceKeeper | None) -> tuple[Device, ...]:
    """Return the inventory as the head stores it; NVLinks by device index, as people do not know UUIDs."""
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
            mig=_mig_of(facts, slices),
        )
        for facts, links in zip(found, by_peer, strict=True)
    )


def _mig_of(facts: DeviceFacts, slices: SliceKeeper | None) -> DeviceMig | None:
    """Return what MIG can do with the device. Without profiles while it is off: a head with 100,000 such GPUs would hold them all."""
    found = None if slices is None else slices.describe(facts)
    return found if found is None or found.on else replace(found, profiles=())


if __name__ == "__main__":
    code = main()
    os._exit(code)  # daemon threads may still wait for the head; there is nothing left to write
