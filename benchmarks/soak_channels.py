"""The channels of a supervisor in the soak test: lease, commands, events with output, samples. Like `node.shell.channels`, but on asyncio."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks.soak_http import HttpAnswer, HttpConnection, NoHeadAnswers
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.events import Event
from phalanx.core.units import GIB
from phalanx.node.logic.events import (
    CommandReceived,
    LeaseRenewed,
    MemberKey,
    SupervisorEvent,
)
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import boottime_ns

DEVICES: Final = 4
POLL_S: Final = 20.0
SAMPLE_S: Final = 5.0
PAUSE_S: Final = 0.5  # until an unanswered request is sent again
RENEW_TIMEOUT_S: Final = 5.0
BATCH_MAX: Final = 64


@dataclass
class SoakChannels:
    """The channels of one node. While `link` is clear, it is cut off; `refused` has the requests that the head rejected."""

    name: NodeId
    port: int
    token: str
    refused: list[str]
    link: asyncio.Event = field(default_factory=asyncio.Event)
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def handle(self, *happenings: SupervisorEvent) -> None:
        """Handle events; implemented by the node."""
        raise NotImplementedError

    def open(self, who: SupervisorId) -> None:
        """Start the channels of a new supervisor."""
        self.link.set()
        self.who = who
        self.carried: tuple[MemberKey, ...] = ()
        self.unsent: list[tuple[int, Event]] = []
        self.chunks: list[wire.StreamChunk] = []
        self.hello_count = self.after = self.held_until_ns = 0
        self.some, self.renew_now, self.greeting = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self.wires = {
            name: HttpConnection(self.port, self.token) for name in ("hello", "lease", "commands", "events", "samples")
        }
        loops: tuple[Coroutine[Any, Any, None], ...] = (self._renew(), self._poll(), self._send(), self._sample())
        self.running = [asyncio.get_running_loop().create_task(loop) for loop in loops]

    def excluded(self) -> None:
        """Stop sending and receiving."""
        for task in self.running:
            task.cancel()
        for connection in self.wires.values():
            connection.close()

    async def _ask(
        self, channel: str, method: str, path: str, message: Any = None, timeout_s: float = 30.0
    ) -> HttpAnswer:
        await self.link.wait()
        answer = await self.wires[channel].ask(
            method, path, b"" if message is None else wire.encode(message), timeout_s=timeout_s
        )
        if not self.link.is_set():
            raise NoHeadAnswers("the link is cut")
        if answer.status == 409 and b"say_hello" in answer.body:
            await self._greet(self.hello_count)
            raise NoHeadAnswers("hello first")
        return answer

    async def _greet(self, seen: int) -> None:
        async with self.greeting:
            if self.hello_count != seen:
                return
            devices = tuple(
                Device(index=i, uuid=f"VIRTUAL-{self.name}-{i}", model="virtual", memory_bytes=GIB, virtual=True)
                for i in range(DEVICES)
            )
            node = Node(
                id=self.name,
                engine="joined",
                cpus=8,
                memory_bytes=64 * GIB,
                state=NodeState.UP,
                virtual=True,
                hostname=self.name,
                devices=devices,
            )
            hello = wire.HelloRequest(
                version=wire.WIRE_VERSION,
                supervisor_id=self.who,
                node=replace(node, supervisor_id=self.who),
                members=[(key.job_id, key.epoch, key.generation) for key in self.carried],
            )
            answer = await self.wires["hello"].ask("POST", "/v1/node/hello", wire.encode(hello))
            if answer.status != 200:
                self._refused("hello", answer)
                raise NoHeadAnswers("hello refused")
            self.after = wire.decode(answer.body, wire.HelloReply).after
            self.hello_count += 1

    def _refused(self, what: str, answer: HttpAnswer) -> None:
        if answer.status != 503:
            self.refused.append(f"{self.name} {what}: {answer.status} {answer.body[:300].decode(errors='replace')}")

    async def _renew(self) -> None:
        while True:
            self.renew_now.clear()
            pause_s = PAUSE_S
            try:
                if self.hello_count == 0:
                    await self.link.wait()
                    await self._greet(0)
                epochs = [(key.job_id, key.epoch) for key in self.carried]
                sent_ns = boottime_ns()
                held_s = max(0, self.held_until_ns - sent_ns) / 1e9
                lease = wire.LeaseRequest(supervisor_id=self.who, node_id=self.name, epochs=epochs, held_s=held_s)
                answer = await self._ask("lease", "POST", "/v1/node/lease", lease, RENEW_TIMEOUT_S)
                if answer.status == 200:
                    reply = wire.decode(answer.body, wire.LeaseReply)
                    self.held_until_ns = sent_ns + int(reply.lease_s * 1e9)
                    pause_s = reply.renew_in_s
                    self.handle(
                        LeaseRenewed(
                            sent_ns=sent_ns,
                            lease_s=reply.lease_s,
                            requested=frozenset(epochs),
                            superseded=frozenset(reply.superseded),
                        )
                    )
                else:
                    self._refused("lease", answer)
            except NoHeadAnswers:
                pass
            try:
                async with asyncio.timeout(pause_s):
                    await self.renew_now.wait()
            except TimeoutError:
                continue

    async def _poll(self) -> None:
        greeted = after = 0
        while True:
            if self.hello_count == 0:
                await asyncio.sleep(PAUSE_S)
                continue
            if greeted != self.hello_count:
                greeted, after = self.hello_count, self.after
            try:
                answer = await self._ask(
                    "commands", "GET", f"/v1/node/commands?after={after}&wait_s={POLL_S:g}", timeout_s=POLL_S + 10
                )
            except NoHeadAnswers:
                await asyncio.sleep(PAUSE_S)
                continue
            if answer.status != 200:
                self._refused("commands", answer)
                await asyncio.sleep(PAUSE_S)
                continue
            reply = wire.decode(answer.body, wire.CommandsReply)
            if greeted != self.hello_count:
                continue
            after = max(after, reply.last)
            for framed in reply.commands:
                command = wire.decode_command(framed)
                if not isinstance(command, wire.OpenExec):
                    self.handle(CommandReceived(command=command))

    async def _send(self) -> None:
        while True:
            await self.some.wait()
            self.some.clear()
            try:
                while self.hello_count and (self.unsent or self.chunks):
                    await self._send_some()
            except NoHeadAnswers:
                pass
            if self.unsent or self.chunks:
                self.some.set()
                await asyncio.sleep(PAUSE_S)

    async def _send_some(self) -> None:
        if self.chunks:
            some = self.chunks[:BATCH_MAX]
            answer = await self._ask(
                "events", "POST", "/v1/node/streams", wire.StreamsRequest(supervisor_id=self.who, chunks=some)
            )
            if answer.status == 503:
                raise NoHeadAnswers("try later")
            self.chunks = self.chunks[len(some) :]
            if answer.status != 200:  # for an attempt that this node has lost while it was cut off
                self._refused("streams", answer)
        if self.unsent:
            batch = self.unsent[:BATCH_MAX]
            framed = [wire.encode_envelope(seq, event) for seq, event in batch]
            answer = await self._ask(
                "events", "POST", "/v1/node/events", wire.EventsRequest(supervisor_id=self.who, events=framed)
            )
            if answer.status == 503:
                raise NoHeadAnswers("try later")
            acked = wire.decode(answer.body, wire.EventsReply).acked if answer.status == 200 else batch[-1][0]
            if answer.status != 200:
                self._refused(f"events {[type(event).__name__ for _, event in batch]}", answer)
            self.unsent = [(seq, event) for seq, event in self.unsent if seq > acked]

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S * random.uniform(0.8, 1.2))
            devices = [
                wire.DeviceSample(
                    index=i,
                    uuid=f"VIRTUAL-{self.name}-{i}",
                    counter="none",
                    utilization=0.5,
                    memory_used_bytes=1,
                    memory_total_bytes=GIB,
                    virtual=True,
                )
                for i in range(DEVICES)
            ]
            samples = wire.SamplesRequest(
                supervisor_id=self.who,
                node_id=self.name,
                at_s=time.time(),
                devices=devices,
                load_1m=1.0,
                memory_available_bytes=GIB,
                disk_free_bytes=GIB,
                every_s=SAMPLE_S,
            )
            try:
                answer = await self._ask("samples", "POST", "/v1/node/samples", samples)
                if answer.status != 204:
                    self._refused("samples", answer)
            except NoHeadAnswers:
                continue
