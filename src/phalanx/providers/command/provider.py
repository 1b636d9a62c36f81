"""Starts and stops machines by a script of the operator, with the verbs `start`, `stop`, `list` and optionally `console`: JSON on its input and output.

Scripts are in the folder `providers` of the head's state folder and are named without a path: who may add pools chooses among them, and can
run no other program on the head's machine. `docs/pools.md` has the JSON of each verb.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine, NodeOffer, NodeTemplate
from phalanx.core.fleet.virtual_devices import VirtualDevices, parse_virtual_devices
from phalanx.core.ids import NodeId
from phalanx.core.units import parse_duration_s, parse_memory_bytes
from phalanx.planner.facts.gpus import find_gpu
from phalanx.ports.engine import EngineContext
from phalanx.ports.provider import (
    CallUnanswered,
    CloudRights,
    EndedOrder,
    LostNode,
    NodeOrder,
    NodeProvider,
    OfferRefused,
    PoolTerms,
    ProviderType,
    StartedMachine,
)
from phalanx.providers.clouds.own_files import check_own_file
from phalanx.providers.clouds.rented_nodes import join_of, owner_of, require_listening

NAME: Final = "command"
DEADLINE_S: Final = 60.0  # of one call, unless the pool has the setting `deadline`
DEADLINE_MAX_S: Final = 600.0
OUTPUT_BYTES_MAX: Final = 4 << 20
DEVICES_MAX: Final = 256  # of one node
CPUS: Final = 8  # of a node, unless the pool has the setting `cpus`
MEMORY_BYTES: Final = 32 << 30  # likewise `memory`
_OWN_SETTINGS: Final = frozenset({"script", "deadline", "cpus", "memory"})  # all others are the script's
_log = logging.getLogger("phalanx.providers")
_SCRIPT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_TEMPLATE: Final = re.compile(r"(?:1x)?(.+)")


class CommandProviderType(ProviderType):
    """See the module."""

    name = NAME
    parallel_calls = 4  # each is a process

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider; its scripts are in the folder `providers` of the head."""
        return CommandProvider(head=head, folder=os.path.join(head.state_folder, "providers"))


@dataclass(slots=True, kw_only=True)
class CommandProvider:
    """The provider of one head. The script has the list of machines; this only knows the orders that it has seen, for a stop of the head."""

    head: EngineContext
    folder: str
    _seen: dict[str, NodeOrder] = field(default_factory=dict)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Return what a node of a template such as `1xh100:8` has; one offer for each zone.

        Raises:
            BadRequest: the template or a setting is not valid, the script cannot be run, or its `list` fails.
        """
        settings = terms.settings
        devices, cpus, memory_bytes = _shape(terms.template, settings)
        _deadline_s(settings)
        require_listening(self.head)
        self._script(settings)
        try:
            self.machines(settings)
        except OSError as error:
            raise BadRequest(f"the script cannot list its machines: {error}") from error
        price_per_h = terms.price_per_h or 0.0
        return NodeTemplate(
            text=terms.template,
            devices=devices,
            cpus=cpus,
            memory_bytes=memory_bytes,
            listed=True,
            offers=tuple(
                NodeOffer(text=zone, zone=zone, price_per_h=price_per_h) for zone in dict.fromkeys(terms.zones)
            ),
        )

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Remember the orders; the head's sweeper compares the list with the records."""
        self._seen = {order.token: order for order in orders}

    def start(self, order: NodeOrder) -> StartedMachine:
        """Ask the script to start the machine of the order.

        Raises:
            OfferRefused: the answer has `refused`.
            OSError: it has `failed`.
            CallUnanswered: it failed in another way, or gave no such answer in time.
        """
        self._seen[order.token] = order
        join = join_of(self.head, order)
        answer = self._call("start", order.settings, {**self._order(order), "join": asdict(join)})
        if "refused" in answer:
            raise OfferRefused(str(answer["refused"]))
        if "failed" in answer:
            raise OSError(str(answer["failed"]))
        machine = answer.get("machine")
        if not isinstance(machine, str) or not machine:
            raise CallUnanswered(f'start: the answer has no "machine": {json.dumps(answer)[:200]}')
        return StartedMachine(machine=machine, since_s=_seconds(answer, "since_s"))

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Ask the script to stop the machines of the order.

        Raises:
            OSError: it did not confirm that.
        """
        answer = self._call("stop", order.settings, {**self._order(order), "machine": order.machine})
        if "failed" in answer:
            raise OSError(str(answer["failed"]))
        if not order.machine:
            self._seen.pop(order.token, None)
        machine = order.machine or order.known_machine
        until_s = _seconds(answer, "until_s")
        return (
            [ChargedMachine(machine=machine, since_s=_seconds(answer, "since_s"), until_s=until_s)] if machine else []
        )

    def console(self, order: NodeOrder) -> str:
        """Ask the script for what the machine printed. The verb is optional: a script without it may fail.

        Raises:
            OSError: it gave no answer with `console`.
        """
        answer = self._call("console", order.settings, {**self._order(order), "machine": order.known_machine})
        if "failed" in answer:
            raise OSError(str(answer["failed"]))
        return str(answer.get("console", ""))

    def observe(self) -> Sequence[LostNode]:
        """Return nothing: the head's sweeper finds machines that ended."""
        return ()

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Ask the script for its machines.

        Raises:
            OSError: it gave no complete list.
        """
        answer = self._call("list", settings, {"owner": self._owner, "settings": _script_settings(settings)})
        if "failed" in answer:
            raise OSError(str(answer["failed"]))
        try:
            return [
                ListedMachine(
                    machine=str(one["machine"]),
                    node_id=NodeId(str(one["node"])),
                    token=str(one["token"]),
                    offer=str(one.get("zone", "")),
                    ended=bool(one.get("ended", False)),
                )
                for one in answer["machines"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise OSError(
                f'list: "machines" is not a list of objects with machine, node and token: {error!r}'
            ) from error

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Refuse: there is nothing to check.

        Raises:
            BadRequest: always.
        """
        del settings
        raise BadRequest(f"provider {NAME} has no credentials to check")

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Unless `keep_nodes`, stop the machines."""
        ended = []
        for order in [] if keep_nodes else list(self._seen.values()):
            try:
                ended.append(EndedOrder(node_id=order.node_id, token=order.token, stopped=self.stop(order)))
            except OSError as error:
                _log.error("the machine of %s may run on: %s", order.node_id, error)
        return ended

    @property
    def _owner(self) -> str:
        return owner_of(self.head)

    def _order(self, order: NodeOrder) -> dict[str, Any]:
        return {
            "owner": self._owner,
            "pool": order.pool,
            "node": order.node_id,
            "token": order.token,
            "template": order.template,
            "zone": order.offer or order.zone,
            "settings": _script_settings(order.settings),
        }

    def _script(self, settings: Mapping[str, str]) -> str:
        """Return the path of the script, which only the head's account or root may change.

        Raises:
            BadRequest: it has no valid name, is missing, or others may write it.
        """
        name = settings.get("script", "")
        if not _SCRIPT.fullmatch(name):
            raise BadRequest(
                f"the setting script is {name[:80]!r}, not the name of a file in {self.folder}", hint="script=NAME"
            )
        path = os.path.join(self.folder, name)
        check_own_file(path)
        if not os.access(path, os.X_OK) or not os.path.isfile(path):
            raise BadRequest(f"{path} is not an executable file", hint=f"chmod u+x {path}")
        return path

    def _call(self, verb: str, settings: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the script, and return its answer.

        Raises:
            CallUnanswered: it ended with an error, not in time, or with no JSON object.
        """
        deadline_s = _deadline_s(settings)
        try:
            script = subprocess.Popen(
                [self._script(settings), verb],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.folder,
                start_new_session=True,
            )
        except BadRequest as error:
            raise CallUnanswered(str(error)) from error
        try:
            output, errors = script.communicate(json.dumps(request).encode(), timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise CallUnanswered(f"{verb}: no answer within {deadline_s:g} s") from None
        finally:
            _end_group(script)
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][:300]
        if script.returncode != 0:
            how = f"signal {-script.returncode}" if script.returncode < 0 else f"exit code {script.returncode}"
            raise CallUnanswered(f"{verb}: {how}: {last or 'no message'}")
        if len(output) > OUTPUT_BYTES_MAX:
            raise CallUnanswered(f"{verb}: the answer has more than {OUTPUT_BYTES_MAX} bytes")
        try:
            answer = json.loads(output)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise CallUnanswered(f"{verb}: the answer is not a JSON object: {output[:120].decode(errors='replace')!r}")
        return answer


def _end_group(script: subprocess.Popen[bytes]) -> None:
    """End what is left of the script and its children. They have a process group of their own."""
    try:
        os.killpg(script.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    script.wait()
    for stream in (script.stdin, script.stdout, script.stderr):
        if stream is not None:
            stream.close()


def _script_settings(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name not in _OWN_SETTINGS}


def _deadline_s(settings: Mapping[str, str]) -> float:
    """Return how long one call of the script may take.

    Raises:
        BadRequest: the setting is not a duration, or too long.
    """
    deadline_s = parse_duration_s(settings["deadline"], what="deadline") if "deadline" in settings else DEADLINE_S
    if not 0.0 < deadline_s <= DEADLINE_MAX_S:
        raise BadRequest(f"the deadline of a script is more than 0 and at most {DEADLINE_MAX_S:g} s")
    return deadline_s


def _seconds(answer: Mapping[str, Any], name: str) -> float:
    value = answer.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _shape(template: str, settings: Mapping[str, str]) -> tuple[tuple[Device, ...], int, int]:
    """Return the devices, CPUs and bytes of memory of a node.

    Raises:
        BadRequest: the template or a setting is not valid.
    """
    match = _TEMPLATE.fullmatch(template.strip().lower())
    asked: VirtualDevices = parse_virtual_devices(match[1] if match is not None else "")
    if not 0 <= asked.count <= DEVICES_MAX or asked.mig:
        raise BadRequest(f"{template}: a node has 0 to {DEVICES_MAX} GPUs and no MIG", hint="use 1xh100:8")
    gpu = find_gpu(asked.model).gpu if asked.model else None  # without a model: virtual devices
    model, device_bytes = ("virtual", 0) if gpu is None else (gpu.name, gpu.memory_bytes)
    devices = tuple(
        Device(index=index, uuid="", model=model, memory_bytes=device_bytes, virtual=gpu is None)
        for index in range(asked.count)
    )
    cpus = settings.get("cpus", str(CPUS))
    if not cpus.isdecimal() or not 0 < int(cpus) <= 4096:
        raise BadRequest(f"the setting cpus is {cpus[:20]!r}, not a number of CPUs")
    return devices, int(cpus), parse_memory_bytes(settings["memory"]) if "memory" in settings else MEMORY_BYTES
