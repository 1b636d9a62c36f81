"""Starts and stops machines of smaller clouds, each described by a table (`cloud_table`); `docs/small-clouds.md` has the settings.

These clouds have no idempotency tokens. A machine has a name made of its order and offer. Before each create the list is searched for it; after a
create without an answer, or one that an earlier head may have sent, no other is sent before the table's `settle_s` is over. If a list lags for
longer, a second machine can start: the head's sweeper finds it as a stray.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine, NodeTemplate
from phalanx.core.fleet.virtual_devices import parse_virtual_devices
from phalanx.core.ids import NodeId
from phalanx.core.units import parse_memory_bytes
from phalanx.planner.facts.gpus import find_gpu
from phalanx.ports.engine import EngineContext
from phalanx.ports.provider import (
    CallUnanswered,
    CloudRight,
    CloudRights,
    EndedOrder,
    LostNode,
    NodeOrder,
    NodeProvider,
    PoolTerms,
    ProviderType,
    StartedMachine,
)
from phalanx.providers.clouds.closing import stop_everything
from phalanx.providers.clouds.offers import ON_DEMAND, parse_zone_offer, zone_offers
from phalanx.providers.clouds.pool_settings import (
    SHARED_SETTINGS,
    MachineSettings,
    check_names,
    parse_machine_settings,
    setting_count,
)
from phalanx.providers.clouds.rented_nodes import join_of, rented_template, require_listening
from phalanx.providers.clouds.start_script import start_script
from phalanx.providers.http.cloud_table import CloudTable, fill, look_up, look_up_all, read_table
from phalanx.providers.http.signed_calls import SignedCalls, SmallCloudError, as_object

NAME: Final = "http"
CPUS: Final = 8  # of a node, unless the pool has the setting `cpus`
MEMORY_BYTES: Final = 32 << 30  # likewise `memory`
GPUS_MAX: Final = 256  # of one node
FOLLOW_S: Final = 20.0  # an operation; then the call that began it is repeated
POLL_S: Final = 1.0
PAGES_MAX: Final = 1000
_OWN: Final = frozenset({"cloud", "shape", "cpus", "memory", *SHARED_SETTINGS})


class HttpProviderType(ProviderType):
    """See the module."""

    name = NAME
    parallel_calls = 8

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider; its own tables and keys are in the folder `providers` of the head."""
        return HttpProvider(head=head, folder=os.path.join(head.state_folder, "providers"))


@dataclass(slots=True, kw_only=True)
class HttpProvider:
    """The provider of one head.

    Attributes:
        sent_s: when (monotonic) a create was or may have been sent last that was not answered, by the name of the machine.
        operations: operations that creates have begun, by the name of the machine.
        since_s: since when a machine is charged, by the first answer about it: lists of some clouds do not say it.
        stop_sent_s: when (Unix seconds) the first stop of a machine was sent that was not answered.
    """

    head: EngineContext
    folder: str
    sent_s: dict[str, float] = field(default_factory=dict)
    operations: dict[str, tuple[str, str]] = field(default_factory=dict)
    since_s: dict[str, float] = field(default_factory=dict)
    stop_sent_s: dict[str, float] = field(default_factory=dict)
    _seen: dict[str, NodeOrder] = field(default_factory=dict)
    _clouds: dict[str, SignedCalls] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Ask the cloud for its types and machines; nothing is started.

        Raises:
            BadRequest: a setting, type or zone is not valid; the key may not list machines; or the head listens only on loopback.
        """
        require_listening(self.head)
        cloud, settings = self._cloud(terms.settings), terms.settings
        table = cloud.table
        check_names(NAME, settings, _OWN | set(table.settings))
        if missing := [name for name in table.settings if not settings.get(name)]:
            raise BadRequest(f"cloud {table.name} needs the setting {missing[0]}", hint=f"--set {missing[0]}=...")
        machine = parse_machine_settings(settings)
        shape = _shape(settings, machine)
        for zone in terms.zones:
            if not re.fullmatch(table.zone, zone):
                raise BadRequest(f"{zone[:40]!r} is not a zone of cloud {table.name}", hint=table.example)
        if not terms.zones or not terms.template:
            raise BadRequest(f"cloud {table.name} needs a type and zones", hint=table.example)
        kind = terms.template.replace(" ", "_")  # an offer has words
        try:
            self._check_type(cloud, terms)
            self.machines(settings)
        except OSError as error:
            raise BadRequest(f"cloud {table.name} refuses: {error}", hint="look at the rights of the key") from error
        price_per_h = terms.price_per_h or 0.0
        offers = zone_offers([ON_DEMAND], [kind], list(dict.fromkeys(terms.zones)), lambda *_: price_per_h)
        return rented_template(terms.template, shape, offers)

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Remember the orders: an earlier head may have sent creates for those without a machine."""
        self._seen = {order.token: order for order in orders}
        for order in orders:
            if not order.known_machine:
                self.sent_s[self._name(order)] = time.monotonic()

    def start(self, order: NodeOrder) -> StartedMachine:
        """Start the machine of the order by its offer, unless the list has one of its name.

        Raises:
            OfferRefused: no capacity or quota there.
            CallUnanswered: no answer, an operation that is not done yet, or a create that the list may still bring up.
            OSError: the cloud refuses the call.
        """
        self._seen[order.token] = order
        cloud, name = self._cloud(order.settings), self._name(order)
        began_s = cloud.service.now_s()
        if name in self.operations:
            return self._follow(cloud, order, name)
        for one in self._items(cloud, order.settings):
            if one.name == name and not one.ended:
                self.sent_s.pop(name, None)
                return self._started(order, one.machine, one.since_s or began_s)
        if name in self.sent_s and (left_s := self.sent_s[name] + cloud.table.settle_s - time.monotonic()) > 0.0:
            raise CallUnanswered(f"a call without an answer may have started {name}: looking for {left_s:.0f} s more")
        answer = self._create(cloud, order, name)
        machine = str(look_up(answer, cloud.table.machine) or "")
        if not machine:
            raise CallUnanswered(f"the answer has no id of the machine at {cloud.table.machine}")
        operation = cloud.table.operation
        if operation is not None:
            self.operations[name] = (str(look_up(answer, operation.id)), machine)
            return self._follow(cloud, order, name)
        return self._started(order, machine, began_s)

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Stop the machines of the order: those that the list has under its name, and the one that the record has.

        Raises:
            OSError: the cloud did not confirm that.
        """
        cloud, name = self._cloud(order.settings), self._name(order)
        listed = {one.machine: one for one in self._items(cloud, order.settings)}
        named = {one.machine for one in listed.values() if one.name == name}
        due = {order.machine} if order.machine else named | {order.known_machine} - {""}
        if name in self.operations and not order.machine:
            due.add(self.operations[name][1])
        stopped = []
        for machine in sorted(due):
            known = listed.get(machine)
            since_s, until_s = 0.0 if known is None else known.since_s, self.stop_sent_s.get(machine, 0.0)
            if known is None or not known.ended:
                self.stop_sent_s.setdefault(machine, cloud.service.now_s())
                if self._stop(cloud, order.settings, machine) or known is not None:
                    until_s = until_s or cloud.service.now_s()
            # The clouds say no time of the end. 0: it ended by itself, or by an earlier head.
            stopped.append(ChargedMachine(machine=machine, since_s=since_s, until_s=until_s))
            self.stop_sent_s.pop(machine, None)
            self.since_s.pop(machine, None)
        if not order.machine:
            self._seen.pop(order.token, None)
            self.operations.pop(name, None)
            self.sent_s.pop(name, None)
        return stopped

    def observe(self) -> Sequence[LostNode]:
        """Return nothing: the head's sweeper finds machines that ended."""
        return ()

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return the machines whose name has the mark of this head. Those of no known order have their name for a token.

        Raises:
            OSError: the list is not complete.
        """
        with self._guard:
            orders = {self._name(order): order for order in list(self._seen.values())}
        found = []
        for one in self._items(self._cloud(settings), settings):
            order = orders.get(one.name)
            if one.name.startswith(self._mark):
                found.append(
                    ListedMachine(
                        machine=one.machine,
                        node_id=NodeId("") if order is None else order.node_id,
                        token=one.name if order is None else order.token,
                        offer="" if order is None else order.offer,
                        ended=one.ended,
                    )
                )
        return found

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Try the list: these clouds do not say what a key may do.

        Raises:
            BadRequest: there is no key, or the cloud does not accept it.
        """
        cloud = self._cloud(settings)
        try:
            self._items(cloud, settings)
        except SmallCloudError as error:
            return CloudRights(rights=[CloudRight(name="list machines", allowed=False, why=str(error))])
        except OSError as error:
            raise BadRequest(f"cloud {cloud.table.name} does not answer: {error}") from error
        why = "cannot be tried without doing it"
        rights = [CloudRight(name=f"{what} machines", allowed=None, why=why) for what in ("start", "stop")]
        return CloudRights(rights=[CloudRight(name="list machines", allowed=True), *rights])

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Unless `keep_nodes`, stop the machines."""
        if keep_nodes:
            return ()
        return stop_everything(self, list(self._seen.values()), lambda settings: settings.get("cloud", ""))

    @property
    def _mark(self) -> str:
        return f"phalanx-{self.head.derive_id('provider owner')[:12]}-"

    def _name(self, order: NodeOrder) -> str:
        return self._mark + hashlib.sha256(f"{order.token} {order.offer}".encode()).hexdigest()[:24]

    def _cloud(self, settings: Mapping[str, str]) -> SignedCalls:
        name = settings.get("cloud", "")
        with self._guard:
            if name not in self._clouds:
                self._clouds[name] = SignedCalls(read_table(name, self.folder), self.folder)
            return self._clouds[name]

    def _values(self, order: NodeOrder, table: CloudTable, name: str) -> dict[str, str]:
        zone, _, _ = parse_zone_offer(order.offer)
        kind, _, count = order.template.partition(":")
        values = {**order.settings, "name": name, "zone": zone, "type": kind, "count": count or "1"}
        machine, join = parse_machine_settings(order.settings), join_of(self.head, order)
        values["script"] = start_script(order.node_id, join, machine, notices="", power_off=table.power_off)
        return values

    def _create(self, cloud: SignedCalls, order: NodeOrder, name: str) -> Mapping[str, Any]:
        start, values = cloud.table.start, self._values(order, cloud.table, name)
        self.sent_s[name] = time.monotonic()
        try:
            reply = cloud.send(start.method, fill(start.path, values), body=fill(start.body, values))
        except CallUnanswered:
            self.sent_s[name] = time.monotonic()
            raise
        except OSError:
            del self.sent_s[name]  # nothing was started, for certain
            raise
        self.sent_s.pop(name, None)
        return reply.body

    def _follow(self, cloud: SignedCalls, order: NodeOrder, name: str) -> StartedMachine:
        """Follow the operation of a create to its end. Raises as `start` does."""
        (operation, machine), template = self.operations[name], cloud.table.operation
        if template is None:
            raise CallUnanswered(f"cloud {cloud.table.name} has no operations any more")
        values, until_s = {**order.settings, "operation": operation}, time.monotonic() + FOLLOW_S
        while True:
            found = cloud.send("GET", fill(template.path, values)).body
            state = str(look_up(found, template.state))
            if state == template.done:
                del self.operations[name]
                return self._started(order, machine, cloud.service.now_s())
            if state == template.failed:
                del self.operations[name]
                code, message = look_up(found, template.code), look_up(found, template.message)
                raise cloud.error_of(str(code or state), str(message or ""), 0)
            if time.monotonic() + POLL_S > until_s:
                raise CallUnanswered(f"the operation {operation} is {state.lower()}")
            time.sleep(POLL_S)

    def _started(self, order: NodeOrder, machine: str, since_s: float) -> StartedMachine:
        self._seen[order.token] = replace(order, known_machine=machine)
        return StartedMachine(machine=machine, since_s=self.since_s.setdefault(machine, since_s))

    def _stop(self, cloud: SignedCalls, settings: Mapping[str, str], machine: str) -> bool:
        """Stop a machine; return whether the cloud has it. Raises as `stop` does."""
        stop, values = cloud.table.stop, {**settings, "machine": machine}
        try:
            cloud.send(stop.method, fill(stop.path, values), body=fill(stop.body, values))
        except SmallCloudError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _items(self, cloud: SignedCalls, settings: Mapping[str, str]) -> Sequence[_Item]:
        """Return all machines of the account, of all pages. Raises as `machines` does."""
        listing, found = cloud.table.listing, []
        query: dict[str, str] = {}
        for _ in range(PAGES_MAX):
            body = cloud.send("GET", fill(listing.path, settings), query=query).body
            items = look_up(body, listing.items)
            if not isinstance(items, list):
                raise OSError(f"the answer has no list at {listing.items}")
            found += [_item(as_object(one), cloud.table) for one in items]
            page = str(look_up(body, listing.next_page) or "") if listing.next_page else ""
            if not page:
                return found
            query = {listing.page_query: page}
        raise OSError(f"the list has more than {PAGES_MAX} pages")

    def _check_type(self, cloud: SignedCalls, terms: PoolTerms) -> None:
        path, names = cloud.table.types
        if path:
            known = sorted(map(str, look_up_all(cloud.send("GET", fill(path, terms.settings)).body, names)))
            if terms.template not in known:
                raise BadRequest(
                    f"cloud {cloud.table.name} has no type {terms.template[:60]}", hint=f"types: {', '.join(known)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A machine of a list."""

    machine: str
    name: str
    ended: bool
    since_s: float


def _item(one: Mapping[str, Any], table: CloudTable) -> _Item:
    listing = table.listing
    machine = look_up(one, listing.id)
    if machine is None:
        raise OSError(f"a machine of the list has no id at {listing.id}")
    return _Item(
        machine=str(machine),
        name=str(look_up(one, listing.name) or ""),
        ended=bool(listing.status) and str(look_up(one, listing.status)) in listing.ended,
        since_s=_seconds(look_up(one, listing.created)) if listing.created else 0.0,
    )


def _seconds(value: Any) -> float:
    """A time of a list in Unix seconds; 0 if it has another form."""
    if isinstance(value, int | float):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return 0.0


def _shape(settings: Mapping[str, str], machine: MachineSettings) -> tuple[tuple[Device, ...], int, int]:
    """Return the devices, CPUs and bytes of memory of a node, by the settings `shape` or `virtual`, `cpus` and `memory`.

    Raises:
        BadRequest: one is missing or invalid.
    """
    if machine.virtual:
        model, device_bytes, count = "virtual", 0, machine.virtual
    else:
        asked = parse_virtual_devices(settings.get("shape", ""))
        if not asked.model or not 1 <= asked.count <= GPUS_MAX or asked.mig:
            raise BadRequest("the setting shape is missing: what GPUs a node has", hint="--set shape=h100:8")
        gpu = find_gpu(asked.model).gpu
        model, device_bytes, count = gpu.name, gpu.memory_bytes, asked.count
    devices = tuple(
        Device(index=index, uuid="", model=model, memory_bytes=device_bytes, virtual=bool(machine.virtual))
        for index in range(count)
    )
    memory_bytes = parse_memory_bytes(settings["memory"]) if "memory" in settings else MEMORY_BYTES
    return devices, setting_count(settings, "cpus", 4096, CPUS), memory_bytes
