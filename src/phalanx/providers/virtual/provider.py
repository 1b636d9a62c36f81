"""Starts and stops virtual nodes on the head's machine: a local engine with a folder of its own, whose nodes come and go.

Each order is a file, written before its supervisor is started and removed after the last process of the node has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine, NodeTemplate
from phalanx.core.fleet.virtual_devices import MODEL_PREFIX, VirtualDevices, parse_virtual_devices
from phalanx.core.ids import NodeId
from phalanx.durable_files import make_directory, remove_file
from phalanx.engines.local.engine import LocalEngine
from phalanx.node.files.private_files import write_private
from phalanx.node.files.rmtree import remove_tree
from phalanx.node.probes.devices import node_facts
from phalanx.planner.facts.gpus import find_gpu
from phalanx.ports.engine import EngineContext, LocalNode
from phalanx.ports.provider import (
    CloudRights,
    EndedOrder,
    LostNode,
    NodeOrder,
    NodeProvider,
    PoolTerms,
    ProviderType,
    StartedMachine,
)

NAME: Final = "virtual"
DEVICES_MAX: Final = 256  # of one node
_TEMPLATE: Final = re.compile(r"(?:1x)?(.+)")
_ORDER: Final = re.compile(r"(.+)\.order")


class VirtualProviderType(ProviderType):
    """See the module."""

    name = NAME

    def create(self, head: EngineContext) -> NodeProvider:
        """Create the provider; its nodes are in the folder `pools` of the head."""
        home = os.path.join(head.state_folder, "pools")
        engine = LocalEngine(
            home=home,
            environment=lambda: {**head.local_environment(), "PHALANX_NODE_ENGINE": NAME},
            token_of=head.node_token,
            jobs_as="owner",
        )
        return VirtualProvider(home=home, engine=engine, sole_head=head.sole_head)


@dataclass(slots=True, kw_only=True)
class VirtualProvider:
    """The provider of one head. Its nodes share the machine, so that CPUs and memory of each are the machine's."""

    home: str
    engine: LocalEngine
    sole_head: bool
    _tokens: dict[NodeId, str] = field(default_factory=dict)
    _lost: list[LostNode] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, terms: PoolTerms) -> NodeTemplate:
        """Return what a node of a template such as `1xh100:8` has.

        Raises:
            BadRequest: the template has another form, an unknown model, or too many devices; there are zones or settings; or several heads share
                the store.
        """
        if terms.zones or terms.settings:
            raise BadRequest(f"nodes of provider {NAME} have no zones and no settings: they are on the head's machine")
        if not self.sole_head:
            raise BadRequest("virtual nodes are on the head's machine, but several heads share the store")
        asked = _parse(terms.template)
        model = MODEL_PREFIX + asked.model if asked.model else "virtual"
        make_directory("pools.home", self.home)
        facts = node_facts(self.home)
        memory_bytes = find_gpu(asked.model).gpu.memory_bytes if asked.model else facts.memory_bytes // asked.count
        return NodeTemplate(
            text=str(asked),
            devices=tuple(
                Device(index=index, uuid="", model=model, memory_bytes=memory_bytes, virtual=True)
                for index in range(asked.count)
            ),
            cpus=facts.cpus,
            memory_bytes=facts.memory_bytes,
        )

    def open(self, orders: Sequence[NodeOrder]) -> None:
        """Watch the nodes of these orders that run, and stop all others."""
        make_directory("pools.home", self.home)
        wanted = {order.node_id: order for order in orders}
        stale = []
        for name in os.listdir(self.home):
            match = _ORDER.fullmatch(name)
            if match is None:
                continue
            node_id, record = NodeId(match[1]), self._read(NodeId(match[1]))
            self._tokens[node_id] = record.token
            self.engine.add(_local_node(record))
            if node_id not in wanted or wanted[node_id].token != record.token:
                stale.append(record)
        running = set(self.engine.adopt())
        for record in stale:
            self.stop(record)
        for node_id, order in wanted.items():
            if node_id not in running and self._tokens.get(node_id) == order.token:
                self._lost.append(
                    LostNode(node_id=node_id, token=order.token, why="it did not run when the head started")
                )
        self.engine.watch()

    def start(self, order: NodeOrder) -> StartedMachine | None:
        """Start the node's supervisor unless it runs.

        Raises:
            OSError: it could not be started.
        """
        known = self._tokens.get(order.node_id)
        if known is not None and known != order.token:
            self.stop(NodeOrder(node_id=order.node_id, token=known, template=order.template))
        write_private(self.home, f"{order.node_id}.order", json.dumps([order.token, order.template]))
        self._tokens[order.node_id] = order.token
        self.engine.add(_local_node(order))
        self.engine.start(order.node_id)
        return None

    def stop(self, order: NodeOrder) -> Sequence[ChargedMachine]:
        """Stop the node's supervisor and its processes, and remove its files; nothing if another order has the node now.

        Raises:
            OSError: its files could not be removed.
        """
        if self._tokens.get(order.node_id) != order.token:
            return ()
        self.engine.stop(order.node_id)
        folder = os.path.join(self.home, "nodes", order.node_id)
        if os.path.isdir(folder):
            remove_tree(folder, make_accessible=True)
        with contextlib.suppress(FileNotFoundError):
            remove_file("pools.order", os.path.join(self.home, f"{order.node_id}.order"))
        del self._tokens[order.node_id]
        return ()

    def observe(self) -> Sequence[LostNode]:
        """Return the nodes whose supervisors ended since the last call."""
        found, self._lost = self._lost, []
        for death in self.engine.observe():
            token = self._tokens.get(death.node_id)
            if token is not None:
                found.append(LostNode(node_id=death.node_id, token=token, why=death.why))
        return found

    def machines(self, settings: Mapping[str, str]) -> Sequence[ListedMachine]:
        """Return nothing: the order files, which `open` compares with the records, are the list."""
        del settings
        return ()

    def check(self, settings: Mapping[str, str]) -> CloudRights:
        """Refuse: there is nothing to check.

        Raises:
            BadRequest: always.
        """
        del settings
        raise BadRequest(f"provider {NAME} has no credentials to check")

    def close(self, *, keep_nodes: bool) -> Sequence[EndedOrder]:
        """Stop watching; unless `keep_nodes`, stop the nodes, whose orders stay."""
        self.engine.close(keep_nodes=keep_nodes)
        return ()

    def _read(self, node_id: NodeId) -> NodeOrder:
        """Return the order on disk; one without a token, which matches no record, if the file is damaged."""
        try:
            with open(os.path.join(self.home, f"{node_id}.order"), encoding="utf-8") as file:
                token, template = json.load(file)
            _parse(str(template))
        except (OSError, ValueError, TypeError, BadRequest):
            token, template = "", "1"
        return NodeOrder(node_id=node_id, token=str(token), template=str(template))


def _parse(template: str) -> VirtualDevices:
    """Parse `[1x][MODEL:]DEVICES`, with the model's name in the fact tables.

    Raises:
        BadRequest: not of that form, an unknown model, or too many devices.
    """
    match = _TEMPLATE.fullmatch(template.strip().lower())
    asked = parse_virtual_devices(match[1] if match is not None else "")
    if not 1 <= asked.count <= DEVICES_MAX or asked.mig:
        raise BadRequest(
            f"--node {template}: a virtual node of a pool has 1 to {DEVICES_MAX} devices and no MIG",
            hint="use --node 1xh100:8",
        )
    return VirtualDevices(count=asked.count, model=find_gpu(asked.model).gpu.name if asked.model else "")


def _local_node(order: NodeOrder) -> LocalNode:
    asked = _parse(order.template)
    return LocalNode(id=order.node_id, virtual_devices=asked.count, virtual_model=asked.model)
